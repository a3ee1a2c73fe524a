//! Ports of the guest's loopback that lead elsewhere.

use std::sync::Mutex;

use wire::{LoopbackWay, Reply, Request};

use super::{channel::ANSWER_LIMIT, error::GuestError, link::GuestLink};

/// What a guest was told, and in which boot: it knows that until it boots anew, also over sleeps.
pub(super) type Told = Mutex<Option<([u8; 16], Vec<LoopbackWay>)>>;

impl GuestLink {
    /// Leads ports of 127.0.0.1 elsewhere for the guest's programs, and all others no more. Nothing is asked of a guest that was
    /// told so before. `false`: its agent is older than this request.
    ///
    /// # Errors
    /// Also [`GuestError::Failed`] when the guest's kernel does not do it.
    pub async fn lead_loopback(&self, ways: &[LoopbackWay]) -> Result<bool, GuestError> {
        if !self.speaks(wire::LOOPBACK_SINCE) {
            return Ok(ways.is_empty());
        }
        let boot = self.hello().map(|hello| hello.boot);
        let known = |told: &Option<([u8; 16], Vec<LoopbackWay>)>| match told {
            Some((at, told)) => Some(*at) == boot && told == ways,
            // Nothing leads elsewhere by itself.
            None => ways.is_empty(),
        };
        if known(&self.lock_told()) {
            return Ok(true);
        }
        match self.ask(Request::Loopback(ways.to_vec()), Some(ANSWER_LIMIT)).await? {
            Reply::Done => {
                *self.lock_told() = boot.map(|boot| (boot, ways.to_vec()));
                Ok(true)
            }
            _ => Err(GuestError::BadAnswer { request: "loopback" }),
        }
    }

    fn lock_told(&self) -> std::sync::MutexGuard<'_, Option<([u8; 16], Vec<LoopbackWay>)>> {
        self.inner.loopback.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
