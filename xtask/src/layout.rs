//! Where things are: in the repository, on this machine, in the data folder.

use std::env;
use std::path::{Path, PathBuf};

/// Where the daemon listens unless told otherwise.
pub(crate) const LISTEN_DEFAULT: &str = "127.0.0.1:8420";

/// The data folder unless `DORMOUSE_DATA` names another.
const DATA_DEFAULT: &str = "/var/lib/dormouse";

/// Where `up` puts the programs.
pub(crate) const PROGRAMS: &str = "/usr/local/lib/dormouse";

/// What makes `dormouse` a command for everybody on this machine.
pub(crate) const COMMAND_LINK: &str = "/usr/local/bin/dormouse";

/// File name of the program.
pub(crate) const PROGRAM: &str = "dormouse";

/// File name of the guest agent, which the image builder looks for beside the program.
pub(crate) const GUEST_AGENT: &str = "dormouse-guest";

/// Root of the repository: where cargo runs this program from; where it was built, when cargo does not run it.
pub(crate) fn root() -> PathBuf {
    // Asked first, for cargo does not build it anew where the repository was moved.
    env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
        .parent()
        .map_or_else(|| PathBuf::from("."), Path::to_owned)
}

/// Where cargo builds.
pub(crate) fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// The data folder. Absolute: the daemon's working folder is another one.
pub(crate) fn data() -> PathBuf {
    let data =
        env::var_os("DORMOUSE_DATA").map_or_else(|| PathBuf::from(DATA_DEFAULT), PathBuf::from);
    std::path::absolute(&data).unwrap_or(data)
}

/// Where tests put what guests' machines open: below the target folder, unless their accounts cannot get there (Debian makes
/// homes so that nobody else can).
pub(crate) fn test_root() -> PathBuf {
    let below_target = target().join("e2e");
    let open_to_all = |dir: &Path| {
        let mode = std::fs::metadata(dir)
            .map(|metadata| std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()));
        // What does not exist yet will be made open.
        mode.map_or(true, |mode| mode & 0o001 != 0)
    };
    if below_target.ancestors().all(open_to_all) {
        below_target
    } else {
        PathBuf::from("/var/tmp/dormouse-e2e")
    }
}

/// The S3 server of the tests: made once, kept between runs.
pub(crate) fn s3_server() -> PathBuf {
    target().join("s3-server")
}

/// The Python client of the tests of the Model Context Protocol: made once, kept between runs.
pub(crate) fn mcp_client() -> PathBuf {
    target().join("mcp-client")
}

/// Node.js for clients of others that the tests run: made once, kept between runs.
pub(crate) fn node() -> PathBuf {
    target().join("node")
}

/// Clients of others, of npm, that the tests run: made once, kept between runs. `node` in it is their Node.js.
pub(crate) fn clients() -> PathBuf {
    target().join("clients")
}

/// Schemathesis, which tries the interface in the tests: made once, kept between runs.
pub(crate) fn schemathesis() -> PathBuf {
    target().join("schemathesis")
}

/// Images for tests: made once, kept between runs.
pub(crate) fn test_images() -> PathBuf {
    env::var_os("DORMOUSE_IMAGES").map_or_else(|| test_root().join("images"), PathBuf::from)
}

/// Templates for tests: made once, kept between runs.
pub(crate) fn test_templates() -> PathBuf {
    env::var_os("DORMOUSE_TEMPLATES").map_or_else(|| test_root().join("templates"), PathBuf::from)
}
