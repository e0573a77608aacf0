//! See `anywarp_sim::fuzz::startup`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_sim::fuzz::startup(data));
