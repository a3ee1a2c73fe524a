//! Checkpoints of a running sandbox: how long it stands still, and how much is carried, by how much of its memory has changed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Options;
use super::api::Api;
use super::figure::{Figure, Side};
use super::stage::new_sandbox;
use crate::{Lab, until};

/// Memory of the guest, MiB.
const MEMORY_MIB: u32 = 512;
/// What may be carried, of what has changed and cannot be compressed.
const CARRIED_MOST: f64 = 1.2;
/// Seconds between checkpoints where none shall be taken, and where one shall be taken now.
const NEVER: u64 = 600;
const NOW: u64 = 1;

/// How long after a checkpoint no other must end for none to be under way.
const OVER_AFTER: Duration = Duration::from_secs(2);

pub(crate) fn figures(_options: &Options) -> Vec<Figure> {
    eprintln!("==> checkpoints");
    let mut lab = Lab::new("checkpoint");
    let store = lab.scratch().join("store");
    std::fs::create_dir_all(&store).expect("a folder for the store");
    lab.daemon_env.push(("DORMOUSE_STORE".to_owned(), format!("file://{}", store.display())));
    lab.start();
    let api = Api::of(&lab);
    let mut body = new_sandbox("kept", MEMORY_MIB);
    body["checkpoint"] = json!({ "every_seconds": NEVER });
    api.call("POST", "/v1/sandboxes", &body);
    // Room for all that will change, in place: a file in memory, grown beforehand.
    lab.sh(
        "kept",
        "mount -o remount,size=300M /dev/shm && head -c 256M /dev/urandom > /dev/shm/noise",
    );
    take(&lab, &api);
    let mut figures = Vec::new();
    for (what, per_cent, mib) in [
        ("checkpoint of 512 MiB of which 1 % has changed: what is carried", 1, 5),
        ("checkpoint of 512 MiB of which 50 % has changed: what is carried", 50, 256),
    ] {
        let fill = format!(
            "dd if=/dev/urandom of=/dev/shm/noise bs=1M count={mib} conv=notrunc status=none"
        );
        lab.sh("kept", &fill);
        let view = take(&lab, &api);
        let number = |field: &str| view[field].as_f64().unwrap_or(f64::NAN);
        let (changed, carried) = (number("changed_bytes"), number("carried_bytes"));
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let text = format!(
            "{:.1} MiB for {:.1} that differ, {} ms pause ({per_cent} %)",
            mib(carried),
            mib(changed),
            number("pause_ms")
        );
        figures.push(Figure {
            what,
            promise: format!("≤ {CARRIED_MOST} × what differs"),
            ours: Side::single(text, carried / changed),
            hand: None,
            value: carried / changed,
            at_most: Some(CARRIED_MOST),
            parts: None,
        });
    }
    lab.tear_down();
    figures
}

/// Has one checkpoint taken, and no other after it.
#[track_caller]
fn take(lab: &Lab, api: &Api) -> Value {
    let set = |seconds: u64| {
        api.call(
            "PATCH",
            "/v1/sandboxes/kept",
            &json!({ "checkpoint": { "every_seconds": seconds } }),
        );
    };
    let last = || lab.view("kept")["checkpoint"]["last_at"].clone();
    let before = last();
    set(NOW);
    let view = until("a checkpoint", || {
        let view = lab.view("kept")["checkpoint"].clone();
        (view["last_at"] != before).then_some(view)
    });
    set(NEVER);
    // Another may have begun in between.
    let mut newest = (last(), Instant::now());
    until("the last one is over", || {
        let now = last();
        if now != newest.0 {
            newest = (now, Instant::now());
        }
        (newest.1.elapsed() >= OVER_AFTER).then_some(())
    });
    view
}
