//! The rules for names in boxes: elements of a map that turns connections back into the box, and of a set of the boxes that have
//! names at all.

use std::fmt::Write as _;
use std::io;
use std::net::Ipv4Addr;

use api::boxes::wiring::{WireTo, Wiring};

use super::{Subnet, run};

/// Changes the elements of one box from what they were to what they shall be, in one transaction. Should the kernel not have what it
/// should have, what there is of them goes one by one, so that whoever has the address next inherits none.
pub(crate) async fn change(
    subnet: Subnet,
    guest: Ipv4Addr,
    before: Option<&Wiring>,
    after: Option<&Wiring>,
) -> io::Result<()> {
    let Err(error) = run("nft", &["-f", "-"], &script(subnet, guest, before, after)).await else {
        return Ok(());
    };
    let Some(before) = before else { return Err(error) };
    tracing::warn!(%guest, %error, "the names of a box are not wired as they were thought to be");
    for line in script(subnet, guest, Some(before), None).lines() {
        if let Err(error) = run("nft", &["-f", "-"], &format!("{line}\n")).await {
            tracing::debug!(%guest, line, %error, "gone already");
        }
    }
    match after {
        Some(_) => run("nft", &["-f", "-"], &script(subnet, guest, None, after)).await,
        None => Ok(()),
    }
}

fn script(
    subnet: Subnet,
    guest: Ipv4Addr,
    before: Option<&Wiring>,
    after: Option<&Wiring>,
) -> String {
    let table = subnet.table();
    let mut text = String::new();
    for (verb, wiring) in [("delete", before), ("add", after)] {
        let Some(wiring) = wiring else { continue };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{verb} element inet {table} wired {{ {guest} }}");
        for wire in &wiring.wires {
            let WireTo::Here { port } = wire.to else { continue };
            let key = match wire.bits {
                32 => format!("{guest} . {} . {}", wire.address, wire.port),
                bits => format!("{guest} . {}/{bits} . {}", wire.address, wire.port),
            };
            let element = match verb {
                "add" => format!("{key} : {guest} . {port}"),
                _ => key,
            };
            let _ = writeln!(text, "{verb} element inet {table} services {{ {element} }}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use api::boxes::wiring::Wire;

    use super::*;

    #[test]
    fn t06_a_change_takes_the_old_elements_away_and_adds_the_new_ones() {
        let subnet = Subnet::new(super::super::SUBNET_DEFAULT);
        let guest = subnet.address(7);
        let wire = |bits, to| Wire {
            name: None,
            address: Ipv4Addr::new(198, 18, 0, 1),
            bits,
            port: 80,
            to,
        };
        let here = Wiring {
            wires: vec![wire(32, WireTo::Here { port: 8080 }), wire(16, WireTo::External)],
            external_base_url: None,
        };
        let text = script(subnet, guest, None, Some(&here));
        assert_eq!(
            text,
            "add element inet dormouse wired { 10.118.0.7 }\n\
             add element inet dormouse services { 10.118.0.7 . 198.18.0.1 . 80 : 10.118.0.7 . 8080 }\n"
        );
        let gone = script(subnet, guest, Some(&here), None);
        assert_eq!(
            gone,
            "delete element inet dormouse wired { 10.118.0.7 }\n\
             delete element inet dormouse services { 10.118.0.7 . 198.18.0.1 . 80 }\n"
        );
    }
}
