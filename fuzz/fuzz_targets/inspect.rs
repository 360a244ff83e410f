//! See `harness/inspect.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[path = "../harness/inspect.rs"]
mod inspect;

libfuzzer_sys::fuzz_target!(|data: &[u8]| inspect::run(data));
