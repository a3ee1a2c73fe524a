//! The crate against a real QEMU and the real kernel. See [`support`] for what these tests need; they fail where it is missing.

mod figures;
mod machine;
mod network;
mod support;
