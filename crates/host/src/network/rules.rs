//! The nftables table: what guests may reach, and who may reach them.
//!
//! A connection of a box to one of its own names is turned back to it, and comes from the gateway then (`services`).
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

/// Where names and ranges of boxes lie (T6, T9): what a box with names sends there is never passed on, but turned back into it or
/// taken by the daemon.
const WIRED: &str = "10.0.0.0/8, 100.64.0.0/10, 172.16.0.0/12, 192.168.0.0/16, 198.18.0.0/15";

/// IPv6 addresses that are not the internet, or lead to IPv4 ones that are not.
const NOT_PUBLIC_V6: &str = "::/96, ::ffff:0:0/96, 64:ff9b::/96, 64:ff9b:1::/48, 100::/64, 2002::/16, fc00::/7, fe80::/10, \
                             fec0::/10, ff00::/8";

/// What is let through of IPv6 when it comes from a guest, before anything is routed: each line a rule.
///
/// A guest has a route for IPv6 whether it reaches anything there or not, so what does not go anywhere is refused at once:
/// programs then turn to IPv4 without waiting.
fn from_guest_v6(subnet: Subnet, taps: &str, outbound: bool) -> String {
    let (Some(prefix), Some(gateway)) = (subnet.ipv6_prefix(), subnet.gateway_ipv6()) else {
        return format!("iifname {taps} meta nfproto ipv6 drop");
    };
    let mut rules = vec![
        // Link-local ones, too: nobody on this link has use for them.
        format!("iifname {taps} meta nfproto ipv6 ip6 saddr != {prefix}/64 drop"),
        format!("iifname {taps} meta nfproto ipv6 fib saddr . iif oif missing drop"),
        format!("iifname {taps} ip6 daddr {gateway} accept"),
    ];
    if outbound {
        rules.push(format!("iifname {taps} ip6 daddr {{ {NOT_PUBLIC_V6} }} drop"));
    } else {
        rules.push(format!("iifname {taps} meta nfproto ipv6 ip6 daddr != ff00::/8 goto nowhere"));
    }
    rules.join("\n    ")
}

/// Unique local addresses mean nothing outside; others are routed back to this host.
fn masquerade_v6(subnet: Subnet, taps: &str) -> String {
    match subnet.ipv6_prefix() {
        Some(prefix) if prefix.octets()[0] & 0xfe == 0xfc => {
            format!("ip6 saddr {prefix}/64 oifname != {{ {taps}, \"lo\" }} masquerade")
        }
        _ => String::new(),
    }
}

/// Replaces the whole table in one transaction.
pub(super) fn script(subnet: Subnet, ipv6_outbound: bool) -> String {
    let (remove, table) = (remove(subnet), subnet.table());
    let taps = format!("\"{}*\"", subnet.tap_prefix());
    let gateway = subnet.gateway();
    let guests = format!("{}/16", subnet.address(0));
    let port = crate::services::PORT;
    let from_guest_v6 = from_guest_v6(subnet, &taps, ipv6_outbound);
    let masquerade_v6 = masquerade_v6(subnet, &taps);
    format!(
        r#"{remove}table inet {table} {{
  chain spoof {{
    type filter hook prerouting priority raw; policy accept;
    iifname {taps} meta nfproto ipv4 fib saddr . iif oif missing drop
    {from_guest_v6}
  }}
  chain nowhere {{
    meta l4proto tcp reject with tcp reset
    reject with icmpv6 type no-route
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname {taps} oifname {taps} ct status dnat accept
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
    iifname {taps} ip daddr {gateway} tcp dport {port} ct status dnat accept
    iifname {taps} drop
  }}
  map services {{
    type ipv4_addr . ipv4_addr . inet_service : ipv4_addr . inet_service
    flags interval
  }}
  set wired {{
    type ipv4_addr
  }}
  chain services {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname {taps} ip daddr {gateway} return
    iifname {taps} dnat ip to ip saddr . ip daddr . tcp dport map @services
    iifname {taps} ip saddr @wired ip daddr {{ {WIRED} }} meta l4proto tcp dnat ip to {gateway}:{port}
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {guests} oifname {taps} ct status dnat snat ip to {gateway}
    ip saddr {guests} oifname != {{ {taps}, "lo" }} masquerade
    {masquerade_v6}
  }}
}}
"#
    )
}
