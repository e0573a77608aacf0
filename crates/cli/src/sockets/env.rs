//! `anywarp sockets env`: prints the variables that `anywarp sockets run` sets, for use by other tools.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde_json::Value;

use super::args::Env;
use crate::cmd::Failure;
use crate::library::Library;

pub(crate) fn run(args: &Env) -> Result<ExitCode, Failure> {
    args.rules.read()?;
    let preload = Library::sockets().map_err(Failure::Library)?;
    let preload = preload.to_string_lossy();
    let rest = args.rules.variables(None);
    let text = if args.systemd {
        systemd(&preload, &rest)
    } else if args.docker {
        docker(&preload, &rest)
    } else {
        shell(&preload, &rest)
    };
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', "'\\''"))
}

/// Returns lines for `eval`. Libraries that are already preloaded follow `preload` in the new value.
fn shell(preload: &str, rest: &[(&str, String)]) -> String {
    let mut text = format!(
        "export LD_PRELOAD={}\"${{LD_PRELOAD:+:$LD_PRELOAD}}\"\n",
        quoted(preload)
    );
    for (name, value) in rest {
        let _infallible = writeln!(text, "export {name}={}", quoted(value));
    }
    text
}

/// Returns `ENV` lines. Dollar signs are escaped, because they would start a variable of the Dockerfile.
fn docker(preload: &str, rest: &[(&str, String)]) -> String {
    let mut text = String::new();
    let all = [("LD_PRELOAD", preload)].into_iter();
    for (name, value) in all.chain(rest.iter().map(|(n, v)| (*n, v.as_str()))) {
        let value = Value::from(value).to_string().replace('$', "\\$");
        let _infallible = writeln!(text, "ENV {name}={value}");
    }
    text
}

/// Returns a drop-in file. Percent signs are escaped, because they would start a specifier.
fn systemd(preload: &str, rest: &[(&str, String)]) -> String {
    let mut text = "# /etc/systemd/system/NAME.service.d/anywarp.conf, then: systemctl daemon-reload; systemctl restart NAME\n\
                    [Service]\n"
        .to_owned();
    let all = [("LD_PRELOAD", preload)].into_iter();
    for (name, value) in all.chain(rest.iter().map(|(n, v)| (*n, v.as_str()))) {
        let value = value
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('%', "%%");
        let _infallible = writeln!(text, "Environment=\"{name}={value}\"");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_escapes_its_special_characters() {
        let rest = [("R", "program a'b$c%d\"e".to_owned())];
        assert_eq!(
            shell("/l.so", &rest),
            "export LD_PRELOAD='/l.so'\"${LD_PRELOAD:+:$LD_PRELOAD}\"\nexport R='program a'\\''b$c%d\"e'\n"
        );
        assert_eq!(
            docker("/l.so", &rest),
            "ENV LD_PRELOAD=\"/l.so\"\nENV R=\"program a'b\\$c%d\\\"e\"\n"
        );
        let text = systemd("/l.so", &rest);
        assert!(
            text.ends_with(
                "[Service]\nEnvironment=\"LD_PRELOAD=/l.so\"\nEnvironment=\"R=program a'b$c%%d\\\"e\"\n"
            ),
            "{text}"
        );
    }
}
