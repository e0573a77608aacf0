//! See `anywarp_sim::fuzz::stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_sim::fuzz::stream(data));
