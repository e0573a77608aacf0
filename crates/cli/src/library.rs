//! Finds the drop-in libraries, and returns the variables that make programs load them instead of the distribution's.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::{env, fmt};

/// The libraries to preload, in this order. The loader uses a preloaded library for every reference to its name.
const PRELOADED: [&str; 2] = ["libibverbs.so.1", "librdmacm.so.1"];

/// The preloaded library with which programs find files of the device in `/sys` and `/dev`. It is optional.
const PATH_SHIM: &str = "libanywarp-path.so";

/// The provider for libfabric, relative to the prefix.
const PROVIDER: &str = "lib/libanywarp-fi.so";

/// The Wireshark dissector for datagrams, relative to the prefix.
const DISSECTOR: &str = "share/anywarp/wireshark/anywarp.lua";
const STUDIES: &str = "share/anywarp/studies";

/// The preloaded library that runs sockets of unmodified programs over RDMA.
const SOCKETS: &str = "libanywarp-sockets.so";

/// The self-test program of `anywarp doctor`.
const SELF_TEST: &str = "anywarp-selftest";

/// The verbs program of `anywarp ping` and `anywarp blast`.
const PERF: &str = "anywarp-perf";

/// The verbs program with which `anywarp bench` and `anywarp study` measure costs other than those of messages.
const COST: &str = "anywarp-cost";

/// The folder with the drop-in libraries, which has been checked.
#[derive(Debug, Clone)]
pub(crate) struct Library {
    dir: PathBuf,
}

/// Why the folder was not found.
#[derive(Debug)]
pub(crate) enum Missing {
    /// The path of this program is unknown, so nothing can be found relative to it.
    OwnPath(std::io::Error),
    /// A library is missing.
    File { path: PathBuf, from_variable: bool },
    /// The path contains white space or a colon, at which dynamic loaders split LD_PRELOAD. LD_PRELOAD has no quoting.
    NotQuotable(PathBuf),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OwnPath(e) => write!(
                f,
                "cannot find out where this program is: {e}; set ANYWARP_LIB"
            ),
            Self::File {
                path,
                from_variable: true,
            } => {
                write!(
                    f,
                    "{} is missing: ANYWARP_LIB must name the folder that holds it",
                    path.display()
                )
            }
            Self::File {
                path,
                from_variable: false,
            } => write!(
                f,
                "{} is missing: install bin/ and lib/anywarp/ side by side, or set ANYWARP_LIB to the folder that \
                 holds it (a source tree makes both with `cargo xtask dist`)",
                path.display()
            ),
            Self::NotQuotable(dir) => write!(
                f,
                "the library folder {} has white space or a colon in its path, which LD_PRELOAD cannot express: move it",
                dir.display()
            ),
        }
    }
}

impl Library {
    /// Finds the folder: ANYWARP_LIB, or `../lib/anywarp` relative to the folder of this program.
    pub(crate) fn find() -> Result<Self, Missing> {
        Self::with(&PRELOADED)
    }

    /// Finds the folder of the preloaded library for sockets. Returns the path of the library.
    pub(crate) fn sockets() -> Result<PathBuf, Missing> {
        // This library does not use the drop-in libraries, which may be absent.
        Self::with(&[SOCKETS]).map(|library| library.dir.join(SOCKETS))
    }

    /// Finds the folder, which must contain the files `needed`.
    fn with(needed: &[&str]) -> Result<Self, Missing> {
        match env::var_os("ANYWARP_LIB").filter(|dir| !dir.is_empty()) {
            Some(dir) => Self::at(Path::new(&dir), true, needed),
            None => {
                let own = env::current_exe().map_err(Missing::OwnPath)?;
                let prefix = own
                    .parent()
                    .and_then(Path::parent)
                    .unwrap_or_else(|| Path::new("/"));
                Self::at(&prefix.join("lib/anywarp"), false, needed)
            }
        }
    }

    /// Checks that the folder `dir` contains the files `needed`.
    fn at(dir: &Path, from_variable: bool, needed: &[&str]) -> Result<Self, Missing> {
        let dir = std::path::absolute(dir).map_err(Missing::OwnPath)?;
        for name in needed {
            let path = dir.join(name);
            if !path.is_file() {
                return Err(Missing::File {
                    path,
                    from_variable,
                });
            }
        }
        if dir
            .as_os_str()
            .as_bytes()
            .iter()
            .any(|b| matches!(b, b' ' | b':' | b'\t' | b'\n'))
        {
            return Err(Missing::NotQuotable(dir));
        }
        Ok(Self { dir })
    }

    /// Returns the path of the folder.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of the drop-in libibverbs.
    pub(crate) fn verbs(&self) -> PathBuf {
        self.dir.join("libibverbs.so.1")
    }

    /// Returns the path of the path shim, if it is installed.
    pub(crate) fn path_shim(&self) -> Option<PathBuf> {
        Some(self.dir.join(PATH_SHIM)).filter(|path| path.is_file())
    }

    /// Returns the path of the Wireshark dissector, if it is installed.
    pub(crate) fn dissector(&self) -> Option<PathBuf> {
        let prefix = self.dir.parent()?.parent()?;
        Some(prefix.join(DISSECTOR)).filter(|path| path.is_file())
    }

    /// Returns the folder with the data files of `anywarp study`, if it is installed.
    pub(crate) fn studies(&self) -> Option<PathBuf> {
        let prefix = self.dir.parent()?.parent()?;
        Some(prefix.join(STUDIES)).filter(|path| path.is_dir())
    }

    /// Returns the folder with the provider for libfabric, if it is installed.
    fn provider_dir(&self) -> Option<PathBuf> {
        let file = self.dir.parent()?.parent()?.join(PROVIDER);
        file.is_file().then_some(())?;
        file.parent().map(Path::to_owned)
    }

    /// Returns the path of the self-test program, if it is installed.
    pub(crate) fn self_test(&self) -> Option<PathBuf> {
        Some(self.dir.join(SELF_TEST)).filter(|path| path.is_file())
    }

    /// Returns the path of the verbs program of `anywarp ping` and `anywarp blast`, if it is installed.
    pub(crate) fn perf(&self) -> Option<PathBuf> {
        Some(self.dir.join(PERF)).filter(|path| path.is_file())
    }

    /// Returns the path of `anywarp-cost`, if it is installed.
    pub(crate) fn cost(&self) -> Option<PathBuf> {
        Some(self.dir.join(COST)).filter(|path| path.is_file())
    }

    /// Returns the files to preload.
    pub(crate) fn preloads(&self, path_shim: bool) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = PRELOADED.iter().map(|name| self.dir.join(name)).collect();
        files.extend(self.path_shim().filter(|_| path_shim));
        files
    }

    /// Returns the variables for a process that inherits `inherited`.
    pub(crate) fn variables(
        &self,
        path_shim: bool,
        inherited: impl Fn(&str) -> Option<OsString>,
    ) -> Vec<(&'static str, OsString)> {
        let preloads = self.preloads(path_shim);
        let files = preloads.iter().map(|path| path.as_os_str());
        let mut variables = vec![
            (
                "LD_PRELOAD",
                in_front(files, inherited("LD_PRELOAD"), b" :\t\n"),
            ),
            (
                "LD_LIBRARY_PATH",
                in_front(
                    [self.dir.as_os_str()].into_iter(),
                    inherited("LD_LIBRARY_PATH"),
                    b":;",
                ),
            ),
        ];
        if let Some(dir) = self.provider_dir() {
            let before = inherited("FI_PROVIDER_PATH");
            let value = in_front([dir.as_os_str()].into_iter(), before, b":");
            variables.push(("FI_PROVIDER_PATH", value));
        }
        variables
    }
}

/// Returns the value of LD_PRELOAD for sockets: the library, followed by the earlier value.
pub(crate) fn with_sockets(preload: &Path, before: Option<OsString>) -> OsString {
    in_front([preload.as_os_str()].into_iter(), before, b" :\t\n")
}

/// Returns `ours`, followed by the earlier value without these entries, so that a nested run adds nothing twice.
fn in_front<'a>(
    ours: impl Iterator<Item = &'a OsStr>,
    before: Option<OsString>,
    separators: &[u8],
) -> OsString {
    let mut list: Vec<&[u8]> = ours.map(OsStrExt::as_bytes).collect();
    let own = list.len();
    let before = before.unwrap_or_default();
    for entry in before.as_bytes().split(|b| separators.contains(b)) {
        if !entry.is_empty() && !list.iter().take(own).any(|ours| *ours == entry) {
            list.push(entry);
        }
    }
    OsString::from_vec(list.join(&b':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(before: &[(&str, &str)]) -> [(&'static str, OsString); 2] {
        of("/opt/lib/anywarp", before).try_into().unwrap()
    }

    fn of(dir: impl Into<PathBuf>, before: &[(&str, &str)]) -> Vec<(&'static str, OsString)> {
        let library = Library { dir: dir.into() };
        library.variables(false, |name| {
            before
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.into())
        })
    }

    #[test]
    fn the_provider_is_found_if_it_is_installed() {
        let prefix = env::temp_dir().join(format!("anywarp-provider-{}", std::process::id()));
        let dir = prefix.join("lib/anywarp");
        std::fs::create_dir_all(&dir).unwrap();
        assert_eq!(of(&dir, &[]).len(), 2);
        std::fs::write(prefix.join(PROVIDER), "").unwrap();
        let variables = of(&dir, &[("FI_PROVIDER_PATH", "/a")]);
        std::fs::remove_dir_all(&prefix).unwrap();
        let mut expected = prefix.join("lib").into_os_string();
        expected.push(":/a");
        assert_eq!(variables.last(), Some(&("FI_PROVIDER_PATH", expected)));
    }

    #[test]
    fn our_files_precede_existing_values() {
        let [(_, preload), (_, path)] =
            variables(&[("LD_PRELOAD", "/a.so /b.so"), ("LD_LIBRARY_PATH", "/x:/y")]);

        assert_eq!(
            preload,
            "/opt/lib/anywarp/libibverbs.so.1:/opt/lib/anywarp/librdmacm.so.1:/a.so:/b.so"
        );
        assert_eq!(path, "/opt/lib/anywarp:/x:/y");
    }

    #[test]
    fn a_run_inside_a_run_adds_nothing() {
        let once = variables(&[]);
        let before: Vec<(&str, &str)> = once
            .iter()
            .map(|(n, v)| (*n, v.to_str().unwrap()))
            .collect();

        assert_eq!(variables(&before), once);
    }

    #[test]
    fn an_empty_entry_does_not_become_the_current_folder() {
        let [_, (_, path)] = variables(&[("LD_LIBRARY_PATH", "")]);

        assert_eq!(path, "/opt/lib/anywarp");
    }

    #[test]
    fn a_folder_without_the_libraries_says_which_file_is_missing() {
        let missing = Library::at(Path::new("/nonexistent"), true, &PRELOADED).unwrap_err();

        assert_eq!(
            missing.to_string(),
            "/nonexistent/libibverbs.so.1 is missing: ANYWARP_LIB must name the folder that holds it"
        );
    }

    #[test]
    fn the_library_for_sockets_needs_no_other_one() {
        let dir = env::temp_dir().join(format!("anywarp-sockets-only-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(SOCKETS), "").unwrap();
        let alone = Library::at(&dir, true, &[SOCKETS]).map(|library| library.dir);
        let verbs = Library::at(&dir, true, &PRELOADED).unwrap_err();
        std::fs::remove_dir_all(&dir).unwrap();
        let missing = Library::at(&dir, true, &[SOCKETS]).unwrap_err();
        assert_eq!(alone.unwrap(), dir);
        assert!(verbs.to_string().contains("libibverbs.so.1 is missing"));
        assert!(
            missing
                .to_string()
                .contains("libanywarp-sockets.so is missing")
        );
    }
}
