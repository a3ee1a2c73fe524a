//! The nftables table: what guests may reach, and who may reach them.
//!
//! A guest reaches the internet (masqueraded as the host) and the host's name server for guests, nothing else: not the
//! host, not another sandbox, no private, link-local or multicast range. From outside nobody reaches a guest; the host
//! itself does. That a guest uses no address but its own is seen to by strict reverse-path filtering on each tap.

use super::Subnet;

/// Takes the table away, whether it is there or not.
pub(super) fn remove(subnet: Subnet) -> String {
    let table = subnet.table();
    format!("add table inet {table}\ndelete table inet {table}\n")
}

/// Addresses that are not the internet (RFC 6890 and successors).
const NOT_PUBLIC: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, \
                          192.0.0.0/24, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/3";

/// Replaces the whole table in one transaction.
pub(super) fn script(subnet: Subnet) -> String {
    let (remove, table) = (remove(subnet), subnet.table());
    let taps = format!("\"{}*\"", subnet.tap_prefix());
    let gateway = subnet.gateway();
    let guests = format!("{}/16", subnet.address(0));
    format!(
        r#"{remove}table inet {table} {{
  chain spoof {{
    type filter hook prerouting priority raw; policy accept;
    iifname {taps} meta nfproto ipv4 fib saddr . iif oif missing drop
    iifname {taps} meta nfproto ipv6 drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname {taps} oifname {taps} drop
    iifname {taps} ip daddr {{ {NOT_PUBLIC} }} drop
    iifname {taps} accept
    oifname {taps} ct state established,related accept
    oifname {taps} drop
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname {taps} ct state established,related accept
    iifname {taps} ip daddr {gateway} udp dport 53 accept
    iifname {taps} ip daddr {gateway} tcp dport 53 accept
    iifname {taps} drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {guests} oifname != {{ {taps}, "lo" }} masquerade
  }}
}}
"#
    )
}
