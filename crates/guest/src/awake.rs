//! `/run/sbx/awake`: programs hold the sandbox awake.
//!
//! `+` raises a hold, `-` lowers one, `?` asks; each is answered `held <of this connection> <of all>`. A connection's holds
//! end with it, however its program ends.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};

/// Connections on the socket at a time. A further one waits to be accepted until another ends.
const CONNECTIONS_MAX: usize = 256;
/// Holds of one connection; more change nothing. Far above any use, and small enough that no sum overflows.
const HOLDS_MAX: u32 = 1_000_000;

/// All holds.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    all: AtomicU32,
}

impl Holds {
    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.all.load(Ordering::Relaxed)
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

impl Drop for Mine<'_> {
    fn drop(&mut self) {
        self.holds.all.fetch_sub(self.mine, Ordering::Relaxed);
    }
}

async fn converse(holds: &Holds, mut stream: UnixStream) -> io::Result<()> {
    let mut held = Mine { holds, mine: 0 };
    let mut bytes = [0; 256];
    loop {
        let read = stream.read(&mut bytes).await?;
        if read == 0 {
            return Ok(());
        }
        let mut answers = Vec::new();
        for byte in &bytes[..read] {
            match byte {
                b'+' if held.mine < HOLDS_MAX => {
                    held.mine += 1;
                    holds.all.fetch_add(1, Ordering::Relaxed);
                }
                b'-' if held.mine > 0 => {
                    held.mine -= 1;
                    holds.all.fetch_sub(1, Ordering::Relaxed);
                }
                b'+' | b'-' | b'?' => {}
                _ => continue,
            }
            answers.extend_from_slice(format!("held {} {}\n", held.mine, holds.count()).as_bytes());
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

    async fn say(stream: &mut UnixStream, bytes: &[u8], lines: usize) -> String {
        stream.write_all(bytes).await.expect("write");
        let mut text = String::new();
        while text.matches('\n').count() < lines {
            text.push(char::from(stream.read_u8().await.expect("read")));
        }
        text
    }
}
