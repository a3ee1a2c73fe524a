//! One sandbox on this host: its task, and the handle through which everybody else speaks with it.
//!
//! ```text
//!   verbs ──messages──▶ task (owner of the state machine) ──orders──▶ work (has the body meanwhile)
//!     ▲                   │        ▲                                    │
//!     └──── replies ──────┘        └────────────── done ────────────────┘
//! ```
//!
//! The task decides nothing itself: it passes facts and wishes on to [`lifecycle`] and has its orders carried out, one after
//! the other. What races, races as messages in one queue.

pub(crate) mod body;
mod replies;
mod story;
mod task;
pub(crate) mod view;
pub(crate) mod work;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::host::{Change, Known};
use api::sandbox::SleepTier;
use api::{ApiError, Code, SandboxId};
use async_trait::async_trait;
use lifecycle::{Call, CallKind};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot, watch};

use crate::exec_names::ExecNames;
use crate::guest::GuestLink;
use crate::manifest::DriveUse;
use crate::record::Record;
use crate::settings::Files;

pub(crate) use replies::spending_error;
pub(crate) use story::death_of;
pub(crate) use task::{Beginning, start};

/// Commands that are being started in one sandbox at a time.
pub(crate) const STARTS_MAX: usize = 16;

/// Speaks with a sandbox's task. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    id: SandboxId,
    files: Files,
    pub(crate) address: Ipv4Addr,
    record: Record,
    /// Commands that are being started.
    starts: Arc<Semaphore>,
    /// Held by who gives it other drives.
    attaching: Arc<tokio::sync::Mutex<()>>,
    /// Unbounded as a type; in it are at most a few messages per call under way, and calls are bounded at the door.
    messages: mpsc::UnboundedSender<Message>,
}

/// What the task is told.
#[derive(Debug)]
pub(crate) enum Message {
    /// A call begins that waits on the sandbox.
    Call {
        call: Call,
        what: String,
        began: Instant,
        reply: oneshot::Sender<Result<Ready, ApiError>>,
    },
    /// Such a call has ended.
    CallEnded(CallKind),
    /// A command was started in it.
    CommandStarted,
    /// Bytes flowed that are no packets on its link, and count like them.
    Flowed,
    /// Put to sleep now.
    Sleep {
        tier: Option<SleepTier>,
        cause: lifecycle::SleepCause,
        reply: oneshot::Sender<Result<(), ApiError>>,
    },
    /// Boot anew.
    Restart { reply: oneshot::Sender<Result<(), ApiError>> },
    /// A box that was stopped for good is to come back.
    Restore { reply: oneshot::Sender<Result<(), ApiError>> },
    /// Its own limit on spending is reached, or is not any more.
    Limit(bool),
    /// Its host goes down.
    Leave,
    /// The next boot gives it these drives; `None`: those that it has.
    Drives(Option<Vec<DriveUse>>),
    /// There is room in memory for a restart, or none came in time.
    Room(Result<crate::budget::Seat, crate::budget::NoRoom>),
    /// Remove.
    Delete { reply: oneshot::Sender<Result<(), ApiError>> },
    /// Remove if it has been asleep for so long, in milliseconds; told whether it is being removed.
    DeleteIdle { asleep_at_least_ms: u64, reply: oneshot::Sender<bool> },
    /// Change settings.
    Update { change: Box<Change>, reply: oneshot::Sender<Result<(), ApiError>> },
    /// Copy into these files.
    Capture { to: Files, reply: oneshot::Sender<Result<(), ApiError>> },
    /// Give the link to its guest, whatever state it is in.
    Link { reply: oneshot::Sender<GuestLink> },
    /// Tell about it.
    View { reply: oneshot::Sender<Known> },
    /// Tell when its first start has ended.
    Started { reply: oneshot::Sender<Result<(), ApiError>> },
    /// An attempt to meet the agent of a running guest again has ended.
    Reattached(Result<(), String>),
    /// The newest checkpoint that the store has of it from before.
    CheckpointFound(
        Result<Option<Box<crate::checkpoints::Latest>>, crate::checkpoints::StoreError>,
    ),
    /// A checkpoint was carried to the store, or could not be.
    CheckpointKept(Result<Box<crate::checkpoints::Kept>, crate::checkpoints::StoreError>),
    /// The guest has said what it does, or nothing.
    Sample(Result<crate::guest::Sample, String>),
    /// What the guest does right before it is put to sleep, for an order that waits until this is known.
    LastSample { sample: crate::guest::Sample, heard: oneshot::Sender<()> },
}

/// The sandbox is awake and stays so while this lives.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) link: GuestLink,
    pub(crate) address: Ipv4Addr,
    pub(crate) life: u64,
    /// Milliseconds waited for a wake; `None`: it was awake.
    pub(crate) woke_ms: Option<f64>,
    /// When it was last woken or started.
    pub(crate) awake_since: Instant,
    pub(crate) env: std::collections::BTreeMap<String, String>,
    /// Ends the call when dropped.
    pub(crate) guard: CallGuard,
}

/// Ends a call when dropped.
#[derive(Debug)]
pub(crate) struct CallGuard {
    kind: CallKind,
    messages: mpsc::UnboundedSender<Message>,
    stands_still: watch::Receiver<bool>,
}

#[async_trait]
impl api::host::Hold for CallGuard {
    async fn stands_still(&self) -> ApiError {
        if self.stands_still.clone().wait_for(|still| *still).await.is_err() {
            // The guest is gone, which whoever waits for it learns otherwise.
            std::future::pending::<()>().await;
        }
        crate::exec::stands_still_error()
    }
}

/// How often it is told that bytes flow: as often as packets are asked for.
const FLOW_EVERY: Duration = Duration::from_millis(lifecycle::SAMPLE_EVERY_MS);

/// Tells a sandbox's task that bytes flow which are no packets on its link.
#[derive(Debug)]
pub(crate) struct Flow {
    messages: mpsc::UnboundedSender<Message>,
    told: Option<Instant>,
}

impl Flow {
    /// Some flow now.
    pub(crate) fn bytes(&mut self) {
        if self.told.is_none_or(|told| told.elapsed() >= FLOW_EVERY) {
            self.told = Some(Instant::now());
            // The task is gone only with the sandbox: then nobody counts any more.
            let _ = self.messages.send(Message::Flowed);
        }
    }
}

impl CallGuard {
    /// For a connection that outlives its call.
    pub(crate) fn flow(&self) -> Flow {
        Flow { messages: self.messages.clone(), told: None }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        // The task is gone only with the sandbox: then nobody counts calls any more.
        let _ = self.messages.send(Message::CallEnded(self.kind));
    }
}

impl Handle {
    /// Waits for one's turn to start a command: a guest starts one after the other, and a crowd would wait in it until their
    /// limits run out.
    pub(crate) async fn turn_to_start(&self) -> Option<SemaphorePermit<'_>> {
        self.starts.acquire().await.ok()
    }

    /// Its tap's name.
    pub(crate) fn tap_name(&self, subnet: crate::network::Subnet) -> String {
        let slot = self.address.to_bits() - subnet.address(0).to_bits();
        subnet.tap(slot)
    }

    /// Its manifest, as it stands.
    pub(crate) fn manifest(&self) -> crate::manifest::Manifest {
        self.record.get()
    }

    /// How it calls its commands.
    pub(crate) fn exec_names(&self) -> ExecNames {
        self.record.with(|manifest| ExecNames::of(&self.id, manifest.forked_from.as_ref()))
    }

    /// What is durable about it.
    pub(crate) fn record(&self) -> &Record {
        &self.record
    }

    /// Its files.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// Waits until it is awake and keeps it so until the answer's guard is dropped.
    pub(crate) async fn call(
        &self,
        call: Call,
        what: impl Into<String>,
    ) -> Result<Ready, ApiError> {
        let what = what.into();
        self.ask(|reply| Message::Call { call, what, began: Instant::now(), reply }).await?
    }

    pub(crate) async fn sleep(
        &self,
        tier: Option<SleepTier>,
        cause: lifecycle::SleepCause,
    ) -> Result<(), ApiError> {
        self.ask(|reply| Message::Sleep { tier, cause, reply }).await?
    }

    pub(crate) async fn restart(&self) -> Result<(), ApiError> {
        self.ask(|reply| Message::Restart { reply }).await?
    }

    /// A command was started: whoever asks from now on is told that it runs.
    pub(crate) fn command_started(&self) {
        // Gone: nothing runs any more.
        let _ = self.messages.send(Message::CommandStarted);
    }

    /// Brings back a box that was stopped for good.
    pub(crate) async fn restore(&self) -> Result<(), ApiError> {
        self.ask(|reply| Message::Restore { reply }).await?
    }

    /// Boots it with these drives from now on. Whether it got them its manifest says: a boot that was under way has not heard
    /// of them.
    pub(crate) async fn restart_with(&self, drives: Vec<DriveUse>) -> Result<(), ApiError> {
        // Gone: the restart says so.
        let _ = self.messages.send(Message::Drives(Some(drives)));
        let restarted = self.restart().await;
        let _ = self.messages.send(Message::Drives(None));
        restarted
    }

    /// Waits until nobody else is about to give it other drives.
    pub(crate) async fn attaching(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.attaching.lock().await
    }

    /// Gone already is fine.
    pub(crate) async fn delete(&self) -> Result<(), ApiError> {
        match self.ask(|reply| Message::Delete { reply }).await {
            Ok(result) => result,
            Err(_) => Ok(()),
        }
    }

    /// Whether it was asleep for so long and is removed now. Gone already is fine.
    pub(crate) async fn delete_idle(&self, asleep_at_least_ms: u64) -> Result<bool, ApiError> {
        match self.ask(|reply| Message::DeleteIdle { asleep_at_least_ms, reply }).await {
            Ok(true) => self.delete().await.map(|()| true),
            Ok(false) => Ok(false),
            Err(_) => Ok(true),
        }
    }

    pub(crate) async fn update(&self, change: Change) -> Result<(), ApiError> {
        self.ask(|reply| Message::Update { change: Box::new(change), reply }).await?
    }

    pub(crate) async fn capture(&self, to: Files) -> Result<(), ApiError> {
        self.ask(|reply| Message::Capture { to, reply }).await?
    }

    pub(crate) async fn started(&self) -> Result<(), ApiError> {
        self.ask(|reply| Message::Started { reply }).await?
    }

    /// The link to its guest, in whatever state: neither wakes it nor holds it awake.
    pub(crate) async fn link(&self) -> Result<GuestLink, ApiError> {
        self.ask(|reply| Message::Link { reply }).await
    }

    /// Its own limit on spending is reached, or is not any more.
    pub(crate) fn limit(&self, reached: bool) {
        // One that is gone has no limit.
        let _ = self.messages.send(Message::Limit(reached));
    }

    /// Its host goes down: it sleeps on disk, and nothing wakes it any more.
    pub(crate) fn leave(&self) {
        // One that is gone has nothing to lose.
        let _ = self.messages.send(Message::Leave);
    }

    /// Its id.
    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    pub(crate) async fn view(&self) -> Result<Known, ApiError> {
        self.ask(|reply| Message::View { reply }).await
    }

    async fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        let gone = || {
            ApiError::new(Code::NotFound, format!("sandbox `{}` does not exist any more", self.id))
        };
        self.messages.send(message(reply)).map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}
