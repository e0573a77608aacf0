//! `anywarp env`: prints the variables that `anywarp run` would set.

use std::fmt::Write;
use std::process::ExitCode;

use serde_json::Value;

use super::Failure;
use crate::cli::Env;
use crate::library::Library;

/// Prints the variables in the selected format.
pub(crate) fn run(args: &Env) -> Result<ExitCode, Failure> {
    let library = Library::find().map_err(Failure::Library)?;
    // The shell appends its own earlier values, so those of this process are not used.
    let variables: Vec<(&str, String)> = library
        .variables(!args.no_path_shim, |_| None)
        .into_iter()
        .map(|(name, value)| (name, value.to_string_lossy().into_owned()))
        .collect();
    let text = if args.json {
        let object: serde_json::Map<String, Value> = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.as_str().into()))
            .collect();
        Value::Object(object).to_string() + "\n"
    } else if args.docker {
        docker(&variables)
    } else {
        shell(&variables)
    };
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

/// Returns lines for `eval`. Earlier values of the shell's variables are kept after the new ones.
fn shell(variables: &[(&str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in variables {
        let quoted = value.replace('\'', "'\\''");
        let _infallible = writeln!(text, "export {name}='{quoted}'\"${{{name}:+:${name}}}\"");
    }
    text
}

/// Returns `ENV` lines. They overwrite earlier values in the image.
fn docker(variables: &[(&str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in variables {
        let _infallible = writeln!(text, "ENV {name}={}", Value::from(value.as_str()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_keeps_previous_values() {
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
