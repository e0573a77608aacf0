//! Parses `crates/abi/link/symbols.txt`, which lists the exported symbols with their library and version.

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
    pub version: Version,
}

/// The definition of a symbol in its version node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// The function of this name, as the default version, which programs link with.
    Default,
    /// The same function as the default version.
    Same,
    /// The default version, which is a function that does nothing.
    Void,
    /// A data symbol of one byte with the value 0. The flag tells whether this is the default version.
    Data(bool),
    /// An old version that only fails.
    Legacy(Legacy),
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

/// Reads all exported symbols in the order of the file.
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

/// The kind of names in a section.
enum Section {
    Default,
    Legacy,
    /// Names of a private interface. They are in the version nodes with these numbers.
    Private(Vec<u32>),
}

/// The node that has the default version of a private name, if the name is in that node.
const USUAL_PRIVATE: u32 = 34;

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
            section = match *words.as_slice() {
                [library, node] => Some((library, node, Section::Default)),
                [library, node, "legacy"] => Some((library, node, Section::Legacy)),
                [library, node, "private", ref numbers @ ..] => {
                    let numbers: std::result::Result<Vec<u32>, _> =
                        numbers.iter().map(|n| n.parse()).collect();
                    Some((library, node, Section::Private(numbers?)))
                }
                _ => return Err(bad().into()),
            };
            continue;
        }
        let (library, node, section) = section.as_ref().ok_or_else(bad)?;
        let mut push = |node: &str, name: &str, version| {
            symbols.push(Symbol {
                library: (*library).to_owned(),
                node: node.to_owned(),
                name: name.to_owned(),
                version,
            });
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        match (section, &*words) {
            (Section::Default, &[name]) => push(node, name, Version::Default),
            (Section::Legacy, &[name, "null"]) => push(node, name, Version::Legacy(Legacy::Null)),
            (Section::Legacy, &[name, "code"]) => push(node, name, Version::Legacy(Legacy::Code)),
            (Section::Legacy, &[name, "void"]) => push(node, name, Version::Legacy(Legacy::Void)),
            (Section::Private(numbers), &[name, ref rest @ ..]) => {
                let (range, kind) = match *rest {
                    [] => ("-", None),
                    [kind @ ("void" | "data")] => ("-", Some(kind)),
                    [range] => (range, None),
                    _ => return Err(bad().into()),
                };
                let numbers: Vec<u32> = within(range, numbers).ok_or_else(bad)?;
                let usual = numbers.iter().copied().find(|n| *n == USUAL_PRIVATE);
                let default = usual.or_else(|| numbers.last().copied());
                for number in numbers {
                    let is_default = default == Some(number);
                    let version = match kind {
                        Some("void") => Version::Void,
                        Some(_) => Version::Data(is_default),
                        None if is_default => Version::Default,
                        None => Version::Same,
                    };
                    let name = name.replace('*', &number.to_string());
                    push(&format!("{node}_{number}"), &name, version);
                }
            }
            _ => return Err(bad().into()),
        }
    }
    Ok(symbols)
}

/// Returns the numbers in a range `FIRST-LAST`, where either may be omitted.
fn within(range: &str, numbers: &[u32]) -> Option<Vec<u32>> {
    let (first, last) = range.split_once('-')?;
    let end = |text: &str, open| {
        if text.is_empty() {
            Some(open)
        } else {
            text.parse().ok()
        }
    };
    let range = end(first, 0)?..=end(last, u32::MAX)?;
    let inside: Vec<u32> = numbers
        .iter()
        .copied()
        .filter(|n| range.contains(n))
        .collect();
    (!inside.is_empty()).then_some(inside)
}

/// Returns the version nodes of `library` in the order of the file.
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
        assert_eq!(new.version, Version::Default);
        assert_eq!(old.node, "A_0");
        assert_eq!(old.version, Version::Legacy(Legacy::Null));
        assert_eq!(nodes(&symbols, "a.so"), ["A_1", "A_0"]);
    }

    #[test]
    fn an_old_symbol_has_its_kind_of_failure() {
        assert!(parse("[a.so A_0 legacy]\nf\n").is_err());
        assert!(parse("[a.so A_0]\nf null\n").is_err());
        assert!(parse("f\n").is_err());
    }

    /// A private name is in all nodes of its range, and one of them has the default version.
    #[test]
    fn a_private_symbol_is_in_the_version_nodes_of_its_range() {
        let text = "[a.so P private 25 34 65]\nall\nold -25\nnew 65-\nhook_* void\nflag data\n";
        let symbols = parse(text).unwrap();
        let of = |name: &str| -> Vec<(&str, Version)> {
            let named = symbols.iter().filter(|s| s.name == name);
            named.map(|s| (s.node.as_str(), s.version)).collect()
        };
        let (same, default) = (Version::Same, Version::Default);
        assert_eq!(
            of("all"),
            [("P_25", same), ("P_34", default), ("P_65", same)]
        );
        assert_eq!(of("old"), [("P_25", default)]);
        assert_eq!(of("new"), [("P_65", default)]);
        assert_eq!(of("hook_34"), [("P_34", Version::Void)]);
        let data: Vec<Version> = of("flag").into_iter().map(|(_, v)| v).collect();
        assert_eq!(data, [false, true, false].map(Version::Data));
        assert!(parse("[a.so P private 25]\nf 34-\n").is_err());
        assert!(parse("[a.so P private 25]\nf x\n").is_err());
    }
}
