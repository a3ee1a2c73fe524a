//! QEMU's control protocol by hand: one line of JSON after the other, waiting for each answer.

use std::io::{BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::wait::WAIT_MAX;

/// Bytes of a pipe for a state; a state of some 100 KiB must fit in whole, as nobody reads while it is written.
const PIPE_BYTES: usize = 1024 * 1024;

/// A connection to one QEMU.
#[derive(Debug)]
pub(crate) struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and greets.
    #[track_caller]
    pub(crate) fn open(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("QEMU's control socket");
        stream.set_read_timeout(Some(WAIT_MAX)).expect("time-out set");
        let lines = BufReader::new(stream.try_clone().expect("descriptor duplicated"));
        let mut qmp = Self { stream, lines };
        qmp.next(|message| message.get("QMP").is_some());
        qmp.run("qmp_capabilities", &Value::Null);
        qmp
    }

    /// Runs a command that must succeed.
    #[track_caller]
    pub(crate) fn run(&mut self, command: &str, arguments: &Value) {
        self.send(command, arguments, None);
    }

    /// Memory stays in its file; progress comes as events.
    #[track_caller]
    pub(crate) fn agree(&mut self) {
        let capabilities =
            ["x-ignore-shared", "events"].map(|name| json!({ "capability": name, "state": true }));
        self.run("migrate-set-capabilities", &json!({ "capabilities": capabilities }));
    }

    /// Loads a state into a QEMU that waits for one.
    #[track_caller]
    pub(crate) fn load(&mut self, state: &[u8]) {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        rustix::pipe::fcntl_setpipe_size(&writer, PIPE_BYTES).expect("a pipe that holds a state");
        self.send("getfd", &json!({ "fdname": "state" }), Some(reader.into()));
        std::io::Write::write_all(&mut &writer, state).expect("state written");
        drop(writer);
        self.run("migrate-incoming", &json!({ "uri": "fd:state" }));
        self.migrated();
    }

    /// Takes the state of a machine that stands.
    #[track_caller]
    pub(crate) fn save(&mut self) -> Vec<u8> {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        self.send("getfd", &json!({ "fdname": "state" }), Some(writer.into()));
        self.run("migrate", &json!({ "uri": "fd:state" }));
        let mut state = Vec::new();
        std::io::Read::read_to_end(&mut reader, &mut state).expect("state read");
        self.migrated();
        state
    }

    /// Waits until a state has gone over; it must have.
    #[track_caller]
    fn migrated(&mut self) {
        let event = self.next(|message| {
            message["event"] == "MIGRATION"
                && ["completed", "failed"].iter().any(|end| message["data"]["status"] == *end)
        });
        assert_eq!(event["data"]["status"], "completed", "{event}");
    }

    #[track_caller]
    fn send(&mut self, command: &str, arguments: &Value, fd: Option<OwnedFd>) {
        let mut line = json!({ "execute": command });
        if !arguments.is_null() {
            line["arguments"] = arguments.clone();
        }
        let line = format!("{line}\n");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = fd.as_ref().map(|fd| [fd.as_fd()]);
        if let Some(fds) = &fds {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let line = [IoSlice::new(line.as_bytes())];
        let sent = sendmsg(&self.stream, &line, &mut ancillary, SendFlags::NOSIGNAL)
            .expect("command sent");
        // QEMU has its own now; ours would keep a pipe open.
        drop(fd);
        assert_eq!(sent, line[0].len(), "a line of this length goes in one piece");
        let answer =
            self.next(|message| message.get("return").is_some() || message.get("error").is_some());
        assert!(answer.get("return").is_some(), "{command}: {answer}");
    }

    /// The next message that fits; others are events of no interest.
    #[track_caller]
    fn next(&mut self, fits: impl Fn(&Value) -> bool) -> Value {
        loop {
            let mut line = String::new();
            let read = self.lines.read_line(&mut line).expect("QEMU speaks");
            assert!(read > 0, "QEMU has ended");
            let message = serde_json::from_str(&line)
                .unwrap_or_else(|error| panic!("QEMU said {line:?}: {error}"));
            if fits(&message) {
                return message;
            }
        }
    }
}
