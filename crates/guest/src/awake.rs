//! `/run/sbx/awake`: programs hold the sandbox awake.
//!
//! `+` raises a hold, `-` lowers one, `?` asks; each is answered `held <of this connection> <of all>`. A connection's holds
//! end with it, however its program ends. Before the sandbox sleeps for idleness each connection may be sent `sleep <ms>`.

use std::{fs, io, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{
        Semaphore,
        broadcast::{self, error::RecvError},
        watch,
    },
};
use wire::{Held, SleepNotice};

/// Connections on the socket at a time. A further one waits to be accepted until another ends.
const CONNECTIONS_MAX: usize = 256;
/// Holds of one connection; more change nothing. Far above any use, and small enough that no sum overflows.
const HOLDS_MAX: u32 = 1_000_000;

/// Notices that wait for one connection. A program that does not read misses the oldest: each says the same but later.
const NOTICES_MAX: usize = 4;

/// All holds.
#[derive(Debug)]
pub(crate) struct Holds {
    held: watch::Sender<Held>,
    notices: broadcast::Sender<SleepNotice>,
}

impl Default for Holds {
    fn default() -> Self {
        Self { held: watch::Sender::default(), notices: broadcast::Sender::new(NOTICES_MAX) }
    }
}

impl Holds {
    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.held.borrow().holds
    }

    /// To be told of each change.
    pub(crate) fn watch(&self) -> watch::Receiver<Held> {
        self.held.subscribe()
    }

    /// Tells everybody who is connected that the guest sleeps soon.
    pub(crate) fn tell(&self, notice: SleepNotice) {
        // Nobody is connected: nobody is told.
        let _nobody = self.notices.send(notice);
    }

    /// Offers the socket to all programs.
    pub(crate) fn serve(holds: Arc<Self>, path: &Path) -> io::Result<()> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
        tokio::spawn(async move {
            let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
            loop {
                // Never closed, so a place always comes.
                let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let holds = Arc::clone(&holds);
                        tokio::spawn(async move {
                            // The client hears of a failure by its own read or write.
                            let _failed = converse(&holds, stream).await;
                            drop(place);
                        });
                    }
                    Err(error) => {
                        eprintln!("accept on the awake socket: {error}");
                        return;
                    }
                }
            }
        });
        Ok(())
    }
}

/// The holds of one connection; lowered when it ends.
struct Mine<'a> {
    holds: &'a Holds,
    mine: u32,
}

impl<'a> Mine<'a> {
    fn connected(holds: &'a Holds) -> Self {
        holds.held.send_modify(|held| held.connections += 1);
        Self { holds, mine: 0 }
    }

    fn raise(&mut self) {
        self.mine += 1;
        self.holds.held.send_modify(|held| held.holds += 1);
    }

    fn lower(&mut self) {
        self.mine -= 1;
        self.holds.held.send_modify(|held| held.holds -= 1);
    }
}

impl Drop for Mine<'_> {
    fn drop(&mut self) {
        self.holds.held.send_modify(|held| {
            held.holds -= self.mine;
            held.connections -= 1;
        });
    }
}

async fn converse(holds: &Holds, mut stream: UnixStream) -> io::Result<()> {
    let mut mine = Mine::connected(holds);
    let mut notices = holds.notices.subscribe();
    let mut bytes = [0; 256];
    loop {
        let mut answers = Vec::new();
        tokio::select! {
            read = stream.read(&mut bytes) => {
                let read = read?;
                if read == 0 {
                    return Ok(());
                }
                for byte in &bytes[..read] {
                    match byte {
                        b'+' if mine.mine < HOLDS_MAX => mine.raise(),
                        b'-' if mine.mine > 0 => mine.lower(),
                        b'+' | b'-' | b'?' => {}
                        _ => continue,
                    }
                    let line = format!("held {} {}\n", mine.mine, holds.count());
                    answers.extend_from_slice(line.as_bytes());
                }
            }
            notice = notices.recv() => match notice {
                Ok(SleepNotice { in_ms, cap }) => {
                    let cap = if cap { " cap" } else { "" };
                    answers.extend_from_slice(format!("sleep {in_ms}{cap}\n").as_bytes());
                }
                // The newest are still there. The sender lives as long as the agent.
                Err(RecvError::Lagged(_) | RecvError::Closed) => continue,
            },
        }
        stream.write_all(&answers).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn s10_holds_add_up_and_end_with_their_connection() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("awake");
        let holds = Arc::new(Holds::default());
        Holds::serve(Arc::clone(&holds), &path).expect("serve");
        let mut first = UnixStream::connect(&path).await.expect("connect");
        let mut second = UnixStream::connect(&path).await.expect("connect");
        assert_eq!(say(&mut first, b"++x?", 3).await, "held 1 1\nheld 2 2\nheld 2 2\n");
        assert_eq!(say(&mut second, b"+-", 2).await, "held 1 3\nheld 0 2\n");
        assert_eq!(say(&mut second, b"-", 1).await, "held 0 2\n", "at zero nothing changes");
        drop(first);
        // The end of the other connection is seen by another task; ask until it was.
        while say(&mut second, b"?", 1).await != "held 0 0\n" {}
        assert_eq!(holds.count(), 0);
    }

    #[tokio::test]
    async fn s13_everybody_connected_is_told_of_a_sleep_to_come() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("awake");
        let holds = Arc::new(Holds::default());
        Holds::serve(Arc::clone(&holds), &path).expect("serve");
        holds.tell(SleepNotice { in_ms: 5, cap: false });
        let mut held = holds.watch();
        let mut first = UnixStream::connect(&path).await.expect("connect");
        let mut second = UnixStream::connect(&path).await.expect("connect");
        assert_eq!(say(&mut first, b"?", 1).await, "held 0 0\n", "an earlier notice is not news");
        assert_eq!(say(&mut second, b"+", 1).await, "held 1 1\n");
        assert_eq!(*held.borrow_and_update(), Held { holds: 1, connections: 2 });
        holds.tell(SleepNotice { in_ms: 1500, cap: false });
        holds.tell(SleepNotice { in_ms: 20, cap: true });
        for stream in [&mut first, &mut second] {
            assert_eq!(say(stream, b"", 2).await, "sleep 1500\nsleep 20 cap\n");
        }
        drop(second);
        held.wait_for(|held| *held == Held { holds: 0, connections: 1 }).await.expect("told");
    }

    #[tokio::test]
    async fn s10_the_example_for_node_holds_while_its_command_runs() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("awake");
        let holds = Arc::new(Holds::default());
        Holds::serve(Arc::clone(&holds), &path).expect("serve");
        let mut held = holds.watch();
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/awake/hold.mjs");
        let mut program = std::process::Command::new("node")
            .args([example, "cat"])
            .env("AWAKE_SOCKET", &path)
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("`node` is there: `cargo xtask setup` installs it");
        held.wait_for(|held| held.holds == 1).await.expect("held");
        drop(program.stdin.take());
        let ended = tokio::task::spawn_blocking(move || program.wait()).await;
        assert!(ended.expect("no panic").expect("its end").success());
        held.wait_for(|held| *held == Held::default()).await.expect("let go");
    }

    async fn say(stream: &mut UnixStream, bytes: &[u8], lines: usize) -> String {
        stream.write_all(bytes).await.expect("write");
        let mut text = String::new();
        while text.matches('\n').count() < lines {
            text.push(char::from(stream.read_u8().await.expect("read")));
        }
        text
    }
}
