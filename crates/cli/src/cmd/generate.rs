//! `anywarp generate`: writes man pages and completions to the folders where a package installs them.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::{Command, CommandFactory};
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
    let mut command = visible(&Cli::command());
    for (shell, name) in COMPLETIONS {
        let mut script = Vec::new();
        generate(shell, &mut command, "anywarp", &mut script);
        write(&args.dir.join(name), &script)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a command without its hidden subcommands and options, which completions would offer like all others.
fn visible(command: &Command) -> Command {
    let options = command
        .get_arguments()
        .filter(|option| !option.is_hide_set());
    let subcommands = command.get_subcommands().filter(|c| !c.is_hide_set());
    Command::new(command.get_name().to_owned())
        .about(command.get_about().cloned().unwrap_or_default())
        .version(env!("CARGO_PKG_VERSION"))
        .args(options.cloned())
        .subcommands(subcommands.map(visible))
}

fn write(path: &Path, content: &[u8]) -> Result<(), Failure> {
    let failed = |e| Failure::Write(path.to_path_buf(), e);
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(failed)?;
    }
    fs::write(path, content).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_do_not_offer_what_is_hidden() {
        for (shell, name) in COMPLETIONS {
            let mut script = Vec::new();
            generate(shell, &mut visible(&Cli::command()), "anywarp", &mut script);
            let script = String::from_utf8(script).unwrap();
            for word in ["doctor", "record-mode", "version", "vary"] {
                assert!(script.contains(word), "{name} lacks {word}");
            }
            for word in ["bench-raw", "generate", "with-parent", "studies"] {
                let offers = script
                    .lines()
                    .any(|line| line.contains(word) && !line.trim_start().starts_with('#'));
                assert!(!offers, "{name} offers {word}");
            }
        }
    }
}
