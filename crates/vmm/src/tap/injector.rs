//! Gives frames that were read from a tap back to the guest.

use std::os::fd::OwnedFd;

use rustix::net::{SendFlags, send};

use super::{Frame, Tap, TapError, sys};

/// Sends frames out of the tap, towards QEMU. They queue behind those that wait in the tap, and [`super::ActivityWatch`] sees them.
#[derive(Debug)]
pub struct Injector {
    socket: OwnedFd,
    name: String,
}

impl Injector {
    /// For this tap.
    pub fn new(tap: &Tap) -> Result<Self, TapError> {
        let fail = |source| TapError::new("open a sender on", tap.name(), source);
        let socket = sys::packet_socket(tap.index(), None).map_err(fail)?;
        sys::use_headers(&socket).map_err(fail)?;
        Ok(Self { socket, name: tap.name().to_owned() })
    }

    /// Sends one.
    pub fn send(&self, frame: &Frame) -> Result<(), TapError> {
        let sent = send(&self.socket, frame.for_packet_socket(), SendFlags::DONTWAIT);
        sent.map(drop).map_err(|errno| TapError::new("give a packet back to", &self.name, errno))
    }
}
