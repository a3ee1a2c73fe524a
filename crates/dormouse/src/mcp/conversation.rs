//! What the daemon is told of the conversation: that it is there, and that it has ended. Nothing of what is said in it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::problem::Problem;

use super::upstream::Upstream;

/// Between two signs of life (B35).
const BEAT_EVERY: Duration = Duration::from_mins(1);
/// How long one, or the last word, may take.
const WORD_TIME_MAX: Duration = Duration::from_secs(5);
/// Bytes of randomness in an id.
const ID_BYTES: usize = 16;

/// A new conversation's id: nobody else has it, and it says nothing.
pub(super) fn draw_id() -> Result<String, Problem> {
    use std::fmt::Write as _;
    let mut random = [0; ID_BYTES];
    let mut filled = 0;
    while filled < ID_BYTES {
        filled +=
            rustix::rand::getrandom(&mut random[filled..], rustix::rand::GetRandomFlags::empty())
                .map_err(|error| Problem::new(format!("cannot draw an id: {error}")))?;
    }
    Ok(random.iter().fold("mcp-".to_owned(), |mut id, byte| {
        // Writing to a string cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    }))
}

/// The conversation, as the daemon is told of it.
pub(super) struct Conversation {
    upstream: Arc<Upstream>,
    ended: CancellationToken,
    beating: Mutex<Option<JoinHandle<()>>>,
}

impl Conversation {
    pub(super) fn new(upstream: Arc<Upstream>) -> Self {
        Self { upstream, ended: CancellationToken::new(), beating: Mutex::default() }
    }

    /// A tool was called: from the first one on signs of life are sent.
    pub(super) fn begin(&self, client: Option<&str>) {
        let mut beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner);
        if beating.is_some() {
            return;
        }
        let (upstream, ended) = (Arc::clone(&self.upstream), self.ended.clone());
        let body = client.map_or_else(|| json!({}), |client| json!({ "client": client }));
        *beating = Some(tokio::spawn(async move {
            loop {
                say(&upstream, "heartbeat", &body).await;
                if ended.run_until_cancelled(tokio::time::sleep(BEAT_EVERY)).await.is_none() {
                    return;
                }
            }
        }));
    }

    /// The conversation has ended. Nothing is said of one in which no tool was called.
    pub(super) async fn leave(&self) {
        let beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(beating) = beating else { return };
        self.ended.cancel();
        // A sign of life after the last word would mean that it is back.
        if let Err(error) = beating.await {
            eprintln!("warning: the signs of life broke: {error}");
        }
        say(&self.upstream, "leave", &json!({})).await;
    }
}

/// One that is lost is followed by another; without the last word, silence says it in three minutes.
async fn say(upstream: &Upstream, what: &str, body: &Value) {
    let path = format!("/v1/agents/{}/{what}", upstream.agent);
    let said = upstream.json::<Value>("POST", &path, body);
    let problem = match tokio::time::timeout(WORD_TIME_MAX, said).await {
        Ok(Ok(_)) => return,
        Ok(Err(problem)) => problem.sentence(),
        Err(_) => format!("no answer within {} s", WORD_TIME_MAX.as_secs()),
    };
    eprintln!("warning: {what}: {problem}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn b35_ids_are_such_as_the_daemon_takes() {
        let (one, other) = (super::draw_id().expect("drawn"), super::draw_id().expect("drawn"));
        assert_ne!(one, other);
        assert!(
            one.len() <= 64 && one.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        );
    }
}
