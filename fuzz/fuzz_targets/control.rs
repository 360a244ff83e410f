//! See `harness/control.rs`.
#![no_main]

#[path = "../harness/control.rs"]
mod control;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| control::run(data));
