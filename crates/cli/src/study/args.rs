//! The options of `anywarp study`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

/// Where a study keeps what it has measured when nothing else is asked for.
const REPORT: &str = "anywarp-study";

/// Arguments of `anywarp study`.
#[derive(Debug, Args)]
pub(crate) struct Study {
    /// What to do
    #[command(subcommand)]
    pub(crate) task: Task,

    /// Folder with the data files of the figures
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, hide = true, global = true)]
    pub(crate) studies: Option<PathBuf>,
}

/// What `anywarp study` does.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// List the figures: the question, and how long the measurement takes on this machine
    List(List),
    /// Measure figures, and write a report
    ///
    /// Everything that is measured is kept in the folder of the report at once. A run that was interrupted goes on from there when
    /// it is started again with the same options, and figures that are added later use what is there.
    ///
    /// The exit status is 0 if everything was measured, whatever the findings are; 1 if something could not be measured; 2 if there
    /// is no such figure or the folder of the report cannot be written; 130 after an interrupt.
    Run(Run),
    /// Advice for programs on this machine, from what was measured
    Hints(Hints),
}

/// Arguments of `anywarp study list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only these: pb:3a, pb:3 for all of its parts, pb for the paper
    #[arg(value_name = "FIGURE")]
    pub(crate) figures: Vec<String>,
}

/// Arguments of `anywarp study run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Figures: pb:3a, pb:3 for all of its parts, pb for the paper, or all
    #[arg(required = true, value_name = "FIGURE")]
    pub(crate) figures: Vec<String>,

    /// Fewer points, and a fraction of a second for each: all figures in less than 20 minutes
    #[arg(long, conflicts_with = "smoke")]
    pub(crate) quick: bool,

    /// Two points of each line, once and shortly: shows that everything works, not how fast it is
    #[arg(long)]
    pub(crate) smoke: bool,

    /// Folder of the report: index.html, a CSV file for each figure, study.json, and what was measured so far
    #[arg(long, value_name = "DIR", default_value = REPORT, value_hint = ValueHint::DirPath)]
    pub(crate) report: PathBuf,

    /// Measure this device of the system's libibverbs in place of anywarp's
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,

    /// Machine on which `anywarp blast --server --forever` runs; without it both ends are on this one
    #[arg(long, value_name = "HOST", requires = "port")]
    pub(crate) host: Option<String>,

    /// Port of that server
    #[arg(long, requires = "host")]
    pub(crate) port: Option<u16>,

    /// Forget what the folder of the report has, and begin anew
    #[arg(long)]
    pub(crate) fresh: bool,

    /// Let what is measured go before the other programs of the machine (nice -20); needs privileges
    #[arg(long)]
    pub(crate) first: bool,

    /// Print no progress
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// Arguments of `anywarp study hints`.
#[derive(Debug, Args)]
pub(crate) struct Hints {
    /// Folder of the report of an earlier `anywarp study run`
    #[arg(long, value_name = "DIR", default_value = REPORT, value_hint = ValueHint::DirPath)]
    pub(crate) report: PathBuf,
}
