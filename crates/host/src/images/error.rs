//! Why an image could not be built or opened; every text says what would be right.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why an image could not be built or opened.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A program of the host is missing.
    #[error("`{program}` is not installed: `apt-get install {package}` brings it")]
    MissingProgram {
        /// Its name.
        program: &'static str,
        /// The Debian package it is in.
        package: &'static str,
    },

    /// A file of the host is missing.
    #[error("{} is missing: `apt-get install {package}` brings it", path.display())]
    MissingFile {
        /// Where it should be.
        path: PathBuf,
        /// The Debian package it is in.
        package: &'static str,
    },

    /// Owners and modes of the guest's files can only be set by root.
    #[error("an image can only be built as root: its files belong to the guest's users")]
    NotRoot,

    /// Too little room for what is about to be built.
    #[error(
        "{} has {} MiB free, building needs {} MiB: free some, or choose another data folder",
        dir.display(), available / 1_048_576, needed / 1_048_576
    )]
    NoSpace {
        /// The folder whose file system is meant.
        dir: PathBuf,
        /// Bytes that are free to this process.
        available: u64,
        /// Bytes that are needed.
        needed: u64,
    },

    /// The guest agent is not where it was looked for.
    #[error("no guest agent at {}: `cargo xtask build` makes it, `--guest PATH` names another", path.display())]
    NoGuestAgent {
        /// Where it was looked for.
        path: PathBuf,
    },

    /// There is no such version of the guest protocol.
    #[error("`--protocol-max {wanted}`: the guest protocol has versions from {oldest} to {newest}")]
    BadProtocol {
        /// What was asked for.
        wanted: u16,
        /// The oldest version there is.
        oldest: u16,
        /// The newest.
        newest: u16,
    },
    /// The guest agent would not start in the guest.
    #[error("{} cannot be the guest agent: {why}", path.display())]
    BadGuestAgent {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },

    /// A package name that apt could take for something else.
    #[error(
        "`{name}` is not the name of a Debian package: letters, digits, `+`, `-` and `.`, as in `python3`"
    )]
    BadPackage {
        /// As given.
        name: String,
    },

    /// A mirror address that apt could take for something else.
    #[error(
        "`{url}` is not the address of a Debian mirror: it looks like http://deb.debian.org/debian"
    )]
    BadMirror {
        /// As given.
        url: String,
    },

    /// A program of the host ended badly.
    #[error("{doing}: {status}\n{tail}")]
    Command {
        /// What it was doing.
        doing: String,
        /// How it ended.
        status: String,
        /// The last lines it said.
        tail: String,
    },

    /// A program of the host took too long and was ended.
    #[error("{doing}: no end after {} s\n{tail}", limit.as_secs())]
    TimedOut {
        /// What it was doing.
        doing: String,
        /// How long it was given.
        limit: Duration,
        /// The last lines it said.
        tail: String,
    },

    /// What a program of the host gave is not what was asked for.
    #[error("{doing}: {what}")]
    Unexpected {
        /// What was being done.
        doing: &'static str,
        /// What was found instead.
        what: String,
    },

    /// The kernel has neither built in nor as a module what the guest needs.
    #[error("kernel {kernel} has no `{module}`, neither built in nor as a module")]
    NoModule {
        /// Release of the kernel.
        kernel: String,
        /// Name of the module.
        module: String,
    },

    /// A file operation failed.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },

    /// A manifest that is none.
    #[error("read manifest {}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },

    /// Built by a newer version.
    #[error("image manifest {} has format {found}, this version reads up to {newest}", path.display())]
    TooNew {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The newest format known here.
        newest: u32,
    },

    /// The folder is not what its manifest or name says.
    #[error("image {} is damaged: {what}", dir.display())]
    Damaged {
        /// The image's folder.
        dir: PathBuf,
        /// What does not fit.
        what: String,
    },

    /// A name that is no digest.
    #[error(
        "`{text}` is not an image: its name is `default`, or the 64 hexadecimal digits that `dormouse images build` printed"
    )]
    BadId {
        /// As given, shortened.
        text: String,
    },

    /// No image was built yet.
    #[error("no default image in {}: `dormouse images build` makes one", images.display())]
    NoDefault {
        /// The folder of the images.
        images: PathBuf,
    },
}
