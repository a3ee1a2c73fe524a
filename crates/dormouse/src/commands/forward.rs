//! A port of a sandbox as a port of this machine.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::sandboxes::path;
use crate::cli::{ForwardArgs, Forwarded};
use crate::client::Client;
use crate::problem::Problem;

/// Most connections at a time; more wait in the kernel's queue.
const CONNECTIONS_MAX: usize = 256;
/// Pause after `accept` failed for want of file descriptors, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

pub(crate) async fn forward(client: &Client, arguments: ForwardArgs) -> Result<i32, Problem> {
    let ForwardArgs { name, ports, bind } = arguments;
    // Asked first, so that a name that does not exist is an error and not a port that ends every connection.
    let _: api::sandbox::Sandbox = client.get(&path(&name)).await?;
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut listeners = JoinSet::new();
    for Forwarded { port, local } in ports {
        let listener = TcpListener::bind((bind, local)).await.map_err(|error| {
            let problem = Problem::new(format!("cannot listen at {bind} port {local}: {error}"));
            problem
                .hint(format!("choose another port here: `dormouse forward {name} {port}:LOCAL`"))
        })?;
        let at = listener
            .local_addr()
            .map_err(|error| Problem::new(format!("cannot listen at {bind}: {error}")))?;
        eprintln!("{at} is port {port} of {name}");
        listeners.spawn(accept(client.clone(), name.clone(), port, listener, Arc::clone(&room)));
    }
    // Until interrupted: then the connections end with this program. Listened for, because a shell that begins it in the background
    // (`&`) has it ignore SIGINT.
    let listen = |kind| {
        signal(kind).map_err(|error| Problem::new(format!("cannot listen for signals: {error}")))
    };
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let ended_by = tokio::select! {
        _ = interrupt.recv() => SignalKind::interrupt(),
        _ = terminate.recv() => SignalKind::terminate(),
        () = async { while listeners.join_next().await.is_some() {} } => return Ok(0),
    };
    Ok(128 + ended_by.as_raw_value())
}

async fn accept(
    client: Client,
    name: String,
    port: u16,
    listener: TcpListener,
    room: Arc<Semaphore>,
) {
    loop {
        let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (client, name) = (client.clone(), name.clone());
                tokio::spawn(async move {
                    let _room = permit;
                    connect(&client, &name, port, stream).await;
                });
            }
            Err(error) => {
                eprintln!("error: cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One connection, to its end. What goes wrong is told; the others go on.
async fn connect(client: &Client, name: &str, port: u16, mut local: TcpStream) {
    // Only slower without.
    let _ = local.set_nodelay(true);
    match client.upgrade(&format!("{}/forward/{port}", path(name)), "tcp").await {
        Err(problem) => {
            problem.print(false);
            // Whoever connected must not take this for an end in order.
            if let Err(error) = reset(&local) {
                eprintln!("error: cannot end a connection: {error}");
            }
        }
        Ok(far) => {
            let mut far = TokioIo::new(far);
            // An end in disorder is the two sides' own business.
            let _ = tokio::io::copy_bidirectional(&mut local, &mut far).await;
        }
    }
}

fn reset(stream: &TcpStream) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?)
}
