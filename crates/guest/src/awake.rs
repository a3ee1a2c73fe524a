//! `/run/sbx/awake`: programs hold the sandbox awake.
//!
//! `+` raises a hold, `-` lowers one, `?` asks; each is answered `held <of this connection> <of all>`. A connection's holds
//! end with it, however its program ends. Before the sandbox sleeps for idleness each connection may be sent `sleep <ms>`.
//! One connection too many is sent `error <why>` and closed.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

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

/// Connections on the socket at a time: enough for two users who leak theirs, and half of what the agent may have open.
const CONNECTIONS_MAX: usize = 512;
/// Connections of one user, so that one who leaks them locks nobody else out. Far above any use: a program needs one.
const CONNECTIONS_OF_ONE_MAX: usize = 256;
/// How long one that was refused is let speak, so that it reads why instead of failing to write; and how many are at a time.
const REFUSED_TIME: Duration = Duration::from_secs(1);
const REFUSED_MAX: usize = 32;
/// How long is waited after an error of the listening socket, such as too many open files, which passes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
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
            let places = Arc::new(Places::default());
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let (holds, places) = (Arc::clone(&holds), Arc::clone(&places));
                        tokio::spawn(async move {
                            // The client hears of a failure by its own read or write.
                            let _failed = serve_one(&holds, &places, stream).await;
                        });
                    }
                    Err(error) => {
                        eprintln!("accept on the awake socket: {error}");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        Ok(())
    }
}

/// How many connections each user has.
#[derive(Debug)]
struct Places {
    taken: Mutex<HashMap<u32, usize>>,
    /// Turns for those that are refused.
    refused: Semaphore,
}

impl Default for Places {
    fn default() -> Self {
        Self { taken: Mutex::default(), refused: Semaphore::new(REFUSED_MAX) }
    }
}

/// One connection's place; given back when dropped.
struct Place<'a> {
    places: &'a Places,
    uid: u32,
}

impl Places {
    /// A place for one more connection of a user, or why there is none.
    fn take(&self, uid: u32) -> Result<Place<'_>, String> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.get(&uid).copied().unwrap_or(0);
        if own >= CONNECTIONS_OF_ONE_MAX {
            return Err(format!(
                "{own} connections of your user are open, which is the limit; close some"
            ));
        }
        if taken.values().sum::<usize>() >= CONNECTIONS_MAX {
            return Err(format!("{CONNECTIONS_MAX} connections are open, which is the limit"));
        }
        *taken.entry(uid).or_default() += 1;
        Ok(Place { places: self, uid })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.uid) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.uid)),
        }
    }
}

async fn serve_one(holds: &Holds, places: &Places, mut stream: UnixStream) -> io::Result<()> {
    match places.take(stream.peer_cred()?.uid()) {
        Ok(_place) => converse(holds, stream).await,
        Err(why) => {
            stream.write_all(format!("error {why}\n").as_bytes()).await?;
            stream.shutdown().await?;
            let Ok(_turn) = places.refused.try_acquire() else { return Ok(()) };
            let mut nowhere = tokio::io::sink();
            let rest = tokio::io::copy(&mut stream, &mut nowhere);
            tokio::time::timeout(REFUSED_TIME, rest).await.map_or(Ok(()), |read| read.map(drop))
        }
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
    async fn s10_a_connection_too_many_is_told_and_closed_and_places_come_back() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("awake");
        Holds::serve(Arc::default(), &path).expect("serve");
        let mut all = Vec::new();
        for _ in 0..CONNECTIONS_OF_ONE_MAX {
            let mut one = UnixStream::connect(&path).await.expect("connect");
            assert_eq!(say(&mut one, b"?", 1).await, "held 0 0\n");
            all.push(one);
        }
        let mut over = UnixStream::connect(&path).await.expect("connect");
        let mut told = String::new();
        over.read_to_string(&mut told).await.expect("told, then closed");
        let why = "256 connections of your user are open, which is the limit; close some";
        assert_eq!(told, format!("error {why}\n"));
        drop(all.pop());
        // That it has ended is seen by another task; try until it was.
        loop {
            let mut again = UnixStream::connect(&path).await.expect("connect");
            again.write_all(b"?").await.expect("written");
            let mut first = [0; 4];
            again.read_exact(&mut first).await.expect("told");
            if &first == b"held" {
                return;
            }
        }
    }

    #[test]
    fn s10_one_user_who_leaks_connections_locks_nobody_else_out() {
        let places = Places::default();
        let leaked: Vec<_> = (0..CONNECTIONS_OF_ONE_MAX).map(|_| places.take(1000)).collect();
        assert!(leaked.iter().all(Result::is_ok));
        assert!(places.take(1000).is_err());
        let other = places.take(0).expect("another user has a place");
        drop((leaked, other));
        assert!(places.taken.lock().expect("not poisoned").is_empty(), "nothing is left behind");
        let all: Vec<_> = (0..512).map(|uid| places.take(uid)).collect();
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(
            places.take(9999).err().as_deref(),
            Some("512 connections are open, which is the limit")
        );
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

    #[tokio::test]
    async fn s10_the_examples_say_how_they_are_called_and_what_they_are_told() {
        let folder = tempfile::tempdir().expect("temp dir");
        let path = folder.path().join("awake");
        let listener = UnixListener::bind(&path).expect("bind");
        tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                stream.write_all(b"error no place\n").await.expect("told");
                stream.shutdown().await.expect("told");
                open.push(stream);
            }
        });
        for (program, file) in [("python3", "hold.py"), ("node", "hold.mjs")] {
            let example = format!("{}/../../examples/awake/{file}", env!("CARGO_MANIFEST_DIR"));
            for (arguments, said) in [(&[][..], "usage: "), (&["true"][..], "no place")] {
                let mut command = std::process::Command::new(program);
                command.arg(&example).args(arguments).env("AWAKE_SOCKET", &path);
                let output = tokio::task::spawn_blocking(move || command.output()).await;
                let output = output.expect("no panic").expect("it is there: `cargo xtask setup`");
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert!(!output.status.success(), "{file} {arguments:?}");
                let lines = stderr.lines().count();
                assert!(stderr.contains(said) && lines == 1, "{file} {arguments:?}: {stderr}");
            }
        }
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
