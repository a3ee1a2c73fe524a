//! Ports of localhost that lead elsewhere, for the user's programs.
//!
//! The kernel is given two small programs that it runs at each `connect` to an IPv4 or IPv6 address below the cgroup of the user's
//! programs (BPF programs of the kinds `cgroup/connect4` and `cgroup/connect6`): they change where the connection goes before there
//! is one. So nothing listens on the port, a program may bind it at any time, and no connection passes through the agent. What is
//! said here is kept by the kernel: it is there after a sleep, and gone after a reboot.
//!
//! Where a port leads is an IPv4 address. A connection to `::1` is sent there as one to the mapped address (`::ffff:a.b.c.d`), which
//! each IPv6 socket takes unless it is set to IPv6 alone (`IPV6_V6ONLY`): such a one is told that the network is unreachable.
//!
//! Numbers and layouts are those of Linux's `include/uapi/linux/bpf.h`.

use std::{
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use wire::LoopbackWay;

/// Most ways at a time: more than a box may have services.
const WAYS_MAX: u32 = 1024;

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_int = 2;
const BPF_MAP_DELETE_ELEM: libc::c_int = 3;
const BPF_MAP_GET_NEXT_KEY: libc::c_int = 4;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
const BPF_CGROUP_INET4_CONNECT: u32 = 10;
const BPF_CGROUP_INET6_CONNECT: u32 = 11;
/// Programs of cgroups below run as well.
const BPF_F_ALLOW_MULTI: u32 = 2;
const BPF_FUNC_MAP_LOOKUP_ELEM: i32 = 1;
const BPF_FUNC_GET_NETNS_COOKIE: i32 = 122;
/// `SO_NETNS_COOKIE` of `asm-generic/socket.h`.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Fields of `struct bpf_sock_addr`.
const USER_IP4: i16 = 4;
/// Four words.
const USER_IP6: [i16; 4] = [8, 12, 16, 20];
const USER_PORT: i16 = 24;
const PROTOCOL: i16 = 36;

/// The ways, which the programs know. The kernel keeps the programs for as long as the cgroup is there.
#[derive(Debug)]
pub(crate) struct Loopback {
    ways: OwnedFd,
}

/// A port, as the program compares it: two bytes in the network's order, and two that are zero.
type Key = [u8; KEY_BYTES as usize];
const KEY_BYTES: u32 = 4;
/// An address and a port, each as the kernel has it in `struct bpf_sock_addr`.
type Value = [u8; VALUE_BYTES as usize];
const VALUE_BYTES: u32 = 8;

impl Loopback {
    /// Begins to look at what the programs of a cgroup (v2) connect to. Nothing leads elsewhere yet.
    pub(crate) fn below(cgroup: BorrowedFd<'_>) -> io::Result<Self> {
        let ways = create_map()?;
        let netns = netns_cookie()?;
        for family in [Family::V4, Family::V6] {
            let program = load(&program(family, ways.as_fd(), netns), family)?;
            attach(cgroup, program.as_fd(), family)?;
        }
        Ok(Self { ways })
    }

    /// From now on these ports lead elsewhere, and no others.
    pub(crate) fn set(&self, ways: &[LoopbackWay]) -> io::Result<()> {
        if ways.len() > WAYS_MAX as usize {
            let text = format!("{} ways are more than {WAYS_MAX}", ways.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let wanted: Vec<(Key, Value)> = ways.iter().copied().map(entry).collect();
        for key in self.keys()? {
            if wanted.iter().all(|(other, _)| *other != key) {
                self.change(BPF_MAP_DELETE_ELEM, key, None)?;
            }
        }
        wanted.into_iter().try_for_each(|(key, value)| {
            self.change(BPF_MAP_UPDATE_ELEM, key, Some(value)).map(drop)
        })
    }

    fn keys(&self) -> io::Result<Vec<Key>> {
        let mut keys = Vec::new();
        let mut key: Option<Key> = None;
        // One more than there can be: the kernel says when there are no more.
        for _ in 0..=WAYS_MAX {
            let mut next: Key = [0; 4];
            let mut attr = Attr::default();
            attr.put_u32(0, raw(self.ways.as_fd()));
            attr.put_u64(8, key.as_ref().map_or(0, |key| key.as_ptr().expose_provenance() as u64));
            attr.put_u64(16, next.as_mut_ptr().expose_provenance() as u64);
            match bpf(BPF_MAP_GET_NEXT_KEY, &attr) {
                Ok(_) => {
                    keys.push(next);
                    key = Some(next);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            }
        }
        Ok(keys)
    }

    fn change(&self, what: libc::c_int, key: Key, value: Option<Value>) -> io::Result<i32> {
        let mut attr = Attr::default();
        attr.put_u32(0, raw(self.ways.as_fd()));
        attr.put_u64(8, key.as_ptr().expose_provenance() as u64);
        attr.put_u64(
            16,
            value.as_ref().map_or(0, |value| value.as_ptr().expose_provenance() as u64),
        );
        bpf(what, &attr)
    }
}

fn entry(way: LoopbackWay) -> (Key, Value) {
    let port = way.port.to_be_bytes();
    let to_port = way.to_port.to_be_bytes();
    let [a, b, c, d] = way.address;
    ([port[0], port[1], 0, 0], [a, b, c, d, to_port[0], to_port[1], 0, 0])
}

/// One instruction of the kernel's machine.
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    value: i32,
}

impl Instruction {
    fn bytes(self) -> [u8; 8] {
        let [o0, o1] = self.offset.to_le_bytes();
        let [v0, v1, v2, v3] = self.value.to_le_bytes();
        [self.code, self.from << 4 | self.to, o0, o1, v0, v1, v2, v3]
    }
}

/// To what kind of address a program connects.
#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

impl Family {
    /// When the kernel runs the program.
    fn attach_type(self) -> u32 {
        match self {
            Self::V4 => BPF_CGROUP_INET4_CONNECT,
            Self::V6 => BPF_CGROUP_INET6_CONNECT,
        }
    }
}

/// At each `connect`: TCP from the guest's own network, to localhost, on a port that leads elsewhere, goes there. All other
/// connections are let through as they are.
fn program(family: Family, ways: BorrowedFd<'_>, netns: u64) -> Vec<u8> {
    /// Stands for the number of instructions to be jumped over, which is known in the end.
    const TO_THE_END: i16 = i16::MAX;
    /// Says of a wide value that it is the descriptor of a map.
    const MAP: u8 = 1;
    /// 127.0.0.1, the last word of `::1`, and the third of mapped addresses, as they are in memory.
    const LOCALHOST: i32 = i32::from_le_bytes([127, 0, 0, 1]);
    const ONE: i32 = i32::from_le_bytes([0, 0, 0, 1]);
    const MAPPED: i32 = i32::from_le_bytes([0, 0, 0xff, 0xff]);
    let op = |code, to, from, offset, value| Instruction { code, to, from, offset, value };
    // Registers: 0 is what a call gives and what the program answers, 1 to 5 are arguments, 6 is kept over calls, 10 is the stack.
    let load_u32 = |to, from, offset| op(0x61, to, from, offset, 0);
    let store_u32 = |to, offset, from| op(0x63, to, from, offset, 0);
    // Of 32 bits each: a value of 64 would have the sign of these.
    let put_u32 = |to, value| op(0xb4, to, 0, 0, value);
    let end_unless = |register, value| op(0x56, register, 0, TO_THE_END, value);
    let skip_unless = |register, value, steps| op(0x56, register, 0, steps, value);
    let skip = |steps| op(0x05, 0, 0, steps, 0);
    let copy = |to, from| op(0xbf, to, from, 0, 0);
    let add = |to, value| op(0x07, to, 0, 0, value);
    let call = |function| op(0x85, 0, 0, 0, function);
    let end_if_zero = |register| op(0x15, register, 0, TO_THE_END, 0);
    let wide = |to, from, value: u64| {
        let [l0, l1, l2, l3, h0, h1, h2, h3] = value.to_le_bytes();
        let (low, high) =
            (i32::from_le_bytes([l0, l1, l2, l3]), i32::from_le_bytes([h0, h1, h2, h3]));
        [op(0x18, to, from, 0, low), op(0, 0, 0, 0, high)]
    };
    let mut steps = vec![copy(6, 1), load_u32(2, 6, PROTOCOL), end_unless(2, libc::IPPROTO_TCP)];
    match family {
        Family::V4 => steps.extend([load_u32(2, 6, USER_IP4), end_unless(2, LOCALHOST)]),
        Family::V6 => steps.extend([
            load_u32(2, 6, USER_IP6[0]),
            end_unless(2, 0),
            load_u32(2, 6, USER_IP6[1]),
            end_unless(2, 0),
            load_u32(2, 6, USER_IP6[2]),
            load_u32(3, 6, USER_IP6[3]),
            // `::1`, or else `::ffff:127.0.0.1`.
            skip_unless(2, 0, 2),
            end_unless(3, ONE),
            skip(2),
            end_unless(2, MAPPED),
            end_unless(3, LOCALHOST),
        ]),
    }
    steps.extend([
        // In a network namespace of its own, as a container's, localhost is the container.
        copy(1, 6),
        call(BPF_FUNC_GET_NETNS_COOKIE),
    ]);
    steps.extend(wide(2, 0, netns));
    steps.extend([
        // Unless both are the same.
        op(0x5d, 0, 2, TO_THE_END, 0),
        load_u32(2, 6, USER_PORT),
        store_u32(10, -4, 2),
    ]);
    steps.extend(wide(1, MAP, u64::from(raw(ways))));
    steps.extend([copy(2, 10), add(2, -4), call(BPF_FUNC_MAP_LOOKUP_ELEM), end_if_zero(0)]);
    if let Family::V6 = family {
        steps.extend([
            put_u32(2, 0),
            store_u32(6, USER_IP6[0], 2),
            store_u32(6, USER_IP6[1], 2),
            put_u32(2, MAPPED),
            store_u32(6, USER_IP6[2], 2),
        ]);
    }
    let address = match family {
        Family::V4 => USER_IP4,
        Family::V6 => USER_IP6[3],
    };
    steps.extend([
        load_u32(2, 0, 0),
        store_u32(6, address, 2),
        load_u32(2, 0, 4),
        store_u32(6, USER_PORT, 2),
        // The end: it is let through.
        op(0xb7, 0, 0, 0, 1),
        op(0x95, 0, 0, 0, 0),
    ]);
    let end = steps.len() - 2;
    for (place, step) in steps.iter_mut().enumerate() {
        if step.offset == TO_THE_END {
            step.offset = i16::try_from(end - place - 1).unwrap_or(0);
        }
    }
    steps.into_iter().flat_map(Instruction::bytes).collect()
}

fn create_map() -> io::Result<OwnedFd> {
    let mut attr = Attr::default();
    attr.put_u32(0, BPF_MAP_TYPE_HASH);
    attr.put_u32(4, KEY_BYTES);
    attr.put_u32(8, VALUE_BYTES);
    attr.put_u32(12, WAYS_MAX);
    bpf(BPF_MAP_CREATE, &attr).map(descriptor)
}

fn load(program: &[u8], family: Family) -> io::Result<OwnedFd> {
    let mut attr = Attr::default();
    let license = c"Apache-2.0";
    attr.put_u32(0, BPF_PROG_TYPE_CGROUP_SOCK_ADDR);
    attr.put_u32(4, u32::try_from(program.len() / 8).map_err(io::Error::other)?);
    attr.put_u64(8, program.as_ptr().expose_provenance() as u64);
    attr.put_u64(16, license.as_ptr().expose_provenance() as u64);
    // `expected_attach_type`
    attr.put_u32(68, family.attach_type());
    bpf(BPF_PROG_LOAD, &attr).map(descriptor)
}

fn attach(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>, family: Family) -> io::Result<()> {
    let mut attr = Attr::default();
    attr.put_u32(0, raw(cgroup));
    attr.put_u32(4, raw(program));
    attr.put_u32(8, family.attach_type());
    attr.put_u32(12, BPF_F_ALLOW_MULTI);
    bpf(BPF_PROG_ATTACH, &attr).map(drop)
}

/// What `SO_NETNS_COOKIE` gives.
const COOKIE_BYTES: libc::socklen_t = 8;

/// Which network namespace this is.
fn netns_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    let mut cookie = 0_u64;
    let mut len: libc::socklen_t = COOKIE_BYTES;
    // SAFETY: the descriptor is open, and both pointers lead to values that live on, the second with the first one's size.
    #[expect(unsafe_code, reason = "an option of sockets that rustix has not")]
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(cookie)
}

/// `union bpf_attr`, as far as it is used here; what is not said is zero.
#[repr(C, align(8))]
#[derive(Default)]
struct Attr([u64; 16]);

impl Attr {
    fn put_u32(&mut self, at: usize, value: u32) {
        let shift = (at % 8) * 8;
        self.0[at / 8] |= u64::from(value) << shift;
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.0[at / 8] = value;
    }
}

fn raw(descriptor: BorrowedFd<'_>) -> u32 {
    // Open descriptors are not negative.
    descriptor.as_raw_fd().unsigned_abs()
}

/// `bpf(2)`.
fn bpf(what: libc::c_int, attr: &Attr) -> io::Result<i32> {
    // SAFETY: the kernel reads as many bytes of `attr` as it is told, which are there; the addresses in it are of buffers of
    // the callers above that live for as long as the call and have the sizes that map and program were made with. The only one
    // that it writes into, that of the next key, is the caller's alone.
    #[expect(unsafe_code, reason = "bpf(2), which rustix has not")]
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, what, &raw const *attr, mem::size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    i32::try_from(result).map_err(io::Error::other)
}

fn descriptor(raw: i32) -> OwnedFd {
    // SAFETY: the kernel has just given it to us, and nobody else has it. It is closed on `exec`, as all that `bpf(2)` gives.
    #[expect(unsafe_code, reason = "taking over a new descriptor")]
    unsafe {
        OwnedFd::from_raw_fd(raw)
    }
}
