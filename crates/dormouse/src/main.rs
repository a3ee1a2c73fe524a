//! The dormouse program.
#![forbid(unsafe_code)]
fn main() {}
