//! `cargo xtask install --prefix DIR`, `cargo xtask deb` and `cargo xtask wheel`: install or package the result of `cargo
//! xtask dist`.
//!
//! There are three Debian packages: `anywarp` contains the command and the libraries in a private folder, and changes nothing
//! else; `anywarp-dev` contains the files for building programs; `anywarp-system` adds the libraries to the start of the
//! loader's path, so that every program finds the device without a launcher. Packages of the same commit and compiler have
//! the same bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::{Result, dist, glibc, sh};

/// The files of `anywarp-dev`, for building programs: folders below the prefix, and links for the linker.
const DEVELOPMENT: [&str; 8] = [
    "include",
    "lib/pkgconfig",
    "lib/cmake",
    "share/man/man3",
    "lib/libexs.so",
    "lib/libanywarp-buffers.so",
    "lib/anywarp/libibverbs.so",
    "lib/anywarp/librdmacm.so",
];

/// Copies the result of `dist` to a prefix.
pub(crate) fn install(prefix: &str) -> Result {
    let prefix = PathBuf::from(prefix);
    if !prefix.is_absolute() {
        return Err("install --prefix needs an absolute path".into());
    }
    let from = built()?;
    dist::copy_tree(&from, &prefix)?;
    println!("{}", prefix.display());
    println!(
        "for one program:   {}/bin/anywarp run -- PROGRAM",
        prefix.display()
    );
    println!(
        "for all programs:  echo {}/lib/anywarp > /etc/ld.so.conf.d/00-anywarp.conf && ldconfig",
        prefix.display()
    );
    Ok(())
}

/// Creates the Debian packages.
pub(crate) fn deb() -> Result {
    let from = built()?;
    let work = folder("deb")?;
    let architecture = architecture()?;
    let version = env!("CARGO_PKG_VERSION");

    let tool = work.join("anywarp");
    dist::copy_tree(&from, &tool.join("usr"))?;
    let doc = tool.join("usr/share/doc/anywarp");
    fs::create_dir_all(&doc)?;
    for name in [
        "README.md",
        "SECURITY.md",
        "CHANGELOG.md",
        "LICENSE-APACHE",
        "LICENSE-MIT",
    ] {
        fs::copy(sh::root().join(name), doc.join(name))?;
    }
    let development = work.join("anywarp-dev");
    for part in DEVELOPMENT {
        let (here, there) = (
            tool.join("usr").join(part),
            development.join("usr").join(part),
        );
        fs::create_dir_all(there.parent().ok_or("no folder")?)?;
        fs::rename(here, there)?;
    }
    // The loader searches /usr/lib anyway, so programs need no run path.
    for name in ["exs", "anywarp-buffers"] {
        let pc = development.join(format!("usr/lib/pkgconfig/{name}.pc"));
        let text = fs::read_to_string(&pc)?;
        fs::write(pc, text.replace(dist::RUN_PATH, ""))?;
    }
    control(
        &tool,
        &[
            ("Package", "anywarp"),
            ("Version", version),
            ("Architecture", &architecture),
            ("Section", "net"),
            ("Priority", "optional"),
            ("Maintainer", "the anywarp authors <anywarp@example.org>"),
            ("Depends", "libc6 (>= 2.28), libgcc-s1"),
            (
                "Description",
                "RDMA on any machine: a software RDMA network card",
            ),
        ],
    )?;
    let first = build(
        &tool,
        &work,
        &format!("anywarp_{version}_{}.deb", &architecture),
    )?;

    control(
        &development,
        &[
            ("Package", "anywarp-dev"),
            ("Version", version),
            ("Architecture", &architecture),
            ("Section", "libdevel"),
            ("Priority", "optional"),
            ("Maintainer", "the anywarp authors <anywarp@example.org>"),
            (
                "Depends",
                &format!("anywarp (= {version}), libibverbs-dev, librdmacm-dev"),
            ),
            (
                "Description",
                "headers and manual pages of anywarpdv, extended sockets and anywarp-buffers",
            ),
        ],
    )?;
    let dev = build(
        &development,
        &work,
        &format!("anywarp-dev_{version}_{}.deb", &architecture),
    )?;

    let system = work.join("anywarp-system");
    let conf = system.join("etc/ld.so.conf.d");
    fs::create_dir_all(&conf)?;
    fs::write(conf.join("00-anywarp.conf"), "/usr/lib/anywarp\n")?;
    control(
        &system,
        &[
            ("Package", "anywarp-system"),
            ("Version", version),
            ("Architecture", "all"),
            ("Section", "net"),
            ("Priority", "optional"),
            ("Maintainer", "the anywarp authors <anywarp@example.org>"),
            ("Depends", &format!("anywarp (= {version})")),
            (
                "Description",
                "makes anywarp the RDMA device of every program on this machine",
            ),
        ],
    )?;
    // The trigger `ldconfig` of libc updates the loader's cache after this package is installed, and after it is removed.
    fs::write(
        system.join("DEBIAN/triggers"),
        "activate-noawait ldconfig\n",
    )?;
    let second = build(&system, &work, &format!("anywarp-system_{version}_all.deb"))?;
    println!(
        "{}\n{}\n{}",
        first.display(),
        dev.display(),
        second.display()
    );
    Ok(())
}

/// Creates the Python wheel.
pub(crate) fn wheel() -> Result {
    let from = built()?;
    let work = folder("wheel")?;
    // The tag of the wheel states the oldest supported glibc.
    glibc::check(&from)?;
    let mut python = Command::new("python3");
    python
        .arg(sh::root().join("python/wheel.py"))
        .args([env!("CARGO_PKG_VERSION"), &sh::arch()])
        .args([&from, &work]);
    sh::run(&mut python)
}

/// Returns the path of the folder for packages of a kind, and removes the folder of an earlier build. As with `dist`, the folder's
/// name contains the architecture if the build is for another one than this machine's.
fn folder(kind: &str) -> Result<PathBuf> {
    let work = sh::target().join(match sh::cross_target() {
        Some(_) => format!("{kind}-{}", sh::arch()),
        None => kind.to_owned(),
    });
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    Ok(work)
}

/// Returns Debian's name of the architecture.
fn architecture() -> Result<String> {
    match (sh::cross_target(), sh::arch().as_str()) {
        (None, _) => {
            let name = sh::output(Command::new("dpkg").arg("--print-architecture"))?;
            Ok(name.trim().to_owned())
        }
        (Some(_), "aarch64") => Ok("arm64".to_owned()),
        (Some(_), "x86_64") => Ok("amd64".to_owned()),
        (Some(target), _) => Err(format!("{target}: no packages for this architecture").into()),
    }
}

fn built() -> Result<PathBuf> {
    let from = sh::dist();
    if !from.join("bin/anywarp").exists() {
        return Err("there is no build to package: run `cargo xtask dist` first".into());
    }
    Ok(from)
}

fn control(package: &Path, fields: &[(&str, &str)]) -> Result {
    let folder = package.join("DEBIAN");
    fs::create_dir_all(&folder)?;
    let text: String = fields
        .iter()
        .map(|(name, value)| format!("{name}: {value}\n"))
        .collect();
    Ok(fs::write(folder.join("control"), text)?)
}

/// Returns the modification time for files in a package: that of the commit, so that rebuilding a package gives the same bytes.
fn source_date() -> Result<String> {
    const NAME: &str = "SOURCE_DATE_EPOCH";
    if let Ok(given) = std::env::var(NAME) {
        return Ok(given);
    }
    let mut git = Command::new("git");
    git.arg("-C").arg(sh::root());
    let commit = sh::output(git.args(["log", "-1", "--format=%ct"]))
        .map_err(|e| format!("no commit to take a time from ({e}); set {NAME}"))?;
    Ok(commit.trim().to_owned())
}

fn build(package: &Path, work: &Path, name: &str) -> Result<PathBuf> {
    let file = work.join(name);
    sh::run(
        Command::new("dpkg-deb")
            .env("SOURCE_DATE_EPOCH", source_date()?)
            .args(["--root-owner-group", "--build"])
            .arg(package)
            .arg(&file)
            .stdout(std::process::Stdio::null()),
    )?;
    Ok(file)
}
