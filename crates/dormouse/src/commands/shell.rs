//! Terminals: opened and joined from this terminal, listed, read and closed.
//!
//! While joined, this terminal is in raw mode: every key goes to the sandbox but Enter, `~`, `.`, which leave. Nothing of
//! what is on the screen is remembered here: after a cut the daemon draws it anew.

use std::io::IsTerminal;

use api::terminal::{
    TERMINAL_SIDE_RANGE, Terminal, TerminalList, TerminalMessage, TerminalRequest, TerminalScreen,
    TerminalSize,
};
use futures_util::{SinkExt, StreamExt};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message;

use super::attached::{RECONNECT_PAUSE, RECONNECT_TIME_MAX};
use super::exec::exit_code;
use super::execs::status;
use super::sandboxes::path;
use crate::cli::{ShellArgs, TerminalsCommand};
use crate::client::{Client, full, quote};
use crate::problem::Problem;
use crate::show;

/// Keys read at a time: what is pasted is longer.
const KEYS_MAX: usize = 16 * 1024;

pub(crate) async fn shell(client: &Client, arguments: ShellArgs) -> Result<i32, Problem> {
    let ShellArgs { name, attach, cwd, env, user, argv } = arguments;
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return Err(Problem::usage("standard input and output are no terminal")
            .hint("`dormouse exec` runs commands without one"));
    }
    let size = own_size();
    let terminals = format!("{}/terminals", path(&name));
    let id = if let Some(id) = attach {
        id
    } else {
        let request = TerminalRequest {
            argv: Some(argv).filter(|argv| !argv.is_empty()),
            command: None,
            cwd,
            env: env.into_iter().collect(),
            user,
            term: own_term(),
            columns: Some(size.columns),
            rows: Some(size.rows),
        };
        let opened: Terminal = client.json("POST", &terminals, Some(&request)).await?;
        opened.terminal_id
    };
    let mut joined = Joined {
        client,
        place: format!("{terminals}/{}", quote(&id)),
        keys: Keys::default(),
        stdin: tokio::io::stdin(),
        resized: listen(SignalKind::window_change())?,
        hung_up: listen(SignalKind::hangup())?,
        terminated: listen(SignalKind::terminate())?,
        screen_drawn: false,
    };
    let raw = Raw::enter()?;
    let left = joined.run().await;
    drop(raw);
    if joined.screen_drawn {
        // The cursor is somewhere in what was drawn, and full-screen programs may have left their modes behind.
        show::bytes(b"\x1b[?1049l\x1b[?25h\x1b[?2004l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[m\r\n")?;
    }
    match left? {
        Left::Exit(exit) => Ok(exit_code(exit)),
        Left::Detached => {
            eprintln!("note: left; `dormouse shell {name} --attach {id}` joins again");
            Ok(0)
        }
        Left::Signal(number) => Ok(128 + number),
    }
}

pub(crate) async fn terminals(
    client: &Client,
    command: TerminalsCommand,
    json: bool,
) -> Result<i32, Problem> {
    let place = |name: &str, id: &str| format!("{}/terminals/{}", path(name), quote(id));
    match command {
        TerminalsCommand::List { name } => {
            let list: TerminalList = client.get(&format!("{}/terminals", path(&name))).await?;
            if json {
                show::json(&list.terminals)?;
                return Ok(0);
            }
            let rows: Vec<Vec<String>> = list
                .terminals
                .iter()
                .map(|terminal| {
                    vec![
                        terminal.terminal_id.clone(),
                        terminal.pid.to_string(),
                        status(terminal.status, terminal.exit),
                        format!("{}x{}", terminal.columns, terminal.rows),
                        terminal.viewers.to_string(),
                        terminal.command.clone(),
                    ]
                })
                .collect();
            show::table(&["TERMINAL", "PID", "STATUS", "SIZE", "VIEWERS", "COMMAND"], &rows)?;
        }
        TerminalsCommand::Screen { name, terminal } => {
            let screen: TerminalScreen =
                client.get(&format!("{}/screen", place(&name, &terminal))).await?;
            if json { show::json(&screen)? } else { show::data(&screen.text)? }
        }
        TerminalsCommand::Close { name, terminal } => {
            client.send(client.request("DELETE", &place(&name, &terminal)), full("")).await?;
        }
    }
    Ok(0)
}

/// One who looks at a terminal and types.
struct Joined<'a> {
    client: &'a Client,
    place: String,
    keys: Keys,
    stdin: tokio::io::Stdin,
    resized: Signal,
    hung_up: Signal,
    terminated: Signal,
    /// Something was drawn on this terminal.
    screen_drawn: bool,
}

/// Why one looks no more.
enum Left {
    Exit(api::exec::Exit),
    Detached,
    Signal(i32),
}

impl Joined<'_> {
    async fn run(&mut self) -> Result<Left, Problem> {
        let mut broken_since: Option<Instant> = None;
        loop {
            match self.once(&mut broken_since).await {
                Ok(Some(left)) => return Ok(left),
                Ok(None) => {}
                Err(problem) if problem.is_unreachable() => {
                    if broken_since.is_some_and(|since| since.elapsed() > RECONNECT_TIME_MAX) {
                        return Err(problem);
                    }
                }
                Err(problem) => return Err(problem),
            }
            broken_since.get_or_insert_with(Instant::now);
            tokio::select! {
                () = tokio::time::sleep(RECONNECT_PAUSE) => {}
                _ = self.hung_up.recv() => return Ok(Left::Signal(1)),
                _ = self.terminated.recv() => return Ok(Left::Signal(15)),
            }
        }
    }

    /// One connection. `None`: it broke.
    async fn once(&mut self, broken_since: &mut Option<Instant>) -> Result<Option<Left>, Problem> {
        let TerminalSize { columns, rows } = own_size();
        let place = format!("{}/attach?columns={columns}&rows={rows}", self.place);
        let mut socket = self.client.web_socket(&place).await?;
        *broken_since = None;
        let mut buffer = vec![0; KEYS_MAX];
        loop {
            let message = tokio::select! {
                message = socket.next() => match message {
                    Some(Ok(Message::Binary(bytes))) => {
                        self.screen_drawn = true;
                        show::bytes(&bytes)?;
                        continue;
                    }
                    Some(Ok(Message::Text(text))) => match serde_json::from_str(&text) {
                        Ok(TerminalMessage::Exit(exit)) => return Ok(Some(Left::Exit(exit))),
                        Ok(TerminalMessage::Error(error)) => return Err(error.into()),
                        // The size of others, or what a newer daemon may say.
                        Ok(TerminalMessage::Screen(_) | TerminalMessage::Size(_)) | Err(_) => continue,
                    },
                    Some(Ok(_)) => continue,
                    Some(Err(_)) | None => return Ok(None),
                },
                read = self.stdin.read(&mut buffer) => match read {
                    Ok(0) => return Ok(Some(Left::Detached)),
                    Ok(read) => match self.keys.pressed(&buffer[..read]) {
                        Pressed::Keys(keys) if keys.is_empty() => continue,
                        Pressed::Keys(keys) => Message::Binary(keys.into()),
                        Pressed::Leave => return Ok(Some(Left::Detached)),
                    },
                    Err(error) => return Err(Problem::new(format!("cannot read the keyboard: {error}"))),
                },
                _ = self.resized.recv() => {
                    let size = TerminalMessage::Size(own_size());
                    Message::Text(serde_json::to_string(&size).expect("plain data").into())
                }
                _ = self.hung_up.recv() => return Ok(Some(Left::Signal(1))),
                _ = self.terminated.recv() => return Ok(Some(Left::Signal(15))),
            };
            if socket.send(message).await.is_err() {
                return Ok(None);
            }
        }
    }
}

/// Finds Enter, `~`, `.` among what is typed.
#[derive(Debug)]
struct Keys {
    /// Where in that sequence the last key was.
    at: At,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// At the beginning of a line.
    Begin,
    /// After a `~` there, which is held back.
    Tilde,
    Middle,
}

impl Default for Keys {
    fn default() -> Self {
        Self { at: At::Begin }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Pressed {
    /// These are for the sandbox.
    Keys(Vec<u8>),
    Leave,
}

impl Keys {
    fn pressed(&mut self, bytes: &[u8]) -> Pressed {
        let mut keys = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes {
            match (self.at, byte) {
                (At::Begin, b'~') => {
                    self.at = At::Tilde;
                    continue;
                }
                (At::Tilde, b'.') => return Pressed::Leave,
                (At::Tilde, other) if other != b'~' => keys.push(b'~'),
                _ => {}
            }
            keys.push(byte);
            self.at = if byte == b'\r' || byte == b'\n' { At::Begin } else { At::Middle };
        }
        Pressed::Keys(keys)
    }
}

/// This terminal in raw mode, for as long as this lives.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Self, Problem> {
        let failed = |error| Problem::new(format!("cannot set up this terminal: {error}"));
        let before = tcgetattr(std::io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw).map_err(failed)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to put back.
        let _gone = tcsetattr(std::io::stdin(), OptionalActions::Drain, &self.0);
    }
}

/// The size of this terminal, within what a sandbox's can have.
fn own_size() -> TerminalSize {
    let within = |side: u16, default: u16| match side {
        0 => default,
        side => side.clamp(*TERMINAL_SIDE_RANGE.start(), *TERMINAL_SIDE_RANGE.end()),
    };
    let default = TerminalSize::default();
    match tcgetwinsize(std::io::stdout()) {
        Ok(size) => TerminalSize {
            columns: within(size.ws_col, default.columns),
            rows: within(size.ws_row, default.rows),
        },
        Err(_) => default,
    }
}

/// The kind of this terminal. One that no sandbox is likely to know is left out, and the daemon's default taken.
fn own_term() -> Option<String> {
    let known = [
        "xterm",
        "xterm-256color",
        "screen",
        "screen-256color",
        "tmux",
        "tmux-256color",
        "linux",
        "vt100",
    ];
    std::env::var("TERM").ok().filter(|term| known.contains(&term.as_str()))
}

fn listen(kind: SignalKind) -> Result<Signal, Problem> {
    signal(kind).map_err(|error| Problem::new(format!("cannot listen for signals: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enter_tilde_dot_leaves_and_nothing_else_does() {
        let check = |pieces: &[&str], keys: Option<&str>| {
            let mut state = Keys::default();
            let mut sent = Vec::new();
            for piece in pieces {
                match state.pressed(piece.as_bytes()) {
                    Pressed::Keys(keys) => sent.extend(keys),
                    Pressed::Leave => {
                        assert_eq!(keys, None, "{pieces:?}");
                        return;
                    }
                }
            }
            assert_eq!(keys, Some(String::from_utf8(sent).unwrap().as_str()), "{pieces:?}");
        };
        check(&["~."], None);
        check(&["ls\r", "~", "."], None);
        check(&["ls\r~~."], Some("ls\r~."));
        check(&["ls ~."], Some("ls ~."));
        check(&["\r~/bin\r"], Some("\r~/bin\r"));
        check(&["~", "x."], Some("~x."));
    }
}
