//! `sandbox_wire`: switching services between their processes in the box and the external base.

use api::boxes::act::BoxWire;
use api::boxes::view::ServiceList;
use rmcp::model::{JsonObject, Tool};

use super::Call;
use super::answer::Outcome;
use super::tool::{Does, about_a_box, read_about, tool};
use crate::boxes;
use crate::failure::Failure;

const WIRE: &str = "\
Switches a service of a box between its own process in the box (mode: box) and the unchanged service at externalBaseUrl \
(mode: external), for programs in the box and for the first service's URL. Names with the same targetPort are one process and switch \
together. A box that was started with externalBaseUrl begins with every service external: start your process with sandbox_exec \
(background: true), listening on 0.0.0.0 at the service's targetPort, then switch the name to it. Connections that went the other way \
end. It is use of the box: a frozen one is thawed first.";

pub(super) fn wire_tool() -> Tool {
    about_a_box(tool::<BoxWire, ServiceList>(
        "sandbox_wire",
        "Switch a service",
        Does::Change,
        WIRE,
    ))
}

pub(super) async fn wire(call: &Call, arguments: JsonObject) -> Result<Outcome, Failure> {
    let (id, request): (String, BoxWire) = read_about(arguments)?;
    let services = boxes::wire(&call.app, &call.who, &id, &request).await?;
    let lines: Vec<String> = services
        .iter()
        .map(|service| {
            let warning = service.warning.as_ref().map(|warning| format!("\n  {warning}"));
            format!(
                "{}:{} -> port {} ({}){}",
                service.name,
                service.port,
                service.target_port,
                service.mode,
                warning.unwrap_or_default()
            )
        })
        .collect();
    Outcome::new(lines.join("\n"), &ServiceList { services })
}
