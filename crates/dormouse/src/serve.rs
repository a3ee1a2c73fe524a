//! The daemon: a host and a control plane in one process.
//!
//! Ending it, by a signal or a crash, ends no guest: the next one takes them up again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::host::Host;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::cli::{LogFormat, ServeArgs};
use crate::problem::Problem;

/// Runs until SIGTERM or SIGINT, or until it is asked to end over the interface (`dormouse drain --stop`).
pub(crate) async fn serve(data: &Path, arguments: ServeArgs) -> Result<i32, Problem> {
    log_to_stderr(arguments.log, data);
    raise_open_files();
    // Before anything is started: a signal that comes meanwhile must not end us halfway.
    let listen = |kind| {
        signal(kind).map_err(|error| Problem::new(format!("cannot listen for signals: {error}")))
    };
    let (mut terminate, mut interrupt) =
        (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);

    let host = start_host(data, &arguments).await?;
    let settings = control::Settings {
        data: data.to_owned(),
        listen: arguments.listen,
        domain: arguments.domain,
        public_url: arguments.public_url,
        edge: control::EdgeLimits {
            answer: Duration::from_secs(arguments.edge_answer_seconds),
            idle: Duration::from_secs(arguments.edge_idle_seconds),
        },
        boxes: arguments.boxes.settings(),
        tls: arguments
            .tls_cert
            .zip(arguments.tls_key)
            .map(|(certificate, key)| control::TlsFiles { certificate, key }),
        trusted_proxies: arguments.trusted_proxies,
        open_metrics: arguments.open_metrics,
        follow_max: arguments.follow_seconds.map(Duration::from_secs),
    };
    let server =
        control::serve(Arc::clone(&host), settings).await.map_err(|error| failed(&error))?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), address = %server.address(), "dormouse is ready");
    let leaving = tokio::select! {
        _ = terminate.recv() => {
            tracing::info!("SIGTERM: stopping; guests go on");
            false
        }
        _ = interrupt.recv() => {
            tracing::info!("SIGINT: stopping; guests go on");
            false
        }
        () = server.asked_to_leave() => {
            tracing::info!("asked to end: stopping; guests sleep on disk");
            true
        }
    };
    server.stop().await;
    if leaving {
        // What woke once more before nobody could ask any more, and what timers wake.
        control::leave(&*host).await;
    }
    host.close().await;
    Ok(0)
}

/// The host of this machine. Everything else here goes through [`Host`].
async fn start_host(data: &Path, arguments: &ServeArgs) -> Result<Arc<dyn Host>, Problem> {
    let mut settings = host::Settings::new(data);
    settings.images.clone_from(&arguments.images);
    settings.templates.clone_from(&arguments.templates);
    settings.qemu.clone_from(&arguments.qemu);
    if let Some(subnet) = arguments.subnet {
        settings.use_subnet(subnet);
    }
    settings.memory_budget_mib = arguments.memory_budget_mib;
    settings.memory_wait = Duration::from_secs(arguments.memory_wait_seconds);
    settings.pool = arguments.pool;
    settings.ipv6 = arguments.ipv6_prefix.unwrap_or_default();
    settings.ipv6_outbound = arguments.ipv6_outbound;
    settings.store.clone_from(&arguments.store);
    if let Some(seconds) = arguments.memory_tier_seconds {
        settings.memory_tier = Duration::from_secs(seconds);
    }
    let daemon = host::Daemon::start(settings)
        .await
        .map_err(|error| failed(&error).hint("`dormouse doctor` says what this machine lacks"))?;
    Ok(daemon)
}

/// What is logged unless `RUST_LOG` says otherwise. Each request over MCP is a service of its own there, and says so three times.
const DEFAULT_LOG: &str = "info,rmcp=warn";

/// `RUST_LOG` says how much; by default what an operator wants to know.
fn log_to_stderr(format: LogFormat, data: &Path) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_LOG));
    let with_sandboxes =
        host::sandbox_log::SandboxLog::new(host::Settings::new(data).sandboxes_dir());
    let registry = tracing_subscriber::registry().with(filter).with(with_sandboxes);
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => registry
            .with(log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())))
            .init(),
        LogFormat::Json => registry.with(log.json()).init(),
    }
}

/// Each sandbox, each connection needs some; the usual 1024 are gone with a few hundred sandboxes.
fn raise_open_files() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(?maximum, "raised the limit of open files"),
        Err(error) => tracing::warn!(%error, ?current, "cannot raise the limit of open files"),
    }
}

fn failed(error: &dyn std::error::Error) -> Problem {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    Problem::new(text)
}
