//! See the crate description.
#![forbid(unsafe_code)]

pub mod images;
pub mod guest;
