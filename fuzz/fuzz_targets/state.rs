//! See `harness/state.rs`.
#![no_main]

#[path = "../harness/state.rs"]
mod state;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| state::run(data));
