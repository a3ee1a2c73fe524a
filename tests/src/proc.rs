//! The machine's processes, as far as a test must know.

use std::path::Path;

/// Process ids of the QEMUs whose files are below this folder (a zombie is not one).
pub fn qemus_below(folder: &Path) -> Vec<i32> {
    let needle = folder.to_string_lossy().into_owned();
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<i32> = processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            line.split('\0').next().is_some_and(|program| program.contains("qemu-system"))
                && line.contains(&needle)
        })
        .collect();
    found.sort_unstable();
    found
}

/// Whether the process exists and is no zombie.
pub fn alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    })
}

/// Open descriptors of a process.
pub fn open_files(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// What a process holds resident, MiB; 0 for one that has gone.
pub fn resident_mib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

/// Whether a process has a file open.
pub fn has_open(pid: i32, file: &Path) -> bool {
    std::fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|open| {
        open.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path == file))
    })
}

/// Ends a process that this test (or what it started) has started. Gone already is fine.
pub fn kill(pid: i32, signal: rustix::process::Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Bytes allocated on disk below a folder.
pub fn disk_use(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => disk_use(&entry.path()),
            Ok(kind) if kind.is_file() => {
                entry.metadata().map_or(0, |metadata| metadata.blocks() * 512)
            }
            _ => 0,
        })
        .sum()
}
