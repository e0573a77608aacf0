//! `crates/abi/link/symbols.txt`: which symbol is exported by which library under which version.

use crate::{Result, sh};
use std::collections::BTreeSet;

pub const IBVERBS: &str = "libibverbs.so.1";
pub const RDMACM: &str = "librdmacm.so.1";

/// One exported symbol.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symbol {
    pub library: String,
    pub node: String,
    pub name: String,
    /// `None`: the default version. Otherwise an old one, and how it fails.
    pub legacy: Option<Legacy>,
}

/// How the old version of a symbol fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Legacy {
    /// Returns a null pointer.
    Null,
    /// Returns an errno value.
    Code,
    /// Returns nothing.
    Void,
}

/// All exported symbols, in the file's order.
pub fn read() -> Result<Vec<Symbol>> {
    let path = sh::root().join("crates/abi/link/symbols.txt");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let symbols = parse(&text)?;
    let mut seen = BTreeSet::new();
    for s in &symbols {
        if !seen.insert((&s.name, &s.node)) {
            return Err(format!("symbols.txt names {}@{} twice", s.name, s.node).into());
        }
    }
    Ok(symbols)
}

fn parse(text: &str) -> Result<Vec<Symbol>> {
    let mut symbols = Vec::new();
    let mut section = None;
    for (number, line) in (1..).zip(text.lines()) {
        let bad = || format!("symbols.txt:{number}: cannot read `{line}`");
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        if let Some(header) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            let words: Vec<&str> = header.split_whitespace().collect();
            section = match *words {
                [library, node] => Some((library, node, false)),
                [library, node, "legacy"] => Some((library, node, true)),
                _ => return Err(bad().into()),
            };
            continue;
        }
        let (library, node, old) = section.ok_or_else(bad)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, legacy) = match (words.as_slice(), old) {
            (&[name], false) => (name, None),
            (&[name, "null"], true) => (name, Some(Legacy::Null)),
            (&[name, "code"], true) => (name, Some(Legacy::Code)),
            (&[name, "void"], true) => (name, Some(Legacy::Void)),
            _ => return Err(bad().into()),
        };
        symbols.push(Symbol {
            library: library.to_owned(),
            node: node.to_owned(),
            name: name.to_owned(),
            legacy,
        });
    }
    Ok(symbols)
}

/// The version nodes of `library`, in the file's order.
pub fn nodes<'a>(symbols: &'a [Symbol], library: &str) -> Vec<&'a str> {
    let mut nodes = Vec::new();
    for s in symbols.iter().filter(|s| s.library == library) {
        if !nodes.contains(&s.node.as_str()) {
            nodes.push(s.node.as_str());
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_gives_library_node_and_age() {
        let text = "# all\n[a.so A_1]\nf # why\n\n[a.so A_0 legacy]\nf null\n";
        let symbols = parse(text).unwrap();
        let [new, old] = symbols.as_slice() else {
            panic!("{symbols:?}")
        };
        assert_eq!(new.node, "A_1");
        assert_eq!(new.legacy, None);
        assert_eq!(old.node, "A_0");
        assert_eq!(old.legacy, Some(Legacy::Null));
        assert_eq!(nodes(&symbols, "a.so"), ["A_1", "A_0"]);
    }

    #[test]
    fn an_old_symbol_says_how_it_fails() {
        assert!(parse("[a.so A_0 legacy]\nf\n").is_err());
        assert!(parse("[a.so A_0]\nf null\n").is_err());
        assert!(parse("f\n").is_err());
    }
}
