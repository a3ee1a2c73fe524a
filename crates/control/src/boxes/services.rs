//! A box's services: their names, their addresses in the box, and their URLs (T6-T11, T17).

use std::collections::HashMap;
use std::net::Ipv4Addr;

use api::ApiError;
use api::boxes::start::{AGENT_PORTS, SERVICES_MAX, ServiceSpec, StartBox};
use api::boxes::view::ServiceView;
use api::boxes::wiring::{self, Wire, WireTo, Wiring};

use super::{BoxRecord, links};
use crate::App;

/// The first address that names get in a box: in the network for benchmarks (RFC 2544), which nobody reaches outside.
const FIRST_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Most characters of a host name, and of one of its labels (RFC 1035).
const NAME_CHARS_MAX: usize = 253;
const LABEL_CHARS_MAX: usize = 63;
/// Networks in which ranges may be declared (T9).
const PRIVATE: [(Ipv4Addr, u32); 4] = [
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
];

/// Checks the services of a box that is to be started.
pub(super) fn check(services: &[ServiceSpec]) -> Result<(), ApiError> {
    if services.len() > SERVICES_MAX {
        let text = format!("`services`: {} of them", services.len());
        return Err(ApiError::invalid("services", text).hint(format!("at most {SERVICES_MAX}")));
    }
    let mut seen: HashMap<(&str, u16), usize> = HashMap::new();
    for (place, service) in services.iter().enumerate() {
        check_one(place, service)?;
        let overlaps = |(_, other): &(usize, &ServiceSpec)| {
            other.port == service.port && overlap(&other.name, &service.name)
        };
        if let Some((other, _)) = services[..place].iter().enumerate().find(overlaps) {
            let field = format!("services[{place}].name");
            let text = format!(
                "`{field}`: {} overlaps with {} of services[{other}] on port {}",
                service.name, services[other].name, service.port
            );
            return Err(ApiError::unprocessable(&field, text)
                .hint("an address leads to one service on each port"));
        }
        if let Some(other) = seen.insert((&service.name, service.port), place) {
            let field = format!("services[{place}]");
            let text = format!(
                "`{field}`: {}:{} is declared by services[{other}] already",
                service.name, service.port
            );
            return Err(ApiError::unprocessable(&field, text).hint("each name and port once"));
        }
    }
    Ok(())
}

fn check_one(place: usize, service: &ServiceSpec) -> Result<(), ApiError> {
    let field = |name: &str| format!("services[{place}].{name}");
    let wrong = |name: &str, text: String| {
        let field = field(name);
        ApiError::invalid(&field, format!("`{field}`: {text}"))
    };
    let name = &service.name;
    if !is_host_name(name) && range(name).is_none() {
        return Err(wrong("name", "not a host name, and no private IPv4 address or range".into()).hint(
            "a-z, 0-9, `-` and `.`, such as `api.shop.internal`; or within 10/8, 172.16/12, 192.168/16, 100.64/10",
        ));
    }
    for (name, port) in [
        ("port", Some(service.port)),
        ("targetPort", service.target_port),
        ("fromPort", service.from_port),
    ] {
        if port == Some(0) {
            return Err(wrong(name, "0 is no port".into()).hint("1-65535"));
        }
    }
    if !service.is_here() {
        for (name, given) in [("targetPort", service.target_port.is_some()), ("web", service.web)] {
            if given {
                return Err(wrong(name, "the service is in another box".into())
                    .hint("leave it out, or leave `fromBox` out"));
            }
        }
        if range(name).is_some() {
            return Err(wrong("fromBox", "a range cannot lead to another box".into())
                .hint("give the service a host name"));
        }
        return Ok(());
    }
    if service.from_port.is_some() {
        return Err(
            wrong("fromPort", "there is no `fromBox`".into()).hint("name the box, or leave it out")
        );
    }
    if let Some(target) = service.target_port.filter(|target| AGENT_PORTS.contains(target)) {
        return Err(wrong("targetPort", format!("port {target} in the box is the guest agent's"))
            .hint("let your process listen on another port; callers keep dialing the name's own"));
    }
    if service.target_port.is_none() && AGENT_PORTS.contains(&service.port) {
        let what = if service.port == 80 { "way to the first service" } else { "interface" };
        let text = format!(
            "port {0} in the box is the guest agent's {what}; add targetPort, the port your process listens on — callers keep dialing {name}:{0}",
            service.port
        );
        return Err(wrong("port", text).hint("such as `\"targetPort\": 8080`"));
    }
    Ok(())
}

/// Checks `externalBaseUrl` (T11), and gives it without a slash at its end. Whether it is in the guests' network its host knows.
pub(super) fn check_external(url: &str) -> Result<String, ApiError> {
    let wrong = |why: &str| {
        ApiError::invalid("externalBaseUrl", format!("`externalBaseUrl`: {why}"))
            .hint("`http(s)://host[/path]`, without a query and without credentials")
    };
    let uri: axum::http::Uri = url.parse().map_err(|_| wrong("not a URL"))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(wrong("neither http nor https"));
    }
    let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
    // As it is read where it is called: `127.1` and `0x7f000001` are addresses there.
    let read = url::Url::parse(url).map_err(|_| wrong("not a URL"))?;
    let host = read.host().ok_or_else(|| wrong("no host"))?;
    if let Some(what) = never_external(&host) {
        return Err(wiring::external_refused(what));
    }
    if authority.as_str().contains('@') {
        return Err(wrong("it has credentials"));
    }
    if uri.query().is_some() || url.contains('#') {
        return Err(wrong("it has a query or a fragment"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

/// What a host of a URL is that is no external base; `None`: it may be one.
fn never_external(host: &url::Host<&str>) -> Option<&'static str> {
    match host {
        url::Host::Ipv4(ip) => wiring::never_external((*ip).into()),
        url::Host::Ipv6(ip) => wiring::never_external((*ip).into()),
        url::Host::Domain(name) => {
            let name = name.trim_end_matches('.');
            (name == "localhost" || name.ends_with(".localhost")).then_some("this host itself")
        }
    }
}

fn is_host_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=LABEL_CHARS_MAX).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
    };
    let digits = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    name.len() <= NAME_CHARS_MAX
        && name.split('.').all(label)
        // What reads like an address is none.
        && !digits(name)
        && name != "localhost"
}

/// A private address or range: the address and the bits that are fixed.
pub(super) fn range(name: &str) -> Option<(Ipv4Addr, u32)> {
    let (address, bits) = match name.split_once('/') {
        Some((address, bits)) => {
            let plain = !bits.starts_with(['0', '+']);
            (address, bits.parse::<u32>().ok().filter(|bits| plain && *bits <= 32)?)
        }
        None => (name, 32),
    };
    let address: Ipv4Addr = address.parse().ok()?;
    let within = |(network, fixed): (Ipv4Addr, u32)| {
        bits >= fixed && (u32::from(address) ^ u32::from(network)) >> (32 - fixed) == 0
    };
    // The bits that are not fixed are zero, so that each range has one way to be written.
    let canonical = bits == 32 || u32::from(address).trailing_zeros() >= 32 - bits;
    (PRIVATE.into_iter().any(within) && canonical).then_some((address, bits))
}

/// Whether both are ranges, and have addresses in common.
fn overlap(one: &str, other: &str) -> bool {
    let (Some((one, one_bits)), Some((other, other_bits))) = (range(one), range(other)) else {
        return false;
    };
    let fixed = one_bits.min(other_bits);
    fixed == 0 || (u32::from(one) ^ u32::from(other)) >> (32 - fixed) == 0
}

/// The address of each name in a box, in the order of the services; ranges have none (T6).
pub(super) fn addresses(services: &[ServiceSpec]) -> Vec<Option<Ipv4Addr>> {
    let mut known: HashMap<&str, Ipv4Addr> = HashMap::new();
    let mut found = Vec::with_capacity(services.len());
    for service in services {
        if range(&service.name).is_some() {
            found.push(None);
            continue;
        }
        let next = u32::from(FIRST_ADDRESS) + u32::try_from(known.len()).unwrap_or(u32::MAX);
        found.push(Some(*known.entry(&service.name).or_insert(Ipv4Addr::from(next))));
    }
    found
}

/// How a box's host is told to wire its names. `external`: which services, by their places, are at the external base.
pub(super) fn wiring(spec: &StartBox, external: &[usize]) -> Wiring {
    let addresses = addresses(&spec.services);
    let wires =
        spec.services.iter().zip(addresses).enumerate().map(|(place, (service, address))| {
            let (address, bits) = match (address, range(&service.name)) {
                (_, Some(range)) => range,
                (Some(address), None) => (address, 32),
                // Every name that is no range has an address.
                (None, None) => (Ipv4Addr::UNSPECIFIED, 32),
            };
            let to = match &service.from_box {
                Some(id) => id
                    .parse()
                    .ok()
                    .map(|id| WireTo::Link { id, port: service.from_port.unwrap_or(service.port) }),
                None if external.contains(&place) => Some(WireTo::External),
                None => Some(WireTo::Here { port: service.target() }),
            };
            let name = range(&service.name).is_none().then(|| service.name.clone());
            to.map(|to| Wire { name, address, bits, port: service.port, to })
        });
    Wiring { wires: wires.flatten().collect(), external_base_url: spec.external_base_url.clone() }
}

/// The service that the box's plain URL opens: the first one declared (T17).
pub(crate) fn first_service(record: &BoxRecord) -> Option<(usize, &ServiceSpec)> {
    record.services().find(|(_, service)| service.is_here())
}

/// Which service of a box a URL with this port opens; `None`: none, as far as anybody outside may know.
pub(crate) fn target_of(record: &BoxRecord, port: Option<u16>) -> Option<(usize, &ServiceSpec)> {
    match port {
        None => first_service(record),
        Some(port) => record
            .services()
            .find(|(_, service)| service.is_here() && service.web && service.target() == port),
    }
}

/// What is told about the services.
pub(super) fn view(app: &App, record: &BoxRecord) -> Vec<ServiceView> {
    let addresses = addresses(&record.spec.services);
    let services = record.services().zip(addresses).map(|((place, service), address)| {
        let mode = match (service.is_here(), record.is_external(place)) {
            (false, _) => "link",
            (true, true) => "external",
            (true, false) => "box",
        };
        ServiceView {
            name: service.name.clone(),
            port: service.port,
            target_port: service.target(),
            web: service.web,
            mode: mode.to_owned(),
            address: address.map(|address| address.to_string()),
            url: (service.web && service.is_here()).then(|| url(app, record, place)),
            from_box: service.from_box.clone(),
            from_port: service.from_box.as_ref().map(|_| service.from_port.unwrap_or(service.port)),
            warning: match &service.from_box {
                Some(id) if record.ended.is_none() => links::warning(app, record, service, id),
                _ => None,
            },
        }
    });
    services.collect()
}

/// The URL of a service, by its place.
pub(super) fn url(app: &App, record: &BoxRecord, place: usize) -> String {
    let first = first_service(record).map(|(first, _)| first);
    let port = match record.spec.services.get(place) {
        Some(service) if first != Some(place) => Some(service.target()),
        _ => None,
    };
    app.links().box_url(&record.id, &record.key, port)
}

/// The URL of the first service for browsers.
pub(super) fn web_url(app: &App, record: &BoxRecord) -> Option<String> {
    let (place, _) = record.services().find(|(_, service)| service.web && service.is_here())?;
    Some(url(app, record, place))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(name: &str, port: u16) -> ServiceSpec {
        ServiceSpec { name: name.to_owned(), port, ..ServiceSpec::default() }
    }

    fn refused(services: &[ServiceSpec]) -> (String, String) {
        let error = check(services).expect_err("refused");
        (error.field.unwrap_or_default(), error.error)
    }

    #[test]
    fn t06_each_name_has_an_address_of_its_own_and_its_ports_share_it() {
        let services = [
            service("api.internal", 8080),
            service("db.internal", 5432),
            service("api.internal", 9000),
            service("10.1.0.0/16", 80),
        ];
        let text = |address: Option<Ipv4Addr>| address.map(|address| address.to_string());
        let found: Vec<_> = addresses(&services).into_iter().map(text).collect();
        let first = Some("198.18.0.1".to_owned());
        assert_eq!(found, [first.clone(), Some("198.18.0.2".to_owned()), first, None]);
    }

    #[test]
    fn t08_ports_of_the_guest_agent_need_another_target() {
        let mut bad = service("api.internal", 80);
        let (field, text) = refused(std::slice::from_ref(&bad));
        assert_eq!(field, "services[0].port");
        assert!(text.contains("add targetPort") && text.contains("api.internal:80"), "{text}");
        bad.target_port = Some(9095);
        assert_eq!(refused(std::slice::from_ref(&bad)).0, "services[0].targetPort");
        bad.target_port = Some(8080);
        check(&[bad]).expect("accepted");
        let link = ServiceSpec {
            from_box: Some("k3b5qj2m4x7a".to_owned()),
            from_port: Some(8080),
            ..service("api.internal", 80)
        };
        check(&[link]).expect("a link on port 80 works as it is");
    }

    #[test]
    fn t09_names_are_host_names_or_private_ranges() {
        for good in ["a", "api.shop.internal", "x-1", "10.0.0.5", "172.16.0.0/16", "100.64.0.0/10"]
        {
            check(&[service(good, 8080)]).unwrap_or_else(|error| panic!("{good}: {error}"));
        }
        for bad in [
            "",
            "API",
            "a_b",
            "-a",
            "a-",
            "a..b",
            "8.8.8.8",
            "10.0.0.0/4",
            "10.0.0.1/8",
            "172.32.0.0/16",
            "localhost",
            "1.2.3",
            "10.0.0.0/33",
            "10.0.0.0/+9",
            "a b",
        ] {
            assert_eq!(refused(&[service(bad, 8080)]).0, "services[0].name", "{bad}");
        }
    }

    #[test]
    fn t10_links_have_no_target_here() {
        let link = ServiceSpec { from_box: Some("box".to_owned()), ..service("api", 8080) };
        assert_eq!(refused(&[ServiceSpec { web: true, ..link.clone() }]).0, "services[0].web");
        let both = ServiceSpec { target_port: Some(1), ..link };
        assert_eq!(refused(&[both]).0, "services[0].targetPort");
        let none = ServiceSpec { from_port: Some(1), ..service("api", 8080) };
        assert_eq!(refused(&[none]).0, "services[0].fromPort");
    }

    #[test]
    fn t11_an_external_base_has_neither_query_nor_credentials() {
        assert_eq!(check_external("https://x.test/a/").as_deref(), Ok("https://x.test/a"));
        assert_eq!(check_external("http://x.test").as_deref(), Ok("http://x.test"));
        for bad in [
            "x.test",
            "ftp://x.test",
            "http://u:p@x.test",
            "http://x.test/?q=1",
            "http://x.test/#f",
            "http:x.test",
            "http:\\\\x.test",
            "",
        ] {
            let error = check_external(bad).expect_err(bad);
            assert!(error.hint.is_some_and(|hint| hint.contains("host[/path]")), "{bad}");
        }
    }

    #[test]
    fn t11_however_it_is_written_an_external_base_is_not_this_host() {
        for host in [
            "127.0.0.1:80",
            "2130706433:8088",
            "0x7f000001",
            "0X7F.1",
            "127.1",
            "0177.0.0.1",
            "127.0.0.1.",
            "0",
            "0.0.0.0",
            "%31%32%37.1",
            "[::1]",
            "[::]:80",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "169.254.169.254",
            "0xa9fea9fe",
            "2852039166",
            "[fe80::1]",
            "[fd00:ec2::254]",
            "224.0.0.1",
            "[ff02::1]",
            "198.18.0.1",
            "198.19.1",
            "localhost",
            "LOCALHOST.",
            "a.localhost:80",
        ] {
            for url in [format!("http://{host}"), format!("https://{host}/a")] {
                let error = check_external(&url).expect_err(&url);
                assert_eq!(error.field.as_deref(), Some("externalBaseUrl"), "{url}");
                // What the strict reader does not take is refused as no URL.
                let hint = error.hint.unwrap_or_default();
                let address =
                    error.code == api::Code::Unprocessable && hint.contains("another machine");
                assert!(address || error.error.contains("not a URL"), "{url}: {}", error.error);
            }
        }
        for host in ["10.1.2.3", "192.168.0.9:8080", "[fd12::1]", "[2001:db8::1]:80", "8.8.8.8"] {
            let url = format!("http://{host}/x");
            assert_eq!(check_external(&url).as_deref(), Ok(url.as_str()));
        }
    }

    #[test]
    fn t19_the_same_name_and_port_twice_is_refused() {
        let twice = [service("a", 1), service("a", 2), service("a", 1)];
        assert_eq!(refused(&twice).0, "services[2]");
        // Also as the same address in other words, and ranges that overlap, in either order.
        for (one, other) in
            [("10.1.2.3", "10.1.2.3/32"), ("10.0.0.0/8", "10.1.0.0/16"), ("10.1.2.3", "10.0.0.0/8")]
        {
            assert_eq!(refused(&[service(one, 1), service(other, 1)]).0, "services[1].name");
            check(&[service(one, 1), service(other, 2)]).expect("on another port");
        }
        check(&[service("10.1.0.0/16", 1), service("10.2.0.0/16", 1)]).expect("apart");
    }
}
