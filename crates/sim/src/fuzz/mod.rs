//! The functions that a fuzzer calls: each takes any bytes and panics if the code under test breaks a promise.
//!
//! The fuzzer's own programs (`fuzz/fuzz_targets`) are one line each; `tests/corpus.rs` runs the inputs that they
//! found, and `tests/fuzzish.rs` runs the same functions on random bytes. A failing input is a file, and `cargo test -p
//! anywarp-sim --test corpus` with that file in `fuzz/corpus/TARGET` replays it.
//!
//! | target | its bytes are |
//! |---|---|
//! | [`startup()`] | the bytes of a peer before there is a stream |
//! | [`stream()`] | the stream of a connection with work of every kind under way |
//! | [`segments()`] | well-formed FPDUs with headers, numbers and lengths of the fuzzer's choice |
//! | [`datagrams()`] | datagrams to a UD and a UC queue pair, raw and with good checksums |
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
