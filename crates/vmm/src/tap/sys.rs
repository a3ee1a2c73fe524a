//! The system calls of taps and packet sockets that rustix does not have.
#![expect(unsafe_code, reason = "tun's ioctls, packet sockets' addresses and options")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Bytes of the virtio header QEMU and we agree on: the long form, as virtio 1 has it.
const HEADER_BYTES: libc::c_int = 12;

/// Attaches an open `/dev/net/tun` to the tap of this name; makes it if there is none.
pub(super) fn attach(tun: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = name_request(name);
    // The values fit: 0x5002.
    #[expect(clippy::cast_possible_truncation, reason = "interface flags are 16 bits wide")]
    let flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    request.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF reads and writes an `ifreq`, which lives through the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })
}

/// Lets the tap live on without a descriptor.
pub(super) fn persist(tun: &OwnedFd) -> io::Result<()> {
    // SAFETY: TUNSETPERSIST takes a plain number.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETPERSIST, 1 as libc::c_ulong) })
}

/// Sets the header's length to [`HEADER_BYTES`].
pub(super) fn set_header(tun: &OwnedFd) -> io::Result<()> {
    let bytes = HEADER_BYTES;
    // SAFETY: TUNSETVNETHDRSZ reads an `int`, which lives through the call.
    check(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) })
}

/// The header's length now: a QEMU may have set another.
pub(super) fn header_bytes(tun: impl AsFd) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: TUNGETVNETHDRSZ writes an `int`, which lives through the call.
    check(unsafe { libc::ioctl(tun.as_fd().as_raw_fd(), libc::TUNGETVNETHDRSZ, &raw mut bytes) })?;
    usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Closes a packet socket on another thread: the kernel waits until no processor can deliver to it any more, some 5 to 20 ms,
/// and a guest may be standing still meanwhile.
pub(super) fn close_later(socket: OwnedFd) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        // Nobody waits for it.
        drop(runtime.spawn_blocking(move || drop(socket)));
    }
}

/// A packet socket on an interface. `filter`: what it receives, of all that crosses the interface in either direction; None: nothing, it only sends.
pub(super) fn packet_socket(
    index: u32,
    filter: Option<&[libc::sock_filter]>,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Protocol 0 receives nothing, so no packet comes in before the filter is there.
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    let mut protocol = 0;
    if let Some(filter) = filter {
        let length =
            libc::c_ushort::try_from(filter.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let program = libc::sock_fprog { len: length, filter: filter.as_ptr().cast_mut() };
        set_option(&socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)?;
        protocol = u16::try_from(libc::ETH_P_ALL).map_err(|_| io::ErrorKind::InvalidInput)?.to_be();
    }
    let family =
        libc::c_ushort::try_from(libc::AF_PACKET).map_err(|_| io::ErrorKind::InvalidInput)?;
    let index = i32::try_from(index).map_err(|_| io::ErrorKind::InvalidInput)?;
    let address = libc::sockaddr_ll {
        sll_family: family,
        sll_protocol: protocol,
        sll_ifindex: index,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = length_of::<libc::sockaddr_ll>()?;
    // SAFETY: the address is a whole `sockaddr_ll` of that length and lives through the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// Frames on a packet socket begin with a virtio header of ten bytes.
pub(super) fn use_headers(socket: &OwnedFd) -> io::Result<()> {
    set_option(socket, libc::SOL_PACKET, libc::PACKET_VNET_HDR, &(1 as libc::c_int))
}

fn set_option<T>(
    socket: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    value: &T,
) -> io::Result<()> {
    let length = length_of::<T>()?;
    // SAFETY: the kernel reads `length` bytes of the value, which is that long and lives through the call. A `sock_fprog`'s own
    // pointer is to a slice that the caller borrows through the call, and the kernel only reads it.
    check(unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length)
    })
}

fn length_of<T>() -> io::Result<libc::socklen_t> {
    libc::socklen_t::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn name_request(name: &str) -> libc::ifreq {
    // SAFETY: an `ifreq` is numbers and unions of numbers; all zero is one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
