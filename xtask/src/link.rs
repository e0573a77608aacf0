//! Links the two libraries, libibverbs and librdmacm.
//!
//! ```text
//!   program ──> libibverbs.so.1   everything: entry points, engine, all state
//!      │            ▲  anywarp_rdma_connect@@ANYWARP_…, …
//!      └──────> librdmacm.so.1    only jumps, no state
//! ```
//!
//! rustc cannot assign version nodes to the symbols of a `cdylib`, so the Rust code is a static library, which the C compiler
//! links with a version script.
//!
//! A process must have one engine, so only one of the two libraries can contain it. The other one consists of jumps into the
//! first. Both define the same symbols as the distribution's libraries, so `dlsym`, `dlvsym`, `nm` and the linker find them,
//! and a program linked with these libraries also runs with those of the distribution. The targets of the jumps have private
//! names, with a version node that contains the version of anywarp. So a `librdmacm.so.1` does not load together with a
//! `libibverbs.so.1` of the distribution or of another version, whose objects differ.

use crate::symbols::{IBVERBS, Legacy, RDMACM, Symbol, Version, nodes};
use crate::{Result, glibc, sh};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The version node of the symbols that librdmacm imports from libibverbs.
const PRIVATE_NODE: &str = concat!("ANYWARP_", env!("CARGO_PKG_VERSION"));

/// Functions of the C library that both libraries define, each with the name of its implementation in libibverbs. librdmacm
/// needs them too, because in a program linked only with librdmacm the loader searches the C library before libibverbs.
///
/// Programs import these functions with a version of the C library, so both libraries define them with that version, but not
/// as the default version. The linker uses only default versions, so a program linked with these libraries still imports the
/// functions from the C library.
const OF_LIBC: [(&str, &str); 2] = [("bind", "anywarp_bind"), ("listen", "anywarp_listen")];

/// Returns the version node of the functions in [`OF_LIBC`].
fn libc_node() -> &'static str {
    match sh::arch().as_str() {
        "x86_64" => "GLIBC_2.2.5",
        _ => "GLIBC_2.17",
    }
}

/// Returns the jumps for the functions in [`OF_LIBC`]: a local name, to which [`libc_versions`] assigns the version, and the
/// target.
fn of_libc() -> impl Iterator<Item = (String, String)> {
    let jump = |(name, ours): (&str, &str)| (format!("anywarp_libc_{name}"), ours.to_owned());
    OF_LIBC.into_iter().map(jump)
}

/// Returns assembler text that assigns the versions to the jumps of [`of_libc`].
fn libc_versions() -> String {
    let node = libc_node();
    let line = |(name, _)| format!(".symver anywarp_libc_{name}, {name}@{node}\n");
    OF_LIBC.map(line).concat()
}

/// Returns the name under which libibverbs exports the target of a jump in librdmacm.
fn inner(name: &str) -> String {
    format!("anywarp_{name}")
}

/// Links `archive` into the two libraries in `out`. Intermediate files are written to `work`.
///
/// `sanitizer`: the arguments for a sanitizer. Undefined symbols are then allowed, because the program contains the
/// sanitizer's runtime. Debug information is kept, because the reports contain line numbers.
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

/// Adds the options for a library with `soname` that exports the names in `map`.
fn shared(cc: &mut std::process::Command, soname: &str, map: &Path) {
    cc.args(["-shared", "-fPIC"])
        .arg(format!("-Wl,-soname,{soname}"))
        .arg(format!("-Wl,--version-script={}", map.display()))
        // An undefined name in the map is an error.
        .arg("-Wl,--no-undefined-version")
        .arg("-Wl,--gc-sections")
        // Calls inside the library use its own functions, even if another library defines the same names.
        .arg("-Wl,-Bsymbolic-functions")
        // The engine's threads run code of the library: dlclose must not unmap it.
        .arg("-Wl,-z,nodelete")
        .arg("-Wl,-z,now")
        .arg("-Wl,-z,relro")
        .arg("-Wl,-z,noexecstack")
        // Each library finds the other in its own folder, even if the program loads only one of them by path.
        .arg("-Wl,--enable-new-dtags,-rpath,$ORIGIN");
}

/// Returns the version script of libibverbs: its public nodes, and the private one for librdmacm.
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

/// Returns the version script of a library: its nodes, newest first. Symbols that are in none of the nodes are hidden.
///
/// A name whose old version is another function appears in two nodes. The linker assigns the function of that name to the
/// first of the two, so the newer node must come first. The old version is assigned by its `.symver`. If the old versions of
/// a name are the same function as the default version, the name appears only in the node of the default version. No node
/// names a predecessor: that would require the opposite order, and the loader ignores it.
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
        // A node may be empty, but a name must follow `global:`.
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

/// Returns assembler text that defines the symbol versions for which the Rust function with the symbol's name is not used directly:
/// jumps, and data.
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

/// Returns the name of the definition of a symbol's version in the assembler text.
fn local_name(s: &Symbol) -> String {
    format!("anywarp_{}_{}", s.name, s.node.replace('.', "_"))
}

/// Returns assembler text that defines each first name as a jump to the second.
fn trampolines(jumps: impl Iterator<Item = (String, String)>) -> Result<String> {
    let mut text = String::from(".text\n");
    for (name, target) in jumps {
        let jump = match sh::arch().as_str() {
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
