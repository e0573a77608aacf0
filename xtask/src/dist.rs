//! `cargo xtask dist`: builds the files to install, in `target/dist`.
//!
//! ```text
//! bin/anywarp
//! bin/exs-ttcp                 throughput and latency of extended sockets: crates/exs/ttcp/exs-ttcp.c
//! lib/anywarp/libibverbs.so.1  librdmacm.so.1  and their .so links
//! lib/anywarp/anywarp-selftest the program of `anywarp doctor`: tests/c/selftest.c
//! lib/anywarp/anywarp-perf     the program of `anywarp ping` and `anywarp blast`: crates/cli/perf/perf.c
//! lib/anywarp/anywarp-cost     another program of `anywarp bench` and `anywarp study`: crates/cli/perf/cost.c
//! lib/anywarp/libanywarp-path.so  makes programs find files of the device when preloaded: crates/cli/shim/path-shim.c
//! lib/anywarp/libanywarp-sockets.so  runs sockets of unmodified programs over RDMA when preloaded: crates/sockets
//! lib/libanywarp-fi.so         the provider for libfabric, found by FI_PROVIDER_PATH: crates/fi
//! lib/libexs.so.1              extended sockets, with its .so link
//! lib/libanywarp-buffers.so.1  buffers that are copied, registered, or have a cached registration, with its .so link: crates/buffers
//! lib/pkgconfig/               exs.pc, anywarp-buffers.pc and anywarpdv.pc
//! lib/cmake/anywarp/           the same for find_package of CMake: xtask/cmake
//! include/                     the C headers
//! share/                       manual pages (from docs/man) and completions
//! share/anywarp/wireshark/     the dissector of datagrams
//! share/anywarp/studies/       the figures of `anywarp study`
//! ```

use crate::{Result, glibc, link, portable, sh, symbols};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Builds all files, and then replaces the earlier result with them.
pub fn run() -> Result {
    let symbols = symbols::read()?;
    sh::run(portable::cargo()?.args([
        "build",
        "--release",
        "--package=anywarp-abi",
        "--package=anywarp-buffers",
        "--package=anywarp-cli",
        "--package=anywarp-exs",
        "--package=anywarp-fi",
        "--package=anywarp-sockets",
    ]))?;
    let built = sh::release();
    let dist = sh::dist();
    let work = dist.with_file_name(match sh::cross_target() {
        Some(_) => format!("dist-link-{}", sh::arch()),
        None => "dist-link".to_owned(),
    });

    // The files are built in a temporary folder, which is renamed at the end: a running program keeps its old files, and a build
    // that fails leaves no incomplete result.
    let new = dist.with_extension("new");
    remove(&new)?;
    let lib = new.join("lib/anywarp");
    link::run(&symbols, &built.join("libanywarp_abi.a"), &work, &lib, None)?;
    verbs_program("anywarp-selftest", "tests/c/selftest.c", &lib, &work, &[])?;
    verbs_program("anywarp-perf", "crates/cli/perf/perf.c", &lib, &work, &[])?;
    path_shim(&lib, &work)?;
    direct_verbs_pc(&new.join("lib"))?;
    cmake_package(&new.join("lib"))?;
    for library in &ABOVE {
        library_above(library, &built, &new, &work)?;
    }
    for crate_ in ["exs", "buffers"] {
        let include = sh::root().join("crates").join(crate_).join("include");
        copy_tree(&include, &new.join("include"))?;
    }
    let with_buffers = [
        format!("-I{}", new.join("include").display()),
        format!("-L{}", new.join("lib").display()),
        "-lanywarp-buffers".to_owned(),
        "-Wl,-rpath,$ORIGIN/..".to_owned(),
    ];
    verbs_program(
        "anywarp-cost",
        "crates/cli/perf/cost.c",
        &lib,
        &work,
        &with_buffers,
    )?;
    preloaded_sockets(&built, &lib, &work)?;
    provider(&built, &new.join("lib"), &work)?;
    let bin = new.join("bin");
    fs::create_dir_all(&bin)?;
    fs::copy(built.join("anywarp"), bin.join("anywarp"))?;
    copy_tree(&sh::root().join("crates/abi/include"), &new.join("include"))?;
    exs_ttcp(&new, &work)?;
    generate(&bin.join("anywarp"), &new.join("share"))?;
    copy_tree(
        &sh::root().join("crates/cli/wireshark"),
        &new.join("share/anywarp/wireshark"),
    )?;
    copy_tree(
        &sh::root().join("studies"),
        &new.join("share/anywarp/studies"),
    )?;

    glibc::check(&new)?;
    portable::check(&new)?;
    // The old folder is renamed before it is removed: removing takes long, and a program that starts meanwhile would find nothing.
    let old = dist.with_extension("old");
    remove(&old)?;
    if dist.exists() {
        fs::rename(&dist, &old)?;
    }
    fs::rename(&new, &dist)?;
    remove(&old)?;
    println!("{}", dist.display());
    Ok(())
}

/// A library that uses verbs like a program does, so it is not among the libraries that replace those of the distribution.
struct Above {
    /// The name of the file without `lib`.
    name: &'static str,
    /// The exported symbols.
    exports: &'static str,
    description: &'static str,
    /// The libraries that it calls.
    needs: &'static [&'static str],
}

const ABOVE: [Above; 2] = [
    Above {
        name: "exs",
        exports: "exs_*",
        description: "Extended sockets over RDMA",
        needs: &["ibverbs", "rdmacm"],
    },
    Above {
        name: "anywarp-buffers",
        exports: "awbuf_*",
        description: "Buffers for RDMA: copied, registered, or kept registered",
        needs: &["ibverbs"],
    },
];

/// Links and installs a library that uses verbs.
fn library_above(library: &Above, built: &Path, new: &Path, work: &Path) -> Result {
    let lib = new.join("lib");
    let Above { name, exports, .. } = library;
    let map = work.join(format!("lib{name}.map"));
    fs::write(&map, format!("{{ global: {exports}; local: *; }};\n"))?;
    let mut cc = portable::cc();
    cc.args(["-shared", "-fPIC"])
        .arg(format!("-Wl,-soname,lib{name}.so.1"))
        .arg(format!("-Wl,--version-script={}", map.display()))
        // The library's threads run its code, so dlclose must not unmap it.
        .args([
            "-Wl,-z,nodelete,-z,now,-z,relro",
            "-Wl,--gc-sections,--strip-debug",
            "-Wl,--no-undefined",
        ])
        .args(glibc::arguments(work, glibc::Into::Library)?)
        .arg("-Wl,--whole-archive")
        .arg(built.join(format!("lib{}.a", name.replace('-', "_"))))
        .arg("-Wl,--no-whole-archive")
        .arg("-L")
        .arg(lib.join("anywarp"))
        .arg("-Wl,--as-needed")
        .args(library.needs.iter().map(|needed| format!("-l{needed}")))
        .args(["-lgcc_s", "-lm", "-lc", "-o"])
        .arg(lib.join(format!("lib{name}.so.1")));
    sh::run(&mut cc)?;
    std::os::unix::fs::symlink(format!("lib{name}.so.1"), lib.join(format!("lib{name}.so")))?;
    let needed: Vec<String> = library.needs.iter().map(|n| format!("lib{n}")).collect();
    let pc = format!(
        "prefix=${{pcfiledir}}/../..\n\nName: {name}\nDescription: {}\nVersion: {}\n\
         Requires.private: {}\nCflags: -I${{prefix}}/include\nLibs: -L${{prefix}}/lib -l{name}{RUN_PATH}\n",
        library.description,
        env!("CARGO_PKG_VERSION"),
        needed.join(" ")
    );
    fs::write(lib.join(format!("pkgconfig/{name}.pc")), pc)?;
    Ok(())
}

/// The end of the linker arguments in the pkg-config files of libexs and libanywarp-buffers: programs find the library in any prefix.
pub const RUN_PATH: &str = " -Wl,-rpath,${prefix}/lib";

/// Writes the pkg-config file of `<infiniband/anywarpdv.h>`. A program that uses the header is linked with anywarp's
/// libibverbs and finds it at run time.
fn direct_verbs_pc(lib: &Path) -> Result {
    fs::create_dir_all(lib.join("pkgconfig"))?;
    let pc = format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib/anywarp\n\nName: anywarpdv\n\
         Description: One-sided operations and reliable datagrams of anywarp\nVersion: {}\n\
         Cflags: -I${{prefix}}/include\nLibs: -L${{libdir}} -libverbs -Wl,-rpath,${{libdir}}\n",
        env!("CARGO_PKG_VERSION")
    );
    Ok(fs::write(lib.join("pkgconfig/anywarpdv.pc"), pc)?)
}

/// Writes the files for `find_package(anywarp)` of CMake.
fn cmake_package(lib: &Path) -> Result {
    let to = lib.join("cmake/anywarp");
    fs::create_dir_all(&to)?;
    for name in ["anywarp-config.cmake", "anywarp-config-version.cmake"] {
        let text = fs::read_to_string(sh::root().join("xtask/cmake").join(name))?;
        fs::write(
            to.join(name),
            text.replace("@VERSION@", env!("CARGO_PKG_VERSION")),
        )?;
    }
    Ok(())
}

/// Returns the symbols that the preloaded library for sockets exports, each with a semicolon: its wrappers, whose names are taken from
/// their source text.
pub fn exports_of_sockets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(sh::root().join("crates/sockets/src/hooks"))? {
        let text = fs::read_to_string(entry?.path())?;
        for rest in text.split("#[unsafe(no_mangle)]").skip(1) {
            let function = rest.split("extern \"C-unwind\" fn ").nth(1);
            let name = function.and_then(|f| f.split('(').next());
            names.push(format!("{};", name.unwrap_or_default()));
        }
    }
    if names.is_empty() {
        return Err("crates/sockets/src/hooks: no wrappers".into());
    }
    Ok(names)
}

/// Links the preloaded library for sockets.
fn preloaded_sockets(built: &Path, lib: &Path, work: &Path) -> Result {
    const NAME: &str = "libanywarp-sockets.so";
    let names = exports_of_sockets()?;
    // Calls inside the library reach its own wrappers.
    let options = ["-Wl,-Bsymbolic-functions"];
    loadable(NAME, &names, &options, built, lib, work)
}

/// Links the provider for libfabric. It exports one function, and is linked neither with libfabric nor with verbs: both are
/// looked up in the process at run time.
fn provider(built: &Path, lib: &Path, work: &Path) -> Result {
    const NAME: &str = "libanywarp-fi.so";
    loadable(NAME, &["fi_prov_ini;".to_owned()], &[], built, lib, work)
}

/// Links a library that programs load by its name. Its code is that of the static library of the same name. `exports`: its
/// symbols, each with a semicolon. The library is never unloaded, because its threads may run its code, or the device that it opened may
/// be in use.
fn loadable(
    name: &str,
    exports: &[String],
    options: &[&str],
    built: &Path,
    lib: &Path,
    work: &Path,
) -> Result {
    let stem = name.trim_end_matches(".so");
    let map = work.join(format!("{stem}.map"));
    fs::write(
        &map,
        format!("{{ global: {} local: *; }};\n", exports.join(" ")),
    )?;
    let mut cc = portable::cc();
    cc.args(["-shared", "-fPIC"])
        .arg(format!("-Wl,-soname,{name}"))
        .arg(format!("-Wl,--version-script={}", map.display()))
        .args([
            "-Wl,--no-undefined-version,--no-undefined",
            "-Wl,--gc-sections,--strip-debug",
            "-Wl,-z,nodelete,-z,now,-z,relro,-z,noexecstack",
        ])
        .args(options)
        .args(glibc::arguments(work, glibc::Into::Library)?)
        .arg("-Wl,--whole-archive")
        .arg(built.join(format!("{}.a", stem.replace('-', "_"))))
        .args([
            "-Wl,--no-whole-archive",
            "-Wl,--as-needed",
            "-lgcc_s",
            "-lm",
            "-lc",
            "-o",
        ])
        .arg(lib.join(name));
    sh::run(&mut cc)
}

/// Builds the program that measures extended sockets. It finds libexs in `../lib`, relative to its own folder. libexs
/// uses whichever verbs libraries the loader finds.
fn exs_ttcp(new: &Path, work: &Path) -> Result {
    let lib = new.join("lib");
    let mut cc = portable::cc();
    cc.args([
        "-std=gnu11",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Wshadow",
        "-Werror",
    ])
    .arg(concat!(
        "-DEXS_TTCP_VERSION=\"",
        env!("CARGO_PKG_VERSION"),
        "\""
    ))
    .arg("-I")
    .arg(new.join("include"))
    .arg("-o")
    .arg(new.join("bin/exs-ttcp"))
    .arg(sh::root().join("crates/exs/ttcp/exs-ttcp.c"))
    .arg("-L")
    .arg(&lib)
    .args(["-lexs", "-Wl,-rpath,$ORIGIN/../lib"])
    .arg(format!("-Wl,-rpath-link,{}", lib.join("anywarp").display()))
    .args(glibc::arguments(work, glibc::Into::Program)?);
    sh::run(&mut cc)
}

/// Builds a verbs program against the libraries in `lib`, with the additional arguments `more`.
fn verbs_program(name: &str, source: &str, lib: &Path, work: &Path, more: &[String]) -> Result {
    let mut cc = portable::cc();
    cc.args(["-O2", "-o"])
        .arg(lib.join(name))
        .arg(sh::root().join(source))
        .args(more)
        .arg("-L")
        .arg(lib)
        .args(["-libverbs", "-lrdmacm", "-lpthread"])
        .args(glibc::arguments(work, glibc::Into::Program)?);
    sh::run(&mut cc)
}

/// Builds the path shim, which depends only on libc.
fn path_shim(lib: &Path, work: &Path) -> Result {
    let mut cc = portable::cc();
    // No `_FORTIFY_SOURCE`, which would rename the functions that the shim replaces.
    cc.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-nonnull-compare", "-U_FORTIFY_SOURCE"])
        .arg(concat!(
            "-DANYWARP_VERSION=\"",
            env!("CARGO_PKG_VERSION"),
            "\""
        ))
        .args([
            "-fPIC",
            "-fvisibility=hidden",
            "-shared",
            "-Wl,-z,now",
            "-o",
        ])
        .arg(lib.join("libanywarp-path.so"))
        .arg(sh::root().join("crates/cli/shim/path-shim.c"))
        .args(glibc::arguments(work, glibc::Into::Replacement)?);
    sh::run(&mut cc)
}

/// Runs the command that writes manual pages and completions. If the result is for another architecture, its command cannot
/// run here, and one that is built for this machine writes the same files.
fn generate(anywarp: &Path, share: &Path) -> Result {
    fs::create_dir_all(share)?;
    let mut generate = match sh::cross_target() {
        None => Command::new(anywarp),
        Some(_) => {
            let mut cargo = portable::cargo()?;
            sh::natively(&mut cargo).args([
                "run",
                "--release",
                "--quiet",
                "--package=anywarp-cli",
                "--",
            ]);
            cargo
        }
    };
    sh::run(generate.arg("generate").arg(share).arg(sh::root()))
}

/// Copies `from` to `to`, if `from` exists.
pub fn copy_tree(from: &Path, to: &Path) -> Result {
    if !from.exists() {
        return Ok(());
    }
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// Removes a folder with its contents, if it exists.
fn remove(path: &Path) -> Result {
    if path.exists() {
        fs::remove_dir_all(path)?;
    }
    Ok(())
}
