//! The daemon of one machine: it runs sandboxes, and decides when they sleep.
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`daemon`] | all sandboxes of the host, and its start |
//! | `verbs` | the verbs of [`api::host::Host`], one after the other |
//! | `sandbox` | one sandbox: its task, its orders, its view |
//! | `exec`, `execs_kept`, `terminals` | commands as the interface speaks of them; those of sleepers; terminals and their screens |
//! | `recovery` | what a starting daemon makes of what it finds |
//! | `forks`, `fork_sets` | copies of one moment, and that they are there all or none |
//! | [`manifest`], `record` | what is durable about a sandbox, and the one place that changes it |
//! | [`template`], `pool` | guests that were booted once, for all to be copied from; copies that wait to be claimed |
//! | [`images`] | kernel, initial RAM disk and root file system |
//! | [`guest`] | the link to the agent in a guest |
//! | [`network`], `tap` | addresses, rules, name server; a sandbox's port, and who answers there while it sleeps |
//! | [`timeline`], [`sandbox_log`] | what happened to a sandbox; what the daemon logged about it |
//! | [`passage`] | whether QEMU's account can get to its files |
//! | `checkpoints`, `takeover` | awake sandboxes kept in an object store, and taken up from there |
//! | `usage` | what a sandbox has used, for bills |
//! | `loopback` | connections to ports that only the guest itself reaches |
//! | [`settings`], [`clock`], `slots`, `phases`, [`fault`] | small things that several of these need |
#![forbid(unsafe_code)]

pub mod budget;
mod checkpoints;
pub mod clock;
pub mod daemon;
mod drive_trouble;
mod drives;
mod exec;
mod exec_names;
mod execs_kept;
mod ext4;
pub mod fault;
mod fork_sets;
mod forks;
mod ground;
pub mod guest;
pub mod images;
mod loopback;
pub mod manifest;
pub mod network;
pub mod passage;
mod phases;
mod pool;
mod promises;
mod record;
mod recovery;
mod sandbox;
pub mod sandbox_log;
mod services;
pub mod settings;
mod slots;
mod snapshots;
mod takeover;
mod tap;
pub mod template;
mod terminals;
pub mod timeline;
mod turns;
mod usage;
mod verbs;
mod volumes;

pub use checkpoints::StoreUrlError;
pub use daemon::{Daemon, StartError};
pub use settings::Settings;
