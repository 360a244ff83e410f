//! See `harness/journal.rs`.
#![no_main]

#[path = "../harness/journal.rs"]
mod journal;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
