//! See `harness/inspect.rs`.
#![no_main]

#[path = "../harness/inspect.rs"]
mod inspect;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| inspect::run(data));
