//! Starting QEMU so that it keeps nothing of us and does not depend on us.
//!
//! The child leaves our session (a terminal's signals and our death do not reach it), gives up its rights, and keeps exactly
//! the descriptors that its command line names, under the numbers they have here: the numbers are unique in this process, so nothing
//! has to be moved about between `fork` and `exec`, where only async-signal-safe calls are allowed.
#![expect(
    unsafe_code,
    reason = "pre_exec, and the calls in it that rustix keeps private because they are only right between fork and exec"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::spec::Account;

/// Most descriptors QEMU may open. It needs some 30; a limit makes a leak visible.
const FILES_MAX: u64 = 1024;

/// What a child is given.
pub(crate) struct Given<'a> {
    /// Becomes stdout and stderr.
    pub(crate) log: std::fs::File,
    /// Kept open under their own numbers.
    pub(crate) fds: Vec<BorrowedFd<'a>>,
    /// Whom it runs as.
    pub(crate) account: Account,
}

/// Starts `command`. The caller must reap the child.
pub(crate) fn spawn(mut command: Command, given: Given<'_>) -> io::Result<Child> {
    let Given { log, fds, account } = given;
    let kept: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    command.current_dir("/").stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // SAFETY: between fork and exec only async-signal-safe calls are allowed, and no allocation. `prepare` makes system calls
    // alone, reads a vector that was allocated before the fork, and its errors are plain numbers.
    unsafe { command.pre_exec(move || prepare(&kept, account)) };
    command.spawn()
}

fn prepare(kept: &[RawFd], account: Account) -> io::Result<()> {
    // SAFETY: setsid takes nothing; it cannot fail in a fresh child, which leads no group.
    check(unsafe { libc::setsid() })?;
    // Everything else goes at exec. Our libraries open all with close-on-exec; this holds even if one does not.
    // (std's own pipe, through which an exec error is told, has the flag already.)
    // SAFETY: plain numbers; marks descriptors, closes none now.
    let marked =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if marked != 0 {
        return Err(io::Error::last_os_error());
    }
    for &fd in kept {
        // SAFETY: changes the flags of a descriptor that the caller borrows for the duration of the spawn.
        check(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) })?;
    }
    // A daemon that goes before others does not pass that on. Going back to the usual priority is always allowed.
    // SAFETY: plain numbers.
    if unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) } < 0 {
        // SAFETY: plain numbers; of this process alone.
        check(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 0) })?;
    }
    limit(libc::RLIMIT_CORE, 0)?;
    limit(libc::RLIMIT_NOFILE, FILES_MAX)?;
    if let Some(threads) = account.threads_max {
        limit(libc::RLIMIT_NPROC, threads)?;
    }
    // SAFETY: plain number; what QEMU creates is for its own user.
    unsafe { libc::umask(0o077) };
    if account.uid != 0 {
        // The raw calls: libc's wrappers would try to do it in all threads of the parent's image, which do not exist here.
        // SAFETY: zero groups, so the null pointer is not read.
        check_long(unsafe {
            libc::syscall(libc::SYS_setgroups, 0_usize, std::ptr::null::<libc::gid_t>())
        })?;
        // SAFETY: plain numbers.
        check_long(unsafe {
            libc::syscall(libc::SYS_setresgid, account.gid, account.gid, account.gid)
        })?;
        // SAFETY: plain numbers.
        check_long(unsafe {
            libc::syscall(libc::SYS_setresuid, account.uid, account.uid, account.uid)
        })?;
    }
    // SAFETY: plain numbers; a set-user-id program cannot give rights back.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: the pointer is to a local that lives through the call.
    check(unsafe { libc::setrlimit(resource, &raw const limit) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn check_long(result: libc::c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::fd::AsFd;

    fn run(script: &str, fds: Vec<BorrowedFd<'_>>, account: Account) -> String {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let log = std::fs::File::from(std::os::fd::OwnedFd::from(writer));
        let mut child = spawn(command, Given { log, fds, account }).unwrap();
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert!(child.wait().unwrap().success(), "{said}");
        said
    }

    #[test]
    fn only_named_descriptors_reach_the_child() {
        let (named, _other) = io::pipe().unwrap();
        // A descriptor without close-on-exec, as a careless library would leave one.
        let leaked = rustix::io::dup(&named).unwrap();
        rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
        let number = named.as_raw_fd();
        let said =
            run("ls /proc/$$/fd | sort -n | tr '\\n' ' '", vec![named.as_fd()], Account::ROOT);
        assert_eq!(said.trim(), format!("0 1 2 {number}"));
    }

    #[test]
    fn it_leads_its_own_session_and_gives_up_its_rights() {
        let account = Account { uid: 64_123, gid: 64_124, threads_max: Some(64) };
        let status = run(
            "grep -E '^(Uid|Gid|Groups|NoNewPrivs|CapEff):' /proc/$$/status; ps -o sid= -p $$; echo $$; ulimit -c",
            Vec::new(),
            account,
        );
        let words: Vec<&str> = status.split_whitespace().collect();
        let expected = "Uid: 64123 64123 64123 64123 Gid: 64124 64124 64124 64124 Groups: CapEff: 0000000000000000 NoNewPrivs: 1";
        assert_eq!(words[..words.len() - 3].join(" "), expected);
        let [session, pid, core] = words[words.len() - 3..] else { panic!("{status}") };
        assert_eq!((session, core), (pid, "0"));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_here() {
        let log = std::fs::File::options().write(true).open("/dev/null").unwrap();
        let given = Given { log, fds: Vec::new(), account: Account::ROOT };
        assert_eq!(
            spawn(Command::new("/no/such/program"), given).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
