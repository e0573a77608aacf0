//! Runs the programs that judge the libraries, and measures: `cargo lab TASK`. What builds and checks is `cargo xtask`.

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
mod pyverbs;
mod sanitize;
mod sockets;
mod study;
mod tutorial;
mod valgrind;

use clap::Parser;
use std::process::ExitCode;
use xtask::finish;

/// Runs programs on the libraries of target/dist (`cargo xtask dist`), and measures them.
#[derive(Debug, Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab")]
enum Task {
    /// The C programs of tests/c.
    CTests {
        /// One program, then parts of test names; without: all of all programs.
        arguments: Vec<String>,
    },
    /// Programs of the distribution, as tests/programs expects them.
    Programs(programs::Options),
    /// Programs of other releases of Debian, in trees that are made for it, as tests/programs and tests/distros expect them.
    Distros(distros::Options),
    /// Software of other people from PyPI, as tests/adopters uses it.
    Adopters {
        /// Only those with this in their name.
        #[arg(long, value_name = "PART")]
        filter: Option<String>,
    },
    /// Programs and tests/interop/peer.c against the kernel's siw in a QEMU guest, as tests/interop expects them.
    Interop(interop::Options),
    /// tests/mpi under the distribution's MPIs.
    Mpi,
    /// Instructions of posting and of receiving, against tests/c/count.expect.
    Count {
        /// Write the figures to tests/c/count.expect.
        #[arg(long)]
        write: bool,
    },
    /// rdma-core's own tests, as tests/pyverbs expects them.
    Pyverbs {
        /// Only modules with this in their name.
        #[arg(long, value_name = "PART")]
        filter: Option<String>,
    },
    /// Unit tests and C programs under AddressSanitizer or ThreadSanitizer; needs a nightly Rust.
    Sanitize {
        kind: sanitize::Kind,
        /// All of the programs that are cut short otherwise.
        #[arg(long)]
        long: bool,
        /// `unit`, or one program and parts of test names; without: everything.
        arguments: Vec<String>,
    },
    /// C programs on the built libraries under memcheck.
    Valgrind {
        /// One program, then parts of test names; without: those that are chosen for it.
        arguments: Vec<String>,
    },
    /// `anywarp ping` and `blast` in the modes of the thesis on datagram-iWARP, with loss and delay; writes docs/results
    /// unless it is short.
    Experiments(experiments::Options),
    /// The kernel's TCP as `experiments` needs it: `take PORT`, or `give PORT SECONDS`.
    #[command(hide = true)]
    ExperimentsTcp { arguments: Vec<String> },
    /// What `anywarp bench` measures, and an MPI program besides, against the bars.
    Bench(bench::Options),
    /// anywarp, siw and rxe side by side in a QEMU guest.
    BenchGuest {
        /// Runs of each row.
        #[arg(long, value_name = "N")]
        repeat: Option<usize>,
        /// Only rows or programs with this in their name.
        #[arg(long, value_name = "PART")]
        filter: Option<String>,
    },
    /// `anywarp ping` and `blast` with every option, shortly; interrupts and wrong ports.
    Perf,
    /// Programs with their traffic captured, as tshark and the dissector of the distribution decode it.
    Capture,
    /// Programs of the distribution with the library for sockets preloaded at both ends, the server, the client.
    Sockets,
    /// Extended sockets beside verbs, rsockets and plain TCP, against their bars.
    Exs(exs::Options),
    /// `anywarp study` with each of its runners, shortly: what it writes, goes on with, and refuses.
    Study,
    /// The commands of docs/tutorial.md.
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
        Task::Adopters { filter } => adopters::run(filter.as_deref()),
        Task::Interop(options) => interop::run(options),
        Task::Mpi => mpi::run(),
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
        Task::Sockets => sockets::run(),
        Task::Exs(options) => exs::run(options),
        Task::Study => study::run(),
        Task::Tutorial => tutorial::run(),
    }
}

fn as_str(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}
