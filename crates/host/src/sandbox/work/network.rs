//! What a guest has open on its network, looked at while it falls asleep, so that the host can answer in its place
//! ([`asleep`](crate::network::asleep)).
//!
//! Where its connections stand its kernel is asked while its programs still run; what is open it tells when they stand still.
//! Between the two, and until the machine stands still as well, everything that crosses its link is watched: then nothing of
//! what was heard is sure, and the guest wakes for whatever comes. What came after its programs stood still they have not
//! seen, though its kernel has taken it: then it wakes at once.

use std::collections::HashMap;

use vmm::packet::Flow;
use vmm::tap::{ActivityWatch, Ends};

use super::{SAMPLE_LIMIT, Worker};
use crate::network::asleep::AtRest;

/// What was heard while it fell asleep.
pub(super) struct Look {
    watch: ActivityWatch,
    /// `None`: it sleeps already and moves to disk; what it told is known.
    flows: Option<HashMap<Ends, Flow>>,
    /// Something crossed the link before its programs stood still.
    crossed: bool,
}

impl Look {
    /// The guest's programs stand still.
    pub(super) fn programs_rest(&mut self) {
        self.crossed = crossed(&self.watch);
    }
}

impl Worker {
    /// Begins to look, while the guest's programs run. `None`: nothing can be known.
    pub(super) async fn look_at_network(&self) -> Option<Look> {
        let port = self.body.port.as_ref()?;
        let watch = self.watch_network()?;
        let asked = self.unless_superseded(self.body.link.sockets());
        let sockets = match tokio::time::timeout(SAMPLE_LIMIT, asked).await {
            Ok(Ok(sockets)) => sockets,
            // It will not tell at rest either, or be found out to be silent by what follows.
            Ok(Err(error)) => {
                tracing::debug!(sandbox = %self.id, %error, "its sockets are not known");
                return None;
            }
            Err(_) => return None,
        };
        let standing = sockets.connections.iter().filter(|connection| connection.stands);
        let ends: Vec<Ends> =
            standing.map(|connection| (connection.local, connection.peer)).collect();
        let flows = tokio::select! {
            flows = port.flows(&ends) => flows,
            () = self.signals.turned_back() => HashMap::new(),
        };
        Some(Look { watch, flows: Some(flows), crossed: false })
    }

    /// Begins to look at a sleeper that moves to disk: its kernel runs for a moment.
    pub(super) fn look_at_sleeper(&self) -> Option<Look> {
        Some(Look { watch: self.watch_network()?, flows: None, crossed: false })
    }

    fn watch_network(&self) -> Option<ActivityWatch> {
        let watch = self.body.port.as_ref()?.watch();
        let failed = |error| tracing::warn!(sandbox = %self.id, %error, "network not watched");
        watch.map_err(failed).ok()
    }

    /// The machine stands still: from here on the host answers in its place.
    pub(super) fn machine_rests(&mut self, look: Option<Look>) {
        let told = self.body.link.sockets_at_rest();
        let Some(port) = self.body.port.as_mut() else { return };
        let Some(Look { watch, flows, crossed: before }) = look else {
            port.rest(None, false);
            return;
        };
        let after = crossed(&watch);
        match flows {
            None if after => port.rest(None, true),
            None => {}
            Some(flows) => {
                let unread = told.as_ref().is_some_and(|told| told.unread);
                let at_rest =
                    told.filter(|_| !before && !after).and_then(|told| AtRest::of(&told, &flows));
                tracing::debug!(
                    sandbox = %self.id,
                    before, after, unread, flows = flows.len(), known = at_rest.is_some(),
                    "its network at rest"
                );
                port.rest(at_rest, after || before && unread);
            }
        }
    }
}

fn crossed(watch: &ActivityWatch) -> bool {
    watch.drain().unwrap_or_else(|error| {
        tracing::warn!(%error, "network not watched");
        true
    })
}
