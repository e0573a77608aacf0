//! Runs tests and measurements of the built libraries: `cargo lab TASK`. Build and check tasks are in `cargo xtask`.

mod adopters;
mod bench;
mod beside;
mod c_tests;
mod capture;
mod count;
mod distros;
mod experiments;
mod exs;
mod interop;
mod mpi;
mod perf;
mod process;
mod programs;
mod python;
mod pyverbs;
mod sanitize;
mod sockets;
mod study;
mod tutorial;
mod valgrind;

use clap::Parser;
use std::process::ExitCode;
use xtask::finish;

/// Runs programs with the libraries of target/dist (`cargo xtask dist`), and measures them.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab")]
enum Task {
    /// Run the C programs of tests/c.
    CTests {
        /// A program, followed by parts of test names; by default all tests of all programs.
        arguments: Vec<String>,
    },
    /// Run programs of the distribution, with the expectations in tests/programs.
    Programs(programs::Options),
    /// Run programs of other releases of Debian, in directory trees, with the expectations in tests/programs and tests/distros.
    Distros(distros::Options),
    /// Run software of other projects from PyPI, Debian and crates.io, with the programs in tests/adopters.
    Adopters(adopters::Options),
    /// Run programs and tests/interop/peer.c against the kernel's siw in a QEMU guest, with the expectations in tests/interop.
    Interop(interop::Options),
    /// Run the programs of tests/mpi and kernels of studies with MPIs of the distribution and of PyPI, or compare transports.
    Mpi(mpi::Options),
    /// Count the instructions of posting and receiving, and compare them with tests/c/count.expect.
    Count {
        /// Write the counts to tests/c/count.expect.
        #[arg(long)]
        write: bool,
    },
    /// Run rdma-core's own tests, with the expectations in tests/pyverbs.
    Pyverbs {
        /// Only modules with this in their name.
        #[arg(long, value_name = "PART")]
        filter: Option<String>,
    },
    /// Run unit tests and C programs with AddressSanitizer or ThreadSanitizer; needs a nightly Rust.
    Sanitize {
        kind: sanitize::Kind,
        /// Run all tests of programs for which only some run by default.
        #[arg(long)]
        long: bool,
        /// `unit`, or a program followed by parts of test names; by default everything.
        arguments: Vec<String>,
    },
    /// Run C programs with the built libraries under valgrind's memcheck.
    Valgrind {
        /// A program, followed by parts of test names; by default a selection of programs.
        arguments: Vec<String>,
    },
    /// Measure `anywarp blast` over datagrams with loss and delay: the modes of Write-Record, and reliable datagrams; write
    /// docs/results unless --short is given.
    Experiments(experiments::Options),
    /// Run one end of the kernel's TCP for `experiments`: `take PORT`, or `give PORT SECONDS`.
    #[command(hide = true)]
    ExperimentsTcp { arguments: Vec<String> },
    /// Run `anywarp bench` and an MPI program, and check the bounds.
    Bench(bench::Options),
    /// Compare anywarp, siw and rxe in a QEMU guest.
    BenchGuest {
        /// Number of runs of each row.
        #[arg(long, value_name = "N")]
        repeat: Option<usize>,
        /// Only rows or programs with this in their name.
        #[arg(long, value_name = "PART")]
        filter: Option<String>,
    },
    /// Run `anywarp ping` and `blast` briefly with every kind of queue pair, operation and completion mode; test interrupts and
    /// wrong ports.
    Perf,
    /// Capture the traffic of programs, and decode it with tshark and anywarp's dissector.
    Capture,
    /// Run the tests of the preloaded library for sockets: programs of tests/c, and programs of the distribution with the library
    /// at both ends, only at the server, and only at the client; or measure upgraded streams against kernel TCP.
    Sockets(sockets::Options),
    /// Compare extended sockets with verbs, rsockets and plain TCP, and check the bounds.
    Exs(exs::Options),
    /// Test `anywarp study` briefly with each of its runners.
    Study {
        /// Also check how Chromium shows the drawings of the report; needs the package chromium.
        #[arg(long)]
        browser: bool,
        /// Instead run `anywarp study` in a QEMU guest, on anywarp, siw and rxe side by side.
        #[arg(long, conflicts_with = "browser")]
        guest: bool,
    },
    /// Run the commands of docs/tutorial.md.
    Tutorial,
}

fn main() -> ExitCode {
    finish(run(&Task::parse()))
}

fn run(task: &Task) -> xtask::Result {
    match task {
        Task::CTests { arguments } => c_tests::run(&as_str(arguments)),
        Task::Programs(options) => programs::run(options),
        Task::Distros(options) => distros::run(options),
        Task::Adopters(options) => adopters::run(options),
        Task::Interop(options) => interop::run(options),
        Task::Mpi(options) => mpi::run(options),
        Task::Count { write } => count::run(*write),
        Task::Pyverbs { filter } => pyverbs::run(filter.as_deref()),
        Task::Sanitize {
            kind,
            long,
            arguments,
        } => sanitize::run(*kind, *long, &as_str(arguments)),
        Task::Valgrind { arguments } => valgrind::run(&as_str(arguments)),
        Task::Experiments(options) => experiments::run(options),
        Task::ExperimentsTcp { arguments } => experiments::tcp(&as_str(arguments)),
        Task::Bench(options) => bench::run(options),
        Task::BenchGuest { repeat, filter } => interop::bench::run(*repeat, filter.as_deref()),
        Task::Perf => perf::run(),
        Task::Capture => capture::run(),
        Task::Sockets(options) => sockets::run(options),
        Task::Exs(options) => exs::run(options),
        Task::Study { guest: true, .. } => interop::study::run(),
        Task::Study { browser, .. } => study::run(*browser),
        Task::Tutorial => tutorial::run(),
    }
}

fn as_str(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}
