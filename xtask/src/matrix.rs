//! `cargo xtask matrix`: our symbols against the distribution's, and `crates/abi/MATRIX.md`.

use crate::load;
use object::Endianness;
use object::elf::{FileHeader64, SHT_DYNSYM};
use object::read::elf::{FileHeader, Sym};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use xtask::symbols::{IBVERBS, RDMACM, Symbol};
use xtask::{Result, sh, symbols};

/// An exported symbol: name, version node, and whether that is the version that programs link with.
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
    let data = fs::read(library)?;
    let exports = parse(&data).map_err(|e| format!("{}: {e}", library.display()))?;
    if exports.is_empty() {
        return Err(format!("{} exports nothing", library.display()).into());
    }
    Ok(exports)
}

/// The defined symbols of the dynamic symbol table of an ELF file.
fn parse(data: &[u8]) -> object::Result<BTreeSet<Export>> {
    let header = FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let symbols = sections.symbols(endian, data, SHT_DYNSYM)?;
    let versions = sections.versions(endian, data)?.unwrap_or_default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut exports = BTreeSet::new();
    for (index, symbol) in symbols.enumerate() {
        // The nodes are absolute symbols.
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
