//! The sources of rules: files and environment variables.

use crate::rules::{Mistake, Policy};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The rules with the lowest precedence.
pub const DEFAULT: &str = "all prefer";
/// The system-wide configuration file.
pub const MACHINE: &str = "/etc/anywarp/sockets.conf";
/// An environment variable that contains rules or the path of a file with rules.
pub const VARIABLE: &str = "ANYWARP_SOCKETS";
/// The environment variable in which `anywarp sockets run --rule` passes its rules.
pub const COMMAND: &str = "ANYWARP_SOCKETS_RULES";
/// The environment variable with the tag by which rules select a process.
pub const TAG: &str = "ANYWARP_SOCKETS_TAG";

/// A source of rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The name in messages.
    pub name: String,
    /// The text of the rules, or why it cannot be read.
    pub text: Result<String, String>,
}

/// Reads a file that may be missing. A file that this user has no permission to read counts as missing, because a program may
/// change its user.
fn file(path: &Path) -> Option<Source> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => Ok(text),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return None;
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => return None,
        Err(e) => Err(e.to_string()),
    };
    Some(Source {
        name: path.display().to_string(),
        text,
    })
}

/// Returns whether a value of [`VARIABLE`] is a path: it contains a slash, and no character that separates words or rules. A path with
/// a space is taken for rules.
pub fn is_file(value: &str) -> bool {
    value.contains('/') && !value.contains([' ', '\t', ';', '\n'])
}

/// Returns all sources in the order in which they are read. The last has the highest precedence.
pub fn all(variable: impl Fn(&str) -> Option<String>) -> Vec<Source> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let mut all = vec![Source {
        name: "default".to_owned(),
        text: Ok(DEFAULT.to_owned()),
    }];
    all.extend(file(Path::new(MACHINE)));
    let home = given("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(given("HOME")?).join(".config")));
    all.extend(home.and_then(|home| file(&home.join("anywarp/sockets.conf"))));
    if let Some(value) = given(VARIABLE) {
        all.push(if is_file(&value) {
            let text = std::fs::read_to_string(&value).map_err(|e| e.to_string());
            Source { name: value, text }
        } else {
            Source {
                name: VARIABLE.to_owned(),
                text: Ok(value),
            }
        });
    }
    if let Some(value) = given(COMMAND) {
        all.push(Source {
            name: "--rule".to_owned(),
            text: Ok(value),
        });
    }
    all
}

/// Parses the rules of all sources.
///
/// # Errors
/// The first mistake.
pub fn read(sources: &[Source]) -> Result<Policy, Mistake> {
    let mut policy = Policy::default();
    for source in sources {
        match &source.text {
            Ok(text) => policy.read(&source.name, text)?,
            Err(why) => {
                return Err(Mistake {
                    source: source.name.clone(),
                    line: 0,
                    column: 0,
                    text: String::new(),
                    what: format!("cannot be read: {why}"),
                });
            }
        }
    }
    Ok(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specific_sources_are_read_after_general_ones() {
        let dir = std::env::temp_dir().join(format!("anywarp-sources-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("anywarp")).unwrap();
        let own = dir.join("anywarp/sockets.conf");
        std::fs::write(&own, "all off\n").unwrap();
        let values = |name: &str| match name {
            "XDG_CONFIG_HOME" => Some(dir.display().to_string()),
            VARIABLE => Some("all tcp".to_owned()),
            COMMAND => Some("all require".to_owned()),
            _ => None,
        };
        let names: Vec<String> = all(values).into_iter().map(|s| s.name).collect();
        let own = own.display().to_string();
        let expected = ["default", &own, VARIABLE, "--rule"];
        assert_eq!(
            names.iter().filter(|n| *n != MACHINE).collect::<Vec<_>>(),
            expected
        );
        // A file that the variable names must exist. A file with a fixed path may be missing.
        let missing = |name: &str| match name {
            VARIABLE => Some("/no/such/file".to_owned()),
            "HOME" => Some("/no/such/folder".to_owned()),
            _ => None,
        };
        let mistake = read(&all(missing)).unwrap_err();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(
            mistake
                .to_string()
                .starts_with("/no/such/file: cannot be read: "),
            "{mistake}"
        );
    }

    #[test]
    fn rules_are_not_taken_for_a_file() {
        assert!(is_file("./rules") && is_file("/etc/x"));
        assert!(!is_file("connect tcp 10.0.0.0/8 tcp") && !is_file("rules"));
    }
}
