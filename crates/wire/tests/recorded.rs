//! Conversations recorded as bytes, read again by today's build: sleepers of that time must still be understood.
//!
//! A recording is never changed. When a protocol version is released, its recording is added; `record` in this file made the
//! bytes of version 1 and shows that today's build still writes them the same.

use std::path::Path;

use wire::sockets::{CONNECTIONS_MAX, LISTENERS_MAX};
use wire::{
    Connection, Decoder, Ended, Entry, EntryKind, ExecId, ExecInfo, ExecSpec, ExecState, Failure,
    FailureCode, Frame, FrameKind, GuestHello, HostHello, Identity, Ipv6Network, LinkId, Listener,
    Mount, Network, OutputChunk, OutputFrom, Quiesce, Quiesced, Reply, Request, Sample, Sockets,
    Stat, Stdin, Step, StepOutcome, StepReport, Stream, TerminalSize, TerminalSpec, ToGuest,
    ToHost, Transport, VersionRange, Wake, Woke, WriteSpec,
};

const V1: VersionRange = VersionRange { oldest: 1, newest: 1 };
const LINK: LinkId = LinkId(*b"link of the test");

/// Everything that version 1 can say.
fn version_1() -> (Vec<ToGuest>, Vec<ToHost>, Vec<Request>, Vec<Reply>) {
    let to_guest = vec![
        ToGuest::Hello(HostHello { link: LINK, versions: V1 }),
        ToGuest::Quiesce(Quiesce {
            attempt: 1,
            sync: true,
            drop_caches: false,
            freeze_limit_ms: 1000,
        }),
        ToGuest::Wake(Wake {
            link: LINK,
            attempt: 2,
            realtime_ns: Some(1_796_036_254_934_000_000),
            entropy: (0..64).collect(),
            identity: Some(Identity {
                hostname: "web2".into(),
                machine_id: [7; 16],
                network: Some(Network {
                    mac: [2, 0, 0, 0, 0, 3],
                    address: [10, 0, 0, 2],
                    gateway: [10, 0, 0, 1],
                    gateway_mac: [2, 0, 0, 0, 0, 1],
                    nameservers: vec![[10, 0, 0, 1]],
                }),
            }),
            fork: true,
        }),
        ToGuest::Wake(Wake {
            link: LINK,
            attempt: 3,
            realtime_ns: None,
            entropy: vec![],
            identity: None,
            fork: false,
        }),
    ];
    let report = |step, outcome| StepReport { step, micros: 300, outcome };
    let to_host = vec![
        ToHost::Hello(GuestHello {
            link: LINK,
            versions: V1,
            agent: "0.1.0".into(),
            boot: [9; 16],
            quiesced: false,
        }),
        ToHost::Quiesced(Quiesced { attempt: 1, frozen: true, freeze_us: 313, flush_us: 4408 }),
        ToHost::Woke(Woke {
            attempt: 2,
            running: true,
            clock_step_ns: -5,
            steps: vec![
                report(Step::Clock, StepOutcome::Done),
                report(Step::Entropy, StepOutcome::Failed("no".into())),
                report(Step::Identity, StepOutcome::Skipped),
                report(Step::Connections, StepOutcome::Done),
                report(Step::Network, StepOutcome::Done),
                report(Step::Thaw, StepOutcome::Done),
            ],
        }),
    ];
    let id = ExecId(0xfeed_0000_0001);
    let mut spec = ExecSpec::argv(["printf", "%s", "ä"]);
    spec.cwd = Some("/work".into());
    spec.env = vec![("A".into(), "b".into())];
    spec.user = Some("ann".into());
    spec.stdin = Stdin::Pipe;
    spec.timeout_ms = Some(60_000);
    spec.name = Some("build".into());
    let path = b"/work/\xff".to_vec();
    let requests = vec![
        Request::Ping,
        Request::Sample,
        Request::ExecStart(spec),
        Request::ExecStart(ExecSpec::shell("true")),
        Request::ExecWait(id),
        Request::ExecOutput { id, stdout: Some(300), stderr: None, follow: true },
        Request::ExecStdin { id, close: true },
        Request::ExecSignal { id, signal: 15 },
        Request::ExecList,
        Request::FileRead { path: path.clone(), offset: 1, length: Some(2) },
        Request::FileWrite(WriteSpec { path: path.clone(), mode: Some(0o755), parents: true }),
        Request::FileStat { path: path.clone() },
        Request::FileList { path: path.clone() },
        Request::FileMkdir { path: path.clone(), parents: true },
        Request::FileRename { from: path.clone(), to: path.clone() },
        Request::FileRemove { path: path.clone(), recursive: true },
        Request::TreeRead { path: path.clone() },
        Request::TreeWrite { path: path.clone() },
        Request::Connect { port: 8000 },
    ];
    let ended = Ended {
        code: Some(3),
        signal: None,
        timed_out: false,
        at_ms: 1_796_036_254_934,
        output_end: OutputFrom { stdout: 17, stderr: 4 },
    };
    let stat = |kind, target| Stat {
        kind,
        size: 5_000_000_000,
        mode: 0o644,
        uid: 1000,
        gid: 1001,
        modified_ms: -1,
        target,
    };
    let replies = vec![
        Reply::Failed(Failure {
            code: FailureCode::NoSpace,
            errno: Some(28),
            field: Some("path".into()),
            message: "write /x: No space left on device".into(),
        }),
        Reply::Failed(Failure {
            code: FailureCode::Other(60_000),
            errno: None,
            field: None,
            message: String::new(),
        }),
        Reply::Done,
        Reply::Sample(Sample {
            cpu_usec: 38_000_000,
            tcp_outbound: 2,
            timer_due_ms: Some(4050),
            holds: 1,
            execs_running: 3,
        }),
        Reply::ExecStarted { id, pid: 145 },
        Reply::ExecState(ExecState::Running),
        Reply::ExecState(ExecState::Ended(ended)),
        Reply::Execs(vec![ExecInfo {
            id,
            pid: 145,
            name: Some("build".into()),
            command: "printf %s ä".into(),
            started_ms: 1_796_036_250_000,
            state: ExecState::Running,
            output_start: OutputFrom::default(),
            output_end: OutputFrom { stdout: 1, stderr: 2 },
        }]),
        Reply::Stat(stat(EntryKind::Symlink, Some(b"../x".to_vec()))),
        Reply::Entries(
            [EntryKind::File, EntryKind::Directory, EntryKind::Symlink, EntryKind::Other]
                .into_iter()
                .map(|kind| Entry { name: b"n\xff".to_vec(), stat: stat(kind, None) })
                .collect(),
        ),
        Reply::Written { bytes: u64::MAX },
        Reply::Connected,
    ];
    (to_guest, to_host, requests, replies)
}

/// The frames of the two directions, in the order in which the messages are listed, then bytes, credit and ends.
fn record() -> [Vec<u8>; 2] {
    let (to_guest, to_host, requests, replies) = version_1();
    let mut down = Vec::new();
    let mut up = Vec::new();
    let put = |out: &mut Vec<u8>, kind, channel, payload: Vec<u8>| {
        Frame { kind, channel, payload }.write_to(out).expect("small");
    };
    for message in &to_guest {
        put(&mut down, FrameKind::Control, 0, wire::encode(message).expect("encode"));
    }
    for (channel, request) in (1..).zip(&requests) {
        put(&mut down, FrameKind::Open, channel, wire::encode(request).expect("encode"));
    }
    for message in &to_host {
        put(&mut up, FrameKind::Control, 0, wire::encode(message).expect("encode"));
    }
    for (channel, reply) in (1..).zip(&replies) {
        put(&mut up, FrameKind::Message, channel, wire::encode(reply).expect("encode"));
    }
    let chunk = OutputChunk { stream: Stream::Stderr, offset: 70_000, bytes: b"out\xff".to_vec() };
    put(&mut up, FrameKind::Data, 6, chunk.to_payload());
    put(&mut down, FrameKind::Data, 7, b"in\xff".to_vec());
    for out in [&mut down, &mut up] {
        Frame::credit(7, 131_072).write_to(out).expect("small");
        Frame::empty(FrameKind::Fin, 7).write_to(out).expect("small");
        Frame::empty(FrameKind::Reset, 8).write_to(out).expect("small");
    }
    [down, up]
}

/// What version 2 says besides about the network.
fn version_2_network() -> (Vec<ToGuest>, Vec<ToHost>, Vec<Request>, Vec<Reply>) {
    let wake = Wake {
        link: LINK,
        attempt: 4,
        realtime_ns: None,
        entropy: vec![],
        identity: None,
        fork: false,
    };
    let mut address = [0; 16];
    (address[0], address[15]) = (0xfd, 2);
    let mut gateway = address;
    gateway[15] = 1;
    let gateway_mac = [2, 0, 0, 0, 0, 1];
    let ipv6 = Ipv6Network { address, gateway, gateway_mac };
    let sockets = Sockets {
        whole: true,
        unread: false,
        listeners: vec![
            Listener {
                transport: Transport::Tcp,
                address: "::".parse().expect("an address"),
                port: 8000,
                v6_only: true,
            },
            Listener {
                transport: Transport::Udp,
                address: "127.0.0.1".parse().expect("an address"),
                port: 53,
                v6_only: false,
            },
        ],
        connections: vec![Connection {
            local: "[fd00::2]:8000".parse().expect("an address"),
            peer: "10.0.0.1:40000".parse().expect("an address"),
            stands: true,
        }],
    };
    let report = StepReport { step: Step::Ipv6, micros: 300, outcome: StepOutcome::Done };
    let woke = Woke { attempt: 4, running: true, clock_step_ns: 0, steps: vec![report] };
    (
        vec![ToGuest::WakeWithIpv6(wake, ipv6)],
        vec![ToHost::Sockets(sockets.clone()), ToHost::Woke(woke)],
        vec![Request::Sockets],
        vec![Reply::Sockets(sockets)],
    )
}

/// What version 4 says besides.
fn version_4() -> (Vec<ToGuest>, Vec<ToHost>) {
    let wake = Wake {
        link: LINK,
        attempt: 5,
        realtime_ns: None,
        entropy: vec![],
        identity: None,
        fork: true,
    };
    let mounts = vec![
        Mount { serial: "drive0".into(), path: b"/data".to_vec(), read_only: false },
        Mount { serial: "drive1".into(), path: b"/models/\xff".to_vec(), read_only: true },
    ];
    let report = StepReport { step: Step::Mounts, micros: 300, outcome: StepOutcome::Done };
    let woke = Woke { attempt: 5, running: true, clock_step_ns: 0, steps: vec![report] };
    (vec![ToGuest::WakeWithMounts(wake, None, mounts)], vec![ToHost::Woke(woke)])
}

/// What version 2 can ask besides.
fn version_2() -> Vec<Request> {
    let size = TerminalSize { columns: 200, rows: 50 };
    let mut exec = ExecSpec::argv(["bash", "-l"]);
    exec.user = Some("ann".into());
    vec![
        Request::Long { bytes: 70_000 },
        Request::TerminalStart(TerminalSpec { exec, term: "xterm-256color".into(), size }),
        Request::TerminalResize { id: ExecId(0xfeed_0000_0001), size },
    ]
}

fn recording(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut decoder = Decoder::default();
    decoder.push(bytes);
    let frames = std::iter::from_fn(|| decoder.next_frame()).collect();
    assert_eq!((decoder.pending(), decoder.skipped()), (0, 0));
    frames
}

fn of_kind<T: serde::de::DeserializeOwned>(frames: &[Frame], kind: FrameKind) -> Vec<T> {
    frames
        .iter()
        .filter(|frame| frame.kind == kind)
        .map(|frame| wire::decode(&frame.payload).expect("understood"))
        .collect()
}

#[test]
fn a_conversation_of_version_1_is_still_understood() {
    let (to_guest, to_host, requests, replies) = version_1();
    let down = frames(&recording("v1-host-to-guest.bin"));
    assert_eq!(of_kind::<ToGuest>(&down, FrameKind::Control), to_guest);
    assert_eq!(of_kind::<Request>(&down, FrameKind::Open), requests);
    let up = frames(&recording("v1-guest-to-host.bin"));
    assert_eq!(of_kind::<ToHost>(&up, FrameKind::Control), to_host);
    assert_eq!(of_kind::<Reply>(&up, FrameKind::Message), replies);
    let data = up.iter().find(|frame| frame.kind == FrameKind::Data).expect("data");
    let chunk = OutputChunk::from_payload(&data.payload).expect("chunk");
    assert_eq!(
        (chunk.stream, chunk.offset, chunk.bytes.as_slice()),
        (Stream::Stderr, 70_000, &b"out\xff"[..])
    );
}

#[test]
fn version_1_is_still_written_the_same() {
    let [down, up] = record();
    for (name, bytes) in [("v1-host-to-guest.bin", down), ("v1-guest-to-host.bin", up)] {
        let now = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
        let same = recording(name) == bytes;
        if !same {
            std::fs::write(&now, &bytes).expect("write");
        }
        assert!(same, "{name} differs from what this build writes, which is in {}", now.display());
    }
}

#[test]
fn what_version_2_adds_is_still_understood_and_written_the_same() {
    compare_requests("v2-host-to-guest.bin", &version_2());
}

#[test]
fn what_version_3_adds_is_still_understood_and_written_the_same() {
    compare_requests("v3-host-to-guest.bin", &[Request::Flush]);
}

#[test]
fn what_version_5_adds_is_still_understood_and_written_the_same() {
    let way = wire::LoopbackWay { port: 80, address: [127, 0, 0, 1], to_port: 8080 };
    let far = wire::LoopbackWay { port: 5432, address: [198, 18, 0, 2], to_port: 5432 };
    let requests = [Request::Loopback(Vec::new()), Request::Loopback(vec![way, far])];
    compare_requests("v5-host-to-guest.bin", &requests);
}

#[track_caller]
fn compare_requests(name: &str, requests: &[Request]) {
    let mut bytes = Vec::new();
    for (channel, request) in (1..).zip(requests) {
        let payload = wire::encode(request).expect("encode");
        Frame { kind: FrameKind::Open, channel, payload }.write_to(&mut bytes).expect("small");
    }
    let now = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
    let recorded = recording(name);
    if recorded != bytes {
        std::fs::write(&now, &bytes).expect("write");
    }
    assert!(recorded == bytes, "{name} differs from what this build writes: {}", now.display());
    assert_eq!(of_kind::<Request>(&frames(&recorded), FrameKind::Open), requests);
}

#[test]
fn what_version_2_says_about_the_network_is_still_understood_and_written_the_same() {
    let (to_guest, to_host, requests, replies) = version_2_network();
    let mut bytes = Vec::new();
    let mut put = |kind, payload: Result<Vec<u8>, _>| {
        let payload = payload.expect("encode");
        Frame { kind, channel: 1, payload }.write_to(&mut bytes).expect("small");
    };
    for message in &to_guest {
        put(FrameKind::Control, wire::encode(message));
    }
    for request in &requests {
        put(FrameKind::Open, wire::encode(request));
    }
    for message in &to_host {
        put(FrameKind::Data, wire::encode(message));
    }
    for reply in &replies {
        put(FrameKind::Message, wire::encode(reply));
    }
    let name = "v2-network.bin";
    let now = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
    let recorded = recording(name);
    if recorded != bytes {
        std::fs::write(&now, &bytes).expect("write");
    }
    assert!(recorded == bytes, "{name} differs from what this build writes: {}", now.display());
    let recorded = frames(&recorded);
    assert_eq!(of_kind::<ToGuest>(&recorded, FrameKind::Control), to_guest);
    assert_eq!(of_kind::<Request>(&recorded, FrameKind::Open), requests);
    assert_eq!(of_kind::<ToHost>(&recorded, FrameKind::Data), to_host);
    assert_eq!(of_kind::<Reply>(&recorded, FrameKind::Message), replies);
}

#[test]
fn what_version_4_says_about_drives_is_still_understood_and_written_the_same() {
    let (to_guest, to_host) = version_4();
    let mut bytes = Vec::new();
    for (kind, payload) in [
        (FrameKind::Control, wire::encode(&to_guest[0])),
        (FrameKind::Data, wire::encode(&to_host[0])),
    ] {
        let payload = payload.expect("encode");
        Frame { kind, channel: 1, payload }.write_to(&mut bytes).expect("small");
    }
    let name = "v4-mounts.bin";
    let now = std::env::temp_dir().join(format!("{}-{name}", std::process::id()));
    let recorded = recording(name);
    if recorded != bytes {
        std::fs::write(&now, &bytes).expect("write");
    }
    assert!(recorded == bytes, "{name} differs from what this build writes: {}", now.display());
    let recorded = frames(&recorded);
    assert_eq!(of_kind::<ToGuest>(&recorded, FrameKind::Control), to_guest);
    assert_eq!(of_kind::<ToHost>(&recorded, FrameKind::Data), to_host);
}

/// What a guest tells of its sockets at most is one frame.
#[test]
fn the_longest_list_of_sockets_fits_into_a_frame() {
    let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().expect("an address");
    let connection = Connection { local: address, peer: address, stands: true };
    let listener = Listener {
        transport: Transport::Udp,
        address: address.ip(),
        port: u16::MAX,
        v6_only: true,
    };
    let sockets = Sockets {
        whole: false,
        unread: true,
        listeners: vec![listener; LISTENERS_MAX],
        connections: vec![connection; CONNECTIONS_MAX],
    };
    wire::encode(&ToHost::Sockets(sockets)).expect("fits");
}

#[test]
fn versions_agree_on_the_newest_of_both_or_not_at_all() {
    let range = |oldest, newest| VersionRange { oldest, newest };
    assert_eq!(range(1, 3).agree(range(2, 5)), Some(3));
    assert_eq!(range(2, 5).agree(range(1, 3)), Some(3));
    assert_eq!(range(1, 1).agree(range(1, 1)), Some(1));
    assert_eq!(range(1, 2).agree(range(3, 4)), None);
    assert_eq!(range(3, 4).agree(range(1, 2)), None);
}
