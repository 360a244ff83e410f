//! See `harness/certificate.rs`.
#![no_main]

#[path = "../harness/certificate.rs"]
mod certificate;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| certificate::run(data));
