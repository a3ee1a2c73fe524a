//! Whether anything that counts has crossed the tap.

use super::{Tap, TapError};

/// Notes unicast IP packets of either direction, except bare TCP acknowledgements and keepalive probes, neighbour discovery and group membership.
#[derive(Debug)]
pub struct ActivityWatch {}

impl ActivityWatch {
    /// On this tap, from now on.
    pub fn new(tap: &Tap) -> Result<Self, TapError> {
        let _ = tap;
        unimplemented!()
    }

    /// Whether there was any since the last call.
    pub fn drain(&self) -> Result<bool, TapError> {
        unimplemented!()
    }
}
