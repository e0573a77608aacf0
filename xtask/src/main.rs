//! Build and check tasks: `cargo xtask TASK`.

mod bench;
mod c_tests;
mod capture;
mod check;
mod conformance;
mod count;
mod dist;
mod expect;
mod experiments;
mod floors;
mod interop;
mod link;
mod load;
mod matrix;
mod mpi;
mod package;
mod perf;
mod programs;
mod pyverbs;
mod sanitize;
mod sh;
mod symbols;
mod table;
mod valgrind;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  check    formatting, lints and documentation, warnings as errors
  floors [--check]
           check that files name only modules of lower floors, as xtask/floors.toml lists them, and none in a circle;
           write the table of files in ARCHITECTURE.md, or say whether it is up to date
  dist     build the libraries and the tool into target/dist
  install --prefix DIR
           copy what dist built below a folder
  deb      make two Debian packages of it: one with the tool, one that makes it every program's device
  matrix   compare the built libraries' symbols with the distribution's; write crates/abi/MATRIX.md;
           load them in every way that programs do
  c-tests [PROGRAM [TEST…]]
           our own C programs in tests/c on the built libraries
  programs [--netns] [--nightly] [--filter PART] [--log LEVEL] [--list]
           programs of the distribution, as tests/programs expects them; on loopback, or between two
           network namespaces
  interop [--filter PART] [--log LEVEL] [--list] [--keep FOLDER]
           programs and our own tests/interop/peer.c against the kernel's siw in a QEMU guest, as tests/interop
           expects them
  mpi      tests/mpi under the distribution's MPIs
  count [--write]
           instructions of posting and of receiving, against tests/c/count.expect
  pyverbs [--filter PART]
           rdma-core's own tests, as tests/pyverbs expects them
  sanitize address|thread [--long] [unit | PROGRAM [TEST…]]
           unit tests and our C programs under AddressSanitizer or ThreadSanitizer; needs a nightly Rust
  valgrind [PROGRAM [TEST…]]
           our own C programs on the built libraries under memcheck
  experiments [--short] [--only latency|bandwidth|reasons|loss|reliable]
           anywarp ping and blast in the modes of the thesis on datagram-iWARP, with loss and delay; the long form
           writes docs/results
  bench [--netns] [--only ROW…] [--repeat N] [--short] [--json FILE] [--strict] …
           what `anywarp bench` measures, all of it, and what tests/bench adds, against the bars; on loopback, or
           between two network namespaces (MTU 1500, then 9000); --write: the results go to docs/results
  bench --guest [--repeat N] [--filter PART]
           anywarp, siw and rxe side by side in a QEMU guest
  perf     anywarp ping and blast in every way, shortly; interrupts and wrong ports
  capture  programs with their traffic captured, as tshark and our dissector understand it
  table [--check]
           write the table of programs in README.md, or say whether it is up to date
  conformance [--check]
           check that each rule of the RFCs has code and test; write conformance/README.md, or say
           whether it is up to date
";

/// What every task returns; the error is printed as it is.
type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match *arguments {
        ["check"] => check::run(),
        ["floors"] => floors::run(false),
        ["floors", "--check"] => floors::run(true),
        ["dist"] => dist::run(),
        ["install", "--prefix", prefix] => package::install(prefix),
        ["deb"] => package::deb(),
        ["matrix"] => matrix::run(),
        ["c-tests", ref rest @ ..] => c_tests::run(rest),
        ["programs", ref rest @ ..] => programs::run(rest),
        ["interop", ref rest @ ..] => interop::run(rest),
        ["mpi"] => mpi::run(),
        ["count", ref rest @ ..] => count::run(rest),
        ["pyverbs", ref rest @ ..] => pyverbs::run(rest),
        ["sanitize", kind, ref rest @ ..] => sanitize::run(kind, rest),
        ["valgrind", ref rest @ ..] => valgrind::run(rest),
        ["experiments", ref rest @ ..] => experiments::run(rest),
        ["experiments-tcp", ref rest @ ..] => experiments::tcp(rest),
        ["bench", ref rest @ ..] => bench::run(rest),
        ["perf"] => perf::run(),
        ["capture"] => capture::run(),
        ["table"] => table::run(false),
        ["table", "--check"] => table::run(true),
        ["conformance"] => conformance::run(false),
        ["conformance", "--check"] => conformance::run(true),
        _ => {
            eprint!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}
