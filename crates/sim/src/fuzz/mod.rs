//! The functions that a fuzzer calls. Each accepts any bytes, and panics if the code under test violates an
//! invariant.
//!
//! Each of the functions has a program of one line in `fuzz/fuzz_targets`. `tests/corpus.rs` runs the inputs that the fuzzer found,
//! and `tests/random_input.rs` runs the same functions on random bytes. The fuzzer writes a failing input to a file in
//! `fuzz/artifacts`. To replay it, copy it to `fuzz/corpus/TARGET` and run `cargo test -p anywarp-sim --test corpus`.
//!
//! | target | input |
//! |---|---|
//! | [`startup()`] | the bytes of a peer before there is a stream |
//! | [`stream()`] | the stream of a connection with outstanding work of every kind |
//! | [`segments()`] | well-formed FPDUs with headers, numbers and lengths of the fuzzer's choice |
//! | [`datagrams()`] | datagrams to queue pairs of each kind, raw and with correct checksums |
//! | [`verbs()`] | calls of an application on two connected ends |

mod datagrams;
mod input;
mod segments;
mod startup;
mod stream;
mod target;
mod verbs;

pub use datagrams::datagrams;
pub use segments::{converse, segments};
pub use startup::startup;
pub use stream::stream;
pub use verbs::verbs;

/// A function that takes any bytes.
pub type Target = fn(&[u8]);

/// All targets by the name of their corpus.
pub const TARGETS: [(&str, Target); 5] = [
    ("startup", startup),
    ("stream", stream),
    ("segments", segments),
    ("datagrams", datagrams),
    ("verbs", verbs),
];
