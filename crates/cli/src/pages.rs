//! Man pages: inserts the generated parts into the sources in `docs/man` (`docs/man/README.md`).

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use anywarp_core::env::VARIABLES;

use crate::cli::Cli;

/// Generates the pages of the source tree `tree`: the file names below `man/`, and the contents.
pub(crate) fn all(tree: &Path) -> io::Result<Vec<(String, String)>> {
    let mut sources = BTreeMap::new();
    for entry in fs::read_dir(tree.join("docs/man"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(|c: char| c.is_ascii_digit()) {
            sources.insert(name.into_owned(), fs::read_to_string(&path)?);
        }
    }
    let maker = Maker {
        include: &tree.join("crates/abi/include"),
        examples: &tree.join("docs/man/examples"),
        functions: functions(&sources),
    };
    let mut pages = Vec::new();
    for (name, source) in &sources {
        let page = maker.page(name, source);
        let page = page.map_err(|why| io::Error::other(format!("docs/man/{name}: {why}")))?;
        pages.push((format!("man{}/{name}", section(name)), page));
    }
    for (function, about) in &maker.functions {
        let name = format!("{function}.3");
        if !sources.contains_key(&name) {
            pages.push((format!("man3/{name}"), format!(".so man3/{}\n", about.page)));
        }
    }
    Ok(pages)
}

/// A function in the NAME section of a page.
struct Function {
    page: String,
    purpose: String,
}

/// Returns the functions that the pages of section 3 name in `NAME[, NAME...] \- PURPOSE`.
fn functions(sources: &BTreeMap<String, String>) -> BTreeMap<String, Function> {
    let mut functions = BTreeMap::new();
    for (page, source) in sources.iter().filter(|(page, _)| page.ends_with(".3")) {
        let line = source.lines().skip_while(|l| *l != ".SH NAME").nth(1);
        let Some((names, purpose)) = line.and_then(|l| l.split_once(" \\- ")) else {
            continue;
        };
        for name in names.split(", ") {
            let function = Function {
                page: page.clone(),
                purpose: purpose.to_owned(),
            };
            functions.insert(name.to_owned(), function);
        }
    }
    functions
}

fn section(page: &str) -> &str {
    page.rsplit('.').next().unwrap_or_default()
}

/// Replaces the placeholders of the sources.
struct Maker<'a> {
    /// The folder with the C headers of this project.
    include: &'a Path,
    /// The folder with the programs of EXAMPLE sections.
    examples: &'a Path,
    functions: BTreeMap<String, Function>,
}

impl Maker<'_> {
    fn page(&self, name: &str, source: &str) -> io::Result<String> {
        let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
        let mut page = String::new();
        for line in source.lines() {
            let Some(placeholder) = line.strip_prefix(".@") else {
                page.push_str(&line.replace("@version@", env!("CARGO_PKG_VERSION")));
                page.push('\n');
                continue;
            };
            let words: Vec<&str> = placeholder.split_whitespace().collect();
            let generated = match *words {
                ["command"] => command(stem)?,
                ["subcommand", sub] => subcommand(stem, sub)?,
                ["environment"] => breakable(&variables().to_roff()),
                ["declare", header, ref names @ ..] => self.declare(header, names)?,
                ["functions", header] => self.list(header)?,
                ["example", program] => self.example(program)?,
                _ => return Err(io::Error::other(format!("cannot read `{line}`"))),
            };
            page.push_str(&generated);
        }
        if !page.contains(&format!("\n.TH {stem} {} ", section(name))) {
            return Err(io::Error::other("its .TH line does not name the file"));
        }
        Ok(page)
    }

    /// Returns a synopsis: the include line and the declarations of functions.
    fn declare(&self, header: &str, names: &[&str]) -> io::Result<String> {
        let text = self.header(header)?;
        let mut roff = Roff::new();
        roff.control("nf", []);
        roff.text([bold(format!("#include <{header}>"))]);
        for name in names {
            roff.control("sp", []);
            let declared = declarations(&text).into_iter().find(|(n, _)| n == name);
            let (_, lines) = declared
                .ok_or_else(|| io::Error::other(format!("{header} does not declare {name}")))?;
            for line in lines {
                roff.text([bold(line)]);
            }
        }
        roff.control("fi", []);
        Ok(roff.to_roff())
    }

    /// Returns the list of functions of a header. Each must have a page.
    fn list(&self, header: &str) -> io::Result<String> {
        let mut roff = Roff::new();
        for (name, _) in declarations(&self.header(header)?) {
            let function = self
                .functions
                .get(name)
                .ok_or_else(|| io::Error::other(format!("no page documents {name} of {header}")))?;
            roff.control("TP", []);
            roff.text([bold(format!("{name}(3)"))]);
            roff.text([roman(function.purpose.replace("\\-", "-"))]);
        }
        Ok(roff.to_roff())
    }

    /// Returns the text of a program, without the line that names its licence.
    fn example(&self, program: &str) -> io::Result<String> {
        let text = fs::read_to_string(self.examples.join(program))?;
        let mut roff = Roff::new();
        roff.control("nf", []);
        for line in text.lines().filter(|line| !line.contains("SPDX-")) {
            if line.is_empty() {
                roff.control("sp", []);
            } else {
                roff.text([roman(line.replace('\t', "    "))]);
            }
        }
        roff.control("fi", []);
        Ok(roff.to_roff())
    }

    /// Reads a header of this project: one of verbs, or one of the libraries based on verbs.
    fn header(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.include.join(name)).or_else(|error| {
            ["exs", "buffers"]
                .iter()
                .map(|of| self.include.join("../..").join(of).join("include"))
                .find_map(|include| fs::read_to_string(include.join(name)).ok())
                .ok_or(error)
        })
    }
}

/// Returns the functions that a header declares at the beginning of a line, with the lines of the declaration.
fn declarations(header: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut lines = header.lines();
    while let Some(line) = lines.next() {
        if line.starts_with([' ', '\t', '*', '/', '#', '}']) || line.contains('{') {
            continue;
        }
        let Some((before, _)) = line.split_once('(') else {
            continue;
        };
        let name = before.rsplit([' ', '*']).next().unwrap_or_default();
        let mut declaration = vec![line];
        while !declaration.last().is_some_and(|l| l.ends_with(");")) {
            match lines.next() {
                Some(line) => declaration.push(line.trim()),
                None => break,
            }
        }
        found.push((name, declaration));
    }
    found
}

/// Returns the sections NAME to SUBCOMMANDS of a page, `anywarp` or `anywarp-SUBCOMMAND`, from the command's help text.
fn command(page: &str) -> io::Result<String> {
    // The subcommand `help` has no page.
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    let command = match page.strip_prefix("anywarp-") {
        Some(sub) => root.find_subcommand(sub),
        None => Some(&root),
    };
    let command = command.ok_or_else(|| io::Error::other("there is no such subcommand"))?;
    let command = command.clone().display_name(page.to_owned());
    let man = Man::new(command.clone());
    let mut text = Vec::new();
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut text)?;
    }
    // A nested subcommand has a section in the page of its command, and no page of its own.
    let own_pages = command.get_name() == root.get_name();
    if own_pages && command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut text)?;
    }
    String::from_utf8(text).map_err(io::Error::other)
}

/// Returns the section of a nested subcommand: its description and its options.
fn subcommand(page: &str, sub: &str) -> io::Result<String> {
    let mut root = Cli::command();
    root.build();
    let of = page.strip_prefix("anywarp-");
    let command = of
        .and_then(|of| root.find_subcommand(of))
        .and_then(|command| command.find_subcommand(sub))
        .ok_or_else(|| io::Error::other(format!("there is no subcommand {sub}")))?;
    let man = Man::new(command.clone());
    let (mut about, mut options) = (Vec::new(), Vec::new());
    man.render_description_section(&mut about)?;
    man.render_options_section(&mut options)?;
    let text = |bytes| String::from_utf8(bytes).map_err(io::Error::other);
    let title = format!(".SH \"{} {sub}\"", page.replace('-', " ")).to_uppercase();
    Ok(text(about)?.replacen(".SH DESCRIPTION", &title, 1)
        + &text(options)?.replacen(".SH OPTIONS", ".SS Options", 1))
}

/// Allows a line to end after each comma of lists without spaces, which may be longer than a line.
fn breakable(roff: &str) -> String {
    let mut out = String::with_capacity(roff.len());
    let mut rest = roff.chars().peekable();
    while let Some(c) = rest.next() {
        out.push(c);
        if c == ',' && rest.peek().is_some_and(char::is_ascii_alphanumeric) {
            out.push_str("\\:");
        }
    }
    out
}

/// Returns the environment variables as a tagged list.
fn variables() -> Roff {
    let mut roff = Roff::new();
    // A line of a list without spaces cannot be adjusted to the right margin.
    roff.control("na", []);
    for variable in VARIABLES {
        roff.control("TP", []);
        roff.text([bold(variable.name), roman("="), italic(variable.value)]);
        roff.text([roman(variable.text)]);
    }
    roff.control("ad", []);
    roff
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> &'static Path {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
    }

    fn maker(functions: BTreeMap<String, Function>) -> Maker<'static> {
        let include = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../abi/include"));
        Maker {
            include,
            examples: include,
            functions,
        }
    }

    #[test]
    fn every_visible_subcommand_and_every_variable_is_in_a_page() {
        let pages: BTreeMap<String, String> = all(tree()).unwrap().into_iter().collect();
        let mut root = Cli::command();
        root.build();
        for sub in root.get_subcommands().filter(|s| s.get_name() != "help") {
            let name = format!("man1/anywarp-{}.1", sub.get_name());
            assert_eq!(pages.contains_key(&name), !sub.is_hide_set(), "{name}");
        }
        for name in ["man1/anywarp.1", "man7/anywarp.7"] {
            for variable in VARIABLES {
                assert!(pages[name].contains(variable.name), "{name}: {variable:?}");
            }
        }
        assert!(!pages["man1/anywarp.1"].contains("help(1)"));
        assert!(pages["man7/anywarp.7"].contains("loss=0.01,\\:dup=0.01,"));
        for (name, page) in &pages {
            // A page may document several functions, and the pages of the others refer to it.
            let named = page.contains(".SH NAME") || page.starts_with(".so man3/");
            assert!(named && !page.contains("@version@"), "{name}");
        }
    }

    #[test]
    fn the_pages_list_the_exit_statuses() {
        let pages: BTreeMap<String, String> = all(tree()).unwrap().into_iter().collect();
        for (page, statuses) in [
            ("bench", &[0, 1, 2, 130][..]),
            ("capture", &[1, 2, 125, 126, 127]),
            ("doctor", &[0, 1, 2, 125, 127]),
            ("run", &[2, 125, 126, 127]),
            ("stat", &[0, 1, 2]),
        ] {
            let text = &pages[&format!("man1/anywarp-{page}.1")];
            for status in statuses {
                let entry = format!(".TP\n\\fB{status}\\fR\n");
                assert!(text.contains(&entry), "{page}: {status}");
            }
        }
    }

    #[test]
    fn a_header_lists_all_its_functions_and_one_without_a_page_is_an_error() {
        let list = |functions| maker(functions).list("infiniband/anywarpdv.h");
        assert!(list(BTreeMap::new()).is_err());

        let pages: BTreeMap<_, _> = all(tree()).unwrap().into_iter().collect();
        let overview = &pages["man7/anywarpdv.7"];
        assert!(overview.contains("\\fBanywarpdv_poll_records(3)\\fR\ndequeue records"));
        let header = maker(BTreeMap::new())
            .header("infiniband/anywarpdv.h")
            .unwrap();
        let declared = declarations(&header).len();
        assert!(declared >= 10 && overview.matches("(3)\\fR").count() == declared);
    }

    #[test]
    fn a_page_may_document_several_functions() {
        let source = ".SH NAME\none, two \\- do it\n".to_owned();
        let functions = functions(&BTreeMap::from([("one.3".to_owned(), source)]));
        assert_eq!(functions["two"].page, "one.3");
        assert_eq!(functions["two"].purpose, "do it");
    }

    #[test]
    fn a_source_that_is_not_understood_is_an_error() {
        let page = |source: &str| maker(BTreeMap::new()).page("x.3", source);
        assert!(page("\n.TH x 3 \"\"\n").is_ok());
        assert!(page("\n.TH x 7 \"\"\n").is_err());
        assert!(page("\n.TH x 3 \"\"\n.@enviroment\n").is_err());
        assert!(page("\n.TH x 3 \"\"\n.@declare infiniband/anywarpdv.h f\n").is_err());
    }

    #[test]
    fn a_declaration_may_have_several_lines() {
        let header = "/* f(x); */\nint *f(int a,\n      int b);\n#define G(x)\nvoid g(void);\n";
        let expected = [
            ("f", vec!["int *f(int a,", "int b);"]),
            ("g", vec!["void g(void);"]),
        ];
        assert_eq!(declarations(header), expected);
    }
}
