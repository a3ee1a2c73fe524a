//! Switching a service between its process in the box and the external base (T6, T11).

use api::boxes::act::BoxWire;
use api::boxes::view::ServiceView;
use api::{ApiError, Code};

use super::{Who, act, checkpoint, services};
use crate::App;
use crate::failure::Failure;

/// Switches a service, and every name that shares its process; gives all of them as they are from then on. What went the other way
/// ends.
pub(crate) async fn wire(
    app: &App,
    who: &Who,
    id: &str,
    request: &BoxWire,
) -> Result<Vec<ServiceView>, Failure> {
    let external = match request.mode.as_str() {
        "box" => false,
        "external" => true,
        _ => {
            return Err(ApiError::invalid("mode", "`mode` is neither `box` nor `external`")
                .hint("`box`: the process in the box; `external`: externalBaseUrl")
                .into());
        }
    };
    let acting = act(app, who, id, "sandbox_wire").await?;
    let record = &acting.record;
    let named = record.services().filter(|(_, service)| {
        service.is_here()
            && service.name == request.service
            && request.port.is_none_or(|port| port == service.port)
    });
    let targets: Vec<u16> = named.map(|(_, service)| service.target()).collect();
    if targets.is_empty() {
        let names: Vec<String> = record
            .services()
            .filter(|(_, service)| service.is_here())
            .map(|(_, service)| format!("{}:{}", service.name, service.port))
            .collect();
        let error = ApiError::new(Code::NotFound, "this box declares no such service of its own");
        return Err(ApiError { field: Some("service".to_owned()), ..error }
            .hint(format!(
                "it declares {}",
                if names.is_empty() { "none".to_owned() } else { names.join(", ") }
            ))
            .into());
    }
    if external && record.spec.external_base_url.is_none() {
        return Err(ApiError::unprocessable("mode", "this box has no externalBaseUrl")
            .hint("it is given at the start: sandbox_start with `externalBaseUrl`")
            .into());
    }
    let mut places = record.external.clone();
    for (place, service) in record.services() {
        if service.is_here() && targets.contains(&service.target()) {
            places.retain(|other| *other != place);
            if external {
                places.push(place);
            }
        }
    }
    places.sort_unstable();
    let wiring = services::wiring(&record.spec, &places);
    app.host().wire(&record.id, wiring).await?;
    app.boxes().change(app.catalogue(), &record.id, |record| record.external = places).await?;
    checkpoint::carry(app, &record.id).await?;
    let now = act::find(app, who, id)?;
    Ok(services::view(app, &now))
}
