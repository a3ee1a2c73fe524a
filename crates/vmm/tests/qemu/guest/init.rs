//! The guest of the tests: pid 1 of a machine that has nothing else.
//!
//! It is not part of any crate: the tests compile it with `rustc` as a static program and add it to the image's initramfs (a later cpio
//! archive adds to an earlier one), so that they need no guest agent and know exactly what the guest does. It loads the image's modules, opens
//! the port, and answers one line with one line.

use std::ffi::{CString, c_char, c_int, c_long, c_ulong, c_void};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

unsafe extern "C" {
    fn mount(source: *const c_char, target: *const c_char, kind: *const c_char, flags: c_ulong, data: *const c_void) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn reboot(how: c_int) -> c_int;
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn clock_gettime(clock: c_int, time: *mut [i64; 2]) -> c_int;
}

const SYS_FINIT_MODULE: c_long = 313;

fn main() {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        fs::create_dir_all(target).unwrap();
        let (kind, target) = (CString::new(kind).unwrap(), CString::new(target).unwrap());
        // SAFETY: three C strings that live through the call.
        unsafe { mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    }
    let mut modules: Vec<_> = fs::read_dir("/lib/dormouse-modules").unwrap().map(|entry| entry.unwrap().path()).collect();
    modules.sort();
    for path in modules {
        let file = File::open(&path).unwrap();
        let parameters = CString::default();
        // SAFETY: an open file and an empty C string.
        if unsafe { syscall(SYS_FINIT_MODULE, file.as_raw_fd(), parameters.as_ptr(), 0) } != 0 {
            println!("module {}: {}", path.display(), std::io::Error::last_os_error());
        }
    }
    let mut port = File::options().read(true).write(true).open(port_path()).unwrap();
    let mut lines = BufReader::new(port.try_clone().unwrap());
    println!("guest is up");
    loop {
        let mut line = String::new();
        // Nobody attached reads as an end; it is none.
        if lines.read_line(&mut line).unwrap_or(0) == 0 {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let mut answer = answer(line.trim());
        answer.push('\n');
        port.write_all(answer.as_bytes()).unwrap();
    }
}

fn port_path() -> String {
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == "dormouse.agent" {
                return format!("/dev/{}", entry.file_name().to_string_lossy());
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn answer(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["ping"] => "pong".to_owned(),
        ["poweroff"] => end(0x4321_fedc),
        ["reboot"] => end(0x0123_4567),
        ["panic"] => {
            fs::write("/proc/sysrq-trigger", "c").unwrap();
            String::new()
        }
        // Nanoseconds of CLOCK_MONOTONIC and CLOCK_REALTIME.
        ["clock"] => format!("{} {}", clock(1), clock(0)),
        // Starts a sleep; `slept` tells how long the last one took by the guest's own clock.
        ["sleep", seconds] => {
            let seconds: u64 = seconds.parse().unwrap();
            std::thread::spawn(move || {
                let before = clock(1);
                std::thread::sleep(Duration::from_secs(seconds));
                fs::write("/slept", (clock(1) - before).to_string()).unwrap();
            });
            // Only when its timer is armed does it sleep; before that it has only been told to.
            while !fs::read_to_string("/proc/timer_list").unwrap().contains("hrtimer_wakeup") {
                std::thread::yield_now();
            }
            "ok".to_owned()
        }
        ["slept"] => fs::read_to_string("/slept").unwrap_or_else(|_| "no".to_owned()),
        ["say", count] => {
            for number in 0..count.parse::<u64>().unwrap() {
                println!("line {number} of what a guest says on its console, again and again and again");
            }
            "ok".to_owned()
        }
        ["disk-write", text] => {
            let disk = File::options().write(true).open("/dev/vda").unwrap();
            let mut block = text.as_bytes().to_vec();
            block.resize(4096, b'.');
            disk.write_all_at(&block, 1 << 20).unwrap();
            disk.sync_all().unwrap();
            "ok".to_owned()
        }
        ["disk-read"] => {
            let mut disk = File::open("/dev/vda").unwrap();
            disk.seek(SeekFrom::Start(1 << 20)).unwrap();
            let mut block = [0; 4096];
            disk.read_exact(&mut block).unwrap();
            String::from_utf8_lossy(&block).split('.').next().unwrap().to_owned()
        }
        ["net", address] => {
            set_address(address.parse().unwrap());
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    std::thread::spawn(move || {
                        let mut back = stream.try_clone().unwrap();
                        std::io::copy(&mut stream, &mut back)
                    });
                }
            });
            "ok".to_owned()
        }
        _ => format!("what is {line:?}?"),
    }
}

fn end(how: c_int) -> String {
    // SAFETY: plain number.
    unsafe { reboot(how) };
    std::io::Error::last_os_error().to_string()
}

fn clock(which: c_int) -> i64 {
    let mut time = [0; 2];
    // SAFETY: a timespec is two 64-bit numbers here.
    unsafe { clock_gettime(which, &raw mut time) };
    time[0] * 1_000_000_000 + time[1]
}

/// `eth0` gets the address, a /24 and goes up.
fn set_address(address: Ipv4Addr) {
    // SAFETY: plain numbers (AF_INET, SOCK_DGRAM).
    let control = unsafe { socket(2, 2, 0) };
    let mut request = [0_u8; 40];
    request[..4].copy_from_slice(b"eth0");
    let mut ask = |code: c_ulong, family: u8, value: [u8; 4], at: usize| {
        request[16..].fill(0);
        request[16] = family;
        request[at..at + 4].copy_from_slice(&value);
        // SAFETY: the request is an `ifreq` of 40 bytes.
        let done = unsafe { ioctl(control, code, request.as_mut_ptr()) };
        assert_eq!(done, 0, "{code:#x}: {}", std::io::Error::last_os_error());
    };
    ask(0x8916, 2, address.octets(), 20);
    ask(0x891c, 2, [255, 255, 255, 0], 20);
    // IFF_UP | IFF_RUNNING
    ask(0x8914, 0x41, [0x41, 0, 0, 0], 16);
}
