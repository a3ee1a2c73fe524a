//! When bytes flowed last.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// A clock of silence, shared by all that pass bytes of one exchange. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    begun: Instant,
    /// Milliseconds after `begun`.
    last: Arc<AtomicU64>,
}

impl Activity {
    /// Bytes flow now.
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), last: Arc::default() }
    }

    /// Bytes flow now.
    pub(super) fn touch(&self) {
        self.last.store(self.now_ms(), Ordering::Relaxed);
    }

    /// How long none have flowed.
    pub(super) fn silent_for(&self) -> Duration {
        Duration::from_millis(self.now_ms().saturating_sub(self.last.load(Ordering::Relaxed)))
    }

    /// Waits until none have flowed for so long.
    pub(super) async fn silence(&self, limit: Duration) {
        loop {
            let left = limit.saturating_sub(self.silent_for());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_is_counted_from_the_last_byte() {
        let activity = Activity::new();
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(activity.silent_for(), Duration::from_secs(3));
        activity.touch();
        let begun = Instant::now();
        let other = activity.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            other.touch();
        });
        activity.silence(Duration::from_secs(5)).await;
        assert_eq!(begun.elapsed(), Duration::from_secs(9));
    }
}
