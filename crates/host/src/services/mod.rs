//! Names inside boxes (T6-T11): where a connection goes that a program in a box opens to one of its names.
//!
//! Each name has an address of its own from a network that leads nowhere else, so what a guest sends there comes to this host by
//! its default route, from containers too, and nothing is needed in the guest. To a process in the box itself it is turned back by
//! a rule in the kernel ([`rules`](crate::network)), with no program between: such a connection is there as long as its two ends
//! are, also over a freeze. Everything else arrives here, at one port of the gateway: requests to an external base
//! ([`external`]), links to other boxes ([`link`]), and port 80 of names that are not declared on it.
//!
//! What goes through here ends when its box sleeps: after the thaw its programs find those connections closed (B17), and the box at
//! the other end is held by nobody that sleeps (B10).

mod external;
mod link;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use api::boxes::wiring::{Wire, WireTo, Wiring};
use api::{ApiError, Event, SandboxId};
use rustix::net::sockopt;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, broadcast};
use tokio_util::sync::CancellationToken;
use wire::LoopbackWay;

use crate::Daemon;
use crate::network::{Subnet, services as rules};

/// The port of the gateway at which connections arrive; guests cannot call it by itself.
pub(crate) const PORT: u16 = 9096;

/// Connections of all boxes at a time; further ones are closed at once.
const CONNECTIONS_MAX: usize = 4096;

/// Pause after `accept` failed for want of file descriptors, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The port that belongs to the guest agent, on which names answer only where they are declared on it (T8).
const SCENE_PORT: u16 = 80;
/// The guest agent's other port.
const AGENT_PORT: u16 = 9095;

/// How all boxes are wired.
#[derive(Debug)]
pub(crate) struct Services {
    subnet: Subnet,
    external: external::External,
    /// By the boxes' addresses.
    wired: Mutex<HashMap<Ipv4Addr, Wired>>,
    /// One change of the rules at a time.
    changing: tokio::sync::Mutex<()>,
}

/// How one box is wired.
#[derive(Clone, Debug)]
struct Wired {
    id: SandboxId,
    wiring: Arc<Wiring>,
    /// Fires when it sleeps or ends.
    rests: CancellationToken,
}

impl Services {
    pub(crate) fn new(subnet: Subnet) -> Self {
        Self {
            subnet,
            external: external::External::new(subnet),
            wired: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }
    }

    /// Refuses a wiring whose external base leads to this host itself or to its guests, as far as its URL tells (T11). One that is
    /// used by no name is not looked at.
    pub(crate) fn check(&self, wiring: &Wiring) -> Result<(), ApiError> {
        let used = wiring.wires.iter().any(|wire| wire.to == WireTo::External);
        wiring
            .external_base_url
            .as_ref()
            .filter(|_| used)
            .map_or(Ok(()), |base| self.external.check(base))
    }

    /// Wires a box, anew or for the first time; without names: not at all.
    pub(crate) async fn wire(
        &self,
        id: &SandboxId,
        address: Ipv4Addr,
        wiring: Option<Wiring>,
    ) -> std::io::Result<()> {
        let _one_at_a_time = self.changing.lock().await;
        let wiring = wiring.filter(|wiring| !wiring.wires.is_empty());
        let before = self.of(address).map(|wired| wired.wiring);
        if before.is_none() && wiring.is_none() {
            return Ok(());
        }
        rules::change(self.subnet, address, before.as_deref(), wiring.as_ref()).await?;
        let mut all = self.lock();
        let earlier = match wiring {
            Some(wiring) => {
                let wired = Wired {
                    id: id.clone(),
                    wiring: Arc::new(wiring),
                    rests: CancellationToken::new(),
                };
                all.insert(address, wired)
            }
            None => all.remove(&address),
        };
        // What went the old way ends.
        if let Some(earlier) = earlier {
            earlier.rests.cancel();
        }
        Ok(())
    }

    /// The address of a name in a box; `None`: the box has no such name.
    pub(crate) fn address_of(&self, guest: Ipv4Addr, name: &str) -> Option<Ipv4Addr> {
        let all = self.lock();
        let wires = &all.get(&guest)?.wiring.wires;
        wires.iter().find(|wire| wire.name.as_deref() == Some(name)).map(|wire| wire.address)
    }

    /// A connection to the external base of a box; `None`: it has none.
    pub(crate) fn external(&self, guest: Ipv4Addr) -> Option<tokio::io::DuplexStream> {
        let wired = self.of(guest)?;
        wired.wiring.external_base_url.as_ref()?;
        Some(self.external.connect((*wired.wiring).clone()))
    }

    fn of(&self, guest: Ipv4Addr) -> Option<Wired> {
        self.lock().get(&guest).cloned()
    }

    /// A box sleeps or has ended: its connections through here end.
    fn rests(&self, id: &SandboxId) {
        for wired in self.lock().values_mut().filter(|wired| wired.id == *id) {
            std::mem::take(&mut wired.rests).cancel();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Ipv4Addr, Wired>> {
        self.wired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ports of the box's own loopback that lead elsewhere: those of external services to their names, but where a process in the
/// box has its own; and 80 to the first service that is declared (T8, T11).
pub(crate) fn loopback(wiring: &Wiring) -> Vec<LoopbackWay> {
    let here = |port: u16| wiring.wires.iter().any(|wire| wire.to == WireTo::Here { port });
    let to_name = |port, wire: &Wire| LoopbackWay {
        port,
        address: wire.address.octets(),
        to_port: wire.port,
    };
    let mut ways: Vec<LoopbackWay> = Vec::new();
    for wire in wiring.wires.iter().filter(|wire| wire.to == WireTo::External) {
        let taken = [SCENE_PORT, AGENT_PORT].contains(&wire.port) || here(wire.port);
        if !taken && ways.iter().all(|way| way.port != wire.port) {
            ways.push(to_name(wire.port, wire));
        }
    }
    ways.extend(wiring.wires.first().map(|first| match first.to {
        WireTo::Here { port: to_port } => {
            LoopbackWay { port: SCENE_PORT, address: Ipv4Addr::LOCALHOST.octets(), to_port }
        }
        WireTo::External | WireTo::Link { .. } => to_name(SCENE_PORT, first),
    }));
    ways
}

/// Takes connections, until the daemon ends.
pub(crate) async fn serve(
    daemon: Weak<Daemon>,
    listener: TcpListener,
    mut events: broadcast::Receiver<Event>,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, SocketAddr::V4(guest))) => {
                    let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
                    let daemon = daemon.clone();
                    tokio::spawn(async move {
                        serve_one(daemon, stream, *guest.ip()).await;
                        drop(permit);
                    });
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "services: accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            event = events.recv() => {
                let Some(daemon) = daemon.upgrade() else { return };
                match event {
                    Ok(event) if is_rest(&event) => daemon.ground.services.rests(&event.sandbox_id),
                    Ok(_) => {}
                    // Which boxes sleep by now is not known: all begin anew.
                    Err(broadcast::error::RecvError::Lagged(_)) => {
                        let ids: Vec<_> = daemon.ground.services.lock().values().map(|wired| wired.id.clone()).collect();
                        for id in &ids {
                            daemon.ground.services.rests(id);
                        }
                    }
                    Err(broadcast::error::RecvError::Closed) => return,
                }
            }
        }
    }
}

fn is_rest(event: &Event) -> bool {
    matches!(event.kind.as_str(), "sandbox.slept" | "sandbox.stopped" | "sandbox.deleted")
}

async fn serve_one(daemon: Weak<Daemon>, stream: TcpStream, guest: Ipv4Addr) {
    let Some(daemon) = daemon.upgrade() else { return };
    let Ok(meant) = sockopt::ip_original_dst(&stream) else { return };
    let Some(wired) = daemon.ground.services.of(guest) else { return };
    let ways = wired.wiring.wires.iter().filter(|wire| wire.covers(*meant.ip()));
    let ways: Vec<&Wire> = ways.collect();
    let way = ways.iter().find(|wire| wire.port == meant.port()).map(|wire| &wire.to);
    let work = async {
        match way {
            Some(WireTo::External) => {
                daemon.ground.services.external.serve(&wired.wiring, stream).await;
            }
            Some(WireTo::Link { id, port }) => {
                link::serve(&daemon, &wired.id, id, *port, stream).await;
            }
            // Turned back by the kernel: it comes here only in the moment in which the wiring changes.
            Some(WireTo::Here { .. }) => {}
            None => {
                refuse(stream, meant.port(), ways.first().and_then(|wire| wire.name.as_deref()))
                    .await;
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = wired.rests.cancelled() => {}
    }
}

/// A port on which nobody has declared anything (T8).
async fn refuse(stream: TcpStream, port: u16, name: Option<&str>) {
    let Some(name) = name else { return };
    let (status, text) = match port {
        SCENE_PORT => (
            "502 Bad Gateway",
            format!(
                "nothing listens on {name}:80 in this box: that name is declared on another port. Dial the port it is declared \
                 on, or declare it on port 80 with targetPort, the port your process listens on\n"
            ),
        ),
        AGENT_PORT => ("404 Not Found", "not found\n".to_owned()),
        // Closed without a word, as a port that nobody listens on.
        _ => return,
    };
    answer(stream, status, &text).await;
}

/// Answers the first request on a connection, whatever it is, and closes it.
async fn answer(mut stream: TcpStream, status: &str, text: &str) {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        text.len()
    );
    // The request is read first: a connection that is closed over unread bytes is reset, and the answer lost.
    let mut request = [0; 4096];
    let read = tokio::time::timeout(Duration::from_secs(5), async {
        stream.readable().await?;
        stream.try_read(&mut request)
    });
    // A program that says nothing gets the answer all the same.
    let _ = read.await;
    if let Err(error) = stream.write_all(format!("{head}{text}").as_bytes()).await {
        tracing::debug!(%error, "services: not answered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t08_t11_where_ports_of_the_loopback_lead() {
        let wire = |last, port, to| Wire {
            name: Some(format!("service-{last}")),
            address: Ipv4Addr::new(198, 18, 0, last),
            bits: 32,
            port,
            to,
        };
        let way = |port, address, to_port| LoopbackWay { port, address, to_port };
        let wiring = |wires| Wiring { wires, external_base_url: None };
        assert_eq!(loopback(&Wiring::default()), []);
        let here = wiring(vec![
            wire(1, 8000, WireTo::Here { port: 8080 }),
            wire(2, 9000, WireTo::Here { port: 9000 }),
        ]);
        assert_eq!(loopback(&here), [way(80, [127, 0, 0, 1], 8080)], "80: the first of them");
        let mixed = wiring(vec![
            wire(1, 80, WireTo::External),
            wire(2, 9000, WireTo::External),
            wire(3, 9000, WireTo::External),
            wire(4, 9001, WireTo::External),
            wire(5, 5432, WireTo::Here { port: 9001 }),
            wire(6, 9095, WireTo::External),
        ]);
        let ways = loopback(&mixed);
        let expected = [way(9000, [198, 18, 0, 2], 9000), way(80, [198, 18, 0, 1], 80)];
        assert_eq!(ways, expected, "9001 is a process's own; 80 and 9095 are the agent's");
    }
}
