//! A thousand sleepers: what they cost the daemon, and that any of them wakes.
//!
//! They are copies of one real sleeper, with names, addresses and taps of their own, put into a data folder before its
//! daemon starts. Memory, state and disk are hard links to the sleeper's, for the daemon never opens those of a sandbox
//! that sleeps; the ones that are picked at random to wake get their own copies first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::Options;
use super::api::Api;
use super::figure::{Figure, Series, Side, show_ms};
use super::hand::copy_sparse;
use super::request::Target;
use super::stage::{MEMORY_MIB, WEB, with_counter};
use crate::{Lab, proc, until};

/// How many, unless told otherwise.
pub(crate) const SLEEPERS: u32 = 1000;
/// How many of them are woken.
const PICKED: usize = 10;
/// The first slot that is theirs: none of those before are in use by then.
const FIRST_SLOT: u32 = 1000;
/// How long nothing is asked while the daemon's CPU time is taken.
const QUIET: Duration = Duration::from_mins(1);
/// The same for `--quick`.
const QUIET_QUICK: Duration = Duration::from_secs(15);
/// Clock ticks a second in `/proc/PID/stat`: the same on every Linux on this architecture.
const TICKS_PER_SECOND: f64 = 100.0;
/// What a manifest says of the network of a sleeper, if that is known.
const AT_REST: &str = "network_at_rest";
/// What makes a sandbox's folder besides its manifest.
const PARTS: [&str; 3] = ["memory", "state", "disk.qcow2"];

/// MiB that the daemon may have.
const MEMORY_MIB_MOST: f64 = 100.0;
/// Per cent of a core that it may take.
const CPU_PERCENT_MOST: f64 = 1.0;

pub(crate) fn figures(options: &Options) -> Vec<Figure> {
    eprintln!("==> {} sleeping sandboxes (seed {})", options.sleepers, options.seed);
    let mut lab = Lab::new("sleepers");
    lab.start();
    let api = Api::of(&lab);
    with_counter(&lab, &api, &options.bare, WEB, MEMORY_MIB);
    let (_, visits) = Target::link(&api.link(WEB)).count();
    put_to_rest(&lab, &api);
    let alone_mib = resident_mib(lab.daemon_pid());
    lab.stop_daemon();
    let mut random = Random(options.seed);
    let folders = multiply(&lab, options.sleepers, &mut random);
    lab.start();
    let view = |n: usize| api.get(&format!("/v1/sandboxes/{}", name(n)));
    assert_eq!(view(folders.len() - 1)["status"], "sleeping");

    let quiet = if options.quick { QUIET_QUICK } else { QUIET };
    let percent = cpu_percent(lab.daemon_pid(), quiet);
    let mib = resident_mib(lab.daemon_pid());
    let taps = crate::net::taps().len();
    assert_eq!(taps, folders.len() + 1, "each has its tap");
    nobody_woke(&api, folders.len() + 1);

    let mut wakes = Series::default();
    let mut left: Vec<usize> = (0..folders.len()).collect();
    for _ in 0..PICKED.min(folders.len()) {
        let n = left.swap_remove(random.below(left.len()));
        own_copies(&folders[n]);
        let (took, count) = Target::link(&api.link(&name(n))).count();
        assert_eq!(count, visits + 1, "{} has another memory", name(n));
        wakes.add(took);
        assert_eq!(view(n)["status"], "running");
        api.delete(&name(n));
        nobody_woke(&api, left.len() + 1);
    }
    eprintln!("    woke and answered: {:.0?} ms", wakes.values());
    for n in left {
        api.delete(&name(n));
    }
    lab.tear_down();
    let count = folders.len();
    let beside = Some(Side::single(format!("{alone_mib:.1} MiB with one"), alone_mib));
    let row = |what, promise: String, text, value, at_most| Figure {
        what,
        promise,
        ours: Side::single(text, value),
        hand: None,
        value,
        at_most: Some(at_most),
        parts: None,
    };
    let memory = row(
        "many sleeping sandboxes: the daemon's memory",
        format!("≤ {MEMORY_MIB_MOST} MiB for {count}"),
        format!("{mib:.1} MiB"),
        mib,
        MEMORY_MIB_MOST,
    );
    let cpu = row(
        "many sleeping sandboxes: the daemon's CPU in a quiet minute",
        format!("≤ {CPU_PERCENT_MOST} % of a core for {count}"),
        format!("{percent:.2} %"),
        percent,
        CPU_PERCENT_MOST,
    );
    let woke = Figure {
        what: "many sleeping sandboxes: ten picked at random wake and answer",
        promise: "all".to_owned(),
        ours: Side { text: format!("all, in {}", show_ms(wakes.median())), series: wakes },
        hand: None,
        value: 0.0,
        at_most: None,
        parts: None,
    };
    vec![Figure { hand: beside, ..memory }, cpu, woke]
}

/// All that are left sleep, and none of them has lived since they were put there: one that woke for itself would have written
/// the memory that all share. If one did, its timeline says why.
#[track_caller]
fn nobody_woke(api: &Api, count: usize) {
    let all = api.sandboxes();
    assert_eq!(all.len(), count);
    let woke =
        all.iter().filter(|one| one["status"] != "sleeping" || one["life"] != all[0]["life"]);
    let told: Vec<String> = woke
        .map(|one| {
            let id = one["id"].as_str().expect("an id");
            let events = api.events(id);
            let events = events.iter().map(|event| format!("\n    {event}"));
            format!("{one}{}", events.collect::<String>())
        })
        .collect();
    assert!(told.is_empty(), "woke without having been asked for:\n{}", told.join("\n"));
}

pub(crate) fn name(n: usize) -> String {
    format!("s{n:04}")
}

/// Puts the one sandbox there is to sleep on disk so that the host knows what is open on its network. Where the end of the last
/// request crosses its link in that moment, everything would wake its copies; and what earlier groups of figures have left
/// half closed when their sandboxes were deleted, the host's kernel sends again to whoever has those addresses now.
#[track_caller]
pub(crate) fn put_to_rest(lab: &Lab, api: &Api) {
    let original = only_folder(lab);
    until("it falls asleep while nothing crosses its link", || {
        api.exec_true(WEB);
        api.sleep(WEB, "disk");
        (manifest(&original)["sandbox"][AT_REST] != Value::Null).then_some(())
    });
}

#[track_caller]
fn only_folder(lab: &Lab) -> PathBuf {
    let mut all = fs::read_dir(lab.data().join("sandboxes")).expect("sandboxes");
    let only = all.next().expect("a sandbox").expect("a sandbox").path();
    assert!(all.next().is_none(), "there is only one");
    only
}

#[track_caller]
fn manifest(folder: &Path) -> Value {
    let text = fs::read(folder.join("manifest.json")).expect("its manifest");
    serde_json::from_slice(&text).expect("its manifest")
}

/// Makes copies of the one sleeper there is; their folders.
#[track_caller]
pub(crate) fn multiply(lab: &Lab, count: u32, random: &mut Random) -> Vec<PathBuf> {
    let sandboxes = lab.data().join("sandboxes");
    let original = only_folder(lab);
    let envelope = manifest(&original);
    assert_eq!(
        envelope["sha256"],
        checksum(&envelope["sandbox"]),
        "the form of manifests has changed"
    );
    assert_eq!(envelope["sandbox"]["state"]["is"], "sleeping_on_disk");
    assert_ne!(envelope["sandbox"][AT_REST], Value::Null, "put to sleep by `put_to_rest`");
    let key = envelope["sandbox"]["link_key"].as_str().expect("a key").len();
    (0..count)
        .map(|n| {
            let mut sandbox = envelope["sandbox"].clone();
            let id = random.letters(12);
            sandbox["id"] = json!(id);
            sandbox["name"] = json!(name(n as usize));
            sandbox["slot"] = json!(FIRST_SLOT + n);
            sandbox["link_key"] = json!(random.letters(key));
            sandbox["needs_identity"] = json!(true);
            let folder = sandboxes.join(id);
            fs::create_dir(&folder).expect("a folder");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
            fs::set_permissions(&folder, mode).expect("permissions");
            for part in PARTS {
                fs::hard_link(original.join(part), folder.join(part)).expect("a link");
            }
            let envelope = json!({ "format": envelope["format"], "sha256": checksum(&sandbox), "sandbox": sandbox });
            fs::write(folder.join("manifest.json"), envelope.to_string()).expect("a manifest");
            folder
        })
        .collect()
}

/// As the daemon reckons it: of the sandbox as compact JSON.
fn checksum(sandbox: &Value) -> String {
    use std::fmt::Write;
    let digest = Sha256::digest(sandbox.to_string().as_bytes());
    digest.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Replaces links by copies.
#[track_caller]
pub(crate) fn own_copies(folder: &Path) {
    for part in PARTS {
        let (path, own) = (folder.join(part), folder.join("own"));
        copy_sparse(&path, &own);
        fs::rename(own, path).expect("replaced");
    }
}

#[track_caller]
fn resident_mib(pid: i32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the daemon lives");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib / 1024.0
}

/// Per cent of a core that a process takes while nobody asks it anything.
#[track_caller]
fn cpu_percent(pid: i32, quiet: Duration) -> f64 {
    let (begun, before) = (Instant::now(), cpu_seconds(pid));
    until("the quiet time is over", || (begun.elapsed() >= quiet).then_some(()));
    assert!(proc::alive(pid), "the daemon has ended");
    (cpu_seconds(pid) - before) / begun.elapsed().as_secs_f64() * 100.0
}

#[track_caller]
pub(crate) fn cpu_seconds(pid: i32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the daemon lives");
    let (_, rest) = stat.rsplit_once(')').expect("its state");
    // The state is field 3; 14 and 15 are user's and system's time.
    let ticks = rest
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<f64>().expect("clock ticks"));
    ticks.sum::<f64>() / TICKS_PER_SECOND
}

/// xorshift64*: enough to choose by, and the same choice for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next()).expect("31 bits fit") % end
    }

    /// Of the alphabet that ids and keys have.
    fn letters(&mut self, count: usize) -> String {
        (0..count)
            .map(|_| char::from(api::id::ALPHABET[self.below(api::id::ALPHABET.len())]))
            .collect()
    }
}
