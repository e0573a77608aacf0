//! See `exs::fuzz::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| exs::fuzz::run(data));
