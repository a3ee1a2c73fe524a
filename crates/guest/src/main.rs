//! The guest agent, as the guest's first program.
//!
//! It must be static, since the guest's libraries are not ours:
//!
//! ```sh
//! RUSTFLAGS='-C target-feature=+crt-static' cargo build -p guest --release --target x86_64-unknown-linux-gnu
//! ```
//!
//! The kernel's command line needs `panic=-1`: when this program ends, for whatever reason, the machine stops and is noticed.

use std::{error::Error, path::Path, process::ExitCode, sync::Arc, time::Duration};

use guest::{Agent, Settings, boot, drives::Drives, link, port, system::Guest};

/// Threads for file system calls; more would only wait for the one disk.
const HELPERS_MAX: usize = 8;

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!(
            "this is the guest agent of Dormouse; it runs only as the first program of a guest"
        );
        return ExitCode::FAILURE;
    }
    let Err(error) = run();
    eprintln!("guest agent ends: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}

fn run() -> Result<std::convert::Infallible, Box<dyn Error>> {
    let versions = boot::versions()?;
    boot::boot()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(HELPERS_MAX)
        // For ever: an idle helper that waits with a time limit would be a timer in the list by which the host decides.
        .thread_keep_alive(Duration::MAX)
        .build()?;
    runtime.block_on(async {
        let settings = Settings {
            cgroup: Some("/sys/fs/cgroup/user".into()),
            execs: "/var/lib/dormouse/exec".into(),
            awake_socket: Some("/run/sbx/awake".into()),
            reap_all: true,
            proc: "/proc".into(),
            etc: "/etc".into(),
            versions,
        };
        let system = Guest { etc: "/etc".into(), card: "eth0".into(), drives: Drives::default() };
        let agent = Agent::start(settings, Arc::new(system))?;
        let device = boot::wait("find the virtio-serial port", || {
            port::find(Path::new("/sys"), Path::new("/dev"))
        })?;
        let port = port::Port::open(&device)?;
        eprintln!("guest agent {} is ready", env!("CARGO_PKG_VERSION"));
        link::serve(agent, port).await?;
        Err("the port ended".into())
    })
}
