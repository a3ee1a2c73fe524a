//! Gives frames that were read from a tap back to the guest.

use super::{Frame, Tap, TapError};

/// Sends frames out of the tap, towards QEMU.
#[derive(Debug)]
pub struct Injector {}

impl Injector {
    /// For this tap.
    pub fn new(tap: &Tap) -> Result<Self, TapError> {
        let _ = tap;
        unimplemented!()
    }

    /// Queues a frame behind those that wait in the tap.
    pub fn send(&self, frame: &Frame) -> Result<(), TapError> {
        let _ = frame;
        unimplemented!()
    }
}
