//! `cargo xtask matrix`: compares the exported symbols with those of the distribution, and writes `crates/abi/MATRIX.md`.

use crate::load;
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM};
use object::read::elf::{FileHeader, Sym};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use xtask::symbols::{IBVERBS, RDMACM, Symbol, Version};
use xtask::{Result, sh, symbols};

/// An exported symbol: name, version node, and whether that is the version that programs link with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Export {
    name: String,
    node: String,
    default: bool,
}

/// Compares the symbols, writes the table, and fails if there is a difference.
pub(crate) fn run() -> Result {
    let symbols = symbols::read()?;
    let refused = refused()?;
    let mut table = String::from(
        "# Exported symbols\n\n\
         Written by `cargo xtask matrix`, which compares the built libraries with the distribution's.\n\
         *served*: has an implementation. *refused*: exported so that programs start, and fails with\n\
         `ENOSYS` or `EOPNOTSUPP`. *old*: a version from before 2007, which fails.\n",
    );
    let mut differences = Vec::new();
    for library in [IBVERBS, RDMACM] {
        let ours = exports(&sh::dist().join("lib/anywarp").join(library))?;
        let theirs = exports(&distribution(library)?)?;
        differences.extend(compare(library, &ours, &theirs));
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

/// Returns the symbols that `ours` lacks or has with another version, and those that only `ours` has in a version node of both libraries.
fn compare(library: &str, ours: &BTreeSet<Export>, theirs: &BTreeSet<Export>) -> Vec<String> {
    let mut differences = Vec::new();
    // Which version of a private name is the default matters only to the linker of rdma-core.
    let key = |e: &Export| {
        (
            e.name.clone(),
            e.node.clone(),
            e.default || private(&e.node),
        )
    };
    let mine: BTreeSet<_> = ours.iter().map(key).collect();
    for e in theirs.iter().filter(|e| !mine.contains(&key(e))) {
        differences.push(format!("{library}: missing {}", show(e)));
    }
    // Other releases of rdma-core have other nodes, and more names in the private ones. Additional symbols of this library
    // have a separate node. The nodes that both libraries have must be equal.
    let known: BTreeSet<&str> = theirs.iter().map(|e| e.node.as_str()).collect();
    let shared = |e: &&Export| known.contains(e.node.as_str()) && !private(&e.node);
    for e in ours.difference(theirs).filter(shared) {
        differences.push(format!("{library}: not in the distribution's: {}", show(e)));
    }
    differences
}

/// Returns whether only libraries of rdma-core and of vendors are linked with the node.
fn private(node: &str) -> bool {
    node.starts_with("IBVERBS_PRIVATE_")
}

/// Writes the table of one library.
fn section(table: &mut String, library: &str, symbols: &[Symbol], refused: &BTreeSet<String>) {
    let mut count = BTreeMap::<&str, usize>::new();
    let mut rows = String::new();
    for s in symbols.iter().filter(|s| s.library == library) {
        let state = match (s.version, refused.contains(&s.name)) {
            (Version::Same | Version::Data(false), _) => continue,
            (Version::Legacy(_), _) => "old",
            (Version::Default, true) => "refused",
            (Version::Default | Version::Void | Version::Data(true), _) => "served",
        };
        *count.entry(state).or_default() += 1;
        let also = symbols.iter().filter(|o| {
            o.name == s.name && matches!(o.version, Version::Same | Version::Data(false))
        });
        let mut version = s.node.clone();
        for o in also.filter(|_| private(&s.node)) {
            let number = o.node.rsplit('_').next().unwrap_or_default();
            let _ = write!(version, ", {number}");
        }
        let _ = writeln!(rows, "| `{}` | {version} | {state} |", s.name);
    }
    let count: Vec<String> = count.iter().map(|(s, n)| format!("{n} {s}")).collect();
    println!("{library}: {}", count.join(", "));
    let _ = write!(
        table,
        "\n## {library}\n\n{}.\n\n| symbol | version | state |\n|---|---|---|\n{rows}",
        count.join(", ")
    );
}

/// Returns the names in `refuse!` lists.
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

/// Returns the path of the distribution's `library`.
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

/// Returns the exports of `library`, except the nodes themselves and anywarp's private node.
fn exports(library: &Path) -> Result<BTreeSet<Export>> {
    let data = fs::read(library)?;
    let exports = parse(&data).map_err(|e| format!("{}: {e}", library.display()))?;
    if exports.is_empty() {
        return Err(format!("{} exports nothing", library.display()).into());
    }
    Ok(exports)
}

/// Parses the defined symbols in the dynamic symbol table of an ELF file.
fn parse(data: &[u8]) -> object::Result<BTreeSet<Export>> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?.unwrap_or_default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut exports = BTreeSet::new();
    for (index, symbol) in symbols.enumerate() {
        // Version nodes are absolute symbols.
        if symbol.is_undefined(endian) || symbol.is_absolute(endian) || symbol.is_local() {
            continue;
        }
        let version = versions.version_index(endian, index);
        let node = versions.version(version)?;
        let node = node.map_or_else(|| "Base".to_owned(), |node| text(node.name()));
        if !node.starts_with("ANYWARP_") {
            exports.insert(Export {
                name: text(symbols.symbol_name(endian, symbol)?),
                node,
                default: !version.is_hidden(),
            });
        }
    }
    Ok(exports)
}

fn show(e: &Export) -> String {
    let at = if e.default { "@@" } else { "@" };
    format!("{}{at}{}", e.name, e.node)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A missing name and one in the wrong node are reported. Nodes of other releases and additional private names are not.
    #[test]
    fn libraries_are_compared_node_by_node() {
        let set = |exports: &[(&str, &str, bool)]| -> BTreeSet<Export> {
            let of = |&(name, node, default): &(&str, &str, bool)| Export {
                name: name.to_owned(),
                node: node.to_owned(),
                default,
            };
            exports.iter().map(of).collect()
        };
        let private = "IBVERBS_PRIVATE_34";
        let theirs = set(&[("a", "V_1", true), ("b", "V_1", true), ("p", private, true)]);
        let ours = set(&[
            ("a", "V_1", true),
            ("c", "V_1", true),
            ("d", "V_2", true),
            ("p", private, false),
            ("q", private, true),
        ]);
        let differences = compare("l", &ours, &theirs);
        let expected = [
            "l: missing b@@V_1".to_owned(),
            "l: not in the distribution's: c@@V_1".to_owned(),
        ];
        assert_eq!(differences, expected);
    }

    #[test]
    fn a_library_exports_old_and_default_versions_but_no_nodes() {
        let dir = std::env::temp_dir().join(format!("anywarp-matrix-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (source, map, library) = (dir.join("f.c"), dir.join("f.map"), dir.join("f.so"));
        let code = "extern char **environ;\n\
             int f_new(void) { return environ != 0; }\nint f_old(void) { return 0; }\nint own(void) { return 0; }\n\
             __asm__(\".symver f_new, f@@V_1.1\\n.symver f_old, f@V_1.0\");\n";
        fs::write(&source, code).unwrap();
        let nodes =
            "V_1.0 { local: f_old; f_new; };\nV_1.1 { } V_1.0;\nANYWARP_0 { global: own; };\n";
        fs::write(&map, nodes).unwrap();
        let mut cc = sh::cc();
        cc.args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .arg(format!("-Wl,--version-script={}", map.display()));
        sh::run(&mut cc).unwrap();

        let exports = exports(&library);
        fs::remove_dir_all(&dir).unwrap();
        let shown: Vec<String> = exports.unwrap().iter().map(show).collect();
        assert_eq!(shown, ["f@V_1.0", "f@@V_1.1"]);
    }
}
