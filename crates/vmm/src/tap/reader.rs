//! The tap in the place of a sleeping guest.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

use super::sys;

/// A frame from the tap, with the virtio header that says what is still to be done to it: whole, as [`super::Injector`] wants it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Header, then Ethernet frame.
    bytes: Vec<u8>,
}

/// A tap that was removed shows by an error alone.
const INTEREST: Interest = Interest::READABLE.add(Interest::ERROR);

/// Bytes of the header that the kernel fills in; the longer form adds a number that only the guest's side uses.
const SHORT_HEADER: usize = 10;
/// Largest frame: a segment of 64 KiB, which the kernel passes undivided where the guest can take it, its link head, and the header.
const FRAME_BYTES_MAX: usize = 65_536 + 64;

impl Frame {
    /// The Ethernet frame, for [`crate::packet::classify`].
    pub fn ethernet(&self) -> &[u8] {
        &self.bytes[SHORT_HEADER..]
    }

    /// A frame to which nothing is still to be done.
    pub(super) fn of(ethernet: &[u8]) -> Self {
        Self { bytes: [&[0; SHORT_HEADER], ethernet].concat() }
    }

    /// Short header and Ethernet frame, as a packet socket takes them.
    pub(super) fn for_packet_socket(&self) -> &[u8] {
        &self.bytes
    }
}

/// Whether the error says that the tap was removed.
pub fn is_gone(error: &io::Error) -> bool {
    // Read and written: the open file has lost its device; asked for: there is none of this name.
    error.kind() == io::ErrorKind::NotFound
        || [rustix::io::Errno::BADFD, rustix::io::Errno::NODEV]
            .iter()
            .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Reads and writes a tap's frames. A frame that is read is no longer in the queue.
#[derive(Debug)]
pub struct Reader {
    fd: AsyncFd<OwnedFd>,
    space: Vec<u8>,
}

impl Reader {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self { fd: crate::pollable::registered(fd, INTEREST)?, space: Vec::new() })
    }

    /// Waits until a frame may be there, or the tap is gone. Cancel safe.
    pub async fn readable(&self) -> io::Result<()> {
        let mut guard = self.fd.ready(INTEREST).await?;
        if guard.ready().is_error() {
            sys::header_bytes(self.fd.get_ref())?;
            guard.clear_ready_matching(Ready::ERROR);
        }
        // Readiness is only taken back by a `try_read` that finds nothing.
        guard.retain_ready();
        Ok(())
    }

    /// The next frame, if there is one. An error means that the tap is gone ([`is_gone`]) or broken.
    pub fn try_read(&mut self) -> io::Result<Option<Frame>> {
        let Self { fd, space } = self;
        // Kept between frames, not between sleeps: 64 KiB for each of many sleepers that nobody writes to would add up.
        space.resize(FRAME_BYTES_MAX, 0);
        match fd.try_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut *space)?)) {
            Ok(bytes) => {
                let header = sys::header_bytes(fd.get_ref())?;
                let (Some(head), Some(ethernet)) =
                    (space.get(..SHORT_HEADER), space.get(header..bytes))
                else {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("frame of {bytes} bytes with a header of {header}"),
                    ));
                };
                Ok(Some(Frame { bytes: [head, ethernet].concat() }))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                space.clear();
                space.shrink_to_fit();
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends an Ethernet frame as the guest would, complete with checksums.
    pub fn write(&self, ethernet: &[u8]) -> io::Result<()> {
        let mut bytes = vec![0; sys::header_bytes(self.fd.get_ref())?];
        bytes.extend_from_slice(ethernet);
        rustix::io::write(self.fd.get_ref(), &bytes)?;
        Ok(())
    }
}
