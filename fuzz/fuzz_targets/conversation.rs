//! See `harness/conversation/mod.rs`.
#![no_main]

#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/control.rs"]
mod control;
#[path = "../harness/conversation/mod.rs"]
mod conversation;
#[allow(dead_code, reason = "the target uses a part of it")]
#[path = "../harness/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|data: &[u8]| conversation::run(data));
