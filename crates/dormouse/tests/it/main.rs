//! The command line against a real control plane, with a host that has no machines: standard output, standard error and
//! exit code together.
#![expect(clippy::needless_raw_string_hashes, reason = "expect-test writes them so")]

mod exec;
#[path = "../../../control/tests/it/fake.rs"]
#[expect(dead_code, reason = "the control plane's own tests use all of it")]
mod fake;
#[path = "../../../control/tests/it/fake_terminals.rs"]
mod fake_terminals;
mod files;
mod sandboxes;
mod world;
