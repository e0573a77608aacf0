//! See `anywarp_engine::net::fuzz_trunk`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_engine::net::fuzz_trunk(data));
