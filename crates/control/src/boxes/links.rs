//! Links to other boxes that may reach nothing (T10): a name that is refused says nothing of why, and an agent would look for the fault
//! in its own program.

use api::boxes::start::ServiceSpec;

use super::BoxRecord;
use crate::App;

/// Where a link without `fromPort` leads in another box, if what that declares settles it (T10): to the service of the same name, on
/// the same port where it has several; else to the only one on that port; else to the only one that there is.
pub(super) fn port_there(service: &ServiceSpec, there: &BoxRecord) -> Option<u16> {
    let only = |fits: &dyn Fn(&ServiceSpec) -> bool| {
        let here = there.services().map(|(_, other)| other).filter(|other| other.is_here());
        let mut targets = here.filter(|other| fits(other)).map(ServiceSpec::target);
        let target = targets.next()?;
        // Several names of one process are one.
        targets.all(|other| other == target).then_some(target)
    };
    only(&|other| other.name == service.name && other.port == service.port)
        .or_else(|| only(&|other| other.name == service.name))
        .or_else(|| only(&|other| other.port == service.port))
        .or_else(|| only(&|_| true))
}

/// Why a link of a box may reach nothing (T10).
pub(super) fn warning(
    app: &App,
    record: &BoxRecord,
    service: &ServiceSpec,
    id: &str,
) -> Option<String> {
    let there = id.parse().ok().and_then(|id| app.boxes().record(&id));
    // Checked at the start, and ids are not used again.
    let there = there.filter(|there| there.account == record.account);
    nothing_there(service, id, there.as_deref())
}

fn nothing_there(service: &ServiceSpec, id: &str, there: Option<&BoxRecord>) -> Option<String> {
    let port = service.from_port.unwrap_or(service.port);
    let leads = format!("{}:{} leads to port {port} of box {id}", service.name, service.port);
    let Some(there) = there.filter(|there| there.ended.is_none()) else {
        return Some(format!("{leads}, which has ended: connections to it are closed"));
    };
    if there.is_stopped() {
        return Some(format!(
            "{leads}, which is stopped: connections to it are closed, unless sandbox_start with `restore` brings it back"
        ));
    }
    let here = || there.services().map(|(_, other)| other).filter(|other| other.is_here());
    if here().any(|other| other.target() == port) {
        return None;
    }
    if let Some(other) = here().find(|other| other.port == port) {
        return Some(format!(
            "{leads}, where the process of {}:{port} listens on {}: that is what `fromPort` should be",
            other.name,
            other.target()
        ));
    }
    let mut declared: Vec<u16> = here().map(ServiceSpec::target).collect();
    declared.sort_unstable();
    declared.dedup();
    let declared: Vec<String> = declared.iter().map(u16::to_string).collect();
    let but = if declared.is_empty() {
        String::new()
    } else {
        format!(" (but on {})", declared.join(", "))
    };
    Some(format!(
        "{leads}, which declares no service there{but}: connections are closed unless a process listens on it"
    ))
}

#[cfg(test)]
mod tests {
    use api::boxes::BoxStatus;
    use api::boxes::view::BoxEvent;

    use super::*;
    use crate::boxes::Ended;

    fn service(name: &str, port: u16) -> ServiceSpec {
        ServiceSpec { name: name.to_owned(), port, ..ServiceSpec::default() }
    }

    #[test]
    fn t10_a_link_without_a_port_leads_where_the_other_box_says() {
        let to = |name, port, target_port| ServiceSpec {
            target_port: Some(target_port),
            ..service(name, port)
        };
        let mut there = BoxRecord::example();
        let mut leads = |services: &[ServiceSpec], name, port| {
            there.spec.services = services.to_vec();
            port_there(&service(name, port), &there)
        };
        let far = ServiceSpec { from_box: Some("box".to_owned()), ..service("far", 7000) };
        let (api, admin) = (to("api", 80, 8080), to("admin", 8000, 9000));
        assert_eq!(leads(&[], "api", 80), None);
        assert_eq!(leads(std::slice::from_ref(&far), "far", 7000), None);
        // The only one, under whatever name and port.
        assert_eq!(leads(&[far.clone(), api.clone()], "db", 5432), Some(8080));
        let both = [api.clone(), admin.clone(), far];
        for (name, port, expected) in [
            ("api", 80, Some(8080)),
            ("api", 8000, Some(8080)),
            ("admin", 80, Some(9000)),
            ("db", 8000, Some(9000)),
            ("db", 80, Some(8080)),
            ("db", 5432, None),
            ("far", 7000, None),
        ] {
            assert_eq!(leads(&both, name, port), expected, "{name}:{port}");
        }
        // One name with several ports, and one port with several names.
        let more = [api.clone(), to("api", 81, 8081), to("admin", 80, 9000)];
        assert_eq!(leads(&more, "api", 81), Some(8081));
        assert_eq!(leads(&more, "api", 82), None);
        assert_eq!(leads(&more, "db", 80), None);
        assert_eq!(leads(&[api, to("alias", 8080, 8080)], "db", 1), Some(8080), "one process");
    }

    #[test]
    fn t10_a_link_that_may_reach_nothing_is_told() {
        let shop = ServiceSpec { target_port: Some(8081), ..service("shop", 9000) };
        let elsewhere = ServiceSpec { from_box: Some("box".to_owned()), ..service("far", 7000) };
        let mut there = BoxRecord::example();
        there.spec.services = vec![service("db", 5432), shop, elsewhere];
        let link = |from_port| ServiceSpec { from_port, ..service("db.internal", 80) };
        let told = |from_port, there: &BoxRecord| {
            nothing_there(&link(from_port), "k3b5qj2m4x7a", Some(there)).map(|warning| {
                let rest =
                    warning.strip_prefix("db.internal:80 leads to port ").expect("which link");
                rest.to_owned()
            })
        };
        assert_eq!(told(Some(5432), &there), None);
        assert_eq!(told(Some(8081), &there), None);
        for (port, why) in [
            (None, "80 of box k3b5qj2m4x7a, which declares no service there (but on 5432, 8081): "),
            (Some(7000), "7000 of box k3b5qj2m4x7a, which declares no service there (but on "),
            (
                Some(9000),
                "9000 of box k3b5qj2m4x7a, where the process of shop:9000 listens on 8081: ",
            ),
        ] {
            let said = told(port, &there).expect("a warning");
            assert!(said.starts_with(why), "{said}");
        }
        let event =
            |status| BoxEvent { at: String::new(), status, reason: String::new(), said: None };
        there.note(event(BoxStatus::Terminated));
        let said = told(Some(5432), &there).expect("a warning");
        assert!(said.contains("which is stopped"), "{said}");
        there.note(event(BoxStatus::Frozen));
        assert_eq!(told(Some(5432), &there), None, "it was brought back");
        there.ended =
            Some(Ended { status: BoxStatus::Terminated, reason: String::new(), at_ms: 1 });
        let said = told(Some(5432), &there).expect("a warning");
        assert!(said.contains("which has ended"), "{said}");
        assert!(nothing_there(&link(None), "gone", None).is_some());
    }
}
