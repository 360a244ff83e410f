#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmferry_fuzz_targets::definition::run(data));
