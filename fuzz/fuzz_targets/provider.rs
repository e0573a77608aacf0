//! See `anywarp_fi::fuzz::messages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| anywarp_fi::fuzz::messages(data));
