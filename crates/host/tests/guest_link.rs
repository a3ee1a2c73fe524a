//! The link to a guest agent, with the real agent at the other end: what the two promise each other.

mod machine;

use std::{sync::atomic::Ordering, time::Duration};

use futures_util::{Stream, StreamExt};
use host::guest::{
    Continuity, Download, Ended, ExecOutput, ExecSpec, ExecState, FailureCode, GuestError,
    GuestLink, Identity, LinkError, LinkState, Mount, Network, OutputFrom, QuiesceOptions, Stdin,
    Step, StepOutcome, Stream as Output, TerminalSize, TerminalSpec, WakeError, WakeParams, Which,
    WriteSpec,
};
use machine::{LIMIT, Machine};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
};

const QUIET: QuiesceOptions = QuiesceOptions { sync: false, drop_caches: false };

fn wake() -> WakeParams {
    WakeParams::default()
}

async fn run(link: &GuestLink, spec: ExecSpec) -> (Ended, String, String) {
    let exec = link.exec_start(spec).await.expect("starts");
    let output = link.exec_output(exec.id, Which::Both, OutputFrom::default(), true);
    let (stdout, stderr) = collect(output.expect("opens")).await;
    (link.exec_wait(exec.id).await.expect("ends"), stdout, stderr)
}

async fn collect(mut output: ExecOutput) -> (String, String) {
    let mut streams = [Vec::new(), Vec::new()];
    while let Some(chunk) = output.next().await {
        let chunk = chunk.expect("chunk");
        streams[usize::from(chunk.stream == Output::Stderr)].extend(chunk.bytes);
    }
    streams.map(|bytes| String::from_utf8(bytes).expect("text")).into()
}

fn code(error: &GuestError) -> FailureCode {
    match error {
        GuestError::Failed(failure) => failure.code,
        other => panic!("not a failure of the guest: {other}"),
    }
}

fn field(error: &GuestError) -> &str {
    match error {
        GuestError::Failed(failure) => failure.field.as_deref().unwrap_or(""),
        other => panic!("not a failure of the guest: {other}"),
    }
}

#[tokio::test]
async fn s22_an_exec_runs_with_its_arguments_environment_and_directory() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    link.ping().await.expect("answers");
    let mut spec = ExecSpec::shell("echo $A $HOME; pwd; echo bad >&2; exit 3");
    spec.env = vec![("A".into(), "ä b".into())];
    spec.cwd = Some("/usr".into());
    let (ended, stdout, stderr) = run(&link, spec).await;
    assert_eq!((stdout.as_str(), stderr.as_str()), ("ä b /root\n/usr\n", "bad\n"));
    assert_eq!((ended.code, ended.signal, ended.timed_out), (Some(3), None, false));
    assert_eq!(ended.output_end, OutputFrom { stdout: 16, stderr: 4 });

    let (_, stdout, _) = run(&link, ExecSpec::argv(["printf", "%s|", "a b", "$A"])).await;
    assert_eq!(stdout, "a b|$A|");
}

#[tokio::test]
async fn an_exec_that_cannot_start_says_why_and_names_the_field() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let failing = |change: fn(&mut ExecSpec)| {
        let mut spec = ExecSpec::argv(["true"]);
        change(&mut spec);
        let link = link.clone();
        async move {
            let error = link.exec_start(spec).await.expect_err("cannot start");
            format!("{} {}", code(&error).as_str(), field(&error))
        }
    };
    let program = |name: &'static str| {
        let link = link.clone();
        async move {
            let error = link.exec_start(ExecSpec::argv([name])).await.expect_err("cannot start");
            format!("{} {}", code(&error).as_str(), field(&error))
        }
    };
    assert_eq!(program("no-such-program").await, "not_found program");
    assert_eq!(program("/etc/passwd").await, "permission program");
    assert_eq!(program("").await, "invalid argv");
    assert_eq!(failing(|spec| spec.cwd = Some("/no".into())).await, "bad_cwd cwd");
    assert_eq!(failing(|spec| spec.cwd = Some("no".into())).await, "invalid cwd");
    assert_eq!(failing(|spec| spec.user = Some("eve".into())).await, "unknown_user user");
    assert_eq!(failing(|spec| spec.env = vec![("A=".into(), String::new())]).await, "invalid env");
    assert_eq!(failing(|spec| spec.timeout_ms = Some(0)).await, "invalid timeout_ms");
    assert_eq!(link.exec_list().await.expect("list"), [], "nothing was started");
}

#[tokio::test]
async fn arguments_and_environment_up_to_what_linux_takes_reach_the_program() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    // Each a little below the kernel's limit for one string.
    let piece = "x".repeat(131_000);
    let mut spec =
        ExecSpec::shell(format!("printf '%s' \"$A$B\" | wc -c; : {}", "y".repeat(130_000)));
    spec.env = vec![("A".into(), piece.clone()), ("B".into(), piece.clone())];
    assert_eq!(run(&link, spec).await.1, "262000\n");
    // More than the kernel takes at once.
    let argv = std::iter::once("true".to_owned()).chain(vec![piece.clone(); 20]);
    let error = link.exec_start(ExecSpec::argv(argv)).await.expect_err("too much");
    assert_eq!((code(&error), field(&error)), (FailureCode::TooLarge, "argv"));
    // More than the protocol takes.
    let argv = std::iter::once("true".to_owned()).chain(vec![piece; 40]);
    let error = link.exec_start(ExecSpec::argv(argv)).await.expect_err("far too much");
    assert!(matches!(error, GuestError::TooLarge { .. }), "{error}");
}

#[tokio::test]
async fn s22_a_program_on_a_terminal_has_its_size_from_the_start_and_hears_of_a_new_one() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let size = |columns, rows| TerminalSize { columns, rows };
    let line = "stty size; tty; echo $TERM; trap 'stty size; exit 3' WINCH; \
                echo ready; while :; do read line && echo got $line; done";
    let spec = TerminalSpec {
        exec: ExecSpec::argv(["bash", "-c", line]),
        term: "xterm-256color".into(),
        size: size(123, 45),
    };
    let exec = link.terminal_start(spec).await.expect("starts");
    let mut output =
        link.exec_output(exec.id, Which::Both, OutputFrom::default(), true).expect("opens");
    let mut shown = String::new();
    let mut until = async |mark: &str| {
        while !shown.contains(mark) {
            let chunk = output.next().await.expect("more comes").expect("chunk");
            assert_eq!(chunk.stream, Output::Stdout);
            shown.push_str(std::str::from_utf8(&chunk.bytes).expect("text"));
        }
        shown.clone()
    };
    let begun = until("ready\r\n").await;
    assert!(begun.starts_with("45 123\r\n/dev/pts/"), "{begun:?}");
    assert!(begun.contains("xterm-256color\r\n"), "{begun:?}");
    let mut stdin = link.exec_stdin(exec.id, false).expect("opens");
    stdin.write(b"hello\r").await.expect("typed");
    stdin.finish().await.expect("taken");
    let typed = until("got hello\r\n").await;
    assert!(typed.contains("ready\r\nhello\r\n"), "it is echoed: {typed:?}");
    link.terminal_resize(exec.id, size(80, 24)).await.expect("resized");
    // A shell that reads a line looks at its traps when it has one.
    let mut stdin = link.exec_stdin(exec.id, false).expect("opens");
    stdin.write(b"\r").await.expect("typed");
    stdin.finish().await.expect("taken");
    until("24 80\r\n").await;
    assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(3));

    let error = link.terminal_resize(exec.id, size(80, 24)).await.expect_err("it has ended");
    assert_eq!(code(&error), FailureCode::Ended);
    let piped = link.exec_start(ExecSpec::argv(["sleep", "1000"])).await.expect("starts");
    let error = link.terminal_resize(piped.id, size(80, 24)).await.expect_err("no terminal");
    assert_eq!((code(&error), field(&error)), (FailureCode::Invalid, "id"));
    link.exec_signal(piped.id, 9).await.expect("killed");
    for bad in [size(0, 24), size(80, 501)] {
        let exec = ExecSpec::argv(["true"]);
        let spec = TerminalSpec { exec, term: "xterm".into(), size: bad };
        let error = link.terminal_start(spec).await.expect_err("no such size");
        assert_eq!((code(&error), field(&error)), (FailureCode::Invalid, "size"));
    }
}

#[tokio::test]
async fn a_terminal_that_is_hung_up_ends_its_programs() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    // One that hears of it, and one that will not, but reads.
    for (line, code, signal) in
        [("read never", None, Some(1)), ("trap '' HUP; read never; exit 4", Some(4), None)]
    {
        let spec = TerminalSpec {
            exec: ExecSpec::argv(["sh", "-c", line]),
            term: "xterm".into(),
            size: TerminalSize { columns: 80, rows: 24 },
        };
        let exec = link.terminal_start(spec).await.expect("starts");
        link.exec_stdin(exec.id, true).expect("opens").finish().await.expect("hung up");
        let ended = link.exec_wait(exec.id).await.expect("ends");
        // Hung up before it ran at all, it may hear of it all the same.
        let early = (ended.code, ended.signal) == (None, Some(1));
        assert!(early || (ended.code, ended.signal) == (code, signal), "{line}: {ended:?}");
        let error = link.exec_stdin(exec.id, false).expect("opens").finish().await;
        assert_eq!(self::code(&error.expect_err("closed")), FailureCode::StdinClosed);
    }
}

#[tokio::test]
async fn all_that_a_program_on_a_terminal_prints_comes_before_its_end() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    for _ in 0..10 {
        let spec = TerminalSpec {
            exec: ExecSpec::argv(["sh", "-c", "seq 2000; exit 7"]),
            term: "xterm".into(),
            size: TerminalSize { columns: 80, rows: 24 },
        };
        let exec = link.terminal_start(spec).await.expect("starts");
        let output = link.exec_output(exec.id, Which::Both, OutputFrom::default(), true);
        let (shown, _) = collect(output.expect("opens")).await;
        assert!(shown.ends_with("1999\r\n2000\r\n"), "{:?}", &shown[shown.len() - 20..]);
        assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(7));
    }
}

#[tokio::test]
async fn an_exec_runs_as_another_user() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let mut spec = ExecSpec::shell("id -u; id -g; id -G; echo $USER");
    spec.user = Some("nobody".into());
    let (_, stdout, _) = run(&link, spec).await;
    assert_eq!(stdout, "65534\n65534\n65534\nnobody\n");
}

#[tokio::test]
async fn a_signal_reaches_the_whole_group_and_a_timeout_kills_it() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let exec = link
        .exec_start(ExecSpec::shell(
            "trap 'echo got it; exit 9' TERM; echo up; while :; do sleep 0.05; done",
        ))
        .await
        .expect("starts");
    let mut output =
        link.exec_output(exec.id, Which::Stdout, OutputFrom::default(), true).expect("opens");
    assert_eq!(output.next().await.expect("some").expect("chunk").bytes, b"up\n");
    link.exec_signal(exec.id, 15).await.expect("signal");
    assert_eq!(output.next().await.expect("some").expect("chunk").bytes, b"got it\n");
    assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(9));
    let error = link.exec_signal(exec.id, 15).await.expect_err("it has ended");
    assert_eq!(code(&error), FailureCode::Ended);
    assert_eq!(
        code(&link.exec_signal(exec.id, 0).await.expect_err("no signal")),
        FailureCode::Invalid
    );

    let mut spec = ExecSpec::shell("sleep 1000 & sleep 1000");
    spec.timeout_ms = Some(50);
    let (ended, _, _) = run(&link, spec).await;
    assert_eq!((ended.code, ended.signal, ended.timed_out), (None, Some(9), true));
}

#[tokio::test]
async fn stdin_is_streamed_closed_and_refused_afterwards() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let mut spec = ExecSpec::argv(["cat"]);
    spec.stdin = Stdin::Pipe;
    let exec = link.exec_start(spec).await.expect("starts");
    let mut stdin = link.exec_stdin(exec.id, false).expect("opens");
    stdin.write(b"one ").await.expect("write");
    assert_eq!(stdin.finish().await.expect("finish"), 4);
    let mut stdin = link.exec_stdin(exec.id, true).expect("opens");
    stdin.write(b"\xfftwo").await.expect("write");
    assert_eq!(stdin.finish().await.expect("finish"), 4);
    assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(0));
    let output = link.exec_output(exec.id, Which::Both, OutputFrom::default(), false);
    let bytes: Vec<u8> = output
        .expect("opens")
        .flat_map(|chunk| futures_util::stream::iter(chunk.expect("chunk").bytes))
        .collect()
        .await;
    assert_eq!(bytes, b"one \xfftwo");
    let error = link.exec_stdin(exec.id, true).expect("opens").finish().await;
    assert_eq!(code(&error.expect_err("closed")), FailureCode::StdinClosed);
}

#[tokio::test]
async fn an_exec_ends_though_what_it_left_behind_reads_no_stdin() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let mut spec = ExecSpec::shell("sleep 1000 <&0 & echo $!; read -n 1; exit 4");
    spec.stdin = Stdin::Pipe;
    let exec = link.exec_start(spec).await.expect("starts");
    let mut stdin = link.exec_stdin(exec.id, true).expect("opens");
    // More than the pipe and the windows hold.
    let sent = stdin.write(&vec![b'x'; 1_000_000]).await;
    assert_eq!(code(&sent.expect_err("nobody reads")), FailureCode::StdinClosed);
    assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(4));
    let output = link.exec_output(exec.id, Which::Stdout, OutputFrom::default(), false);
    let left: i32 = collect(output.expect("opens")).await.0.trim().parse().expect("pid");
    let left = rustix::process::Pid::from_raw(left).expect("pid");
    rustix::process::kill_process(left, rustix::process::Signal::KILL).expect("it still runs");
}

#[tokio::test]
async fn output_is_read_again_from_any_offset_and_an_exec_outlives_its_readers() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let (ended, stdout, _) = run(&link, ExecSpec::shell("seq 1 20000")).await;
    let execs = link.exec_list().await.expect("list");
    assert_eq!(execs.len(), 1);
    assert_eq!(execs[0].state, ExecState::Ended(ended));
    assert_eq!(execs[0].output_end.stdout, stdout.len() as u64);
    let from = OutputFrom { stdout: 100_000, stderr: 0 };
    for follow in [true, false] {
        let output = link.exec_output(execs[0].id, Which::Stdout, from, follow).expect("opens");
        assert_eq!(collect(output).await.0, stdout[100_000..]);
    }
    let error = link.exec_wait(host::guest::ExecId(1)).await.expect_err("no such exec");
    assert_eq!(code(&error), FailureCode::UnknownExec);

    // What is left behind keeps neither the result nor the reader waiting.
    let (ended, stdout, _) = run(&link, ExecSpec::shell("sleep 1000 & echo $!")).await;
    assert_eq!(ended.code, Some(0));
    let left: i32 = stdout.trim().parse().expect("pid");
    let left = rustix::process::Pid::from_raw(left).expect("pid");
    rustix::process::kill_process(left, rustix::process::Signal::KILL).expect("it still runs");
}

#[tokio::test]
async fn s07_a_stream_goes_on_after_a_sleep_with_a_new_socket_and_loses_nothing() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let exec = link.exec_start(ExecSpec::shell("seq 1 2000000")).await.expect("starts");
    let waiting = tokio::spawn({
        let link = link.clone();
        async move { link.exec_wait(exec.id).await }
    });
    let mut output =
        link.exec_output(exec.id, Which::Stdout, OutputFrom::default(), true).expect("opens");
    let mut stdout = Vec::new();
    let mut sleeps = 0;
    while let Some(chunk) = output.next().await {
        let chunk = chunk.expect("chunk");
        assert_eq!(chunk.offset, stdout.len() as u64);
        stdout.extend(chunk.bytes);
        // In the middle of the flood, again and again.
        if stdout.len() / 1_000_000 > sleeps {
            sleeps += 1;
            let quiesced = link.quiesce(QUIET, LIMIT).await.expect("quiesce");
            assert!(quiesced.frozen);
            assert_eq!(link.state(), LinkState::Quiesced);
            if sleeps % 2 == 0 {
                link.detach().expect("detach");
                assert_eq!(link.state(), LinkState::Parked);
                link.attach(machine.socket(), Continuity::Resumed, LIMIT).await.expect("resume");
            }
            let woke = link.wake(wake(), LIMIT).await.expect("wake");
            assert_eq!(woke.clock_step_ns, 7);
            assert_eq!(link.state(), LinkState::Running);
        }
    }
    let expected: String = (1..=2_000_000).map(|n| format!("{n}\n")).collect::<Vec<_>>().concat();
    assert!(stdout == expected.as_bytes(), "{} bytes of {}", stdout.len(), expected.len());
    assert!(sleeps >= 10, "{sleeps} sleeps");
    assert_eq!(waiting.await.expect("task").expect("ends").code, Some(0));
}

#[tokio::test]
async fn a_new_daemon_takes_over_in_the_middle_of_frames_and_reads_on_by_offset() {
    let machine = Machine::boot();
    let mut link = machine.link(Continuity::Unknown).await;
    let exec = link.exec_start(ExecSpec::shell("seq 1 2000000")).await.expect("starts");
    let mut stdout = Vec::new();
    let mut lives = 0;
    while stdout.len() < 14_888_896 {
        let from = OutputFrom { stdout: stdout.len() as u64, stderr: 0 };
        let mut output = link.exec_output(exec.id, Which::Stdout, from, true).expect("opens");
        // Also bytes towards the guest are under way when the daemon goes.
        let mut upload = link.file_write(write_spec(&machine.path("upload"))).expect("opens");
        upload.write(&vec![0xd0; 200_000]).await.expect("write");
        let stop = stdout.len() + 700_000;
        while stdout.len() < stop
            && let Some(chunk) = output.next().await
        {
            let chunk = chunk.expect("chunk");
            assert_eq!(chunk.offset, stdout.len() as u64);
            stdout.extend(chunk.bytes);
        }
        lives += 1;
        // The daemon dies: its socket ends wherever it is.
        link.lost("killed");
        // What had come is still given, then the end with its reason, or the output's own end.
        while let Some(chunk) = output.next().await {
            match chunk {
                Ok(chunk) => stdout.extend(chunk.bytes),
                Err(GuestError::Gone { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        link = machine.link(Continuity::Unknown).await;
    }
    let expected: String = (1..=2_000_000).map(|n| format!("{n}\n")).collect::<Vec<_>>().concat();
    assert!(stdout == expected.as_bytes());
    assert!(lives >= 15, "{lives} lives");
    assert_eq!(link.exec_wait(exec.id).await.expect("ends").code, Some(0));
    // Uploads that were cut left nothing behind.
    let left: Vec<_> = list(&link, &machine.path("")).await;
    assert_eq!(left, ["exec"]);
}

#[tokio::test]
async fn a_quiesce_is_cancelled_by_a_wake_whether_or_not_it_was_answered() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    for _ in 0..20 {
        let quiesce = link.quiesce(QUIET, LIMIT);
        // Sent, and given up.
        drop(futures_util::future::poll_immediate(Box::pin(quiesce)).await);
        link.wake(wake(), LIMIT).await.expect("wake");
        link.ping().await.expect("answers");
    }
    let error = link.detach().expect_err("it runs");
    assert_eq!(error, LinkError::State { call: "detach", state: LinkState::Running });
    // A request made while it stands still is answered after waking.
    link.quiesce(QUIET, LIMIT).await.expect("quiesce");
    let ping = tokio::spawn({
        let link = link.clone();
        async move { link.ping().await }
    });
    tokio::task::yield_now().await;
    assert!(!ping.is_finished());
    link.wake(wake(), LIMIT).await.expect("wake");
    ping.await.expect("task").expect("answers");
}

#[tokio::test]
async fn a_wake_does_its_steps_in_order_and_a_fork_without_entropy_stays_frozen() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    link.quiesce(QUIET, LIMIT).await.expect("quiesce");
    link.detach().expect("saved");
    // The fork: another link meets the quiesced guest.
    let fork = machine.link(Continuity::Clean).await;
    assert_eq!(fork.state(), LinkState::Quiesced);
    let identity = Identity {
        hostname: "fork".into(),
        machine_id: [1; 16],
        network: Some(Network {
            mac: [2; 6],
            address: [10, 0, 0, 2],
            gateway: [10, 0, 0, 1],
            gateway_mac: [2; 6],
            nameservers: vec![],
        }),
    };
    let params = WakeParams { identity: Some(identity), fork: true };
    machine.system.entropy_fails.store(true, Ordering::Relaxed);
    let refused = fork.wake(params.clone(), LIMIT).await.expect_err("no entropy");
    let WakeError::NotRunning(woke) = &refused else { panic!("{refused}") };
    let failed = StepOutcome::Failed("no luck".into());
    assert!(woke.steps.iter().any(|step| step.step == Step::Entropy && step.outcome == failed));
    assert_eq!(refused.to_string(), "guest does not run: Entropy: no luck");
    assert_eq!(fork.state(), LinkState::Quiesced);
    // A plain wake does not get around it.
    fork.wake(wake(), LIMIT).await.expect_err("still no entropy");

    machine.system.entropy_fails.store(false, Ordering::Relaxed);
    machine.system.network_fails.store(true, Ordering::Relaxed);
    let refused = fork.wake(params.clone(), LIMIT).await.expect_err("still its parent's address");
    assert_eq!(refused.to_string(), "guest does not run: Network: no card");
    fork.wake(wake(), LIMIT).await.expect_err("nor does a plain wake get around that");
    machine.system.network_fails.store(false, Ordering::Relaxed);
    machine.system.calls();
    let woke = fork.wake(params, LIMIT).await.expect("wake");
    assert_eq!(
        machine.system.calls(),
        ["clock", "entropy 64", "identity fork", "connections", "network [10, 0, 0, 2]"]
    );
    let steps: Vec<Step> = woke.steps.iter().map(|report| report.step).collect();
    assert_eq!(
        steps,
        [Step::Clock, Step::Entropy, Step::Identity, Step::Connections, Step::Network, Step::Thaw]
    );
    fork.ping().await.expect("answers");
}

#[tokio::test]
async fn s22_programs_do_not_run_without_their_drives() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    link.quiesce(QUIET, LIMIT).await.expect("stands still");
    let mounts = vec![Mount { serial: "drive0".into(), path: b"/data".to_vec(), read_only: false }];
    machine.system.mount_fails.store(true, Ordering::Relaxed);
    machine.system.calls();
    let refused = link.wake_with(wake(), None, mounts.clone(), LIMIT).await.expect_err("no disk");
    assert_eq!(refused.to_string(), "guest does not run: Mounts: no disk");
    assert_eq!(machine.system.calls(), ["clock", "entropy 64", "mount drive0 /data"]);
    link.wake(wake(), LIMIT).await.expect_err("a plain wake does not get around that");
    machine.system.mount_fails.store(false, Ordering::Relaxed);
    link.wake_with(wake(), None, mounts, LIMIT).await.expect("wakes");
    link.ping().await.expect("answers");
}

#[tokio::test]
async fn s16_a_guest_that_dies_ends_all_that_waits_for_it() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let exec = link.exec_start(ExecSpec::argv(["sleep", "1000"])).await.expect("starts");
    let wait = tokio::spawn({
        let link = link.clone();
        async move { link.exec_wait(exec.id).await }
    });
    let mut states = link.watch_state();
    tokio::task::yield_now().await;
    link.ping().await.expect("answers");
    link.lost("qemu exited");
    states.wait_for(|state| *state == LinkState::Detached).await.expect("told");
    let gone = GuestError::Gone { reason: "qemu exited".into() };
    assert_eq!(wait.await.expect("task"), Err(gone.clone()));
    assert_eq!(link.ping().await, Err(gone));
    let again = machine.link(Continuity::Unknown).await;
    again.exec_signal(exec.id, 9).await.expect("it is still there");
    assert_eq!(again.exec_wait(exec.id).await.expect("ends").signal, Some(9));
}

#[tokio::test]
async fn who_waits_for_a_guest_that_is_made_to_stand_still_is_told_and_who_looks_on_is_not() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let caller = link.impatient();
    let mut spec = ExecSpec::shell("read line; echo got $line");
    spec.stdin = Stdin::Pipe;
    let exec = caller.exec_start(spec).await.expect("starts").id;
    let looked_on = link.exec_output(exec, Which::Stdout, OutputFrom::default(), true);
    let looked_on = looked_on.expect("opens");
    let (waiting, waited) = (caller.clone(), tokio::sync::oneshot::channel());
    let waits = tokio::spawn(async move {
        let wait = waiting.exec_wait(exec);
        tokio::pin!(wait);
        // Asked before it is made to stand still.
        assert!(futures_util::poll!(&mut wait).is_pending());
        waited.0.send(()).expect("somebody wants to know");
        wait.await
    });
    waited.1.await.expect("it waits");
    link.stand_still(true);
    assert_eq!(waits.await.expect("no panic"), Err(GuestError::StandsStill));
    assert_eq!(caller.ping().await, Err(GuestError::StandsStill), "not even begun");
    link.stand_still(false);
    let mut stdin = caller.exec_stdin(exec, true).expect("opens");
    stdin.write(b"well\n").await.expect("written");
    stdin.finish().await.expect("done");
    assert_eq!(collect(looked_on).await.0, "got well\n");
    assert_eq!(caller.exec_wait(exec).await.expect("ends").code, Some(0));
}

fn write_spec(path: &str) -> WriteSpec {
    WriteSpec { path: path.into(), mode: None, parents: false }
}

async fn list(link: &GuestLink, path: &str) -> Vec<String> {
    let mut listing = link.file_list(path).expect("opens");
    let mut names = Vec::new();
    while let Some(entries) = listing.next().await {
        let entries = entries.expect("entries");
        names
            .extend(entries.into_iter().map(|entry| String::from_utf8(entry.name).expect("utf-8")));
    }
    names
}

async fn read_all(download: Download) -> Vec<u8> {
    download
        .map(|bytes| bytes.expect("bytes"))
        .fold(Vec::new(), |mut all, bytes| async move {
            all.extend(bytes);
            all
        })
        .await
}

#[tokio::test]
async fn s22_files_are_written_whole_read_in_part_listed_moved_and_removed() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let path = machine.path("a/b/file");
    let error = link.file_write(write_spec(&path)).expect("opens").finish().await;
    assert_eq!(code(&error.expect_err("no such directory")), FailureCode::NotFound);
    let spec = WriteSpec { mode: Some(0o640), parents: true, ..write_spec(&path) };
    let mut upload = link.file_write(spec).expect("opens");
    upload.write(b"0123456789").await.expect("write");
    let error = link.file_stat(&path).await.expect_err("not there before it is whole");
    assert_eq!(code(&error), FailureCode::NotFound);
    assert_eq!(upload.finish().await.expect("finish"), 10);
    let stat = link.file_stat(&path).await.expect("stat");
    assert_eq!((stat.size, stat.mode), (10, 0o640));
    let part = link.file_read(&path, 3, Some(4)).await.expect("read");
    assert_eq!((part.stat.size, read_all(part.download).await), (10, b"3456".to_vec()));

    // Replacing keeps the permissions.
    link.file_write(write_spec(&path)).expect("opens").finish().await.expect("finish");
    let stat = link.file_stat(&path).await.expect("stat");
    assert_eq!((stat.size, stat.mode), (0, 0o640));

    // A symbolic link is written through.
    std::os::unix::fs::symlink(&path, machine.path("link")).expect("link");
    let mut upload = link.file_write(write_spec(&machine.path("link"))).expect("opens");
    upload.write(b"through").await.expect("write");
    upload.finish().await.expect("finish");
    let through = link.file_stat(machine.path("link")).await.expect("stat");
    assert_eq!(through.target, Some(path.clone().into_bytes()));
    let target = link.file_read(&path, 0, None).await.expect("read");
    assert_eq!(read_all(target.download).await, b"through");

    // An upload that is given up leaves nothing.
    let mut upload = link.file_write(write_spec(&machine.path("a/gone"))).expect("opens");
    upload.write(b"x").await.expect("write");
    drop(upload);
    link.file_mkdir(machine.path("a/d"), false).await.expect("mkdir");
    let error = link.file_mkdir(machine.path("a/d"), false).await.expect_err("exists");
    assert_eq!(code(&error), FailureCode::Exists);
    link.file_rename(&path, machine.path("a/d/new")).await.expect("rename");
    while list(&link, &machine.path("a")).await != ["b", "d"] {}
    for n in 0..250 {
        std::fs::write(machine.path(&format!("a/d/{n:03}")), "").expect("write");
    }
    assert_eq!(list(&link, &machine.path("a/d")).await.len(), 251, "in several messages");
    let error = link.file_remove(machine.path("a/d"), false).await.expect_err("not empty");
    assert_eq!(code(&error), FailureCode::NotEmpty);
    link.file_remove(machine.path("a/d"), true).await.expect("remove");
    assert_eq!(list(&link, &machine.path("a")).await, ["b"]);

    for (path, expected) in [
        ("relative", "invalid path"),
        ("/a\0b", "invalid path"),
        ("/etc/passwd/x", "not_a_directory path"),
        ("/etc", "is_a_directory path"),
        ("/dev/null", "invalid path"),
    ] {
        let error = link.file_read(path, 0, None).await.expect_err("refused");
        assert_eq!(format!("{} {}", code(&error).as_str(), field(&error)), expected, "{path:?}");
    }
}

#[tokio::test]
async fn s22_a_tree_goes_down_and_up_as_a_tar_stream() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    std::fs::create_dir_all(machine.path("tree/locked")).expect("mkdir");
    std::fs::write(machine.path("tree/locked/file"), vec![5; 300_000]).expect("write");
    std::fs::write(machine.path(&format!("tree/{}", "long".repeat(50))), "x").expect("write");
    std::os::unix::fs::symlink("/etc/passwd", machine.path("tree/link")).expect("link");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o555);
    std::fs::set_permissions(machine.path("tree/locked"), mode).expect("mode");

    let archive = read_all(link.tree_read(machine.path("tree")).expect("opens")).await;
    let mut upload = link.tree_write(machine.path("copy/of/it")).expect("opens");
    upload.write(&archive).await.expect("write");
    assert_eq!(upload.finish().await.expect("finish"), archive.len() as u64);
    let (_, difference, _) = run(
        &link,
        ExecSpec::shell(format!(
            "diff -r --no-dereference {} {}; stat -c %a {}",
            machine.path("tree"),
            machine.path("copy/of/it"),
            machine.path("copy/of/it/locked")
        )),
    )
    .await;
    assert_eq!(difference, "555\n");

    // A file is an archive of itself alone, also by a link to it.
    std::os::unix::fs::symlink("tree/locked/file", machine.path("alias")).expect("link");
    for (path, name) in [("tree/locked/file", "file"), ("alias", "alias")] {
        let archive = read_all(link.tree_read(machine.path(path)).expect("opens")).await;
        let mut archive = tar::Archive::new(archive.as_slice());
        let mut found = Vec::new();
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).expect("its bytes");
            found.push((entry.path().expect("a name").into_owned(), bytes));
        }
        assert_eq!(found, [(std::path::PathBuf::from(name), vec![5; 300_000])], "{path}");
    }
    for path in ["/dev/null", "/etc/passwd/."] {
        let error = first_error(link.tree_read(path).expect("opens")).await;
        assert_eq!(code(&error), FailureCode::NotADirectory, "{path}");
    }
    let mut upload = link.tree_write(machine.path("cut")).expect("opens");
    upload.write(&archive[..archive.len() / 2]).await.expect("write");
    let error = upload.finish().await.expect_err("half an archive");
    assert_eq!(code(&error), FailureCode::Invalid);
}

async fn first_error(
    mut stream: impl Stream<Item = Result<bytes::Bytes, GuestError>> + Unpin,
) -> GuestError {
    loop {
        if let Err(error) = stream.next().await.expect("an error before the end") {
            return error;
        }
    }
}

#[tokio::test]
async fn an_archive_that_would_leave_its_target_is_refused() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let outside = machine.path("outside");
    std::fs::create_dir(&outside).expect("mkdir");
    for name in ["../outside/x", "/tmp/dormouse-x", "a/../../outside/x", "way/x", "hard"] {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        let mut link_header = tar::Header::new_ustar();
        link_header.set_entry_type(tar::EntryType::Symlink);
        link_header.set_size(0);
        link_header.set_mode(0o777);
        if name == "way/x" {
            builder.append_link(&mut link_header, "way", &outside).expect("append");
        }
        if name == "hard" {
            link_header.set_entry_type(tar::EntryType::Link);
            builder.append_link(&mut link_header, "hard", "/etc/passwd").expect("append");
        }
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(4);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append(&header, &b"evil"[..]).expect("append");
        let archive = builder.into_inner().expect("archive");
        let mut upload = link.tree_write(machine.path("target")).expect("opens");
        let sent = upload.write(&archive).await;
        let error = match sent {
            Ok(()) => upload.finish().await.expect_err("refused"),
            Err(error) => error,
        };
        assert_eq!(code(&error), FailureCode::OutsideTree, "{name}: {error}");
        link.file_remove(machine.path("target"), true).await.expect("remove");
    }
    assert_eq!(list(&link, &outside).await, [""; 0]);
    assert!(!std::path::Path::new("/tmp/dormouse-x").exists());
}

#[tokio::test]
async fn s22_a_loopback_port_is_reached_with_half_closes_and_a_closed_one_is_refused() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("address").port();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("accept");
        let mut request = Vec::new();
        stream.read_to_end(&mut request).await.expect("read");
        stream.write_all(&request.repeat(10)).await.expect("write");
        // Gone: the next connection is refused.
    });
    let mut stream = link.connect_port(port).await.expect("connect");
    let request = vec![42; 500_000];
    stream.write_all(&request).await.expect("write");
    stream.shutdown().await.expect("half close");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("read");
    assert!(answer == request.repeat(10), "{} bytes", answer.len());
    server.await.expect("server");
    let error = link.connect_port(port).await.expect_err("nobody listens");
    assert_eq!(code(&error), FailureCode::Refused);
}

#[tokio::test]
async fn s02_a_sample_tells_of_execs_and_their_time_limits() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let sample = link.sample().await.expect("sample");
    assert_eq!((sample.execs_running, sample.holds), (0, 0));
    let mut spec = ExecSpec::argv(["sleep", "1000"]);
    spec.timeout_ms = Some(100_000);
    let exec = link.exec_start(spec).await.expect("starts");
    let sample = link.sample().await.expect("sample");
    assert_eq!(sample.execs_running, 1);
    assert!(sample.timer_due_ms.is_some_and(|ms| ms <= 100_000), "{sample:?}");
    link.exec_signal(exec.id, 9).await.expect("kill");
}

#[tokio::test]
async fn more_requests_than_channels_are_refused_and_slots_come_back() {
    let machine = Machine::boot();
    let link = machine.link(Continuity::Unknown).await;
    let exec = link.exec_start(ExecSpec::argv(["sleep", "1000"])).await.expect("starts");
    let open = || link.exec_output(exec.id, Which::Both, OutputFrom::default(), true);
    let held: Vec<ExecOutput> = (0..256).map(|_| open().expect("opens")).collect();
    assert!(matches!(open(), Err(GuestError::Busy)));
    drop(held);
    link.ping().await.expect("answers");
    link.exec_signal(exec.id, 9).await.expect("kill");
}

/// A guest that is not ours: what it writes comes from the test.
async fn impostor(
    link: &GuestLink,
    answer: impl FnOnce(&wire::HostHello) -> wire::GuestHello + Send + 'static,
) -> (Result<wire::GuestHello, LinkError>, UnixStream) {
    let (ours, mut theirs) = UnixStream::pair().expect("pair");
    let guest = tokio::spawn(async move {
        let mut decoder = wire::Decoder::default();
        let mut bytes = vec![0; 1000];
        let frame = loop {
            let read = theirs.read(&mut bytes).await.expect("read");
            decoder.push(&bytes[..read]);
            if let Some(frame) = decoder.next_frame() {
                break frame;
            }
        };
        let wire::ToGuest::Hello(hello) = wire::decode(&frame.payload).expect("hello") else {
            panic!("not a hello")
        };
        let payload = wire::encode(&wire::ToHost::Hello(answer(&hello))).expect("encode");
        send(&mut theirs, wire::FrameKind::Control, 0, &payload).await;
        theirs
    });
    let met = link.attach(ours, Continuity::Unknown, LIMIT).await;
    (met, guest.await.expect("guest"))
}

async fn send(socket: &mut UnixStream, kind: wire::FrameKind, channel: u32, payload: &[u8]) {
    let mut bytes = Vec::new();
    wire::Frame { kind, channel, payload: payload.to_vec() }.write_to(&mut bytes).expect("small");
    // The host may have hung up already, which is what the test is after.
    drop(socket.write_all(&bytes).await);
}

fn met(hello: &wire::HostHello) -> wire::GuestHello {
    wire::GuestHello {
        link: hello.link,
        versions: wire::VERSIONS,
        agent: "x".into(),
        boot: [0; 16],
        quiesced: false,
    }
}

#[tokio::test]
async fn a_guest_of_another_protocol_is_refused_with_both_ranges() {
    let link = GuestLink::random().expect("random");
    let versions = wire::VersionRange { oldest: 900, newest: 901 };
    let (result, _socket) =
        impostor(&link, move |hello| wire::GuestHello { versions, ..met(hello) }).await;
    assert_eq!(result, Err(LinkError::Version { guest: versions, host: wire::VERSIONS }));
    assert_eq!(link.state(), LinkState::Detached);
}

#[tokio::test]
async fn a_guest_that_answers_another_link_is_not_met() {
    let link = GuestLink::random().expect("random");
    let (ours, mut theirs) = UnixStream::pair().expect("pair");
    let hello = wire::HostHello { link: host::guest::LinkId([9; 16]), versions: wire::VERSIONS };
    let payload = wire::encode(&wire::ToHost::Hello(met(&hello))).expect("encode");
    send(&mut theirs, wire::FrameKind::Control, 0, &payload).await;
    let limit = Duration::from_millis(100);
    let result = link.attach(ours, Continuity::Clean, limit).await;
    assert_eq!(result, Err(LinkError::TimedOut { call: "hello", limit }));
    assert_eq!(link.state(), LinkState::Detached);
}

#[tokio::test]
async fn a_guest_that_breaks_the_protocol_loses_its_link_and_nothing_else() {
    use wire::FrameKind::{Control, Credit, Data, Open};
    for (what, kind, payload, times) in [
        ("unreadable control message", Control, vec![0xff; 100], 1),
        ("guest opened a channel", Open, vec![], 1),
        ("more data than credit", Data, vec![1; 65_536], 5),
        ("more credit than the window", Credit, u32::MAX.to_le_bytes().to_vec(), 1),
        ("malformed credit", Credit, vec![1], 1),
    ] {
        let link = GuestLink::random().expect("random");
        let (result, mut socket) = impostor(&link, met).await;
        result.expect("met");
        let mut stream = link.tree_read("/x").expect("opens");
        for _ in 0..times {
            send(&mut socket, kind, 1, &payload).await;
        }
        let mut states = link.watch_state();
        states.wait_for(|state| *state == LinkState::Detached).await.expect("lost");
        let reason = format!("guest broke the protocol: {what}");
        loop {
            // Data within the credit was good.
            match stream.next().await.expect("an end with a reason") {
                Ok(_) => {}
                Err(error) => break assert_eq!(error, GuestError::Gone { reason }),
            }
        }
    }
}

#[tokio::test]
async fn nonsense_answers_fail_their_request_only() {
    let link = GuestLink::random().expect("random");
    let (result, mut socket) = impostor(&link, met).await;
    result.expect("met");
    let ping = tokio::spawn({
        let link = link.clone();
        async move { link.ping().await }
    });
    let sample = tokio::spawn({
        let link = link.clone();
        async move { link.sample().await }
    });
    tokio::task::yield_now().await;
    send(&mut socket, wire::FrameKind::Message, 1, &[0xff; 50]).await;
    let done = wire::encode(&wire::Reply::Done).expect("encode");
    send(&mut socket, wire::FrameKind::Message, 2, &done).await;
    assert_eq!(ping.await.expect("task"), Err(GuestError::BadAnswer { request: "ping" }));
    assert_eq!(sample.await.expect("task"), Err(GuestError::BadAnswer { request: "sample" }));
    assert_eq!(link.state(), LinkState::Running);
}
