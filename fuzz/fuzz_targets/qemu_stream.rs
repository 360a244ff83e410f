//! See `harness/qemu_stream.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;
#[allow(dead_code, reason = "only tests make seeds")]
#[path = "../harness/qemu_stream.rs"]
mod qemu_stream;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qemu_stream::run(data));
