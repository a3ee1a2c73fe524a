//! "The internet": another network namespace behind a link with addresses that belong to nobody (TEST-NET-3).

use std::process::{Child, Command, Stdio};

use crate::net;
use crate::until;

/// Address of the far end.
pub const FAR: &str = "203.0.113.9";

/// Address of this machine towards it.
pub const NEAR: &str = "203.0.113.1";

/// The same over IPv6 (the documentation's prefix).
pub const FAR_V6: &str = "2001:db8:113::9";

/// Address of this machine towards that.
pub const NEAR_V6: &str = "2001:db8:113::1";

/// The far end; gone when dropped.
#[derive(Debug)]
pub struct Far {
    namespace: Child,
    servers: Vec<Child>,
}

impl Far {
    /// Makes it, once per test.
    #[track_caller]
    pub fn make() -> Self {
        net::output("ip", &["link", "add", "wan", "type", "veth", "peer", "name", "far"]);
        let namespace =
            Command::new("unshare").args(["--net", "sleep", "1200"]).spawn().expect("a namespace");
        let far = Self { namespace, servers: Vec::new() };
        let pid = far.pid();
        until("the namespace is there", || {
            let own = std::fs::read_link("/proc/self/ns/net").ok()?;
            let other = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
            (own != other).then_some(())
        });
        net::output("ip", &["link", "set", "far", "netns", &pid]);
        net::output("ip", &["addr", "add", &format!("{NEAR}/24"), "dev", "wan"]);
        net::output("ip", &["link", "set", "wan", "up"]);
        net::output("ip", &["addr", "add", &format!("{NEAR_V6}/64"), "dev", "wan", "nodad"]);
        far.inside(&["ip", "addr", "add", &format!("{FAR}/24"), "dev", "far"]);
        far.inside(&["ip", "link", "set", "far", "up"]);
        far.inside(&["ip", "addr", "add", &format!("{FAR_V6}/64"), "dev", "far", "nodad"]);
        far
    }

    /// Starts a Python program there.
    #[track_caller]
    pub fn serve(&mut self, program: &str) {
        let server = Command::new("nsenter")
            .args(["--net", "--target", &self.pid(), "--", "python3", "-c", program])
            .stdin(Stdio::null())
            .spawn()
            .expect("a server");
        self.servers.push(server);
    }

    fn inside(&self, arguments: &[&str]) -> String {
        net::output("nsenter", &[&["--net", "--target", &self.pid(), "--"], arguments].concat())
    }

    fn pid(&self) -> String {
        self.namespace.id().to_string()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        for child in self.servers.iter_mut().chain([&mut self.namespace]) {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
