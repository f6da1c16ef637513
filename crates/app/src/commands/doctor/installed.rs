//! The installation on a machine: the configuration files of its daemons, and the limits of its units.

use crate::client_file::HOST_DIR;
use crate::config::check_file;
use crate::program;
use rustix::process::{Resource, getrlimit};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of the wait for systemctl.
const UNITS_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of the longest answer of systemctl.
const UNITS_BYTES_MAX: usize = 64 << 10;
/// Configuration files that are checked, at most.
const FILES_MAX: usize = 256;
/// The units with limits, by an instance of no meaning.
const UNITS: [&str; 4] = [
    "pagemesh-brick@any.service",
    "pagemesh-export@any.service",
    "pagemesh-mount@any.service",
    "pagemesh-nfs@any.service",
];
/// The keys that have an address to listen on.
const ADDRESS_KEYS: [&str; 2] = ["listen", "metrics"];

/// A configuration file.
#[derive(Debug)]
pub struct ConfigFile {
    /// The file.
    pub path: PathBuf,
    /// Its keys and values, or the reason why its program refuses it.
    pub content: Result<Vec<(String, String)>, String>,
}

/// The limits of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Whether the units set them. Otherwise they are this shell's.
    pub is_of_units: bool,
    /// RLIMIT_MEMLOCK; none if unlimited.
    pub memlock_bytes: Option<u64>,
    /// RLIMIT_NOFILE; none if unlimited.
    pub open_files: Option<u64>,
}

/// The configuration files of this machine.
pub fn config_files() -> Vec<ConfigFile> {
    config_files_in(Path::new(HOST_DIR))
}

fn config_files_in(dir: &Path) -> Vec<ConfigFile> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|it| it == "toml"))
        .take(FILES_MAX)
        .collect();
    paths.sort();
    let files = paths.into_iter().filter_map(|path| {
        let content = check_file(&path)?.map_err(|cause| cause.to_string());
        Some(ConfigFile { path, content })
    });
    files.collect()
}

/// The first value of a key in valid files.
pub fn value<'a>(files: &'a [ConfigFile], key: &str) -> Option<&'a str> {
    values(files, key).next()
}

fn values<'a>(files: &'a [ConfigFile], key: &str) -> impl Iterator<Item = &'a str> {
    let pairs = files.iter().filter_map(|file| file.content.as_ref().ok());
    let found = pairs.flatten().filter(move |(name, _)| name == key);
    found.map(|(_, value)| value.as_str())
}

/// The ports that the daemons of this machine listen on, without those that the system chooses.
pub fn ports(files: &[ConfigFile]) -> Vec<u16> {
    let addresses = ADDRESS_KEYS.iter().flat_map(|key| values(files, key));
    let port = |address: &str| address.rsplit_once(':')?.1.parse().ok();
    let mut ports: Vec<u16> = addresses.filter_map(port).filter(|it| *it != 0).collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// The limits of the installed units, with their drop-ins; this process's limits if none is installed.
pub fn limits() -> Limits {
    let words = [
        "show",
        "--property=LoadState,LimitNOFILESoft,LimitMEMLOCKSoft",
    ];
    let words = [&words[..], &UNITS].concat();
    let shown = program::output("systemctl", &words, UNITS_TIMEOUT, UNITS_BYTES_MAX);
    let of_units = shown.ok().and_then(|shown| limits_of_units(&shown.text));
    of_units.unwrap_or_else(|| Limits {
        is_of_units: false,
        memlock_bytes: getrlimit(Resource::Memlock).current,
        open_files: getrlimit(Resource::Nofile).current,
    })
}

/// The lowest limits in the output of `systemctl show`; none unless all units are installed.
fn limits_of_units(shown: &str) -> Option<Limits> {
    let values = |key: &str| {
        let lines = shown.lines().filter_map(|line| line.split_once('='));
        let found = lines.filter(|(name, _)| *name == key);
        found.map(|(_, value)| value).collect::<Vec<_>>()
    };
    let loaded = values("LoadState");
    if loaded.len() != UNITS.len() || loaded.iter().any(|it| *it != "loaded") {
        return None;
    }
    // `infinity` is no number.
    let lowest = |key| values(key).iter().filter_map(|it| it.parse().ok()).min();
    Some(Limits {
        is_of_units: true,
        memlock_bytes: lowest("LimitMEMLOCKSoft"),
        open_files: lowest("LimitNOFILESoft"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_checked_by_their_daemons() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in [
            ("manager.toml", "listen = \"10.0.0.1:7070\"\nkey = \"/k\"\n"),
            (
                "brick-one.toml",
                "listen = \"10.0.0.1:7071\"\nmanager = \"http://m:1\"\n",
            ),
            (
                "brick-two.toml",
                "listen = \"10.0.0.1:0\"\nmetrics = \"127.0.0.1:9000\"\n",
            ),
            ("export-a.toml", "lisen = \"x\"\n"),
            ("client.toml", "manager = \"http://m:1\"\n"),
            ("other.toml", "anything = 1\n"),
            ("key", "secret"),
        ] {
            std::fs::write(dir.path().join(name), text).expect("written");
        }
        let files = config_files_in(dir.path());
        let name = |file: &ConfigFile| file.path.file_name().map(|it| it.to_owned());
        let wrong: Vec<_> = files.iter().filter(|it| it.content.is_err()).collect();
        assert_eq!(files.len(), 5, "{files:?}");
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert_eq!(name(wrong[0]), Some("export-a.toml".into()));
        assert_eq!(ports(&files), [7070, 7071, 9000]);
        assert_eq!(value(&files, "manager"), Some("http://m:1"));
        assert_eq!(value(&files, "pool"), None);
        assert_eq!(config_files_in(Path::new("/nowhere")).len(), 0);
    }

    #[test]
    fn lowest_limit_of_units_counts() {
        let unit = |files: &str| {
            format!("LimitNOFILESoft={files}\nLimitMEMLOCKSoft=infinity\nLoadState=loaded\n\n")
        };
        let files = ["65536", "4096", "infinity", "65536"];
        let shown = files.map(unit).concat();
        let wanted = Limits {
            is_of_units: true,
            memlock_bytes: None,
            open_files: Some(4096),
        };
        assert_eq!(limits_of_units(&shown), Some(wanted));
        let absent = shown.replacen("=loaded", "=not-found", 1);
        for shown in ["", &unit("1"), &absent] {
            assert_eq!(limits_of_units(shown), None);
        }
    }
}
