//! The ranges that a type cannot say, checked before anything is written down or a host is asked.

use std::collections::BTreeMap;

use api::checkpoint::EVERY_SECONDS_RANGE;
use api::drive::{AttachDrive, AttachVolume, CreateDrive, DRIVE_MIB_RANGE, DRIVES_MAX};
use api::exec::{ARGUMENT_BYTES_MAX, ExecRequest};
use api::project::DELETE_AFTER_IDLE_DAYS_MAX;
use api::sandbox::{
    AWAKE_PORTS_MAX, CONNECTION_IDLE_SECONDS_RANGE, CPUS_RANGE, CreateSandbox,
    DELETE_AFTER_IDLE_MS_MAX, ENV_BYTES_MAX, FORKS_MAX, ForkRequest, LABELS_MAX, MEMORY_MIB_RANGE,
    NAME_CHARS_MAX, PolicyPatch, SLEEP_AFTER_SECONDS_MAX, SLEEP_HOLD_MAX_MS_MAX,
    SLEEP_NOTICE_MS_MAX, SleepRequest, SleepTier, UpdateSandbox,
};
use api::terminal::{TERMINAL_SIDE_RANGE, TerminalRequest, TerminalSize};
use api::{ApiError, Code};

/// Most bytes of a path in a guest: Linux's own limit.
const PATH_BYTES_MAX: usize = 4096;
/// Most characters of a label's key.
pub(crate) const LABEL_KEY_CHARS_MAX: usize = 63;
/// Most characters of a label's value.
pub(crate) const LABEL_VALUE_CHARS_MAX: usize = 255;
/// The longest time-out of a command, milliseconds: a week. Longer work needs none.
pub(crate) const TIMEOUT_MS_MAX: u64 = 7 * 24 * 60 * 60 * 1000;
/// Most bytes of arguments: with the environment they must stay under the kernel's 2 MiB.
const ARGV_BYTES_MAX: usize = 1024 * 1024;
/// Most characters of the name of a kind of terminal.
pub(crate) const TERM_CHARS_MAX: usize = 64;
/// The last second that is a time here: any later one may be of the year 10000 somewhere on earth.
const TIME_MAX: &str = "9999-12-30T22:00:00Z";
/// What a name looks like.
const NAME_HINT: &str = "1-63 characters of a-z, 0-9 and `-`, not at the ends";

/// What an image is called.
const IMAGE_HINT: &str = "`default`, or the digest that `dormouse images build` has printed: 64 characters of 0-9 and a-f";
/// Characters of an image's digest, a SHA-256 in hexadecimal.
const DIGEST_CHARS: usize = 64;

/// Checks what a new sandbox shall be.
pub(crate) fn create(request: &CreateSandbox) -> Result<(), ApiError> {
    if let Some(given) = &request.name {
        name("name", given)?;
    }
    if let Some(image) = &request.image
        && !is_name(image)
        && !is_digest(image)
    {
        let error = ApiError::invalid("image", "neither the name nor the digest of an image");
        return Err(error.hint(IMAGE_HINT));
    }
    if let Some(cpus) = request.cpus
        && !CPUS_RANGE.contains(&cpus)
    {
        return Err(out_of_range("cpus", cpus, CPUS_RANGE.start(), CPUS_RANGE.end()));
    }
    if let Some(memory) = request.memory_mib
        && !MEMORY_MIB_RANGE.contains(&memory)
    {
        return Err(out_of_range(
            "memory_mib",
            memory,
            MEMORY_MIB_RANGE.start(),
            MEMORY_MIB_RANGE.end(),
        ));
    }
    if let Some(snapshot) = &request.snapshot {
        name("snapshot", snapshot)?;
        let also = [
            ("image", request.image.is_some()),
            ("cpus", request.cpus.is_some()),
            ("memory_mib", request.memory_mib.is_some()),
            ("drives", !request.drives.is_empty()),
            ("volumes", !request.volumes.is_empty()),
        ];
        if let Some((field, _)) = also.into_iter().find(|(_, given)| *given) {
            let text = format!("`{field}`: the snapshot decides about this");
            return Err(
                ApiError::invalid(field, text).hint("leave it out, or leave `snapshot` out")
            );
        }
    }
    attached(&request.drives, &request.volumes)?;
    env(&request.env)?;
    labels(&request.labels)?;
    policy(&request.policy())
}

/// Checks a new drive.
pub(crate) fn drive(request: &CreateDrive) -> Result<(), ApiError> {
    name("name", &request.name)?;
    match request.size_mib {
        Some(size) if !DRIVE_MIB_RANGE.contains(&size) => {
            let (least, most) = (DRIVE_MIB_RANGE.start(), DRIVE_MIB_RANGE.end());
            Err(out_of_range("size_mib", size, least, most))
        }
        _ => Ok(()),
    }
}

/// Checks drives and volumes that a sandbox shall have.
pub(crate) fn attached(drives: &[AttachDrive], volumes: &[AttachVolume]) -> Result<(), ApiError> {
    let count = drives.len() + volumes.len();
    if count > DRIVES_MAX {
        let field = if drives.is_empty() { "volumes" } else { "drives" };
        let text = format!("`{field}`: {count} drives and volumes");
        let error = ApiError::unprocessable(field, text);
        return Err(error.hint(format!("at most {DRIVES_MAX} together")));
    }
    let drives = drives.iter().map(|drive| ("drives", &drive.name, &drive.path));
    let volumes = volumes.iter().map(|volume| ("volumes", &volume.name, &volume.path));
    let mut seen: Vec<(&str, &String, &String)> = Vec::new();
    for (kind, given, at) in drives.chain(volumes) {
        let number = seen.iter().filter(|(other, ..)| *other == kind).count();
        let field = format!("{kind}[{number}].name");
        name(&field, given)?;
        if seen.iter().any(|(other, name, _)| *other == kind && *name == given) {
            return Err(ApiError::unprocessable(
                &field,
                format!("`{field}`: `{given}` is there twice"),
            ));
        }
        let field = format!("{kind}[{number}].path");
        mount_path(&field, at)?;
        if seen.iter().any(|(_, _, other)| parts(other).eq(parts(at))) {
            let text = format!("`{field}`: another drive or volume has this path");
            return Err(ApiError::unprocessable(&field, text));
        }
        seen.push((kind, given, at));
    }
    Ok(())
}

/// Folders, with all in them, in which no drive can be: the kernel's, and the guest agent's.
const NOT_IN: [&str; 5] = ["/proc", "/sys", "/dev", "/run", "/var/lib/dormouse"];
/// Folders in place of which no drive can be: no program would run.
const NOT_AT: [&str; 9] =
    ["/", "/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr", "/usr/bin", "/usr/lib"];

fn mount_path(field: &str, given: &str) -> Result<(), ApiError> {
    path(field, given)?;
    if given.chars().any(char::is_control) {
        return Err(ApiError::invalid(field, format!("`{field}`: contains a control character")));
    }
    let within = |folder: &&str| {
        let mut given = parts(given);
        parts(folder).all(|part| given.next() == Some(part))
    };
    if NOT_IN.iter().any(within) || NOT_AT.iter().any(|folder| parts(folder).eq(parts(given))) {
        let text = format!("`{field}`: the system needs this folder itself");
        return Err(
            ApiError::unprocessable(field, text).hint("a folder of its own, such as `/data`")
        );
    }
    Ok(())
}

fn parts(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|part| !part.is_empty() && *part != ".")
}

/// Checks changes.
pub(crate) fn update(request: &UpdateSandbox) -> Result<(), ApiError> {
    if let Some(given) = &request.name {
        name("name", given)?;
    }
    if let Some(given) = &request.labels {
        labels(given)?;
    }
    policy(&request.policy())
}

/// Checks a fork.
pub(crate) fn fork(request: &ForkRequest) -> Result<(), ApiError> {
    if let Some(count) = request.count
        && !(1..=FORKS_MAX).contains(&count)
    {
        return Err(out_of_range("count", count, 1, FORKS_MAX));
    }
    let Some(given) = &request.name else { return Ok(()) };
    name("name", given)?;
    // The longest of their names.
    let longest = request.count.map_or_else(|| given.clone(), |count| fork_name(given, count));
    if longest.len() > NAME_CHARS_MAX {
        let text = format!("`name`: `{longest}` would be longer than {NAME_CHARS_MAX} characters");
        return Err(ApiError::invalid("name", text).hint(NAME_HINT));
    }
    Ok(())
}

/// Name of one of several forks, counted from 1.
pub(crate) fn fork_name(name: &str, number: u32) -> String {
    format!("{name}-{number}")
}

/// Checks a sleep that is asked for.
pub(crate) fn sleep(request: &SleepRequest) -> Result<(), ApiError> {
    match request.tier {
        None | Some(SleepTier::Memory | SleepTier::Disk) => Ok(()),
        Some(SleepTier::Store | SleepTier::Off) => {
            Err(ApiError::invalid("tier", "cannot be asked for").hint("`memory` or `disk`"))
        }
    }
}

/// Checks a command.
pub(crate) fn exec(request: &ExecRequest) -> Result<(), ApiError> {
    let one_of =
        "exactly one of `argv` (program and arguments) and `command` (a line for the shell)";
    match (&request.argv, &request.command) {
        (None, None) => {
            return Err(ApiError::invalid("argv", "there is nothing to run").hint(one_of));
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid("command", "`argv` is given as well").hint(one_of));
        }
        (Some(argv), None) => {
            if argv.first().is_none_or(String::is_empty) {
                return Err(ApiError::invalid("argv", "names no program")
                    .hint("such as `[\"ls\", \"-l\"]`"));
            }
            for (index, argument) in argv.iter().enumerate() {
                let field = format!("argv[{index}]");
                no_nul(&field, argument)?;
                argument_length(&field, argument)?;
            }
            let bytes = argv.iter().map(|argument| argument.len() + 1).sum::<usize>();
            if bytes > ARGV_BYTES_MAX {
                return Err(out_of_range("argv", bytes, 1, ARGV_BYTES_MAX)
                    .hint("large data goes through a file"));
            }
        }
        (None, Some(command)) => {
            if command.trim().is_empty() {
                return Err(ApiError::invalid("command", "is empty").hint(one_of));
            }
            no_nul("command", command)?;
            argument_length("command", command)?;
        }
    }
    if let Some(cwd) = &request.cwd {
        path("cwd", cwd)?;
    }
    env(&request.env)?;
    if let Some(user) = &request.user
        && (user.is_empty()
            || user.chars().count() > NAME_CHARS_MAX
            || user.bytes().any(|byte| byte <= b' ' || byte == b':'))
    {
        return Err(
            ApiError::invalid("user", "not a user").hint("a name such as `nobody`, or a number")
        );
    }
    if let Some(timeout) = request.timeout_ms
        && !(1..=TIMEOUT_MS_MAX).contains(&timeout)
    {
        return Err(out_of_range("timeout_ms", timeout, 1, TIMEOUT_MS_MAX));
    }
    if request.open_stdin && request.stdin.is_some() {
        return Err(ApiError::invalid(
            "open_stdin",
            "`stdin` is given as well, which closes it after that text",
        ));
    }
    if request.open_stdin && !request.background {
        return Err(ApiError::invalid(
            "open_stdin",
            "nobody could write to it while this call waits for the end",
        )
        .hint("add `\"background\": true` and use `…/stdin` or `…/attach`"));
    }
    Ok(())
}

/// Checks a program for a new terminal.
pub(crate) fn terminal(request: &TerminalRequest) -> Result<(), ApiError> {
    let run = ExecRequest {
        argv: request.argv.clone(),
        // Without either it is a login shell.
        command: request
            .command
            .clone()
            .or_else(|| request.argv.is_none().then(|| "login shell".to_owned())),
        cwd: request.cwd.clone(),
        env: request.env.clone(),
        user: request.user.clone(),
        ..ExecRequest::default()
    };
    exec(&run)?;
    if let Some(term) = &request.term {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_+.".contains(&byte);
        if term.is_empty() || term.len() > TERM_CHARS_MAX || !term.bytes().all(known) {
            return Err(ApiError::invalid("term", "`term`: not a kind of terminal")
                .hint("such as `xterm-256color`"));
        }
    }
    let size = TerminalSize::default();
    terminal_size(TerminalSize {
        columns: request.columns.unwrap_or(size.columns),
        rows: request.rows.unwrap_or(size.rows),
    })
}

/// Checks the size of a terminal.
pub(crate) fn terminal_size(size: TerminalSize) -> Result<(), ApiError> {
    for (field, side) in [("columns", size.columns), ("rows", size.rows)] {
        if !TERMINAL_SIDE_RANGE.contains(&side) {
            let (least, most) = (TERMINAL_SIDE_RANGE.start(), TERMINAL_SIDE_RANGE.end());
            return Err(out_of_range(field, side, least, most));
        }
    }
    Ok(())
}

/// Checks a path in the guest: absolute, no step upwards, no NUL.
pub(crate) fn path(field: &str, given: &str) -> Result<(), ApiError> {
    let hint = "an absolute path in the sandbox without `..`, such as `/work/file`";
    let problem = if given.is_empty() {
        "no path"
    } else if !given.starts_with('/') {
        "not absolute"
    } else if given.len() > PATH_BYTES_MAX {
        "longer than 4096 bytes"
    } else if given.contains('\0') {
        "contains a NUL"
    } else if given.split('/').any(|part| part == "..") {
        "contains `..`"
    } else {
        return Ok(());
    };
    Err(ApiError::invalid(field, format!("`{field}`: {problem}")).hint(hint))
}

/// Whether this can be the name of a sandbox or an image.
pub(crate) fn is_name(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=NAME_CHARS_MAX).contains(&text.len())
        && text.bytes().all(|byte| inner(byte) || byte == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// Whether this can be the digest of an image.
fn is_digest(text: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == DIGEST_CHARS && text.bytes().all(is_digit)
}

/// A number is outside of what is allowed.
pub(crate) fn out_of_range<T: std::fmt::Display>(
    field: &str,
    given: T,
    least: impl std::fmt::Display,
    most: impl std::fmt::Display,
) -> ApiError {
    let never = if CAN_BE_NEVER.contains(&field) { OR_NEVER } else { "" };
    ApiError::invalid(field, format!("`{field}`: {given} is out of range"))
        .hint(format!("from {least} to {most}{never}"))
}

/// Fields that may be null.
const CAN_BE_NEVER: [&str; 6] = [
    "sleep_after_seconds",
    "connection_idle_seconds",
    "sleep_notice_ms",
    "delete_after_idle_ms",
    "delete_after_idle_days",
    "expires_at",
];

/// What is said of them.
const OR_NEVER: &str = ", or never (`null` in JSON)";

/// What a field that is a number may be, in words; `None`: not one whose range is known here.
pub(crate) fn range_of(field: &str) -> Option<String> {
    let last = field.rsplit('.').next().unwrap_or(field);
    let name = last.split('[').next().unwrap_or(last);
    let (least, most) = match name {
        "cpus" => (u64::from(*CPUS_RANGE.start()), u64::from(*CPUS_RANGE.end())),
        "memory_mib" => (u64::from(*MEMORY_MIB_RANGE.start()), u64::from(*MEMORY_MIB_RANGE.end())),
        "sleep_after_seconds" => (1, SLEEP_AFTER_SECONDS_MAX),
        "memory_tier_seconds" => (0, SLEEP_AFTER_SECONDS_MAX),
        "awake_ports" => (1, u64::from(u16::MAX)),
        "connection_idle_seconds" => {
            (*CONNECTION_IDLE_SECONDS_RANGE.start(), *CONNECTION_IDLE_SECONDS_RANGE.end())
        }
        "sleep_hold_max_ms" => (0, SLEEP_HOLD_MAX_MS_MAX),
        "sleep_notice_ms" => (1, SLEEP_NOTICE_MS_MAX),
        "delete_after_idle_ms" => (1, DELETE_AFTER_IDLE_MS_MAX),
        "delete_after_idle_days" => (1, u64::from(DELETE_AFTER_IDLE_DAYS_MAX)),
        "every_seconds" => (*EVERY_SECONDS_RANGE.start(), *EVERY_SECONDS_RANGE.end()),
        "timeout_ms" => (1, TIMEOUT_MS_MAX),
        "columns" | "rows" => {
            (u64::from(*TERMINAL_SIDE_RANGE.start()), u64::from(*TERMINAL_SIDE_RANGE.end()))
        }
        _ => return None,
    };
    let never = if CAN_BE_NEVER.contains(&name) { OR_NEVER } else { "" };
    Some(format!("a whole number from {least} to {most}{never}"))
}

pub(crate) fn name(field: &str, given: &str) -> Result<(), ApiError> {
    if is_name(given) {
        Ok(())
    } else {
        Err(ApiError::invalid(field, format!("`{field}`: not a name")).hint(NAME_HINT))
    }
}

fn policy(policy: &PolicyPatch) -> Result<(), ApiError> {
    if let Some(Some(seconds)) = policy.sleep_after_seconds
        && !(1..=SLEEP_AFTER_SECONDS_MAX).contains(&seconds)
    {
        return Err(out_of_range("sleep_after_seconds", seconds, 1, SLEEP_AFTER_SECONDS_MAX));
    }
    if let Some(seconds) = policy.memory_tier_seconds
        && seconds > SLEEP_AFTER_SECONDS_MAX
    {
        return Err(out_of_range("memory_tier_seconds", seconds, 0, SLEEP_AFTER_SECONDS_MAX));
    }
    if let Some(ports) = &policy.awake_ports {
        if ports.len() > AWAKE_PORTS_MAX {
            let error =
                ApiError::invalid("awake_ports", format!("`awake_ports`: {} ports", ports.len()));
            return Err(error.hint(format!("at most {AWAKE_PORTS_MAX}")));
        }
        for (index, port) in ports.iter().enumerate() {
            let field = format!("awake_ports[{index}]");
            if *port == 0 {
                return Err(out_of_range(&field, port, 1, u16::MAX));
            }
            if ports[..index].contains(port) {
                return Err(ApiError::invalid(&field, format!("`{field}`: {port} is there twice")));
            }
        }
    }
    if let Some(Some(seconds)) = policy.connection_idle_seconds
        && !CONNECTION_IDLE_SECONDS_RANGE.contains(&seconds)
    {
        let (least, most) =
            (CONNECTION_IDLE_SECONDS_RANGE.start(), CONNECTION_IDLE_SECONDS_RANGE.end());
        return Err(out_of_range("connection_idle_seconds", seconds, least, most));
    }
    if let Some(ms) = policy.sleep_hold_max_ms
        && ms > SLEEP_HOLD_MAX_MS_MAX
    {
        return Err(out_of_range("sleep_hold_max_ms", ms, 0, SLEEP_HOLD_MAX_MS_MAX));
    }
    if let Some(Some(ms)) = policy.sleep_notice_ms
        && !(1..=SLEEP_NOTICE_MS_MAX).contains(&ms)
    {
        return Err(out_of_range("sleep_notice_ms", ms, 1, SLEEP_NOTICE_MS_MAX));
    }
    if let Some(Some(ms)) = policy.delete_after_idle_ms
        && !(1..=DELETE_AFTER_IDLE_MS_MAX).contains(&ms)
    {
        return Err(out_of_range("delete_after_idle_ms", ms, 1, DELETE_AFTER_IDLE_MS_MAX));
    }
    if let Some(Some(checkpoint)) = policy.checkpoint
        && !EVERY_SECONDS_RANGE.contains(&checkpoint.every_seconds)
    {
        let range = (EVERY_SECONDS_RANGE.start(), EVERY_SECONDS_RANGE.end());
        let seconds = checkpoint.every_seconds;
        return Err(out_of_range("checkpoint.every_seconds", seconds, range.0, range.1));
    }
    if let Some(Some(at)) = &policy.expires_at {
        let wrong = |what: &str| {
            let text = format!("`expires_at`: {what}");
            ApiError::invalid("expires_at", text)
                .hint(format!("a time to come, RFC 3339, such as 2030-01-31T18:00:00Z{OR_NEVER}"))
        };
        if at.starts_with("9999-12-3") && at.parse::<jiff::Timestamp>().is_err() {
            let text = "`expires_at`: later than a time can be told";
            return Err(ApiError::unprocessable("expires_at", text)
                .hint(format!("at the latest {TIME_MAX}{OR_NEVER}")));
        }
        let time: jiff::Timestamp = at.parse().map_err(|_| wrong("not a time"))?;
        if time <= jiff::Timestamp::now() {
            return Err(ApiError { code: Code::Unprocessable, ..wrong("this time has passed") });
        }
    }
    Ok(())
}

fn env(env: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let mut bytes = 0;
    for (key, value) in env {
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(ApiError::invalid("env", "`env`: a name is empty or contains `=` or NUL"));
        }
        no_nul(&format!("env.{key}"), value)?;
        if key.len() + value.len() + 1 > ARGUMENT_BYTES_MAX {
            let field = format!("env.{key}");
            let error = ApiError::invalid(&field, format!("`{field}`: {} bytes", value.len()));
            return Err(error.hint(format!(
                "Linux takes at most {ARGUMENT_BYTES_MAX} bytes of name, `=` and value"
            )));
        }
        bytes += key.len() + value.len() + 2;
    }
    if bytes > ENV_BYTES_MAX {
        return Err(ApiError::invalid("env", format!("`env`: {bytes} bytes"))
            .hint(format!("at most {ENV_BYTES_MAX}")));
    }
    Ok(())
}

fn labels(labels: &BTreeMap<String, String>) -> Result<(), ApiError> {
    if labels.len() > LABELS_MAX {
        return Err(ApiError::invalid("labels", format!("`labels`: {} labels", labels.len()))
            .hint(format!("at most {LABELS_MAX}")));
    }
    for (key, value) in labels {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte);
        if key.is_empty() || key.len() > LABEL_KEY_CHARS_MAX || !key.bytes().all(plain) {
            return Err(ApiError::invalid("labels", "`labels`: not a key")
                .hint("1-63 characters of a-z, A-Z, 0-9, `-`, `_`, `.` and `/`"));
        }
        // A comma would make the filter of the list ambiguous.
        if value.chars().count() > LABEL_VALUE_CHARS_MAX
            || value.contains(',')
            || value.chars().any(char::is_control)
        {
            let field = format!("labels.{key}");
            return Err(ApiError::invalid(&field, format!("`{field}`: not a value"))
                .hint("at most 255 characters, without `,` and control characters"));
        }
    }
    Ok(())
}

fn argument_length(field: &str, text: &str) -> Result<(), ApiError> {
    if text.len() <= ARGUMENT_BYTES_MAX {
        return Ok(());
    }
    let error = ApiError::invalid(field, format!("`{field}`: {} bytes", text.len()));
    Err(error
        .hint(format!("Linux takes at most {ARGUMENT_BYTES_MAX}; put longer ones into a file")))
}

fn no_nul(field: &str, text: &str) -> Result<(), ApiError> {
    if text.contains('\0') {
        Err(ApiError::invalid(field, format!("`{field}`: contains a NUL")))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use api::checkpoint::CheckpointSetting;

    use super::*;

    #[test]
    fn where_drives_can_be() {
        let drive = |name: &str, path: &str| AttachDrive {
            name: name.to_owned(),
            path: path.to_owned(),
            read_only: false,
        };
        let field = |drives: &[AttachDrive]| attached(drives, &[]).expect_err("refused").field;
        let volume = AttachVolume { name: "a".to_owned(), path: "/data/b".to_owned() };
        let good = [drive("a", "/data"), drive("b", "/data/b2"), drive("c", "/home/x/c")];
        attached(&good, std::slice::from_ref(&volume)).unwrap();
        let same = attached(&[drive("b", "/data/b")], &[volume]).expect_err("refused").field;
        assert_eq!(same.as_deref(), Some("volumes[0].path"));
        for wrong in
            ["", "data", "/", "//", "/./", "/proc/x", "/dev", "/run/../data", "/etc/", "/a\nb"]
        {
            let field = field(&[drive("a", wrong)]);
            assert_eq!(field.as_deref(), Some("drives[0].path"), "{wrong}");
        }
        attached(&[drive("a", "/devices"), drive("b", "/etc/app")], &[]).unwrap();
        let twice = field(&[drive("a", "/data"), drive("b", "/data/.")]);
        assert_eq!(twice.as_deref(), Some("drives[1].path"));
        let twice = field(&[drive("a", "/data"), drive("a", "/other")]);
        assert_eq!(twice.as_deref(), Some("drives[1].name"));
        let many: Vec<_> = (0..9).map(|n| drive(&format!("d{n}"), &format!("/d{n}"))).collect();
        assert_eq!(field(&many).as_deref(), Some("drives"));
    }

    #[test]
    fn names() {
        for good in ["a", "web", "web-2", "0", &"x".repeat(63)] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", "a-", "Web", "a_b", "a.b", "ä", "a b", "a\n", &"x".repeat(64)] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn paths() {
        for good in ["/", "/work", "/work/a b/..c/d..", "/ü"] {
            assert_eq!(path("path", good), Ok(()), "{good}");
        }
        for bad in ["", "work", "/a/../b", "/..", "/a\0b", &format!("/{}", "x".repeat(4096))] {
            assert_eq!(path("path", bad).unwrap_err().field.as_deref(), Some("path"), "{bad:?}");
        }
    }

    #[test]
    fn the_first_field_out_of_range_is_named() {
        let field = |change: fn(&mut CreateSandbox)| {
            let mut request = CreateSandbox::default();
            change(&mut request);
            create(&request).unwrap_err().field.unwrap()
        };
        assert_eq!(create(&CreateSandbox::default()), Ok(()));
        assert_eq!(field(|r| r.name = Some("No".into())), "name");
        assert_eq!(field(|r| r.image = Some("../x".into())), "image");
        assert_eq!(field(|r| r.image = Some("A".repeat(64))), "image");
        assert_eq!(field(|r| r.image = Some("a".repeat(65))), "image");
        for image in ["default".to_owned(), "0f".repeat(32)] {
            let request = CreateSandbox { image: Some(image), ..CreateSandbox::default() };
            assert!(create(&request).is_ok());
        }
        assert_eq!(field(|r| r.cpus = Some(0)), "cpus");
        assert_eq!(field(|r| r.memory_mib = Some(255)), "memory_mib");
        assert_eq!(field(|r| r.sleep_after_seconds = Some(Some(0))), "sleep_after_seconds");
        assert_eq!(field(|r| r.memory_tier_seconds = Some(u64::MAX)), "memory_tier_seconds");
        assert_eq!(field(|r| r.awake_ports = Some((1..=17).collect())), "awake_ports");
        assert_eq!(field(|r| r.awake_ports = Some(vec![1, 0])), "awake_ports[1]");
        assert_eq!(field(|r| r.awake_ports = Some(vec![1, 1])), "awake_ports[1]");
        assert_eq!(
            field(|r| r.connection_idle_seconds = Some(Some(86_401))),
            "connection_idle_seconds"
        );
        assert_eq!(field(|r| r.sleep_hold_max_ms = Some(900_001)), "sleep_hold_max_ms");
        assert_eq!(field(|r| r.sleep_notice_ms = Some(Some(0))), "sleep_notice_ms");
        let every = "checkpoint.every_seconds";
        let field_of_0 =
            field(|r| r.checkpoint = Some(Some(CheckpointSetting { every_seconds: 0 })));
        assert_eq!(field_of_0, every);
        let field_of_601 =
            field(|r| r.checkpoint = Some(Some(CheckpointSetting { every_seconds: 601 })));
        assert_eq!(field_of_601, every);
        let late = |at: &str| {
            let request =
                CreateSandbox { expires_at: Some(Some(at.into())), ..CreateSandbox::default() };
            create(&request).map_err(|error| error.hint.unwrap_or_default())
        };
        assert_eq!(late(TIME_MAX), Ok(()));
        assert_eq!(late("9999-01-01T00:00:00Z"), Ok(()));
        let hint = late("9999-12-31T23:59:59Z").expect_err("too late");
        assert!(hint.contains(TIME_MAX), "{hint}");
        assert_eq!(field(|r| r.env = [("A=B".into(), String::new())].into()), "env");
        assert_eq!(field(|r| r.labels = [(String::new(), String::new())].into()), "labels");
    }

    #[test]
    fn commands() {
        let field = |request: ExecRequest| exec(&request).unwrap_err().field.unwrap();
        let run = || ExecRequest { command: Some("true".into()), ..ExecRequest::default() };
        assert_eq!(exec(&run()), Ok(()));
        assert_eq!(field(ExecRequest::default()), "argv");
        assert_eq!(field(ExecRequest { argv: Some(vec!["a".into()]), ..run() }), "command");
        assert_eq!(field(ExecRequest { argv: Some(vec![]), ..ExecRequest::default() }), "argv");
        assert_eq!(
            field(ExecRequest { command: Some("  ".into()), ..ExecRequest::default() }),
            "command"
        );
        assert_eq!(field(ExecRequest { cwd: Some("work".into()), ..run() }), "cwd");
        assert_eq!(field(ExecRequest { user: Some(String::new()), ..run() }), "user");
        assert_eq!(field(ExecRequest { timeout_ms: Some(0), ..run() }), "timeout_ms");
        assert_eq!(field(ExecRequest { open_stdin: true, ..run() }), "open_stdin");
        let most = "x".repeat(ARGUMENT_BYTES_MAX);
        assert_eq!(exec(&ExecRequest { command: Some(most.clone()), ..run() }), Ok(()));
        let more = most + "x";
        assert_eq!(field(ExecRequest { command: Some(more.clone()), ..run() }), "command");
        let argv = Some(vec!["echo".into(), more.clone()]);
        assert_eq!(field(ExecRequest { argv, command: None, ..run() }), "argv[1]");
        assert_eq!(field(ExecRequest { env: [("A".into(), more)].into(), ..run() }), "env.A");
    }
}
