//! The life of a sandbox, tested from outside as a host drives it.
//!
//! - `table`: every phase times everything that can happen, as text.
//! - `histories`: random histories against a world that counts machines and memories.
//! - `month`: a month in a few seconds.
//! - `boxes`, `box_days`: the B-rules, and many days of many boxes.
//! - `quiet`, `sleeping`, `holds`, `failing`: the S-rules, one test or more each, named after them.

mod box_days;
mod boxes;
mod failing;
mod histories;
mod holds;
mod month;
mod obedient;
mod quiet;
mod sleeping;
mod spending;
mod table;
mod world;
