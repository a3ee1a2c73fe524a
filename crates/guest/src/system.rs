//! Setting the guest right after a sleep: clock, entropy, identity, network. Behind a trait, so that the order and the
//! consequences of failures are tested where no clock may be set.

use std::{fs, io, net::Ipv4Addr, path::PathBuf};

use rustix::time::{ClockId, Timespec};
use wire::{Identity, Ipv6Network, Mount, Network, control::ENTROPY_LEN};

use crate::{
    drives::Drives,
    netlink::{self, Card},
};

/// A wall clock that is off by less is left alone: a step disturbs programs more than it helps them.
pub const CLOCK_TOLERANCE_NS: i64 = 3_000_000;

/// What the agent does to the guest as a whole. Errors are texts: they are reported to the host, for people.
pub trait System: std::fmt::Debug + Send + Sync + 'static {
    /// Sets the wall clock to nanoseconds since 1970 unless it is right; gives what it was moved by.
    fn set_clock(&self, realtime_ns: i64) -> Result<i64, String>;
    /// Adds bytes to the kernel's random generator and makes it use them at once.
    fn reseed(&self, entropy: &[u8]) -> Result<(), String>;
    /// Host name, machine id, `/etc/hosts`.
    fn identify(&self, identity: &Identity) -> Result<(), String>;
    /// Takes the card down and cuts all TCP connections but those within the loopback.
    fn cut_connections(&self) -> Result<(), String>;
    /// Card, address, routes, neighbour, name servers.
    fn network(&self, network: &Network) -> Result<(), String>;
    /// The card's IPv6 address, routes and neighbour.
    fn ipv6(&self, network: &Ipv6Network) -> Result<(), String>;
    /// Mounts drives that are not mounted yet.
    fn mount(&self, mounts: &[Mount]) -> Result<(), String>;
    /// Has everything of the drives written and their file systems marked as whole; until [`System::free_drives`] nobody writes
    /// them. May take as long as the disk does.
    fn still_drives(&self) -> Result<(), String>;
    /// Undoes [`System::still_drives`]; harmless without it.
    fn free_drives(&self) -> Result<(), String>;
}

/// The guest that we run in.
#[derive(Debug)]
pub struct Guest {
    /// `/etc`.
    pub etc: PathBuf,
    /// The name of the network card.
    pub card: String,
    /// What it has mounted.
    pub drives: Drives,
}

impl System for Guest {
    fn set_clock(&self, realtime_ns: i64) -> Result<i64, String> {
        let now = rustix::time::clock_gettime(ClockId::Realtime);
        let now_ns = now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec);
        let step = realtime_ns.saturating_sub(now_ns);
        if step.abs() < CLOCK_TOLERANCE_NS {
            return Ok(0);
        }
        let time = Timespec {
            tv_sec: realtime_ns.div_euclid(1_000_000_000),
            tv_nsec: realtime_ns.rem_euclid(1_000_000_000),
        };
        rustix::time::clock_settime(ClockId::Realtime, time)
            .map_err(|error| format!("set the clock: {error}"))?;
        Ok(step)
    }

    fn reseed(&self, entropy: &[u8]) -> Result<(), String> {
        let entropy: &[u8; ENTROPY_LEN] = entropy
            .try_into()
            .map_err(|_| format!("{} bytes of entropy, not {ENTROPY_LEN}", entropy.len()))?;
        entropy::add(entropy).map_err(|error| format!("reseed the random generator: {error}"))
    }

    fn identify(&self, identity: &Identity) -> Result<(), String> {
        let name = identity.hostname.as_str();
        let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        if name.is_empty() || name.len() > 63 || !name.bytes().all(good) {
            return Err(format!("`{}` is no host name", name.escape_debug()));
        }
        rustix::system::sethostname(name.as_bytes())
            .map_err(|error| format!("set the host name: {error}"))?;
        self.write("hostname", &format!("{name}\n"))?;
        let id = u128::from_be_bytes(identity.machine_id);
        self.write("machine-id", &format!("{id:032x}\n"))?;
        let hosts = match fs::read_to_string(self.etc.join("hosts")) {
            Ok(hosts) => hosts,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n".to_owned()
            }
            Err(error) => return Err(format!("read hosts: {error}")),
        };
        self.write("hosts", &with_host(&hosts, name))
    }

    fn cut_connections(&self) -> Result<(), String> {
        self.card()?.down().map_err(|error| format!("take {} down: {error}", self.card))?;
        netlink::cut_connections().map_err(|error| format!("cut connections: {error}"))
    }

    fn network(&self, network: &Network) -> Result<(), String> {
        let card = self.card()?;
        card.down().map_err(|error| format!("take {} down: {error}", self.card))?;
        card.configure(network).map_err(|error| format!("configure {}: {error}", self.card))?;
        let servers: Vec<String> = network
            .nameservers
            .iter()
            .map(|server| format!("nameserver {}\n", Ipv4Addr::from(*server)))
            .collect();
        if servers.is_empty() { Ok(()) } else { self.write("resolv.conf", &servers.concat()) }
    }

    fn ipv6(&self, network: &Ipv6Network) -> Result<(), String> {
        let done = self.card()?.configure_ipv6(network);
        done.map_err(|error| format!("give {} its IPv6 address: {error}", self.card))
    }

    fn mount(&self, mounts: &[Mount]) -> Result<(), String> {
        self.drives.mount(mounts)
    }

    fn still_drives(&self) -> Result<(), String> {
        self.drives.freeze()
    }

    fn free_drives(&self) -> Result<(), String> {
        self.drives.thaw()
    }
}

impl Guest {
    fn card(&self) -> Result<Card, String> {
        Card::find(&self.card).map_err(|error| format!("find {}: {error}", self.card))
    }

    /// Replaces a file in `/etc` at once; a symbolic link there is replaced, not followed.
    fn write(&self, name: &str, text: &str) -> Result<(), String> {
        let temporary = self.etc.join(format!(".{name}.dormouse"));
        fs::write(&temporary, text)
            .and_then(|()| fs::rename(&temporary, self.etc.join(name)))
            .map_err(|error| format!("write {name}: {error}"))
    }
}

/// `/etc/hosts` with the line for this host, and otherwise as it was.
fn with_host(hosts: &str, name: &str) -> String {
    let mut lines: Vec<&str> =
        hosts.lines().filter(|line| !line.starts_with("127.0.1.1")).collect();
    let own = format!("127.0.1.1 {name}");
    lines.push(&own);
    lines.join("\n") + "\n"
}

/// The two requests to the random generator that have no safe wrapper.
mod entropy {
    use std::{fs::File, io, os::fd::AsRawFd};

    use super::ENTROPY_LEN;

    /// `_IOW('R', 3, int[2])`: adds bytes and credits them.
    const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;
    /// `_IO('R', 7)`: the generator takes what was added now and not some minutes later.
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        bytes: libc::c_int,
        entropy: [u8; ENTROPY_LEN],
    }

    #[expect(unsafe_code, reason = "ioctls of /dev/random")]
    pub(super) fn add(entropy: &[u8; ENTROPY_LEN]) -> io::Result<()> {
        let random = File::open("/dev/urandom")?;
        let bytes = libc::c_int::try_from(ENTROPY_LEN).map_err(io::Error::other)?;
        let info = PoolInfo { entropy_bits: bytes * 8, bytes, entropy: *entropy };
        // SAFETY: the request reads a `rand_pool_info`: two ints, then as many bytes as the second says. `info` has that
        // layout (repr(C), no padding before the bytes), says its true length, and outlives the call. The descriptor is open.
        if unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the request takes no argument. The descriptor is open.
        if unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_the_old_name_goes_and_the_users_lines_stay() {
        let hosts = "127.0.0.1 localhost\n127.0.1.1 web\n10.1.1.1 db\n";
        assert_eq!(with_host(hosts, "web2"), "127.0.0.1 localhost\n10.1.1.1 db\n127.0.1.1 web2\n");
    }
}
