//! `cargo xtask conformance`: checks that every rule of the RFCs has code and a test, or a reason why not.
//!
//! The rules are in `conformance/*.toml`. The code and the tests of a rule are named there, or have a comment with the rule's id in
//! brackets. `conformance/README.md` is generated from both.

use regex_lite::Regex;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use xtask::{Result, sh};

/// The folders whose files an entry may name. Comments with ids are searched in all of them except `lab/src`.
const FOLDERS: [&str; 4] = ["crates", "tests", "fuzz", "lab/src"];
/// The prefixes of ids.
const PREFIXES: &str = "mpa|ddp|rdmap|mr|read|stag|term|atomic|imm|sec";

/// The contents of one file: the rules of an RFC.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Catalogue {
    rfc: u16,
    title: String,
    #[serde(default, rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    id: String,
    section: String,
    level: Level,
    text: String,
    #[serde(default)]
    code: Vec<String>,
    #[serde(default)]
    tests: Vec<String>,
    exception: Option<String>,
    untestable: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
enum Level {
    #[serde(rename = "MUST")]
    Must,
    #[serde(rename = "SHOULD")]
    Should,
    #[serde(rename = "requirement")]
    Requirement,
}

/// The contents of the files by path.
type Tree = BTreeMap<String, String>;

/// Checks the catalogue and writes the summary. With `check`, fails if the summary is out of date.
pub(crate) fn run(check: bool) -> Result {
    let mut tree = Tree::new();
    for folder in FOLDERS {
        read(&sh::root(), folder, &mut tree)?;
    }
    let mut files = Tree::new();
    read(&sh::root(), "conformance", &mut files)?;
    let readme = files.remove("conformance/README.md").unwrap_or_default();
    let mut catalogues = Vec::new();
    for (path, text) in &files {
        let one: Catalogue = toml::from_str(text).map_err(|e| format!("{path}: {e}"))?;
        catalogues.push(one);
    }
    catalogues.sort_by_key(|c| c.rfc);

    let marks = Marks::of(&tree)?;
    let mut faults = faults(&catalogues, &marks, &tree)?;
    let new = summary(&catalogues, &marks);
    if check && new != readme {
        faults
            .push("conformance/README.md is not up to date: run `cargo xtask conformance`".into());
    }
    if !check && new != readme {
        fs::write(sh::root().join("conformance/README.md"), new)?;
    }
    for fault in &faults {
        eprintln!("conformance: {fault}");
    }
    match faults.len() {
        0 => Ok(()),
        n => Err(format!("{n} errors in the catalogue of rules").into()),
    }
}

/// Reads all text files below `folder`, if the folder exists.
fn read(root: &Path, folder: &str, tree: &mut Tree) -> Result {
    let path = root.join(folder);
    if !path.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type()?;
        if kind.is_dir() && !name.ends_with("/target") {
            read(root, &name, tree)?;
        } else if kind.is_file()
            && let Ok(text) = String::from_utf8(fs::read(entry.path())?)
        {
            tree.insert(name, text);
        }
    }
    Ok(())
}

/// The comments that name rules, as "PATH ITEM" by id.
#[derive(Debug, Default)]
struct Marks {
    code: BTreeMap<String, BTreeSet<String>>,
    tests: BTreeMap<String, BTreeSet<String>>,
    /// Comments in the simulator, which is neither part of the product nor a test. Their ids must exist.
    other: BTreeMap<String, BTreeSet<String>>,
}

impl Marks {
    fn of(tree: &Tree) -> Result<Self> {
        // After "RFC 5041 §7.1" any word in brackets is an id; elsewhere only words with one of the prefixes are.
        let id = Regex::new(&format!(
            r"\[((?:{PREFIXES})-[a-z0-9-]+)\]|RFC \d+ §[^\[\]]*\[([a-z0-9]+(?:-[a-z0-9]+)+)\]"
        ))?;
        let mut marks = Self::default();
        for (path, text) in tree {
            if path.starts_with("lab/") {
                continue;
            }
            let lines: Vec<&str> = text.lines().collect();
            let tests = test_lines(path, &lines)?;
            for (n, line) in lines.iter().enumerate() {
                let Some(comment) = comment(path, line) else {
                    continue;
                };
                for found in id.captures_iter(comment) {
                    let Some(id) = found.get(1).or_else(|| found.get(2)) else {
                        continue;
                    };
                    let place = match item(path, &lines, n)? {
                        Some(item) => format!("{path} {item}"),
                        None => path.clone(),
                    };
                    let kind = if tests.contains(&n) {
                        &mut marks.tests
                    } else if path.starts_with("crates/sim/") {
                        &mut marks.other
                    } else {
                        &mut marks.code
                    };
                    kind.entry(id.as_str().into()).or_default().insert(place);
                }
            }
        }
        Ok(marks)
    }
}

/// Returns the numbers of the lines that belong to tests.
fn test_lines(path: &str, lines: &[&str]) -> Result<BTreeSet<usize>> {
    let crates_tests = Regex::new(r"^crates/[^/]+/(tests/|scripts/|src/(.*/)?tests(\.rs$|/))")?;
    if !path.starts_with("crates/") || crates_tests.is_match(path) {
        return Ok((0..lines.len()).collect());
    }
    let mut all = BTreeSet::new();
    let mut rest = lines.iter().enumerate();
    while let Some((_, line)) = rest.next() {
        if line.trim() != "#[cfg(test)]" {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let mut head = true;
        for (n, line) in rest.by_ref() {
            all.insert(n);
            if **line == *end || head && line.ends_with(';') {
                break;
            }
            head &= !line.ends_with('{');
        }
    }
    Ok(all)
}

/// Returns the comment in a line.
fn comment<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    let begin = match path.rsplit_once('.').map(|(_, kind)| kind) {
        Some("rs" | "pkt") => line.find("//"),
        Some("c" | "h") if line.trim_start().starts_with('*') => Some(0),
        Some("c" | "h") => line.find("/*").or_else(|| line.find("//")),
        Some("md" | "toml") => None,
        Some("lua") => line.find("--"),
        _ => line.find('#'),
    };
    begin.and_then(|at| line.get(at..))
}

/// Returns the item that contains the comment in line `n`, or that follows the comment.
fn item(path: &str, lines: &[&str], n: usize) -> Result<Option<String>> {
    if !path.ends_with(".rs") {
        return Ok(None);
    }
    let declaration = Regex::new(
        r"^ *(?:pub(?:\([a-z]+\))? )?(?:(?:const|unsafe|async|extern) )*(?:fn|struct|enum|const|static|type|trait|mod|impl|macro_rules!) *([A-Za-z_0-9<]+)",
    )?;
    let name = |line: &&str| {
        let found = declaration.captures(line)?;
        found.get(1).map(|m| m.as_str().to_owned())
    };
    let indent = |line: &str| line.len() - line.trim_start().len();
    let skipped = |line: &&&str| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with("//") && !line.starts_with("#[")
    };
    if lines.get(n).is_some_and(|line| line.starts_with("//!")) {
        return Ok(None);
    }
    let next = lines.iter().skip(n).find(skipped);
    if let Some(next) = next
        && let Some(found) = name(next)
        && lines.get(n).is_some_and(|l| indent(l) == indent(next))
        && found != "impl"
    {
        return Ok(Some(found));
    }
    let mut inside = lines.get(n).map_or(0, |line| indent(line));
    for line in lines.iter().take(n).rev() {
        if line.trim().is_empty() || indent(line) >= inside {
            continue;
        }
        inside = indent(line);
        if let Some(found) = name(line) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Returns all mistakes.
fn faults(catalogues: &[Catalogue], marks: &Marks, tree: &Tree) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let mut listed = BTreeSet::new();
    let shape = Regex::new(&format!("^(?:{PREFIXES})-[a-z0-9-]+$"))?;
    for catalogue in catalogues {
        if catalogue.rules.is_empty() {
            faults.push(format!("RFC {}: no rules", catalogue.rfc));
        }
        for rule in &catalogue.rules {
            let mut fault = |what: String| faults.push(format!("{}: {what}", rule.id));
            if !listed.insert(rule.id.as_str()) {
                fault("listed twice".into());
            }
            if !shape.is_match(&rule.id) {
                fault(format!(
                    "an id begins with one of {PREFIXES} and is lower case"
                ));
            }
            if rule.text.trim().is_empty() || rule.section.trim().is_empty() {
                fault("the text or the section is missing".into());
            }
            let (code, tests) = (rule.code(marks), rule.tests(marks));
            let blank =
                |reason: &Option<String>| reason.as_ref().is_some_and(|r| r.trim().is_empty());
            if blank(&rule.exception) || blank(&rule.untestable) {
                fault("the reason is empty".into());
            }
            if rule.exception.is_some() {
                if !code.is_empty() {
                    fault(format!(
                        "an exception, although this code implements the rule: {}",
                        join(&code)
                    ));
                }
                if rule.untestable.is_some() {
                    fault("an exception must not give a reason for a missing test".into());
                }
            } else if code.is_empty() {
                fault("has neither code nor an exception".into());
            } else if rule.untestable.is_some() {
                if !tests.is_empty() {
                    fault(format!(
                        "declared untestable, although it is tested by {}",
                        join(&tests)
                    ));
                }
            } else if tests.is_empty() {
                fault("no test".into());
            }
            for entry in &rule.code {
                if let Err(why) = check_code(entry, tree) {
                    fault(format!("code \"{entry}\": {why}"));
                }
            }
            for entry in &rule.tests {
                if let Err(why) = check_test(entry, tree) {
                    fault(format!("test \"{entry}\": {why}"));
                }
            }
        }
    }
    for (id, places) in marks.code.iter().chain(&marks.tests).chain(&marks.other) {
        if !listed.contains(id.as_str()) {
            let places: Vec<&str> = places.iter().map(String::as_str).collect();
            faults.push(format!(
                "{id}: not in the catalogue, but named in {}",
                join(&places)
            ));
        }
    }
    Ok(faults)
}

fn join(places: &[&str]) -> String {
    places.join(", ")
}

impl Rule {
    fn code<'a>(&'a self, marks: &'a Marks) -> Vec<&'a str> {
        named(&self.code, &marks.code, &self.id)
    }

    fn tests<'a>(&'a self, marks: &'a Marks) -> Vec<&'a str> {
        named(&self.tests, &marks.tests, &self.id)
    }
}

fn named<'a>(
    entries: &'a [String],
    marks: &'a BTreeMap<String, BTreeSet<String>>,
    id: &str,
) -> Vec<&'a str> {
    let marked = marks.get(id).into_iter().flatten();
    let all: BTreeSet<&str> = marked.chain(entries).map(String::as_str).collect();
    all.into_iter().collect()
}

/// Checks that "PATH ITEM" exists outside tests and comments.
fn check_code(entry: &str, tree: &Tree) -> Result {
    let (path, item) = entry.split_once(' ').ok_or("not of the form PATH ITEM")?;
    let text = tree.get(path).ok_or("no such file")?;
    let lines: Vec<&str> = text.lines().collect();
    let tests = test_lines(path, &lines)?;
    let code = lines.iter().enumerate().filter(|(n, _)| !tests.contains(n));
    let code: Vec<&str> = code
        .map(|(_, line)| {
            let rest = comment(path, line).map_or(0, str::len);
            line.get(..line.len() - rest).unwrap_or_default()
        })
        .collect();
    // In `Type::method` both words must exist.
    for part in item.split("::") {
        let word = word(part)?;
        if !code.iter().any(|line| word.is_match(line)) {
            return Err(format!("no {part} in this file's code").into());
        }
    }
    Ok(())
}

/// Checks that "PATH ITEM" is a test, or "PATH" a script.
fn check_test(entry: &str, tree: &Tree) -> Result {
    let (path, item) = entry.split_once(' ').unwrap_or((entry, ""));
    let text = tree.get(path).ok_or("no such file")?;
    let (kind, found) = match path.rsplit_once('.').map(|(_, kind)| kind) {
        Some("pkt") => ("script", item.is_empty()),
        _ if item.is_empty() => return Err("not of the form PATH TEST".into()),
        Some("rs") => ("#[test]", rust_tests(text)?.contains(item)),
        Some("c") => ("test", text.contains(&format!("{{ \"{item}\","))),
        Some("expect") => {
            let case = format!("case {item}");
            ("case", text.lines().any(|line| line.trim() == case))
        }
        _ => {
            let word = word(item)?;
            let says = |line: &str| word.is_match(line) && !line.trim_start().starts_with('#');
            ("case", path.starts_with("tests/") && text.lines().any(says))
        }
    };
    if found {
        Ok(())
    } else {
        Err(format!("no such {kind} in this file").into())
    }
}

fn word(word: &str) -> Result<Regex> {
    let plain = |c: char| c.is_alphanumeric() || "_-".contains(c);
    if word.is_empty() || !word.chars().all(plain) {
        return Err("an item is one word".into());
    }
    Ok(Regex::new(&format!(r"\b{word}\b"))?)
}

/// Returns the functions marked as tests, including those that a macro generates from `name: …,` or `name => …`.
fn rust_tests(text: &str) -> Result<BTreeSet<String>> {
    let function = Regex::new(r"^\s*fn ([a-z0-9_]+|\$[a-z]+)\(")?;
    let by_macro = Regex::new(r"^    ([a-z0-9_]+)(?::| =>|,|\()")?;
    let mut all = BTreeSet::new();
    let (mut test, mut macros) = (false, false);
    for line in text.lines() {
        if line.trim() == "#[test]" {
            test = true;
        } else if let Some(name) = function.captures(line).and_then(|c| c.get(1)) {
            if test && name.as_str().starts_with('$') {
                macros = true;
            } else if test {
                all.insert(name.as_str().to_owned());
            }
            test = false;
        } else if macros && let Some(name) = by_macro.captures(line).and_then(|c| c.get(1)) {
            all.insert(name.as_str().to_owned());
        }
    }
    Ok(all)
}

/// Returns the text of `conformance/README.md`.
fn summary(catalogues: &[Catalogue], marks: &Marks) -> String {
    let mut text = String::from(INTRODUCTION);
    text += "\n## Summary\n\n| RFC | | MUST | SHOULD | implemented | tested | exceptions |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n";
    let mut sum = [0; 5];
    for c in catalogues {
        let count = |wanted: &dyn Fn(&Rule) -> bool| c.rules.iter().filter(|r| wanted(r)).count();
        let row = [
            count(&|r| r.level != Level::Should),
            count(&|r| r.level == Level::Should),
            count(&|r| r.exception.is_none() && !r.code(marks).is_empty()),
            count(&|r| r.exception.is_none() && !r.tests(marks).is_empty()),
            count(&|r| r.exception.is_some()),
        ];
        for (sum, n) in sum.iter_mut().zip(row) {
            *sum += n;
        }
        let name = format!("[{}](#rfc-{}) | {}", c.rfc, c.rfc, c.title);
        line(&mut text, &name, row.map(|n| n.to_string()).join(" | "));
    }
    line(&mut text, "all |", sum.map(|n| n.to_string()).join(" | "));

    text += "\n## Exceptions\n\n| rule | RFC | level | rule text | reason |\n| --- | --- | --- | --- | --- |\n";
    for c in catalogues {
        for rule in &c.rules {
            let Some(why) = &rule.exception else { continue };
            let place = format!("{} §{} | {}", c.rfc, rule.section, rule.level.word());
            let row = format!("{place} | {} | {}", cell(&rule.text), cell(why));
            line(&mut text, &rule.id, row);
        }
    }

    for c in catalogues {
        let _infallible = write!(
            text,
            "\n## RFC {}\n\n{}.\n\n| rule | § | level | rule text | code | tests |\n| --- | --- | --- | --- | --- | --- |\n",
            c.rfc, c.title
        );
        for rule in &c.rules {
            let (code, tests) = match (&rule.exception, &rule.untestable) {
                (Some(_), _) => ("[exception](#exceptions)".into(), String::new()),
                (None, Some(why)) => (places(&rule.code(marks)), cell(why)),
                (None, None) => (places(&rule.code(marks)), places(&rule.tests(marks))),
            };
            let what = cell(&rule.text);
            let row = format!(
                "{} | {} | {what} | {code} | {tests}",
                rule.section,
                rule.level.word()
            );
            line(&mut text, &rule.id, row);
        }
    }
    text
}

const INTRODUCTION: &str = "\
# Rules of the RFCs, with their code and tests

Generated by `cargo xtask conformance` from the files `rfc*.toml` of this folder and from comments in the code.

Each rule of the RFCs that anywarp implements has an id, its section, and one sentence that states it in our words.
Statements that repeat one another are one rule. The code that implements a rule names it in brackets
(`// RFC 5041 §7.1 [ddp-bounds]: …`), and so does its test: a unit test, a packet script, a simulation or a
C program. If no comment names a rule, the keys `code` and `tests` of its entry in `rfc*.toml` list the places as `\"PATH ITEM\"`. A rule that is not implemented, or that
applies to another party, has an `exception` with the reason. A rule that cannot be violated without changing a type has the reason
for its missing test in `untestable`.

The tool fails when an id in the code is in no file, or in two; when a rule has neither code nor an exception, or code and
no test; when the item that an entry names does not exist; when a rule has both an exception and code. CI runs it with `--check`, which
also fails when this file is out of date. In the summary the column MUST also counts MUST NOT, SHALL and
REQUIRED, and the requirements of RFC 5042; SHOULD also counts SHOULD NOT and RECOMMENDED.
";

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Must => "MUST",
            Self::Should => "SHOULD",
            Self::Requirement => "requirement",
        }
    }
}

fn line(text: &mut String, first: &str, rest: String) {
    text.push_str("| ");
    text.push_str(first);
    text.push_str(" | ");
    text.push_str(&rest);
    text.push_str(" |\n");
}

fn cell(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.join(" ").replace('|', "\\|")
}

/// Formats the first few entries "PATH ITEM", without the folders that all have in common.
fn places(all: &[&str]) -> String {
    const SHOWN: usize = 3;
    let short = |place: &&str| {
        let place = place.replace("crates/sim/scripts/", "");
        format!("`{}`", place.replace("crates/", "").replace("/src/", "/"))
    };
    let mut shown: Vec<String> = all.iter().take(SHOWN).map(short).collect();
    if all.len() > SHOWN {
        shown.push(format!("{} more", all.len() - SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: &str = "\
/// A door.
pub struct Door;

impl Door {
    fn open(&self) {
        if true {
            // RFC 5041 §7.1 [ddp-door]: doors open.
            go();
        }
    }
}

#[cfg(test)]
mod tests {
    // RFC 5041 §7.1 [ddp-door]
    #[test]
    fn doors_open() {}

    fn no_test() {}
}
";

    fn tree(files: &[(&str, &str)]) -> Tree {
        let own = |&(path, text): &(&str, &str)| (path.to_owned(), text.to_owned());
        files.iter().map(own).collect()
    }

    /// Returns the mistakes for these rules in a tree with `CODE` and these files.
    fn check(rules: &str, more: &[(&str, &str)]) -> Vec<String> {
        let rules = format!("rfc = 5041\ntitle = \"x\"\n{rules}");
        let catalogue = toml::from_str(&rules).unwrap();
        let mut tree = tree(more);
        tree.insert("crates/core/src/door.rs".into(), CODE.into());
        let marks = Marks::of(&tree).unwrap();
        faults(&[catalogue], &marks, &tree).unwrap()
    }

    fn rule(id: &str, more: &str) -> String {
        format!(
            "[[rule]]\nid = \"{id}\"\nsection = \"7.1\"\nlevel = \"MUST\"\ntext = \"t\"\n{more}\n"
        )
    }

    fn door() -> String {
        rule("ddp-door", "")
    }

    #[test]
    fn comments_are_code_and_test() {
        assert_eq!(check(&door(), &[]), [""; 0]);
        let tree = tree(&[("crates/core/src/door.rs", CODE)]);
        let marks = Marks::of(&tree).unwrap();
        let place = |s: &str| BTreeSet::from([format!("crates/core/src/door.rs {s}")]);
        assert_eq!(marks.code["ddp-door"], place("open"));
        assert_eq!(marks.tests["ddp-door"], place("doors_open"));
    }

    #[test]
    fn an_id_that_is_not_listed_is_found_wherever_it_is() {
        for (path, text) in [
            ("crates/core/src/a.rs", "// [read-new]: x"),
            (
                "crates/core/src/a.rs",
                "go(); // RFC 5040 §4 via x [read-new]",
            ),
            ("crates/core/src/tests.rs", "// [read-new]: x"),
            ("crates/sim/src/a.rs", "//! [read-new]: x"),
            ("crates/sim/scripts/a.pkt", "// RFC 5040 §1 [read-new]: x"),
            ("tests/c/a.c", "\t/* [read-new] */"),
            ("tests/interop/a.sh", "x # [read-new]"),
        ] {
            let found = check(&door(), &[(path, text)]);
            let [only] = &found[..] else {
                panic!("{path}: {found:?}")
            };
            assert!(only.starts_with("read-new: not in the catalogue, but named in "));
            assert!(only.contains(path), "{only}");
        }
        // A word without a known prefix is an id after a section.
        let other = [("crates/core/src/a.rs", "// RFC 5040 §4 [one-segment]: x")];
        assert_eq!(check(&door(), &other).len(), 1);
        let index = [
            ("crates/core/src/a.rs", "let x = a[read-b];"),
            ("tests/c/a.c", "x = a[mr-b];"),
        ];
        assert_eq!(check(&door(), &index), [""; 0]);
    }

    #[test]
    fn an_id_is_listed_once_and_has_a_shape() {
        assert_eq!(check(&(door() + &door()), &[]), ["ddp-door: listed twice"]);
        let odd = rule("door", "exception = \"x\"");
        assert!(check(&(door() + &odd), &[])[0].starts_with("door: an id begins with"));
    }

    #[test]
    fn a_rule_has_code_and_test_or_an_exception() {
        let with = |more: &str| check(&(door() + &rule("ddp-x", more)), &[]);
        const CODE: &str = "code = [\"crates/core/src/door.rs open\"]\n";
        const TEST: &str = "tests = [\"crates/core/src/door.rs doors_open\"]\n";
        assert_eq!(with(""), ["ddp-x: has neither code nor an exception"]);
        assert_eq!(with(TEST), ["ddp-x: has neither code nor an exception"]);
        assert_eq!(with(CODE), ["ddp-x: no test"]);
        assert_eq!(with(&[CODE, TEST].concat()), [""; 0]);
        assert_eq!(with("exception = \"x\""), [""; 0]);
        assert_eq!(with("exception = \" \""), ["ddp-x: the reason is empty"]);
        let both = with(&[CODE, "exception = \"x\""].concat());
        assert_eq!(
            both,
            [
                "ddp-x: an exception, although this code implements the rule: crates/core/src/door.rs open"
            ]
        );
        let why = "untestable = \"x\"";
        assert_eq!(with(why), ["ddp-x: has neither code nor an exception"]);
        assert_eq!(with(&[CODE, why].concat()), [""; 0]);
        assert!(with(&[CODE, TEST, why].concat())[0].contains("although it is tested by"));
        let commented = check(&rule("ddp-door", "exception = \"x\""), &[]);
        assert!(commented[0].contains("implements the rule: crates/core/src/door.rs open"));
    }

    #[test]
    fn an_entry_with_a_missing_file_is_reported() {
        let tree = tree(&[
            ("crates/core/src/door.rs", CODE),
            (
                "crates/sim/tests/m.rs",
                "#[test]\n        fn $name() {}\n}\nm! {\n    by_macro: X,\n}\n",
            ),
            ("crates/sim/scripts/a.pkt", ""),
            ("tests/c/a.c", "\t{ \"a_test\", f, 0 },\n"),
            ("tests/programs/rping.expect", "case plain\n"),
            ("tests/interop/run", "case_x() {\n# case_y\n"),
        ]);
        for (code, fine) in [
            ("crates/core/src/door.rs open", true),
            ("crates/core/src/door.rs Door::open", true),
            ("crates/core/src/door.rs Window::open", false),
            ("crates/core/src/door.rs ope", false),
            ("crates/core/src/door.rs doors", false),
            ("crates/core/src/door.rs doors_open", false),
            ("crates/core/src/gone.rs open", false),
            ("crates/core/src/door.rs", false),
        ] {
            assert_eq!(check_code(code, &tree).is_ok(), fine, "{code}");
        }
        for (test, fine) in [
            ("crates/core/src/door.rs doors_open", true),
            ("crates/core/src/door.rs no_test", false),
            ("crates/core/src/door.rs open", false),
            ("crates/core/src/door.rs", false),
            ("crates/sim/tests/m.rs by_macro", true),
            ("crates/sim/tests/m.rs by_hand", false),
            ("crates/sim/scripts/a.pkt", true),
            ("crates/sim/scripts/b.pkt", false),
            ("tests/c/a.c a_test", true),
            ("tests/c/a.c f", false),
            ("tests/programs/rping.expect plain", true),
            ("tests/programs/rping.expect other", false),
            ("tests/interop/run case_x", true),
            ("tests/interop/run case_y", false),
        ] {
            assert_eq!(check_test(test, &tree).is_ok(), fine, "{test}");
        }
        // The whole report contains the missing item too.
        let gone = "code = [\"crates/core/src/door.rs gone\"]\ntests = [\"tests/c/a.c gone\"]";
        assert_eq!(check(&(door() + &rule("ddp-x", gone)), &[]).len(), 2);
    }

    #[test]
    fn test_code_is_not_an_implementation() {
        let text = "\
fn a() {}
#[cfg(test)]
mod tests;
// here
struct S {
    #[cfg(test)]
    t: u8,
    #[cfg(test)]
    fn f() {
        x();
    }
    // here too
}
";
        let lines: Vec<&str> = text.lines().collect();
        let tests = test_lines("crates/core/src/a.rs", &lines).unwrap();
        assert!(tests.contains(&2) && tests.contains(&9));
        assert!(!tests.contains(&0) && !tests.contains(&3));
        for path in [
            "crates/core/src/a/tests.rs",
            "crates/core/src/tests/a.rs",
            "crates/sim/tests/a.rs",
            "tests/c/a.c",
        ] {
            assert_eq!(
                test_lines(path, &lines).unwrap().len(),
                lines.len(),
                "{path}"
            );
        }
    }

    #[test]
    fn the_summary_counts() {
        let rules =
            rule("ddp-door", "") + &rule("ddp-x", "exception = \"a | b\"") + &rule("ddp-y", "");
        let rules = rules.replacen("MUST", "SHOULD", 1);
        let catalogue = toml::from_str(&format!("rfc = 5041\ntitle = \"Doors\"\n{rules}")).unwrap();
        let marks = Marks::of(&tree(&[("crates/core/src/door.rs", CODE)])).unwrap();
        let text = summary(&[catalogue], &marks);
        assert!(
            text.contains("| [5041](#rfc-5041) | Doors | 2 | 1 | 1 | 1 | 1 |\n"),
            "{text}"
        );
        assert!(text.contains("| all | | 2 | 1 | 1 | 1 | 1 |\n"));
        assert!(text.contains("| ddp-x | 5041 §7.1 | MUST | t | a \\| b |\n"));
        assert!(text.contains(
            "| ddp-door | 7.1 | SHOULD | t | `core/door.rs open` | `core/door.rs doors_open` |\n"
        ));
    }
}
