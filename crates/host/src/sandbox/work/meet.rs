//! Meeting the guest agent of a machine that runs, and what it is told first.

use std::time::Duration;

use lifecycle::{FailureCode, Left, Report};

use super::settle::lost;
use super::{Failed, MOUNT_LIMIT, Unanswered, WAKE_LIMIT, Worker, chain, failed};
use crate::drive_trouble;
use crate::guest::{Continuity, LinkError, Step, StepOutcome, WakeError, WakeParams};
use crate::sandbox::body::{Told, identity_owed, ipv6_owed, mounts_owed, note_told};

impl Worker {
    /// Meets the guest agent of the running machine.
    pub(super) async fn attach(
        &mut self,
        continuity: Continuity,
        limit: Duration,
    ) -> Result<(), Failed> {
        let silent =
            |error: String| Failed { code: FailureCode::AgentSilent, left: Left::Awake, error };
        let Some(machine) = self.body.machine.as_mut() else { return Err(lost("no machine")) };
        let socket = machine.guest_stream().map_err(|error| silent(chain(&error)))?;
        let exit = machine.exit_watch();
        let met = tokio::select! {
            met = self.body.link.attach(socket, continuity, limit) => met.map(drop).map_err(|error| silent(chain(&error))),
            end = async { let mut exit = exit; exit.exited().await } => Err(lost(&format!("its machine ended: {:?}", end.cause))),
            () = self.signals.superseded() => Err(silent("given up for a newer order".to_owned())),
        };
        self.phases.mark("attach");
        met
    }

    /// Clock, entropy, identity, then the guest's programs; from then on it is another life.
    pub(super) async fn go_on(&mut self) -> Result<Report, Failed> {
        let who = identity_owed(&self.ground, &self.record, &self.body);
        let who = who.map_err(|error| failed(FailureCode::AgentSilent, Left::Awake, &error))?;
        let told = who.as_ref().map(Told::of);
        let ipv6 = ipv6_owed(&self.ground, &self.record, &self.body);
        let mounts = mounts_owed(&self.record);
        let (limit, has_drives) =
            if mounts.is_empty() { (WAKE_LIMIT, false) } else { (MOUNT_LIMIT, true) };
        let params = WakeParams { fork: who.is_some(), identity: who };
        let asked = self.body.link.wake_with(params, ipv6, mounts, limit);
        let woke = self.unless_superseded(asked).await;
        self.phases.mark("guest");
        let woke = woke.map_err(|error| {
            if !(has_drives && is_about_drives(&error)) {
                return failed(FailureCode::AgentSilent, Left::Awake, &error);
            }
            let said = chain(&error);
            let drives = self.record.with(|manifest| manifest.drives.clone());
            let error = drive_trouble::explain(&said, &drives).unwrap_or(said);
            Failed { code: FailureCode::DriveUnusable, left: Left::Awake, error }
        })?;
        for step in &woke.steps {
            if let StepOutcome::Failed(why) = &step.outcome {
                tracing::warn!(sandbox = %self.id, step = ?step.step, why, "a step of the wake failed");
            }
        }
        self.lead_loopback().await;
        if told.is_some() || ipv6.is_some() {
            let record = self.record.clone();
            let id = self.id.clone();
            // Not awaited: told twice it is the same identity.
            tokio::spawn(async move {
                let noted = record.change(|manifest| note_told(manifest, told, ipv6, &woke));
                if let Err(error) = noted.await {
                    tracing::warn!(sandbox = %id, error = chain(&error), "identity not noted");
                }
            });
        }
        Ok(Report::Ready)
    }

    /// Leads ports of a box's own loopback to its services. A box is of use without it, so that is no reason not to go on.
    async fn lead_loopback(&self) {
        let ways = self.record.with(|manifest| {
            manifest.wiring.as_ref().map(crate::services::loopback).unwrap_or_default()
        });
        match self.unless_superseded(self.body.link.lead_loopback(&ways)).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(sandbox = %self.id, "its guest agent is too old to lead localhost to its services");
            }
            Err(error) => error.log(&self.id, "its localhost is not led to its services"),
        }
    }
}

/// Whether drives were what the guest could not do.
fn is_about_drives(error: &Unanswered<WakeError>) -> bool {
    match error {
        Unanswered::Failed(WakeError::NotRunning(woke)) => woke.steps.iter().any(|report| {
            report.step == Step::Mounts && matches!(report.outcome, StepOutcome::Failed(_))
        }),
        Unanswered::Failed(WakeError::Link(LinkError::NoDrives)) => true,
        _ => false,
    }
}
