//! See `harness/balloon.rs`.
#![no_main]

#[path = "../harness/balloon.rs"]
mod balloon;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| balloon::run(data));
