//! See `harness/journal.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[path = "../harness/journal.rs"]
mod journal;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
