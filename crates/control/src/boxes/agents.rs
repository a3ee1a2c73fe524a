//! The conversations that use boxes (B35-B37): a random id each, signs of life, and that one has left.
//!
//! Nothing of what is said in a conversation comes here.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use api::ApiError;
use api::boxes::BoxStatus;
use api::boxes::view::{AgentState, AgentView};
use serde::{Deserialize, Serialize};

use crate::catalogue::{Catalogue, now_ms};
use crate::failure::Failure;

/// Most characters of a conversation's id.
const ID_CHARS_MAX: usize = 64;
/// How long a conversation is remembered after its last sign of life, milliseconds: longer than any box that it used is listed.
const REMEMBERED_MS: i64 = 30 * 24 * 60 * 60 * 1000;
/// A conversation that has not used a box for so long is away from it (B37).
const AWAY_AFTER_MS: i64 = 10 * 60 * 1000;
/// And after so long it has stopped working with it.
const IDLE_AFTER_MS: i64 = 60 * 60 * 1000;

/// A conversation's id: 1-64 of letters, digits, `-`, `_`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct AgentId(String);

impl FromStr for AgentId {
    type Err = ApiError;

    fn from_str(text: &str) -> Result<Self, ApiError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if (1..=ID_CHARS_MAX).contains(&text.len()) && text.bytes().all(plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(ApiError::invalid("id", "agent id: letters, digits, - and _ only, at most 64"))
    }
}

impl fmt::Display for AgentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What is known of a conversation that has given a sign of life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Agent {
    /// The program that it runs in, as it says.
    pub(crate) client: Option<String>,
    /// When it was heard last, milliseconds since 1970.
    pub(crate) heard_ms: i64,
    /// It has said that it leaves, and was not heard since.
    pub(crate) has_left: bool,
}

/// All conversations that have given a sign of life lately.
pub(crate) struct Agents {
    silence_ms: i64,
    known: Mutex<HashMap<AgentId, Agent>>,
}

impl Agents {
    pub(super) async fn load(catalogue: &Catalogue, silence: Duration) -> Result<Self, Failure> {
        let known = catalogue.agents(now_ms() - REMEMBERED_MS).await?;
        let known = known.into_iter().map(|(id, agent)| (AgentId(id), agent)).collect();
        let silence_ms = i64::try_from(silence.as_millis()).unwrap_or(i64::MAX);
        Ok(Self { silence_ms, known: Mutex::new(known) })
    }

    /// It is there; after it has left: it is back.
    pub(crate) async fn heartbeat(
        &self,
        catalogue: &Catalogue,
        id: &AgentId,
        client: Option<&str>,
    ) -> Result<(), Failure> {
        let before = self.get(id).and_then(|agent| agent.client);
        let client = client.map(str::to_owned);
        let agent = Agent { client: client.or(before), heard_ms: now_ms(), has_left: false };
        self.keep(catalogue, id, agent).await
    }

    /// It has ended.
    pub(crate) async fn leave(&self, catalogue: &Catalogue, id: &AgentId) -> Result<(), Failure> {
        let client = self.get(id).and_then(|agent| agent.client);
        self.keep(catalogue, id, Agent { client, heard_ms: now_ms(), has_left: true }).await
    }

    async fn keep(&self, catalogue: &Catalogue, id: &AgentId, agent: Agent) -> Result<(), Failure> {
        let forget_before = now_ms() - REMEMBERED_MS;
        catalogue.keep_agent(&id.0, &agent, forget_before).await?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, agent| agent.heard_ms >= forget_before);
        known.insert(id.clone(), agent);
        Ok(())
    }

    fn get(&self, id: &AgentId) -> Option<Agent> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// What the conversation does that used a box last (B37).
    pub(crate) fn view(
        &self,
        id: Option<&AgentId>,
        status: BoxStatus,
        last_used_ms: i64,
    ) -> AgentView {
        let agent = id.and_then(|id| self.get(id));
        let now = now_ms();
        let unused_ms = now.saturating_sub(last_used_ms).max(0);
        let left = agent.as_ref().is_some_and(|agent| {
            agent.has_left || now.saturating_sub(agent.heard_ms) > self.silence_ms
        });
        AgentView {
            state: state(left, status, unused_ms),
            idle_sec: u64::try_from(unused_ms / 1000).unwrap_or(0),
            client: agent.and_then(|agent| agent.client),
        }
    }
}

fn state(left: bool, status: BoxStatus, unused_ms: i64) -> AgentState {
    if left {
        AgentState::Left
    } else if unused_ms >= IDLE_AFTER_MS {
        AgentState::Idle
    } else if status == BoxStatus::Frozen || unused_ms >= AWAY_AFTER_MS {
        AgentState::Away
    } else {
        AgentState::Working
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b35_ids_are_letters_digits_and_two_signs() {
        for good in ["a", "A-b_9", &"x".repeat(64)] {
            assert_eq!(good.parse::<AgentId>().map(|id| id.to_string()), Ok(good.to_owned()));
        }
        for bad in ["", "a b", "ä", "a/b", &"x".repeat(65)] {
            let error = bad.parse::<AgentId>().expect_err("refused");
            assert_eq!(error.error, "agent id: letters, digits, - and _ only, at most 64");
        }
    }

    #[test]
    fn b37_states_in_their_order() {
        let minute = 60_000;
        let ready = BoxStatus::Ready;
        assert_eq!(state(false, ready, 9 * minute), AgentState::Working);
        assert_eq!(state(false, ready, 10 * minute), AgentState::Away);
        assert_eq!(state(false, BoxStatus::Frozen, minute), AgentState::Away);
        assert_eq!(state(false, BoxStatus::Frozen, 60 * minute), AgentState::Idle);
        assert_eq!(state(true, ready, 0), AgentState::Left);
    }
}
