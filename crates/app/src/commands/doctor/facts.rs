//! The facts about a machine that the checks judge.
//!
//! Invariants: reads only; every wait has a limit. A fact that cannot be read is unknown, never an
//! error of the command.

use super::installed::{self, ConfigFile, Limits};
use super::ports::{self, PortFacts};
use crate::client_file::ClientFiles;
use crate::key;
use crate::program;
use pagemesh_base::key::{Key, KeyError};
use pagemesh_manage::ManagerClient;
use pagemesh_pmem::io_uring_refusal;
use rustix::fs::{Access, access, statvfs};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of the wait for the service that knows the clock.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of its longest answer.
const CLOCK_BYTES_MAX: usize = 4096;
/// The ports of the shipped configuration: the manager's and the brick's.
const PORTS: [u16; 2] = [7070, 7071];

/// Access to a device file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// It can be read and written.
    Usable,
    /// This user may not.
    Forbidden,
    /// There is none.
    Absent,
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// A time service keeps it.
    Synchronised,
    /// It may be wrong.
    Unsynchronised,
    /// No service answers.
    Unknown,
}

/// The key file.
#[derive(Debug)]
pub enum KeyFacts {
    /// None is named, and there is none for the manager's address.
    Unnamed,
    /// It can be read by its owner only.
    Usable(PathBuf),
    /// It is there, and this user may not read it.
    Unseen(PathBuf),
    /// pagemesh refuses it.
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason.
        cause: String,
    },
}

/// The manager.
#[derive(Debug)]
pub enum ManagerFacts {
    /// None is named.
    Unnamed,
    /// It answers at this address.
    Answers(String),
    /// It was not asked, because this user may not read the key.
    NotAsked(String),
    /// It does not answer, or refuses the key.
    Fails(String),
}

/// A machine.
#[derive(Debug)]
pub struct HostFacts {
    /// The kernel's release.
    pub kernel: String,
    /// /dev/fuse.
    pub fuse_device: DeviceAccess,
    /// Whether root asks.
    pub is_root: bool,
    /// Whether fusermount3 is on the search path.
    pub has_fusermount: bool,
    /// `enable_uring` of the module fuse; none if the module has no such parameter.
    pub fuse_uring: Option<bool>,
    /// `kernel.io_uring_disabled`; none in kernels without it, which permit io_uring.
    pub io_uring_disabled: Option<String>,
    /// The reason why the system refuses io_uring to this process.
    pub io_uring_refusal: Option<String>,
    /// The selected word of `shmem_enabled`.
    pub shmem_huge: Option<String>,
    /// Mount points of tmpfs with huge pages.
    pub huge_tmpfs: Vec<PathBuf>,
    /// Names of DAX devices, and of block devices in mode fsdax.
    pub dax_devices: Vec<String>,
    /// The limits of the daemons.
    pub limits: Limits,
    /// The configuration files in /etc/pagemesh.
    pub config_files: Vec<ConfigFile>,
    /// The ports of the configuration.
    pub ports: Vec<PortFacts>,
    /// The clock.
    pub clock: Clock,
    /// Free bytes of /dev/shm.
    pub shm_free_bytes: Option<u64>,
    /// The key file.
    pub key: KeyFacts,
    /// The manager.
    pub manager: ManagerFacts,
}

impl HostFacts {
    /// Reads the facts of this machine. A manager and a key that are not named come from `client.toml`, and then
    /// from the configuration of the daemons.
    pub fn gather(manager: Option<&str>, key: Option<&Path>) -> HostFacts {
        let release = rustix::system::uname();
        let config_files = installed::config_files();
        // An invalid file is among the configuration files.
        let of_client = ClientFiles::load().unwrap_or_default();
        let of_daemons = installed::value(&config_files, "manager");
        let manager = manager.or(of_client.manager()).or(of_daemons);
        let key = key_file(manager, key, &config_files);
        let key_facts = key_facts(key.as_deref());
        let mut numbers = installed::ports(&config_files);
        if numbers.is_empty() {
            numbers = PORTS.into();
        }
        HostFacts {
            kernel: release.release().to_string_lossy().into_owned(),
            fuse_device: device_access(Path::new("/dev/fuse")),
            is_root: rustix::process::geteuid().is_root(),
            has_fusermount: is_on_search_path("fusermount3"),
            fuse_uring: read_word("/sys/module/fuse/parameters/enable_uring")
                .map(|word| word == "Y" || word == "1"),
            io_uring_disabled: read_word("/proc/sys/kernel/io_uring_disabled"),
            io_uring_refusal: io_uring_refusal().map(|cause| cause.to_string()),
            shmem_huge: read_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .and_then(|line| selected_word(&line)),
            huge_tmpfs: huge_tmpfs(&read_word("/proc/self/mounts").unwrap_or_default()),
            dax_devices: dax_devices(),
            limits: installed::limits(),
            ports: numbers.into_iter().map(ports::state).collect(),
            clock: clock(),
            shm_free_bytes: shm_free_bytes(),
            manager: manager_facts(manager, key.as_deref(), &key_facts),
            key: key_facts,
            config_files,
        }
    }
}

/// The trimmed text of a small file.
fn read_word(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}

/// The word in brackets, as in `always [advise] never`.
fn selected_word(line: &str) -> Option<String> {
    let (_, rest) = line.split_once('[')?;
    let (word, _) = rest.split_once(']')?;
    Some(word.to_owned())
}

fn device_access(path: &Path) -> DeviceAccess {
    if !path.exists() {
        DeviceAccess::Absent
    } else if access(path, Access::READ_OK | Access::WRITE_OK).is_ok() {
        DeviceAccess::Usable
    } else {
        DeviceAccess::Forbidden
    }
}

fn is_on_search_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| access(dir.join(program), Access::EXEC_OK).is_ok())
}

/// The mount points of tmpfs with huge pages, from lines of /proc/self/mounts.
fn huge_tmpfs(mounts: &str) -> Vec<PathBuf> {
    let huge = |line: &str| {
        let mut fields = line.split(' ').skip(1);
        let (dir, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let mut options = options.split(',').filter_map(|it| it.strip_prefix("huge="));
        let is_huge = kind == "tmpfs" && options.any(|word| word != "never");
        is_huge.then(|| PathBuf::from(dir))
    };
    mounts.lines().filter_map(huge).collect()
}

fn names(dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

fn dax_devices() -> Vec<String> {
    let blocks = names("/sys/block").into_iter();
    let dax =
        |name: &String| read_word(&format!("/sys/block/{name}/queue/dax")).as_deref() == Some("1");
    names("/sys/bus/dax/devices")
        .into_iter()
        .chain(blocks.filter(dax))
        .collect()
}

/// The state of the clock, from the service that has it.
fn clock() -> Clock {
    if Path::new("/run/systemd/timesync/synchronized").exists() {
        return Clock::Synchronised;
    }
    let words = ["show", "--property=NTPSynchronized", "--value"];
    let asked = program::output("timedatectl", &words, CLOCK_TIMEOUT, CLOCK_BYTES_MAX);
    let asked = asked
        .ok()
        .filter(|it| it.status.is_some_and(|it| it.success()));
    match asked.as_ref().map(|it| it.text.trim()) {
        Some("yes") => Clock::Synchronised,
        Some("no") => Clock::Unsynchronised,
        _ => Clock::Unknown,
    }
}

fn shm_free_bytes() -> Option<u64> {
    let told = statvfs("/dev/shm").ok()?;
    Some(told.f_bavail.saturating_mul(told.f_frsize))
}

/// The key file: the named one, the one for the manager, or the one of the daemons.
fn key_file(
    manager: Option<&str>,
    named: Option<&Path>,
    config_files: &[ConfigFile],
) -> Option<PathBuf> {
    let located = match manager {
        Some(manager) => key::locate(named, manager).ok().flatten(),
        None => key::nonempty_path(named).map(Path::to_owned),
    };
    located.or_else(|| installed::value(config_files, "key").map(PathBuf::from))
}

fn key_facts(path: Option<&Path>) -> KeyFacts {
    let Some(path) = path.map(Path::to_owned) else {
        return KeyFacts::Unnamed;
    };
    match Key::load(&path) {
        Ok(_) => KeyFacts::Usable(path),
        Err(KeyError::Unreadable { cause, .. }) if cause.kind() == ErrorKind::PermissionDenied => {
            KeyFacts::Unseen(path)
        }
        Err(cause) => KeyFacts::Refused {
            path,
            cause: cause.to_string(),
        },
    }
}

fn manager_facts(url: Option<&str>, key: Option<&Path>, key_facts: &KeyFacts) -> ManagerFacts {
    let Some(url) = url else {
        return ManagerFacts::Unnamed;
    };
    if let KeyFacts::Unseen(_) = key_facts {
        return ManagerFacts::NotAsked(url.to_owned());
    }
    let ask = || -> anyhow::Result<()> {
        let key = key::find(key, url)?;
        ManagerClient::new(url, &key)?.status()?;
        Ok(())
    };
    match ask() {
        Ok(()) => ManagerFacts::Answers(url.to_owned()),
        Err(cause) => ManagerFacts::Fails(format!("{cause:#}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selected_word_is_in_brackets() {
        assert_eq!(
            selected_word("always [advise] never").as_deref(),
            Some("advise")
        );
        assert_eq!(selected_word("always"), None);
        assert_eq!(selected_word("[x"), None);
    }

    #[test]
    fn tmpfs_with_huge_pages_is_found() {
        let mounts = "tmpfs /a tmpfs rw,huge=always 0 0\ntmpfs /b tmpfs rw,huge=never 0 0\n\
                      x /c ext4 rw,huge=always 0 0\nshort\ntmpfs /d tmpfs rw 0 0\n";
        assert_eq!(huge_tmpfs(mounts), [PathBuf::from("/a")]);
    }

    #[test]
    fn facts_of_this_machine_are_read() {
        let host = HostFacts::gather(Some("http://127.0.0.1:1"), None);
        assert!(!host.kernel.is_empty());
        assert!(matches!(host.manager, ManagerFacts::Fails(_)), "{host:?}");
    }
}
