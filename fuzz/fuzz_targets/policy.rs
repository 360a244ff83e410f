//! See `harness/policy.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[path = "../harness/policy.rs"]
mod policy;

libfuzzer_sys::fuzz_target!(|data: &[u8]| policy::run(data));
