//! What most figures are measured on: a daemon, a sandbox with a counter and a bare server in it, and images of the same
//! guest for doing it by hand.

use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Options;
use super::api::Api;
use super::hand::{BARE_PORT, Bare, Image, Machine};
use super::request::Target;
use crate::{Lab, until};

/// Memory of the guests, MiB: the least there is. One figure compares it with [`BIG_MIB`].
pub(crate) const MEMORY_MIB: u32 = 256;
/// Memory of the big guest, MiB.
pub(crate) const BIG_MIB: u32 = 4096;

/// The sandbox that ours is measured on.
pub(crate) const WEB: &str = "web";

/// See the module.
pub(crate) struct Stage<'a> {
    pub(crate) lab: &'a mut Lab,
    pub(crate) api: Api,
    pub(crate) rounds: usize,
    bare: PathBuf,
    /// The counter in [`WEB`], through its link.
    pub(crate) link: Target,
    /// [`WEB`]'s own address.
    pub(crate) address: String,
    /// A copy of [`WEB`], asleep.
    pub(crate) hand: Machine,
    /// Where it has its address.
    pub(crate) hand_address: String,
    /// The image it is a copy of.
    pub(crate) image: Image,
    /// A guest as a new sandbox is, with the bare server alone in it.
    pub(crate) plain: Image,
}

impl<'a> Stage<'a> {
    #[track_caller]
    pub(crate) fn set(lab: &'a mut Lab, options: &Options) -> Self {
        eprintln!("==> the stage");
        let api = Api::of(lab);
        with_counter(lab, &api, &options.bare, WEB, MEMORY_MIB);
        // The same guest under another name: its image keeps its own address.
        api.call("POST", &format!("/v1/sandboxes/{WEB}/fork"), &json!({ "name": "mirror" }));
        create(&api, "plain", MEMORY_MIB);
        with_bare(lab, &options.bare, "plain");
        let [image, plain] = images(lab, &api, ["mirror", "plain"]);
        let hand = image.copy(lab.scratch().join("hand"));
        let link = Target::link(&api.link(WEB));
        let address = address(&api, WEB);
        let hand_address = image.address.clone();
        let bare = options.bare.clone();
        Self {
            lab,
            api,
            rounds: options.rounds(),
            bare,
            link,
            address,
            hand,
            hand_address,
            image,
            plain,
        }
    }

    /// Makes another sandbox with a counter; returns its counter's target.
    #[track_caller]
    pub(crate) fn another(&mut self, name: &str, memory_mib: u32) -> Target {
        with_counter(self.lab, &self.api, &self.bare, name, memory_mib);
        Target::link(&self.api.link(name))
    }

    /// The counter of the machine that is run by hand.
    pub(crate) fn hand_counter(&self) -> Target {
        Target::direct(&self.hand_address, COUNTER_PORT)
    }

    /// Ends what is run by hand.
    pub(crate) fn clear(self) {
        self.hand.remove();
        self.image.link_down();
        self.plain.link_down();
    }
}

/// Where the counter listens.
pub(crate) const COUNTER_PORT: u16 = 8000;

/// Makes a sandbox in which the counter and the bare server listen.
#[track_caller]
pub(crate) fn with_counter(lab: &Lab, api: &Api, bare: &Path, name: &str, memory_mib: u32) {
    create(api, name, memory_mib);
    lab.ok(&["files", "put", "./examples/counter", &format!("{name}:/work")]);
    lab.ok(&[
        "exec",
        name,
        "--background",
        "--",
        "python3",
        "/work/counter/server.py",
        &COUNTER_PORT.to_string(),
    ]);
    with_bare(lab, bare, name);
    let address = address(api, name);
    until("the counter listens", || TcpStream::connect((address.as_str(), COUNTER_PORT)).ok());
    Target::link(&api.link(name)).count();
}

#[track_caller]
fn create(api: &Api, name: &str, memory_mib: u32) {
    api.call("POST", "/v1/sandboxes", &new_sandbox(name, memory_mib));
}

/// A request for a sandbox that sleeps only when told to.
pub(crate) fn new_sandbox(name: &str, memory_mib: u32) -> serde_json::Value {
    json!({ "name": name, "memory_mib": memory_mib, "sleep_after_seconds": null })
}

#[track_caller]
fn with_bare(lab: &Lab, bare: &Path, name: &str) {
    lab.ok(&["files", "put", &bare.to_string_lossy(), &format!("{name}:/work/bare")]);
    lab.ok(&["exec", name, "--", "chmod", "+x", "/work/bare"]);
    lab.ok(&["exec", name, "--background", "--", "/work/bare"]);
    let address = address(&Api::of(lab), name);
    until("the bare server listens", || TcpStream::connect((address.as_str(), BARE_PORT)).ok());
    Bare::open(&address).order(b't');
}

#[track_caller]
pub(crate) fn address(api: &Api, name: &str) -> String {
    api.get(&format!("/v1/sandboxes/{name}"))["address"].as_str().expect("an address").to_owned()
}

/// Takes images of running sandboxes while no daemon is there, and deletes them then, so that their addresses are free.
#[track_caller]
fn images<const N: usize>(lab: &mut Lab, api: &Api, names: [&str; N]) -> [Image; N] {
    let found = names.map(|name| {
        let view = api.get(&format!("/v1/sandboxes/{name}"));
        let folder = lab.data().join("sandboxes").join(view["id"].as_str().expect("an id"));
        (folder, address(api, name), lab.scratch().join(format!("image-{name}")))
    });
    lab.kill_daemon();
    let images = found.map(|(origin, address, folder)| Image::take(&origin, &address, folder));
    lab.start();
    for (name, image) in names.iter().zip(&images) {
        api.delete(name);
        image.link_up();
    }
    images
}
