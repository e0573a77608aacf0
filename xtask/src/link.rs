//! How the two libraries are linked.
//!
//! ```text
//!   program ──> libibverbs.so.1   everything: entry points, engine, all state
//!      │            ▲  anywarp_rdma_connect@@ANYWARP_…, …
//!      └──────> librdmacm.so.1    68 jumps, no state
//! ```
//!
//! rustc cannot give symbols of a `cdylib` version nodes, so the Rust side is a static library and
//! the C compiler links it with a version script.
//!
//! A process must have one engine, so only one of the two can hold it. The other one is made of
//! jumps: real symbols in both, so that `dlsym`, `dlvsym`, `nm` and the linker find in each what
//! they find in the distribution's, and a program linked against ours also runs with theirs. The
//! jumps go to names of our own under a node that carries our version: a `librdmacm.so.1` that
//! meets another `libibverbs.so.1` does not load, instead of working on objects it does not know.

use crate::symbols::{IBVERBS, Legacy, RDMACM, Symbol, Version, nodes};
use crate::{Result, glibc, sh};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The node of what librdmacm takes from libibverbs.
const PRIVATE_NODE: &str = concat!("ANYWARP_", env!("CARGO_PKG_VERSION"));

/// Functions of the C library that both libraries have too, and the names of libibverbs's own. A program that is linked with
/// librdmacm alone has libibverbs behind the C library.
///
/// Programs name them with the version of the C library, so they must have that version here. It is an old one, which the
/// linker does not take: a program that is linked with this library still has them from the C library.
const OF_LIBC: [(&str, &str); 2] = [("bind", "anywarp_bind"), ("listen", "anywarp_listen")];

/// The version of those functions.
fn libc_node() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "GLIBC_2.2.5",
        _ => "GLIBC_2.17",
    }
}

/// Jumps to our functions, under names for their versions.
fn of_libc() -> impl Iterator<Item = (String, String)> {
    let jump = |(name, ours): (&str, &str)| (format!("anywarp_libc_{name}"), ours.to_owned());
    OF_LIBC.into_iter().map(jump)
}

/// Assembler text that gives those jumps their versions.
fn libc_versions() -> String {
    let node = libc_node();
    let line = |(name, _)| format!(".symver anywarp_libc_{name}, {name}@{node}\n");
    OF_LIBC.map(line).concat()
}

/// Under which name libibverbs hands a symbol of librdmacm over.
fn inner(name: &str) -> String {
    format!("anywarp_{name}")
}

/// Links `archive` into the two libraries, in `out`; intermediate files go to `work`.
///
/// With `sanitizer`, what is linked in for it; the program brings its runtime, and reports need line numbers.
pub fn run(
    symbols: &[Symbol],
    archive: &Path,
    work: &Path,
    out: &Path,
    sanitizer: Option<&[String]>,
) -> Result {
    fs::create_dir_all(work)?;
    fs::create_dir_all(out)?;
    let cm: Vec<&Symbol> = symbols.iter().filter(|s| s.library == RDMACM).collect();

    let map = work.join("libibverbs.map");
    fs::write(&map, ibverbs_map(symbols, &cm))?;
    let versions = work.join("versions.s");
    fs::write(&versions, other_versions(symbols)?)?;
    let mut inner_names = String::new();
    for s in &cm {
        let _ = writeln!(inner_names, "-Wl,--defsym={}={}", inner(&s.name), s.name);
    }
    let aliases = work.join("inner-names");
    fs::write(&aliases, inner_names)?;
    let mut cc = sh::cc();
    shared(&mut cc, IBVERBS, &map);
    if sanitizer.is_none() {
        cc.args(["-Wl,--no-undefined", "-Wl,--strip-debug"]);
        cc.args(glibc::arguments(work, glibc::Into::Library)?);
    }
    cc.arg(format!("@{}", aliases.display()))
        .arg("-Wl,--whole-archive")
        .arg(archive)
        .arg("-Wl,--no-whole-archive")
        .arg(&versions)
        .args(sanitizer.unwrap_or_default())
        .args(["-Wl,--as-needed", "-lgcc_s", "-lm", "-lc"])
        .arg("-o")
        .arg(out.join(IBVERBS));
    sh::run(&mut cc)?;

    let map = work.join("librdmacm.map");
    let mut script = version_script(symbols, RDMACM);
    let _ = writeln!(script, "{} {{\n}};", libc_node());
    fs::write(&map, script)?;
    let jumps = work.join("librdmacm.s");
    let targets = cm.iter().map(|s| (s.name.clone(), inner(&s.name)));
    let mut text = trampolines(targets.chain(of_libc()))?;
    text.push_str(&libc_versions());
    fs::write(&jumps, text)?;
    let mut cc = sh::cc();
    shared(&mut cc, RDMACM, &map);
    cc.args(["-Wl,--no-undefined", "-Wl,--strip-debug"])
        .arg("-nostartfiles")
        .arg(&jumps)
        .arg(out.join(IBVERBS))
        .arg("-o")
        .arg(out.join(RDMACM));
    sh::run(&mut cc)?;

    for (link, library) in [("libibverbs.so", IBVERBS), ("librdmacm.so", RDMACM)] {
        std::os::unix::fs::symlink(library, out.join(link))?;
    }
    Ok(())
}

/// Options for a library with `soname` that exports what `map` names.
fn shared(cc: &mut std::process::Command, soname: &str, map: &Path) {
    cc.args(["-shared", "-fPIC"])
        .arg(format!("-Wl,-soname,{soname}"))
        .arg(format!("-Wl,--version-script={}", map.display()))
        // A name in the map that nothing defines is an error.
        .arg("-Wl,--no-undefined-version")
        .arg("-Wl,--gc-sections")
        // Our calls of our own functions stay ours, whatever else is loaded.
        .arg("-Wl,-Bsymbolic-functions")
        // The engine's threads run our code: dlclose must not take it away.
        .arg("-Wl,-z,nodelete")
        .arg("-Wl,-z,now")
        .arg("-Wl,-z,relro")
        .arg("-Wl,-z,noexecstack")
        // Each library finds the other beside it, also when only one was named by path.
        .arg("-Wl,--enable-new-dtags,-rpath,$ORIGIN");
}

/// The version script of libibverbs: its own nodes, and the private one for librdmacm.
fn ibverbs_map(symbols: &[Symbol], cm: &[&Symbol]) -> String {
    let mut map = version_script(symbols, IBVERBS);
    let _ = writeln!(map, "{PRIVATE_NODE} {{\n    global:");
    for s in cm {
        let _ = writeln!(map, "        {};", inner(&s.name));
    }
    for (_, ours) in OF_LIBC {
        let _ = writeln!(map, "        {ours};");
    }
    map.push_str("};\n");
    let _ = writeln!(map, "{} {{\n}};", libc_node());
    map
}

/// One node after another, the newest first; all that is in none of them is hidden.
///
/// A name that has an old version stands in two nodes. The linker gives the function of that name
/// to the first of them, which must be the newer one, and the old version to the node that its
/// `.symver` gives; names of which all versions but one are the same function stand only in the node of the
/// default version. No node is "on top of" another: that is a note to readers which would force the
/// other order, and the loader does not look at it.
fn version_script(symbols: &[Symbol], library: &str) -> String {
    let mut map = String::new();
    let nodes = nodes(symbols, library);
    let oldest = nodes.first().copied().unwrap_or_default();
    for node in nodes.into_iter().rev() {
        let given = symbols.iter().filter(|s| {
            let version = matches!(s.version, Version::Default | Version::Legacy(_));
            s.library == library && s.node == node && version
        });
        let names: String = given.map(|s| format!("        {};\n", s.name)).collect();
        // A node may be without names, but not the keyword.
        let global = if names.is_empty() {
            ""
        } else {
            "    global:\n"
        };
        let _ = write!(map, "{node} {{\n{global}{names}");
        if node == oldest {
            map.push_str("    local:\n        *;\n");
        }
        map.push_str("};\n");
    }
    map
}

/// The versions of symbols that are not the function of that name: jumps, and data.
fn other_versions(symbols: &[Symbol]) -> Result<String> {
    let jumps = symbols.iter().filter_map(|s| {
        let target = match s.version {
            Version::Default | Version::Data(_) => return None,
            Version::Same => &s.name,
            Version::Void | Version::Legacy(Legacy::Void) => "anywarp_legacy_void",
            Version::Legacy(Legacy::Null) => "anywarp_legacy_null",
            Version::Legacy(Legacy::Code) => "anywarp_legacy_code",
        };
        Some((local_name(s), target.to_owned()))
    });
    let mut text = trampolines(jumps.chain(of_libc()))?;
    text.push_str(&libc_versions());
    for s in symbols {
        let at = match s.version {
            Version::Default => continue,
            Version::Void | Version::Data(true) => "@@",
            Version::Same | Version::Data(false) | Version::Legacy(_) => "@",
        };
        let local = local_name(s);
        if let Version::Data(_) = s.version {
            let _ = writeln!(
                text,
                ".data\n.globl {local}\n.type {local}, %object\n{local}:\n.byte 0\n.size {local}, 1"
            );
        }
        let _ = writeln!(text, ".symver {local}, {}{at}{}", s.name, s.node);
    }
    Ok(text)
}

/// What a version of a symbol is called where it is defined.
fn local_name(s: &Symbol) -> String {
    format!("anywarp_{}_{}", s.name, s.node.replace('.', "_"))
}

/// Assembler text that defines each first name as a jump to the second.
fn trampolines(jumps: impl Iterator<Item = (String, String)>) -> Result<String> {
    let mut text = String::from(".text\n");
    for (name, target) in jumps {
        let jump = match std::env::consts::ARCH {
            "x86_64" => format!("endbr64\njmp *{target}@GOTPCREL(%rip)"),
            "aarch64" => format!(
                "hint #34\nadrp x16, :got:{target}\nldr x16, [x16, :got_lo12:{target}]\nbr x16"
            ),
            other => return Err(format!("no trampolines for {other}").into()),
        };
        let _ = writeln!(
            text,
            ".globl {name}\n.type {name}, %function\n.p2align 4\n{name}:\n.cfi_startproc\n{jump}\n.cfi_endproc\n.size {name}, . - {name}"
        );
    }
    text.push_str(".section .note.GNU-stack, \"\", %progbits\n.text\n");
    Ok(text)
}
