//! Unix sockets whose path may be longer than a socket address.
//!
//! `sun_path` holds 107 bytes; a data folder can be deeper. So sockets are bound and reached through `/proc/self/fd/<folder>/<name>`,
//! which is always short, and the kernel resolves to the same file. The daemon binds the listening sockets and QEMU inherits
//! them: connecting never races with QEMU's start, and QEMU needs no right to the folder.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that wait for QEMU to accept. One daemon at a time talks to a machine; the rest is for one that just died.
const BACKLOG: i32 = 4;

/// Binds `folder/name` and listens; an old socket file of that name is removed.
pub(crate) fn listen(folder: &Path, name: &str) -> io::Result<OwnedFd> {
    let dir = open_folder(folder)?;
    match rustix::fs::unlinkat(&dir, name, rustix::fs::AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    let socket = unix_socket(SocketFlags::CLOEXEC)?;
    rustix::net::bind(&socket, &address(&dir, name)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Connects to `folder/name` without waiting for an `accept`: a stopped process's socket is connected at once.
/// `WouldBlock` if [`BACKLOG`] others wait already. Call within a tokio runtime.
pub(crate) fn connect(folder: &Path, name: &str) -> io::Result<tokio::net::UnixStream> {
    let dir = open_folder(folder)?;
    let socket = unix_socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    rustix::net::connect(&socket, &address(&dir, name)?)?;
    tokio::net::UnixStream::from_std(socket.into())
}

fn unix_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)
}

fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

fn address(dir: &OwnedFd, name: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_path_of_three_hundred_bytes_is_reached() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("a".repeat(100)).join("b".repeat(100)).join("c".repeat(100));
        std::fs::create_dir_all(&deep).unwrap();
        let first = listen(&deep, "x.sock").unwrap();
        drop(first);
        // The file of the first listener is still there: a second daemon must not fail on it.
        let second = std::os::unix::net::UnixListener::from(listen(&deep, "x.sock").unwrap());
        let client = connect(&deep, "x.sock").unwrap();
        let (_server, _) = second.accept().unwrap();
        client.writable().await.unwrap();
    }

    #[tokio::test]
    async fn a_missing_socket_is_not_found() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(connect(root.path(), "x.sock").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
