//! Building guest images.

use std::path::Path;

use host::images::{BuildOptions, DEFAULT_PACKAGES, build as build_image};

use crate::cli::BuildArgs;
use crate::problem::Problem;
use crate::show;

pub(crate) async fn build(data: &Path, arguments: BuildArgs, json: bool) -> Result<i32, Problem> {
    let images = arguments.images.unwrap_or_else(|| data.join("images"));
    let mut options = BuildOptions::new(images).map_err(|error| failed(&error))?;
    if let Some(guest) = arguments.guest {
        options.guest = guest;
    }
    options.packages =
        DEFAULT_PACKAGES.iter().map(|name| (*name).to_owned()).chain(arguments.packages).collect();
    options.mirror = arguments.mirror;
    options.protocol_max = arguments.protocol_max;
    options.make_default = !arguments.keep_default;
    options.refresh = arguments.refresh;
    let id = build_image(options, &mut |line| eprintln!("{line}"))
        .await
        .map_err(|error| failed(&error))?;
    if json {
        show::json(&serde_json::json!({"image": id.as_str()}))?;
    } else {
        show::data(id.as_str())?;
    }
    Ok(0)
}

fn failed(error: &dyn std::error::Error) -> Problem {
    let mut text = format!("cannot build the image: {error}");
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    Problem::new(text)
}
