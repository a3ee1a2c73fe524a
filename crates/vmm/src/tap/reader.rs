//! The tap in the place of a sleeping guest.

use std::io;

/// A frame from the tap, with its virtio header: whole, as [`super::Injector`] wants it back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    header: [u8; 10],
    ethernet: Vec<u8>,
}

impl Frame {
    /// The Ethernet frame, for [`crate::packet::classify`].
    pub fn ethernet(&self) -> &[u8] {
        &self.ethernet
    }

    /// The virtio header's first ten bytes (checksum and segmentation still to be done).
    pub fn header(&self) -> &[u8; 10] {
        &self.header
    }
}

/// Reads and writes a tap's frames.
#[derive(Debug)]
pub struct Reader {}

impl Reader {
    /// Waits until a frame may be there. Cancel safe.
    pub async fn readable(&self) -> io::Result<()> {
        unimplemented!()
    }

    /// The next frame, if there is one.
    pub fn try_read(&mut self) -> io::Result<Option<Frame>> {
        unimplemented!()
    }

    /// Sends a frame as the guest would.
    pub fn write(&self, ethernet: &[u8]) -> io::Result<()> {
        let _ = ethernet;
        unimplemented!()
    }
}
