//! See `anywarp_sockets::fuzz::run`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_sockets::fuzz::run(data));
