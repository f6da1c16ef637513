//! The facts about a machine that the checks judge.
//!
//! Invariants: reads only; every wait has a limit. A fact that cannot be read is unknown, never an
//! error of the command.

use crate::key;
use pagemesh_base::key::Key;
use pagemesh_manage::ManagerClient;
use rustix::fs::{Access, access, statvfs};
use rustix::process::{Resource, getrlimit};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The ports of the shipped configuration: the manager's and the brick's.
const PORTS: [u16; 2] = [7070, 7071];
/// The name of this program in /proc.
const PROGRAM: &str = "pagemesh";
/// Limit of the wait for the service that knows the clock.
const CLOCK_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The state LISTEN in /proc/net/tcp.
const LISTENING: &str = "0A";

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

/// A port of the default configuration.
#[derive(Debug)]
pub struct PortFacts {
    /// The port.
    pub number: u16,
    /// Its state.
    pub state: PortState,
}

/// The listener of a port.
#[derive(Debug)]
pub enum PortState {
    /// None.
    Free,
    /// A process of pagemesh.
    Ours,
    /// Another program, by its name if it is known.
    Taken(Option<String>),
    /// The system refuses the question.
    Unknown(String),
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
    /// pagemesh refuses it.
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason.
        cause: String,
    },
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
    /// The selected word of `shmem_enabled`.
    pub shmem_huge: Option<String>,
    /// Mount points of tmpfs with huge pages.
    pub huge_tmpfs: Vec<PathBuf>,
    /// Names of DAX devices, and of block devices in mode fsdax.
    pub dax_devices: Vec<String>,
    /// RLIMIT_MEMLOCK; none if unlimited.
    pub memlock_bytes: Option<u64>,
    /// RLIMIT_NOFILE; none if unlimited.
    pub open_files: Option<u64>,
    /// The ports of the default configuration.
    pub ports: Vec<PortFacts>,
    /// The clock.
    pub clock: Clock,
    /// Free bytes of /dev/shm.
    pub shm_free_bytes: Option<u64>,
    /// The key file.
    pub key: KeyFacts,
    /// The named manager, with the error if it does not answer.
    pub manager: Option<(String, Option<String>)>,
}

impl HostFacts {
    /// Reads the facts of this machine.
    pub fn gather(manager: Option<&str>, key: Option<&Path>) -> HostFacts {
        let release = rustix::system::uname();
        HostFacts {
            kernel: release.release().to_string_lossy().into_owned(),
            fuse_device: device_access(Path::new("/dev/fuse")),
            is_root: rustix::process::geteuid().is_root(),
            has_fusermount: is_on_search_path("fusermount3"),
            fuse_uring: read_word("/sys/module/fuse/parameters/enable_uring")
                .map(|word| word == "Y" || word == "1"),
            shmem_huge: read_word("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
                .and_then(|line| selected_word(&line)),
            huge_tmpfs: huge_tmpfs(&read_word("/proc/self/mounts").unwrap_or_default()),
            dax_devices: dax_devices(),
            memlock_bytes: getrlimit(Resource::Memlock).current,
            open_files: getrlimit(Resource::Nofile).current,
            ports: PORTS.map(port).into(),
            clock: clock(),
            shm_free_bytes: shm_free_bytes(),
            key: key_facts(manager, key),
            manager: manager.map(|url| (url.to_owned(), ask_manager(url, key).err())),
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

fn port(number: u16) -> PortFacts {
    let state = match TcpListener::bind(("0.0.0.0", number)) {
        Ok(_) => PortState::Free,
        Err(cause) if cause.kind() == ErrorKind::AddrInUse => match listener(number) {
            Some(name) if name == PROGRAM => PortState::Ours,
            other => PortState::Taken(other),
        },
        Err(cause) => PortState::Unknown(cause.to_string()),
    };
    PortFacts { number, state }
}

/// The name of the process that listens on a port, if this user may see it.
fn listener(port: u16) -> Option<String> {
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| read_word(path).unwrap_or_default());
    let sockets: HashSet<String> = tables
        .iter()
        .flat_map(|table| listening_inodes(table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    names("/proc").into_iter().find_map(|pid| {
        pid.parse::<u32>().ok()?;
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let mut targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let is_listener =
            targets.any(|target| target.to_str().is_some_and(|it| sockets.contains(it)));
        is_listener.then(|| read_word(&format!("/proc/{pid}/comm")))?
    })
}

/// The inodes of the sockets that listen on a port, from a table of /proc/net.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    let wanted = format!(":{port:04X}");
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_listener = fields.get(1)?.ends_with(&wanted) && *fields.get(3)? == LISTENING;
        is_listener.then(|| fields.get(9).map(|it| (*it).to_owned()))?
    };
    table.lines().filter_map(inode).collect()
}

/// The state of the clock, from the service that has it.
fn clock() -> Clock {
    if Path::new("/run/systemd/timesync/synchronized").exists() {
        return Clock::Synchronised;
    }
    let asked = output_in_time(&[
        "timedatectl",
        "show",
        "--property=NTPSynchronized",
        "--value",
    ]);
    match asked.as_deref().map(str::trim) {
        Some("yes") => Clock::Synchronised,
        Some("no") => Clock::Unsynchronised,
        _ => Clock::Unknown,
    }
}

/// The output of a program that succeeds in time.
fn output_in_time(words: &[&str]) -> Option<String> {
    let (program, arguments) = words.split_first()?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn().ok()?;
    let end = Instant::now() + CLOCK_TIMEOUT;
    while child.try_wait().ok()?.is_none() {
        if Instant::now() > end {
            // Fails only if the child has ended.
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let output = child.wait_with_output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then_some(text)
}

fn shm_free_bytes() -> Option<u64> {
    let told = statvfs("/dev/shm").ok()?;
    Some(told.f_bavail.saturating_mul(told.f_frsize))
}

fn key_facts(manager: Option<&str>, named: Option<&Path>) -> KeyFacts {
    let by_address = || {
        key::default_path(manager?)
            .ok()
            .filter(|path| path.exists())
    };
    let named = key::nonempty_path(named).map(Path::to_owned);
    let Some(path) = named.or_else(by_address) else {
        return KeyFacts::Unnamed;
    };
    match Key::load(&path) {
        Ok(_) => KeyFacts::Usable(path),
        Err(cause) => KeyFacts::Refused {
            path,
            cause: cause.to_string(),
        },
    }
}

fn ask_manager(url: &str, named: Option<&Path>) -> Result<(), String> {
    let ask = || -> anyhow::Result<()> {
        let key = key::find(named, url)?;
        ManagerClient::new(url, &key)?.status()?;
        Ok(())
    };
    ask().map_err(|cause| format!("{cause:#}"))
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
    fn listener_of_own_port_is_this_process() {
        let listener_socket = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = listener_socket.local_addr().expect("an address").port();
        let own = read_word("/proc/self/comm");
        assert_eq!(listener(port), own);
        assert!(matches!(super::port(port).state, PortState::Taken(Some(_))));
        drop(listener_socket);
    }

    #[test]
    fn torn_tables_have_no_listener() {
        for table in ["", "a", "0: 0100007F:1B9E", "0: :1B9E 0 0A"] {
            assert_eq!(listening_inodes(table, 7070), Vec::<String>::new());
        }
    }

    #[test]
    fn silent_program_is_ended() {
        assert_eq!(output_in_time(&["sleep", "60"]), None);
        assert_eq!(output_in_time(&["echo", "yes"]).as_deref(), Some("yes\n"));
        assert_eq!(output_in_time(&["/nowhere/program"]), None);
    }

    #[test]
    fn facts_of_this_machine_are_read() {
        let host = HostFacts::gather(Some("http://127.0.0.1:1"), None);
        assert!(!host.kernel.is_empty());
        let (_, error) = host.manager.expect("the named manager");
        assert!(error.is_some());
    }
}
