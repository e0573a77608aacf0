//! `cargo xtask matrix`: our symbols against the distribution's, and `crates/abi/MATRIX.md`.

use crate::load;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::symbols::{IBVERBS, RDMACM, Symbol};
use xtask::{Result, sh, symbols};

/// A symbol as `objdump -T` shows it: name, version node, and whether that is the default.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Export {
    name: String,
    node: String,
    default: bool,
}

/// Compares, writes the table, and fails on a difference.
pub(crate) fn run() -> Result {
    let symbols = symbols::read()?;
    let refused = refused()?;
    let mut table = String::from(
        "# Exported symbols\n\n\
         Written by `cargo xtask matrix`, which compares the built libraries with the distribution's.\n\
         *served*: has an implementation. *refused*: exported so that programs start, and fails with\n\
         `ENOSYS` or `EOPNOTSUPP`. *old*: version of before 2007, fails.\n",
    );
    let mut differences = Vec::new();
    for library in [IBVERBS, RDMACM] {
        let ours = exports(&sh::dist().join("lib/anywarp").join(library))?;
        let theirs = exports(&distribution(library)?)?;
        for missing in theirs.difference(&ours) {
            differences.push(format!("{library}: missing {}", show(missing)));
        }
        // What is ours alone has a node of its own.
        let foreign = |e: &&Export| !e.node.starts_with("ANYWARPDV_");
        for extra in ours.difference(&theirs).filter(foreign) {
            differences.push(format!(
                "{library}: not in the distribution's: {}",
                show(extra)
            ));
        }
        section(&mut table, library, &symbols, &refused);
    }
    let path = sh::root().join("crates/abi/MATRIX.md");
    fs::write(&path, table)?;
    println!("{}", path.display());
    if !differences.is_empty() {
        return Err(differences.join("\n").into());
    }
    load::run()
}

/// The table of one library.
fn section(table: &mut String, library: &str, symbols: &[Symbol], refused: &BTreeSet<String>) {
    let mut count = BTreeMap::<&str, usize>::new();
    let mut rows = String::new();
    for s in symbols.iter().filter(|s| s.library == library) {
        let state = match (s.legacy, refused.contains(&s.name)) {
            (Some(_), _) => "old",
            (None, true) => "refused",
            (None, false) => "served",
        };
        *count.entry(state).or_default() += 1;
        let _ = writeln!(rows, "| `{}` | {} | {state} |", s.name, s.node);
    }
    let count: Vec<String> = count.iter().map(|(s, n)| format!("{n} {s}")).collect();
    println!("{library}: {}", count.join(", "));
    let _ = write!(
        table,
        "\n## {library}\n\n{}.\n\n| symbol | version | state |\n|---|---|---|\n{rows}",
        count.join(", ")
    );
}

/// The names in `refuse!` lists.
fn refused() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for file in ["pending.rs", "verbs/private.rs"] {
        let text = fs::read_to_string(sh::root().join("crates/abi/src").join(file))?;
        let Some((_, list)) = text.split_once("\nrefuse! {") else {
            continue;
        };
        let code = list.lines().filter(|l| !l.trim_start().starts_with("//"));
        for line in code.take_while(|l| *l != "}") {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            names.extend(words.filter(|w| !w.is_empty()).map(str::to_owned));
        }
    }
    Ok(names)
}

/// Where the distribution keeps `library`.
fn distribution(library: &str) -> Result<PathBuf> {
    let arch = std::env::consts::ARCH;
    let folders = [
        format!("/usr/lib/{arch}-linux-gnu"),
        "/usr/lib64".to_owned(),
        "/usr/lib".to_owned(),
    ];
    let candidates = folders.iter().map(|f| Path::new(f).join(library));
    for path in candidates {
        if path.exists() {
            return Ok(path);
        }
    }
    Err(format!("the distribution's {library} is not installed: nothing to compare with").into())
}

/// What `library` exports, except the nodes themselves and our private node.
fn exports(library: &Path) -> Result<BTreeSet<Export>> {
    let listing = sh::output(Command::new("objdump").arg("-T").arg(library))?;
    let exports: BTreeSet<Export> = listing.lines().filter_map(export).collect();
    if exports.is_empty() {
        return Err(format!("{} exports nothing", library.display()).into());
    }
    Ok(exports)
}

/// One line of `objdump -T`: `ADDRESS FLAGS SECTION<tab>SIZE NODE NAME`, the node in parentheses if
/// it is not the default.
fn export(line: &str) -> Option<Export> {
    let (head, tail) = line.split_once('\t')?;
    let section = head.split_whitespace().last()?;
    let words: Vec<&str> = tail.split_whitespace().collect();
    let [_size, node, name] = *words.as_slice() else {
        return None;
    };
    if section == "*UND*" || section == "*ABS*" || node.starts_with("ANYWARP_") {
        return None;
    }
    let old = node.strip_prefix('(').and_then(|n| n.strip_suffix(')'));
    Some(Export {
        name: name.to_owned(),
        node: old.unwrap_or(node).to_owned(),
        default: old.is_none(),
    })
}

fn show(e: &Export) -> String {
    let at = if e.default { "@@" } else { "@" };
    format!("{}{at}{}", e.name, e.node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_objdump_is_a_symbol_or_nothing() {
        let line = "0000000000010dd0 g    DF .text\t00000000000000a5 (V_1.0) f";
        let e = export(line).unwrap();
        assert_eq!(
            (e.name.as_str(), e.node.as_str(), e.default),
            ("f", "V_1.0", false)
        );
        let line = "0000000000010dd0 g    DF .text\t00000000000000a5  V_1.1   f";
        assert!(export(line).unwrap().default);
        let undefined = "0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.2.5) free";
        assert_eq!(export(undefined), None);
        let node = "0000000000000000 g    DO *ABS*\t0000000000000000  V_1.0 V_1.0";
        assert_eq!(export(node), None);
    }
}
