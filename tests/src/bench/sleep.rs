//! Falling asleep on disk: how long the guest stands still, and how long until it is published.
//!
//! A program in the guest ticks every millisecond, as seen from outside; its last tick is when it began to stand still.
//! Published is a sleep by the rename of its manifest, on both sides.

use std::fs;
use std::mem::MaybeUninit;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use serde_json::Value;

use super::figure::{Figure, Parts, Series, millis};
use super::hand::{BARE_PORT, Bare};
use super::stage::{Stage, WEB};
use crate::until;
use crate::wait::WAIT_MAX;

/// Ticks that are waited for before the sleep begins. No sandbox falls asleep by itself within the first seconds after it woke,
/// and meanwhile the daemon has asked it each second what it does.
const TICKS_BEFORE: usize = 2500;
/// Ticks that are waited for once a guest that stood still goes on.
const TICKS_AFTER: usize = 20;
/// Ticks that are asked for: those before, and more than a sleep takes, even under load.
const TICKS: u16 = 6000;
/// How often the listener looks whether it may stop.
const LISTEN_FOR: Duration = Duration::from_millis(20);

pub(crate) fn figures(stage: &mut Stage<'_>) -> Vec<Figure> {
    eprintln!("==> sleep to disk");
    let (mut parts, mut parts_hand) = (Parts::default(), Parts::default());
    let [mut still, mut still_hand, mut published, mut published_hand] =
        [(); 4].map(|()| Series::default());
    let manifest = Manifest::of(stage);
    for round in 0..stage.rounds {
        let mut by_us = |stage: &mut Stage<'_>| {
            wake_and_work(&stage.address);
            let ticks = Ticks::begin(&stage.address);
            let (begun, at) = manifest.sleep(stage);
            published.add(at - begun);
            still.add(at - ticks.last_before(at));
            let mut phases = stage.api.phases(WEB, "slept");
            // QEMU is ended when all is published.
            phases.retain(|(name, _)| name != "quit");
            parts.add(at - begun, &phases, Duration::ZERO);
        };
        let mut by_hand = |stage: &mut Stage<'_>| {
            stage.hand.wake();
            let mut bare = wake_and_work(&stage.hand_address);
            let ticks = Ticks::begin(&stage.hand_address);
            let slept = stage.hand.sleep(&mut bare);
            published_hand.add(slept.published - slept.begun);
            let steps = slept.steps.map(|(name, took)| (name.to_owned(), millis(took)));
            parts_hand.add(slept.published - slept.begun, &steps, Duration::ZERO);
            still_hand.add(slept.published - ticks.last_before(slept.published));
        };
        if round.is_multiple_of(2) {
            by_us(stage);
            by_hand(stage);
        } else {
            by_hand(stage);
            by_us(stage);
        }
    }
    vec![
        Figure::ratio("sleep to `disk`: how long the guest stands still", &still, &still_hand, 1.5),
        Figure::ratio("sleep to `disk`: until published", &published, &published_hand, 2.0)
            .with_parts(parts, parts_hand),
    ]
}

/// What both guests do while they are awake, so that both have as much to save.
pub(crate) fn wake_and_work(address: &str) -> Bare {
    let mut bare = Bare::open(address);
    bare.order(b't');
    bare
}

/// A guest's ticks, heard in a thread of their own.
pub(crate) struct Ticks {
    enough: Arc<AtomicBool>,
    /// How many were heard so far.
    heard: Arc<AtomicUsize>,
    listener: JoinHandle<Vec<Instant>>,
}

impl Ticks {
    /// Asks for ticks and returns when they come.
    #[track_caller]
    pub(crate) fn begin(address: &str) -> Self {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        socket.set_read_timeout(Some(LISTEN_FOR)).expect("time-out set");
        // Connected: a fork of the guest ticks on as well, from an address of its own.
        socket.connect((address, BARE_PORT)).expect("a peer");
        socket.send(&TICKS.to_le_bytes()).expect("ticks asked for");
        let (enough, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stop, counted) = (Arc::clone(&enough), Arc::clone(&count));
        let listener = std::thread::spawn(move || {
            let mut heard = Vec::new();
            let mut tick = [0; 2];
            while heard.len() < usize::from(TICKS) && !stop.load(Ordering::Relaxed) {
                // Nothing for a while: the guest stands still.
                if socket.recv(&mut tick).is_ok() {
                    heard.push(Instant::now());
                }
                counted.store(heard.len(), Ordering::Relaxed);
            }
            heard
        });
        until("the guest ticks", || (count.load(Ordering::Relaxed) >= TICKS_BEFORE).then_some(()));
        Self { enough, heard: count, listener }
    }

    /// The last tick before this moment. Ends the listening.
    #[track_caller]
    fn last_before(self, at: Instant) -> Instant {
        self.end().into_iter().rfind(|tick| *tick < at).expect("a tick")
    }

    /// The longest time without a tick since this moment. Ends the listening once it ticks again.
    #[track_caller]
    pub(crate) fn longest_gap_after(self, at: Instant) -> Duration {
        let heard = self.heard.load(Ordering::Relaxed);
        until("it ticks on", || {
            (self.heard.load(Ordering::Relaxed) > heard + TICKS_AFTER).then_some(())
        });
        let ticks = self.end();
        let pairs = ticks.windows(2).filter(|pair| pair[1] > at);
        pairs.map(|pair| pair[1] - pair[0]).max().expect("ticks")
    }

    #[track_caller]
    fn end(self) -> Vec<Instant> {
        self.enough.store(true, Ordering::Relaxed);
        let heard = self.listener.join().expect("the listener ends");
        assert!(heard.len() < usize::from(TICKS), "it ran out of ticks");
        heard
    }
}

/// Watches a sandbox's manifest.
struct Manifest {
    path: PathBuf,
}

impl Manifest {
    #[track_caller]
    fn of(stage: &Stage<'_>) -> Self {
        let view = stage.api.get(&format!("/v1/sandboxes/{WEB}"));
        let id = view["id"].as_str().expect("an id");
        Self { path: stage.lab.data().join("sandboxes").join(id).join("manifest.json") }
    }

    /// Has the sandbox put to sleep: when that was asked, and when its sleep was published.
    #[track_caller]
    fn sleep(&self, stage: &Stage<'_>) -> (Instant, Instant) {
        let folder = self.path.parent().expect("its folder");
        let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)
            .expect("a watch");
        inotify::add_watch(&watch, folder, inotify::WatchFlags::MOVED_TO).expect("a watch");
        let api = stage.api.clone();
        let begun = Instant::now();
        let asking = std::thread::spawn(move || api.sleep(WEB, "disk"));
        let mut space = [MaybeUninit::uninit(); 4096];
        let mut events = inotify::Reader::new(&watch, &mut space);
        let published = loop {
            let patience = Timespec { tv_sec: WAIT_MAX.as_secs().cast_signed(), tv_nsec: 0 };
            let ready =
                poll(&mut [PollFd::new(&watch, PollFlags::IN)], Some(&patience)).expect("waited");
            let now = Instant::now();
            assert!(ready > 0, "no sleep was published");
            let event = events.next().expect("what has happened");
            if event.file_name().is_some_and(|name| name == c"manifest.json") && self.sleeps() {
                break now;
            }
        };
        asking.join().expect("it sleeps");
        (begun, published)
    }

    fn sleeps(&self) -> bool {
        let text = fs::read(&self.path).expect("a manifest");
        let manifest: Value = serde_json::from_slice(&text).expect("a manifest");
        manifest["sandbox"]["state"]["is"] == "sleeping_on_disk"
    }
}
