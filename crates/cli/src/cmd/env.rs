//! `anywarp env`: prints what `anywarp run` would set.

use std::fmt::Write;
use std::process::ExitCode;

use super::Failure;
use crate::cli::Env;
use crate::json;
use crate::library::Library;

/// Prints the variables in the form asked for.
pub(crate) fn run(args: &Env) -> Result<ExitCode, Failure> {
    let library = Library::find().map_err(Failure::Library)?;
    // The shell and the image add what they have themselves, so nothing is inherited here.
    let variables: Vec<(&str, String)> = library
        .variables(!args.no_path_shim, |_| None)
        .into_iter()
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    let text = if args.json {
        json::object(
            variables
                .iter()
                .map(|(name, value)| (name, json::string(value))),
        ) + "\n"
    } else if args.docker {
        docker(&variables)
    } else {
        shell(&variables)
    };
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

/// Lines for `eval`; what the shell has set stays behind ours.
fn shell(variables: &[(&str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in variables {
        let quoted = value.replace('\'', "'\\''");
        let _infallible = writeln!(text, "export {name}='{quoted}'\"${{{name}:+:${name}}}\"");
    }
    text
}

/// `ENV` lines; an image that sets the variables otherwise must be told by hand.
fn docker(variables: &[(&str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in variables {
        let _infallible = writeln!(text, "ENV {name}={}", json::string(value));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_keeps_what_it_had() {
        let text = shell(&[("LD_PRELOAD", "/opt/it's/libibverbs.so.1".to_owned())]);

        assert_eq!(
            text,
            "export LD_PRELOAD='/opt/it'\\''s/libibverbs.so.1'\"${LD_PRELOAD:+:$LD_PRELOAD}\"\n"
        );
    }

    #[test]
    fn a_dockerfile_gets_env_lines() {
        let text = docker(&[("LD_LIBRARY_PATH", "/opt/lib".to_owned())]);

        assert_eq!(text, "ENV LD_LIBRARY_PATH=\"/opt/lib\"\n");
    }
}
