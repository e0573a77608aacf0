//! See `anywarp_engine::net::fuzz_handover`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_engine::net::fuzz_handover(data));
