//! `anywarp generate`: writes man pages and completions to the folders where a package installs them.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use super::Failure;
use crate::cli::{Cli, Generate};
use crate::pages;

/// The folders in which the shells look for completions, below PREFIX/share.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/anywarp"),
    (Shell::Zsh, "zsh/site-functions/_anywarp"),
    (Shell::Fish, "fish/vendor_completions.d/anywarp.fish"),
];

/// Writes all files below the given folder.
pub(crate) fn run(args: &Generate) -> Result<ExitCode, Failure> {
    let pages = pages::all(&args.tree).map_err(|e| Failure::Write(args.tree.clone(), e))?;
    for (name, page) in pages {
        write(&args.dir.join("man").join(name), page.as_bytes())?;
    }
    for (shell, name) in COMPLETIONS {
        let mut script = Vec::new();
        generate(shell, &mut Cli::command(), "anywarp", &mut script);
        write(&args.dir.join(name), &script)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let failed = |e| Failure::Write(path.to_path_buf(), e);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(failed)?;
    }
    fs::write(path, content).map_err(failed)
}
