//! See `harness/state.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[path = "../harness/state.rs"]
mod state;

libfuzzer_sys::fuzz_target!(|data: &[u8]| state::run(data));
