//! What the daemon logs about a sandbox, kept with the sandbox.
//!
//! A layer for [`tracing_subscriber`]: every event that names a sandbox (a field `sandbox`) also goes into `daemon.log` in that
//! sandbox's folder, where `dormouse logs NAME --daemon` finds it, and goes away with the sandbox.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

use api::SandboxId;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::clock;
use crate::settings::Files;

/// Size at which a log begins anew, bytes; the one before is kept beside it.
pub const LOG_BYTES_MAX: u64 = 512 * 1024;

/// See the module.
#[derive(Debug)]
pub struct SandboxLog {
    sandboxes: PathBuf,
}

impl SandboxLog {
    /// For the sandboxes below this folder.
    pub fn new(sandboxes: PathBuf) -> Self {
        Self { sandboxes }
    }
}

impl<S: Subscriber> Layer<S> for SandboxLog {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() > Level::INFO {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        // Checked as an id before it becomes a path.
        let Some(id) = line.sandbox.and_then(|text| text.parse::<SandboxId>().ok()) else { return };
        let files = Files::in_dir(self.sandboxes.join(id.as_str()));
        if !files.dir().is_dir() {
            return;
        }
        let at = clock::rfc3339(clock::unix_ms());
        let text = format!("{at} {:5} {}{}\n", event.metadata().level(), line.message, line.fields);
        let path = files.daemon_log();
        if std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() > LOG_BYTES_MAX) {
            // Errors here have nowhere to be logged but where they came from.
            let _ = std::fs::rename(&path, path.with_extension("log.1"));
        }
        if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(&path) {
            let _ = file.write_all(text.as_bytes());
        }
    }
}

#[derive(Default)]
struct Line {
    sandbox: Option<String>,
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "sandbox" => {
                self.sandbox = Some(format!("{value:?}"));
                Ok(())
            }
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "sandbox" {
            self.sandbox = Some(value.to_owned());
        } else {
            self.record_debug(field, &value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    #[test]
    fn what_names_a_sandbox_is_kept_with_it_and_nothing_leaves_its_folder() {
        let dir = tempfile::tempdir().expect("temp folder");
        let id = SandboxId::from_random([5; 12]);
        std::fs::create_dir(dir.path().join(id.as_str())).expect("folder");
        let subscriber =
            tracing_subscriber::registry().with(SandboxLog::new(dir.path().to_owned()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(sandbox = %id, tries = 2, "boot stayed silent");
            tracing::warn!(sandbox = "../../evil", "nothing");
            tracing::debug!(sandbox = %id, "too much detail");
        });
        let text =
            std::fs::read_to_string(dir.path().join(id.as_str()).join("daemon.log")).expect("log");
        assert!(text.ends_with("Z WARN  boot stayed silent tries=2\n"), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
}
