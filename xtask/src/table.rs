//! `cargo xtask table`: generates the table of programs in the README from the expectation files.

use std::fmt::Write;
use std::fs;
use xtask::expect::{self, Place, Program};
use xtask::{Result, sh};

const BEGIN: &str = "<!-- programs: made by `cargo xtask table` -->";
const END: &str = "<!-- end of programs -->";

/// Writes the table. With `check`, fails if it is out of date.
pub(crate) fn run(check: bool) -> Result {
    let path = sh::root().join("README.md");
    let text = fs::read_to_string(&path)?;
    let new = replace(&text, &table(&expect::read()?))?;
    match (check, new == text) {
        (_, true) => Ok(()),
        (false, false) => Ok(fs::write(&path, new)?),
        (true, false) => {
            Err("the table in README.md is not up to date: run `cargo xtask table`".into())
        }
    }
}

/// Replaces the text between the two markers by `table`.
fn replace(text: &str, table: &str) -> Result<String> {
    let (before, rest) = text
        .split_once(BEGIN)
        .ok_or("README.md has no marker for the table")?;
    let (_old, after) = rest
        .split_once(END)
        .ok_or("README.md has no marker after the table")?;
    Ok(format!("{before}{BEGIN}\n{table}{END}{after}"))
}

fn table(programs: &[Program]) -> String {
    let mut text = String::from(
        "| program | Debian package | what runs | cases | reasons for skipped cases |\n| --- | --- | --- | --- | --- |\n",
    );
    for program in programs {
        let skipped: Vec<&str> = program
            .cases
            .iter()
            .filter_map(|case| {
                case.skipped(Place::Loopback)
                    .or_else(|| case.skipped(Place::Namespaces))
            })
            .collect();
        let mut reasons = skipped.clone();
        reasons.sort_unstable();
        reasons.dedup();
        let _infallible = writeln!(
            text,
            "| {} | {} | {} | {} | {} |",
            program.name,
            program.package,
            program.shows,
            program.cases.len() - skipped.len(),
            reasons.join("; ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_between_the_markers_changes() {
        let text = format!("a\n{BEGIN}\nold\n{END}\nb\n");

        assert_eq!(
            replace(&text, "new\n").unwrap(),
            format!("a\n{BEGIN}\nnew\n{END}\nb\n")
        );
        assert!(replace("nothing", "x").is_err());
    }
}
