//! See `harness/qmp.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[path = "../harness/qmp.rs"]
mod qmp;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qmp::run(data));
