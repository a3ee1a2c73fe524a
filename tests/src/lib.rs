//! What the end-to-end tests share: a daemon of their own in a network namespace of their own.
#![forbid(unsafe_code)]
