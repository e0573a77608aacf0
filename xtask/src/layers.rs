//! `cargo xtask layers`: checks the layers of modules. A file may use only modules of its own and of lower layers.
//!
//! `xtask/layers.toml` lists the modules of each crate, lowest layer first. Errors are a file that names a module of a higher
//! layer, and files of one layer that depend on each other in a cycle. A file names a module by a path that begins with
//! `crate`, `super`, `self` or one of its submodules. Tests may name any module. The root of a crate (`lib.rs`) is not
//! checked: it lists the modules and defines macros.
//!
//! The table of files in ARCHITECTURE.md is generated from the same list, with the first sentence of each file.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use xtask::{Result, sh};

/// The markers around the table in ARCHITECTURE.md.
const BEGIN: &str = "<!-- layers: made by `cargo xtask layers` -->\n";
const END: &str = "<!-- end of layers -->";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    #[serde(rename = "crate")]
    crates: Vec<Crate>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Crate {
    name: String,
    /// Modules in which cycles between files are not errors.
    #[serde(default)]
    whole: Vec<String>,
    /// The layers, lowest first.
    layer: Vec<Layer>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layer {
    name: String,
    /// Module paths, such as `verbs::qp`. A module includes its submodules that no other entry names.
    modules: Vec<String>,
}

impl Crate {
    fn name_of(&self, layer: usize) -> &str {
        self.layer.get(layer).map_or("", |layer| &layer.name)
    }
}

/// The path of a module: its names, outermost first.
type Module = Vec<String>;

/// One file of a crate.
#[derive(Debug, Default)]
struct File {
    /// The path relative to the crate's `src`.
    path: String,
    lines: usize,
    /// The first sentence of the documentation.
    summary: String,
    /// The modules that the file names, each with the first line that names it.
    names: BTreeMap<Module, usize>,
    /// The modules declared for tests only.
    tests: BTreeSet<String>,
}

/// Checks every crate in the list and writes the table of ARCHITECTURE.md. With `check`, fails if the table is out of date.
pub(crate) fn run(check: bool) -> Result {
    let list: List = toml::from_str(&fs::read_to_string(sh::root().join("xtask/layers.toml"))?)?;
    let mut errors = Vec::new();
    let mut table = String::new();
    for crate_ in &list.crates {
        let files = read_crate(&sh::root().join("crates").join(&crate_.name).join("src"))?;
        judge(crate_, &files, &mut errors);
        describe(crate_, &files, &mut table)?;
    }
    for error in &errors {
        println!("{error}");
    }
    match errors.len() {
        0 => write_table(&table, check),
        n => Err(format!("the layers of modules have {n} errors").into()),
    }
}

/// Reads all files below `src` except the crate's root and test modules.
fn read_crate(src: &Path) -> Result<BTreeMap<Module, File>> {
    let mut files = BTreeMap::new();
    read_folder(src, &mut Vec::new(), &mut files)?;
    let tests: Vec<Module> = files
        .iter()
        .flat_map(|(module, file)| {
            file.tests
                .iter()
                .map(|name| [module.as_slice(), std::slice::from_ref(name)].concat())
        })
        .collect();
    files.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
    let known: BTreeSet<Module> = files.keys().cloned().collect();
    for (module, file) in &mut files {
        file.names = resolve(module, std::mem::take(&mut file.names), &known);
    }
    files.remove(&Vec::new());
    Ok(files)
}

fn read_folder(folder: &Path, module: &mut Module, files: &mut BTreeMap<Module, File>) -> Result {
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<std::io::Result<_>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let stem = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() {
            module.push(stem);
            read_folder(&path, module, files)?;
            module.pop();
        } else if path.extension().is_some_and(|e| e == "rs") {
            let mut own = module.clone();
            if !matches!(stem.as_str(), "mod" | "lib") {
                own.push(stem);
            }
            let text = fs::read_to_string(&path)?;
            let file = read_file(&own, &text).map_err(|e| format!("{}: {e}", path.display()))?;
            let path = path.strip_prefix(sh::root())?.display().to_string();
            files.insert(own, File { path, ..file });
        }
    }
    Ok(())
}

fn read_file(module: &Module, text: &str) -> Result<File> {
    let mut file = File {
        lines: text.lines().count(),
        summary: summary_of(text),
        ..File::default()
    };
    let tokens: TokenStream = text.parse().map_err(|e| format!("{e}"))?;
    let mut children = BTreeSet::new();
    let items: Vec<TokenTree> = tokens.clone().into_iter().collect();
    for three in items.windows(3) {
        if let [
            TokenTree::Ident(m),
            TokenTree::Ident(name),
            TokenTree::Punct(end),
        ] = three
            && m == "mod"
            && end.as_char() == ';'
        {
            children.insert(name.to_string());
        }
    }
    scan(tokens, module, &children, &mut file);
    Ok(file)
}

/// Returns the first sentence of the file's documentation, without links.
fn summary_of(text: &str) -> String {
    let paragraph: Vec<&str> = text
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let paragraph = paragraph.join(" ").replace(['[', ']'], "");
    let end = paragraph.find(". ").map_or(paragraph.len(), |at| at + 1);
    paragraph[..end].replace('|', "\\|")
}

/// Records every path in `tokens` that begins with `crate`, `super`, `self` or a submodule. Test code is skipped.
fn scan(tokens: TokenStream, module: &Module, children: &BTreeSet<String>, file: &mut File) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token {
            TokenTree::Punct(p) if p.as_char() == '#' && is_for_tests(tokens.get(at + 1)) => {
                let end = end_of_item(&tokens, at + 2);
                if let Some([TokenTree::Ident(name), TokenTree::Punct(_)]) =
                    tokens.get(end.saturating_sub(2)..end)
                    && children.contains(&name.to_string())
                {
                    file.tests.insert(name.to_string());
                }
                at = end;
                continue;
            }
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                let follows = is_path(&tokens, at + 1);
                let preceded = at >= 2 && is_path(&tokens, at - 2);
                let begin = match name.as_str() {
                    "crate" => Some(Module::new()),
                    "self" => Some(module.clone()),
                    "super" => Some(
                        module
                            .split_last()
                            .map_or_else(Module::new, |(_, up)| up.to_vec()),
                    ),
                    child if children.contains(child) => {
                        Some([module.as_slice(), std::slice::from_ref(&name)].concat())
                    }
                    _ => None,
                };
                if let Some(begin) = begin
                    && follows
                    && !preceded
                {
                    let line = ident.span().start().line;
                    note(
                        tokens.get(at + 3..).unwrap_or_default(),
                        begin,
                        line,
                        &mut file.names,
                    );
                }
            }
            TokenTree::Group(group) => scan(group.stream(), module, children, file),
            _ => {}
        }
        at += 1;
    }
}

/// Returns whether the tokens at index `at` are `::`.
fn is_path(tokens: &[TokenTree], at: usize) -> bool {
    let colon = |at| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':');
    colon(at) && colon(at + 1)
}

/// Returns whether an attribute is `cfg(test)` or contains it.
fn is_for_tests(brackets: Option<&TokenTree>) -> bool {
    let Some(TokenTree::Group(group)) = brackets else {
        return false;
    };
    let text = group.stream().to_string().replace(' ', "");
    text.starts_with("cfg(") && text.contains("test") && !text.contains("not(test")
}

/// Returns the index after the item that begins at `at`: after its braces or its semicolon.
fn end_of_item(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(p) => p.as_char() == ';',
        _ => false,
    };
    let item = tokens.get(at..).unwrap_or_default();
    item.iter()
        .position(ends)
        .map_or(tokens.len(), |n| at + n + 1)
}

/// Records the paths that continue `path` at these tokens: one path, or those of a group of `use`.
fn note(tokens: &[TokenTree], path: Module, line: usize, names: &mut BTreeMap<Module, usize>) {
    match tokens.first() {
        Some(TokenTree::Ident(ident)) if ident == "self" => {
            names.entry(path).or_insert(line);
        }
        Some(TokenTree::Ident(ident)) => {
            let path = if ident == "super" {
                path.split_last()
                    .map_or_else(Module::new, |(_, up)| up.to_vec())
            } else {
                [path.as_slice(), &[ident.to_string()]].concat()
            };
            if is_path(tokens, 1) {
                note(tokens.get(3..).unwrap_or_default(), path, line, names);
            } else {
                names.entry(path).or_insert(line);
            }
        }
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let inner: Vec<TokenTree> = group.stream().into_iter().collect();
            let comma = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ',');
            for part in inner.split(comma) {
                note(part, path.clone(), line, names);
            }
        }
        _ => {
            names.entry(path).or_insert(line);
        }
    }
}

/// Returns the files that paths refer to: the innermost module on each path, unless it is the file itself.
fn resolve(
    own: &Module,
    names: BTreeMap<Module, usize>,
    known: &BTreeSet<Module>,
) -> BTreeMap<Module, usize> {
    let mut files = BTreeMap::new();
    for (path, line) in names {
        let module = (1..=path.len())
            .rev()
            .filter_map(|n| path.get(..n))
            .find(|m| known.contains(*m));
        if let Some(module) = module
            && module != own.as_slice()
        {
            files.entry(module.to_vec()).or_insert(line);
        }
    }
    files
}

/// Returns whether a module is `entry` or a submodule of it.
fn is_below(path: &str, entry: &str) -> bool {
    path.strip_prefix(entry)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Returns the layer of a module: that of the longest entry that contains it.
fn layer_of(crate_: &Crate, module: &Module) -> Option<usize> {
    let path = module.join("::");
    let entries = crate_.layer.iter().enumerate();
    entries
        .flat_map(|(layer, f)| f.modules.iter().map(move |entry| (layer, entry)))
        .filter(|(_, entry)| is_below(&path, entry))
        .max_by_key(|(_, entry)| entry.len())
        .map(|(layer, _)| layer)
}

/// Finds references to higher layers, cycles, and entries of the list that match no module.
fn judge(crate_: &Crate, files: &BTreeMap<Module, File>, errors: &mut Vec<String>) {
    for entry in crate_.layer.iter().flat_map(|layer| &layer.modules) {
        if !files
            .keys()
            .any(|m| m.join("::") == *entry || m.join("::").starts_with(&format!("{entry}::")))
        {
            errors.push(format!(
                "xtask/layers.toml: {}: there is no module {entry}",
                crate_.name
            ));
        }
    }
    for (module, file) in files {
        let Some(layer) = layer_of(crate_, module) else {
            errors.push(format!("{}: not in xtask/layers.toml", file.path));
            continue;
        };
        for (other, line) in &file.names {
            if let Some(above) = layer_of(crate_, other).filter(|above| *above > layer) {
                errors.push(format!(
                    "{}:{line}: up: {} ({}) names {} ({})",
                    file.path,
                    module.join("::"),
                    crate_.name_of(layer),
                    other.join("::"),
                    crate_.name_of(above),
                ));
            }
        }
    }
    for cycle in cycles(files) {
        let cycle: Vec<String> = cycle.iter().map(|m| m.join("::")).collect();
        let inside = |whole: &String| cycle.iter().all(|module| is_below(module, whole));
        if crate_.whole.iter().any(inside) {
            continue;
        }
        errors.push(format!(
            "crates/{}: cycle: {}",
            crate_.name,
            cycle.join(" -> ")
        ));
    }
}

/// Returns the shortest cycle through each file that is part of a cycle. A cycle that several files share is returned once.
fn cycles(files: &BTreeMap<Module, File>) -> Vec<Vec<Module>> {
    let mut found: Vec<Vec<Module>> = Vec::new();
    let mut seen = BTreeSet::new();
    for start in files.keys() {
        let Some(cycle) = shortest_cycle(files, start) else {
            continue;
        };
        let mut members = cycle.clone();
        members.sort();
        members.dedup();
        if seen.insert(members) {
            found.push(cycle);
        }
    }
    found
}

/// Returns the shortest cycle through a file, in which each file names the next one.
fn shortest_cycle(files: &BTreeMap<Module, File>, start: &Module) -> Option<Vec<Module>> {
    let mut ways: Vec<Vec<Module>> = vec![vec![start.clone()]];
    let mut seen = BTreeSet::new();
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in &ways {
            let names = way.last().and_then(|last| files.get(last));
            for next in names.iter().flat_map(|file| file.names.keys()) {
                let way = [way.as_slice(), std::slice::from_ref(next)].concat();
                if next == start {
                    return Some(way);
                }
                if seen.insert(next) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

/// Writes the table of one crate, its highest layer first.
fn describe(crate_: &Crate, files: &BTreeMap<Module, File>, table: &mut String) -> Result {
    writeln!(
        table,
        "\n### `crates/{}`\n\n| layer | file | what |\n| --- | --- | --- |",
        crate_.name
    )?;
    for (layer, Layer { name, .. }) in crate_.layer.iter().enumerate().rev() {
        let mut name = name.as_str();
        for (module, file) in files {
            if layer_of(crate_, module) == Some(layer) {
                let path = file
                    .path
                    .split_once("/src/")
                    .map_or(file.path.as_str(), |(_, p)| p);
                writeln!(table, "| {name} | `{path}` | {} |", file.summary)?;
                name = "";
            }
        }
    }
    for (layer, Layer { name, .. }) in crate_.layer.iter().enumerate().rev() {
        let lines: usize = files
            .iter()
            .filter(|(module, _)| layer_of(crate_, module) == Some(layer))
            .map(|(_, file)| file.lines)
            .sum();
        println!("{:>7} lines  {} {layer}: {name}", lines, crate_.name);
    }
    Ok(())
}

/// Writes the table into ARCHITECTURE.md. With `check`, fails if it differs.
fn write_table(table: &str, check: bool) -> Result {
    let path = sh::root().join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path)?;
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        return Err("ARCHITECTURE.md lacks the markers around the table of layers".into());
    };
    let new = format!("{}{table}\n{}", &text[..begin + BEGIN.len()], &text[end..]);
    if new == text {
        return Ok(());
    }
    if check {
        return Err(
            "the table of files in ARCHITECTURE.md is not up to date: run `cargo xtask layers`"
                .into(),
        );
    }
    Ok(fs::write(path, new)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the modules that a file `a::b` with this text names.
    fn names(text: &str) -> Vec<String> {
        let module = vec!["a".to_owned(), "b".to_owned()];
        let file = read_file(&module, text).unwrap();
        file.names.keys().map(|m| m.join("::")).collect()
    }

    #[test]
    fn paths_of_every_form_are_found() {
        assert_eq!(
            names("use crate::x::{y::Z, w, self};"),
            ["x", "x::w", "x::y::Z"]
        );
        assert_eq!(
            names("use super::c; fn f() { super::super::d::g(); }"),
            ["a::c", "d::g"]
        );
        assert_eq!(
            names("mod child; pub use child::Thing;"),
            ["a::b::child::Thing"]
        );
        assert_eq!(names("entry! { fn f() { crate::x::y() } }"), ["x::y"]);
        assert_eq!(names("use std::io; fn f(crate_: u8) {}"), [""; 0]);
    }

    #[test]
    fn paths_in_tests_are_ignored() {
        assert_eq!(names("#[cfg(test)] mod tests { use crate::x; }"), [""; 0]);
        assert_eq!(
            names("#[cfg(all(test, unix))] use crate::x; use crate::y;"),
            ["y"]
        );
        assert_eq!(names("#[cfg(not(test))] use crate::x;"), ["x"]);
    }

    fn file(names: &[&str]) -> File {
        File {
            names: names.iter().map(|n| (vec![(*n).to_owned()], 1)).collect(),
            ..File::default()
        }
    }

    /// Returns the errors for these files, where `low` is the lower layer.
    fn judged(files: &[(&str, &[&str])]) -> Vec<String> {
        let files = files
            .iter()
            .map(|(m, names)| (vec![(*m).to_owned()], file(names)))
            .collect();
        let layer = |name: &str, modules: &[&str]| Layer {
            name: name.into(),
            modules: modules.iter().map(|m| (*m).to_owned()).collect(),
        };
        let crate_ = Crate {
            name: "c".into(),
            whole: vec!["w".into()],
            layer: vec![layer("lower", &["low", "low2"]), layer("upper", &["high"])],
        };
        let mut errors = Vec::new();
        judge(&crate_, &files, &mut errors);
        errors
    }

    #[test]
    fn paths_down_are_allowed_and_paths_up_are_not() {
        assert_eq!(
            judged(&[("low", &[]), ("low2", &["low"]), ("high", &["low"])]),
            [""; 0]
        );
        let up = judged(&[("low", &["high"]), ("low2", &[]), ("high", &[])]);
        assert_eq!(up, [":1: up: low (lower) names high (upper)"]);
    }

    #[test]
    fn cycles_in_one_layer_are_reported_once() {
        let errors = judged(&[("low", &["low2"]), ("low2", &["low"]), ("high", &[])]);
        assert_eq!(errors, ["crates/c: cycle: low -> low2 -> low"]);
    }

    #[test]
    fn cycles_inside_a_whole_module_are_ignored() {
        let cycle = |a: &str| {
            let b = format!("{a}::b");
            let names = |other: &str| {
                let path = other.split("::").map(str::to_owned).collect();
                File {
                    names: BTreeMap::from([(path, 1)]),
                    ..File::default()
                }
            };
            let module = |path: &str| path.split("::").map(str::to_owned).collect::<Module>();
            let files = BTreeMap::from([(module(a), names(&b)), (module(&b), names(a))]);
            let mut errors = Vec::new();
            let crate_ = Crate {
                name: "c".into(),
                whole: vec!["w".into()],
                layer: vec![Layer {
                    name: "lower".into(),
                    modules: vec![a.into()],
                }],
            };
            judge(&crate_, &files, &mut errors);
            errors.len()
        };
        assert_eq!((cycle("w"), cycle("x")), (0, 1));
    }

    #[test]
    fn a_file_without_a_layer_is_an_error() {
        let errors = judged(&[("low", &[]), ("low2", &[]), ("high", &[]), ("new", &[])]);
        assert_eq!(errors, [": not in xtask/layers.toml"]);
    }
}
