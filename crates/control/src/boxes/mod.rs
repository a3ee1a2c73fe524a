//! The box face: what a box is beyond its sandbox, and what is done with one, for REST and MCP alike.
//!
//! - [`record`]: what is kept of a box, also after it has ended.
//! - [`agents`]: the conversations that use boxes.
//! - [`start`]: making one, or bringing one back.
//! - [`update`]: changing one.
//! - [`room`]: whether an account may have one more.
//! - [`view`]: telling about one.
//! - [`act`]: calls that act on one, each of which is use from its start to its end.
//! - [`exec`], [`procs`]: commands and processes; [`secrets`]: what they get.
//! - [`services`]: names, addresses and URLs; [`wire`]: switching them.
//! - [`checkpoint`]: copies in an object store, from which another daemon takes a box up.
//! - [`keep`]: what happens to boxes by themselves.
//!
//! # Not here
//!
//! When a box is frozen, thawed or stopped for good: its host decides, by the same engine as for sandboxes.

mod act;
mod agents;
mod checkpoint;
mod exec;
mod keep;
mod links;
mod procs;
mod record;
mod room;
mod secrets;
mod services;
mod start;
mod update;
mod view;
mod wire;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use api::SandboxId;
use api::boxes::BoxLimits;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

pub(crate) use act::{Acting, act, say, stop, wake, while_paid};
pub(crate) use agents::{Agent, AgentId, Agents};
pub(crate) use checkpoint::{enter, set_checkpoint};
pub(crate) use exec::{Way, command, commands, exec, feed, signal};
pub(crate) use keep::{keep, settle};
pub(crate) use procs::procs;
pub(crate) use record::{BootsTold, BoxRecord, Ended};
pub(crate) use room::{Claim, claim, no_credit};
pub(crate) use secrets::add_secrets;
pub(crate) use services::{first_service, target_of};
pub(crate) use start::{Asked, NAMES_MAX, NewBox, start};
pub(crate) use update::update;
pub(crate) use view::{events, list, rfc3339, status};
pub(crate) use wire::wire;

use crate::catalogue::Catalogue;
use crate::failure::Failure;

/// How boxes are set up.
#[derive(Clone, Debug)]
pub struct BoxSettings {
    /// Virtual processors of a unit (T3).
    pub unit_cpus: u32,
    /// Memory of a unit, MiB.
    pub unit_memory_mib: u32,
    /// When a box is frozen and stopped.
    pub limits: BoxLimits,
    /// How long a page load that thaws a box is held before it gets the waking page (B18).
    pub page_hold: Duration,
    /// Within so long a box is asked to wake by page loads once (B18).
    pub wake_every: Duration,
    /// Silent for so long a conversation is gone (B35).
    pub agent_silence: Duration,
}

impl Default for BoxSettings {
    /// As the B-rules have it.
    fn default() -> Self {
        Self {
            unit_cpus: 2,
            unit_memory_mib: 8192,
            limits: BoxLimits::default(),
            page_hold: Duration::from_secs(1),
            wake_every: Duration::from_secs(15),
            agent_silence: Duration::from_mins(3),
        }
    }
}

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    /// Whose boxes these are.
    pub(crate) account: String,
    /// The conversation that it comes from.
    pub(crate) agent: Option<AgentId>,
}

/// All boxes.
pub(crate) struct Boxes {
    pub(crate) settings: BoxSettings,
    records: RwLock<HashMap<SandboxId, Arc<BoxRecord>>>,
    pub(crate) agents: Agents,
    claims: room::Claims,
    /// When a page load has last asked a box to wake.
    asked: Mutex<HashMap<SandboxId, Instant>>,
    /// One change at a time: it begins with what the one before has left.
    changing: tokio::sync::Mutex<()>,
    /// Held from reading what goes along with a box's checkpoints until its host has it.
    carrying: tokio::sync::Mutex<()>,
    /// Held while a box is brought back.
    restoring: Turns,
    /// Held while a box's settings change: its host has what is told of it.
    updating: Turns,
}

/// One at a time for each box.
#[derive(Default)]
struct Turns(Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the box's turn, which ends when this is dropped.
    async fn turn(&self, id: &SandboxId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody has or awaits these.
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(id.clone()).or_default())
        };
        turn.lock_owned().await
    }
}

impl Boxes {
    /// Reads what is kept.
    pub(crate) async fn load(
        catalogue: &Catalogue,
        settings: BoxSettings,
    ) -> Result<Self, Failure> {
        let records = catalogue.boxes().await?;
        let records =
            records.into_iter().map(|record| (record.id.clone(), Arc::new(record))).collect();
        let agents = Agents::load(catalogue, settings.agent_silence).await?;
        Ok(Self {
            settings,
            records: RwLock::new(records),
            agents,
            claims: room::Claims::default(),
            asked: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            carrying: tokio::sync::Mutex::default(),
            restoring: Turns::default(),
            updating: Turns::default(),
        })
    }

    /// What is kept of a box. Asked for with each request to its URLs, so nothing is copied.
    pub(crate) fn record(&self, id: &SandboxId) -> Option<Arc<BoxRecord>> {
        self.read().get(id).cloned()
    }

    /// All of an account, oldest first.
    pub(crate) fn of_account(&self, account: &str) -> Vec<Arc<BoxRecord>> {
        let records = self.read();
        let mut all: Vec<_> =
            records.values().filter(|record| record.account == account).cloned().collect();
        all.sort_by(|a, b| (a.created_ms, &a.id).cmp(&(b.created_ms, &b.id)));
        all
    }

    /// All that have not ended.
    pub(crate) fn live(&self) -> Vec<Arc<BoxRecord>> {
        self.read().values().filter(|record| record.ended.is_none()).cloned().collect()
    }

    /// All of an account that have not ended.
    pub(crate) fn live_of(&self, account: &str) -> Vec<Arc<BoxRecord>> {
        let mine = |record: &&Arc<BoxRecord>| record.ended.is_none() && record.account == account;
        self.read().values().filter(mine).cloned().collect()
    }

    /// Keeps a box as it is now.
    pub(crate) async fn keep(
        &self,
        catalogue: &Catalogue,
        record: BoxRecord,
    ) -> Result<(), Failure> {
        catalogue.keep_box(&record).await?;
        self.write().insert(record.id.clone(), Arc::new(record));
        Ok(())
    }

    /// Changes what is kept of a box. Nothing, where none is.
    pub(crate) async fn change(
        &self,
        catalogue: &Catalogue,
        id: &SandboxId,
        change: impl FnOnce(&mut BoxRecord),
    ) -> Result<(), Failure> {
        let _one_at_a_time = self.changing.lock().await;
        let Some(record) = self.record(id) else { return Ok(()) };
        let mut record = Arc::unwrap_or_clone(record);
        change(&mut record);
        self.keep(catalogue, record).await
    }

    /// Forgets a box.
    pub(crate) async fn forget(
        &self,
        catalogue: &Catalogue,
        id: &SandboxId,
    ) -> Result<(), Failure> {
        let _one_at_a_time = self.changing.lock().await;
        catalogue.forget_box(id).await?;
        self.write().remove(id);
        Ok(())
    }

    /// Whether a page load may ask this box to wake now; from then on none may for a while (B18).
    pub(crate) fn may_ask(&self, id: &SandboxId) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        asked.retain(|_, at| now.duration_since(*at) < self.settings.wake_every);
        if asked.contains_key(id) {
            return false;
        }
        asked.insert(id.clone(), now);
        true
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<SandboxId, Arc<BoxRecord>>> {
        self.records.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<SandboxId, Arc<BoxRecord>>> {
        self.records.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_one_at_a_time_for_each_box_and_are_forgotten() {
        let turns = Turns::default();
        let (one, other): (SandboxId, SandboxId) =
            ("k3b5qj2m4x7a".parse().unwrap(), "k3b5qj2m4x7b".parse().unwrap());
        let held = turns.turn(&one).await;
        let others = turns.turn(&other).await;
        let mut waits = std::pin::pin!(turns.turn(&one));
        assert!(futures_util::poll!(&mut waits).is_pending());
        drop((held, others));
        let held = waits.await;
        drop(turns.turn(&other).await);
        assert_eq!(turns.0.lock().unwrap().len(), 2);
        drop(held);
        drop(turns.turn(&other).await);
        assert_eq!(turns.0.lock().unwrap().len(), 1);
    }

    #[tokio::test]
    async fn b02_of_two_changes_at_once_none_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::open(folder.path()).await.unwrap();
        let boxes = Boxes::load(&catalogue, BoxSettings::default()).await.unwrap();
        let id: SandboxId = "k3b5qj2m4x7a".parse().unwrap();
        let record = BoxRecord::example();
        boxes.keep(&catalogue, record).await.unwrap();
        let (one, other) = tokio::join!(
            boxes.change(&catalogue, &id, |record| record.last_used_ms = 2),
            boxes.change(&catalogue, &id, |record| record.stop_reason = Some("idle".to_owned())),
        );
        one.and(other).unwrap();
        let again = Boxes::load(&catalogue, BoxSettings::default()).await.unwrap();
        for kept in [boxes.record(&id).unwrap(), again.record(&id).unwrap()] {
            assert_eq!((kept.last_used_ms, kept.stop_reason.as_deref()), (2, Some("idle")));
        }
    }
}
