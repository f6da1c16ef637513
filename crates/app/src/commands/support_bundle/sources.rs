//! The parts of a bundle: what each reads of the host or the manager.
//!
//! Invariants: each part ends in bounded time and reads a bounded number of bytes. A part that fails
//! says so in the list of contents. Of an environment the values of some variables are read, and no other.

use super::SupportBundleArgs;
use super::archive::{Archive, ITEM_BYTES_MAX};
use crate::client::manager_client;
use crate::commands::doctor;
use crate::program;
use pagemesh_manage::{ManagerClient, ManagerError};
use rustix::fs::{Mode, OFlags};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Limit of one answer of the manager.
const MANAGER_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of a program, as journalctl.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(10);
/// Lines of the journal.
const JOURNAL_LINES: &str = "5000";
/// Events, the last ones.
const EVENTS: usize = 1000;
/// Volumes whose stages are asked for: the slowest.
const SLOWEST_VOLUMES: usize = 5;
/// Processes and files of one directory.
const PROCESSES_MAX: usize = 256;
const FILES_MAX: usize = 256;
/// Files of the kernel, with their names in the bundle.
const KERNEL_FILES: [(&str, &str); 11] = [
    ("version", "/proc/version"),
    ("os-release", "/etc/os-release"),
    ("meminfo", "/proc/meminfo"),
    ("mounts", "/proc/self/mounts"),
    ("loadavg", "/proc/loadavg"),
    ("limits", "/proc/self/limits"),
    ("pressure-memory", "/proc/pressure/memory"),
    ("pressure-io", "/proc/pressure/io"),
    ("fuse-io-uring", "/sys/module/fuse/parameters/enable_uring"),
    (
        "shmem-huge-pages",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    ),
    (
        "clock-source",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    ),
];
/// Variables of processes that are shown with their values.
const SHOWN_VARIABLES: [&str; 3] = ["PAGEMESH_MANAGER", "PAGEMESH_LOG", "PAGEMESH_KEY"];

/// The name of the part of the cluster, if it is missing as a whole.
pub const CLUSTER: &str = "cluster";

/// Reads a part into an archive.
type Collect<'a> = Box<dyn FnOnce(&mut Archive) -> anyhow::Result<()> + 'a>;

/// A part of the bundle.
pub struct Source<'a> {
    pub name: &'static str,
    pub collect: Collect<'a>,
}

/// All parts, the cheap ones first.
pub fn all(args: &SupportBundleArgs) -> Vec<Source<'_>> {
    let source = |name, collect| Source { name, collect };
    vec![
        source("version", Box::new(add_version)),
        source("host", Box::new(add_kernel)),
        source("processes", Box::new(add_processes)),
        source("config", Box::new(|archive| add_dirs(archive, &args.dir))),
        source(CLUSTER, Box::new(|archive| add_cluster(archive, args))),
        source("doctor", Box::new(|archive| add_doctor(archive, args))),
        source("journal", Box::new(add_journal)),
        source("units", Box::new(add_units)),
    ]
}

fn add_version(archive: &mut Archive) -> anyhow::Result<()> {
    archive.add(
        "version.txt",
        concat!("pagemesh ", env!("CARGO_PKG_VERSION"), "\n"),
    )
}

fn add_kernel(archive: &mut Archive) -> anyhow::Result<()> {
    for (name, path) in KERNEL_FILES {
        archive.add_or_missing(&format!("host/{name}.txt"), read_bounded(Path::new(path)))?;
    }
    Ok(())
}

/// A process of pagemesh.
pub struct Process(PathBuf);

/// The processes of pagemesh that this user can see.
pub fn running() -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_ours = |dir: &PathBuf| {
        let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
        name.trim_end() == "pagemesh"
    };
    let found = entries.map(|entry| entry.path()).filter(is_ours);
    found.take(PROCESSES_MAX).map(Process).collect()
}

impl Process {
    fn text(&self, file: &str) -> String {
        read_bounded(&self.0.join(file)).unwrap_or_else(|cause| format!("missing: {cause}\n"))
    }

    pub fn environment(&self) -> Vec<u8> {
        read_bounded(&self.0.join("environ"))
            .unwrap_or_default()
            .into_bytes()
    }

    /// The words of its command line.
    pub fn words(&self) -> Vec<String> {
        let words = self.text("cmdline");
        words.split_terminator('\0').map(str::to_owned).collect()
    }

    /// Its variables of pagemesh: some with their values, the others by name.
    fn variables(&self) -> String {
        let environment = self.environment();
        let text = String::from_utf8_lossy(&environment);
        let ours = text.split('\0').filter(|it| it.starts_with("PAGEMESH_"));
        let shown = ours.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if SHOWN_VARIABLES.contains(&name) {
                format!("{name}={value}\n")
            } else {
                format!("{name} is set\n")
            }
        });
        shown.collect()
    }
}

fn add_processes(archive: &mut Archive) -> anyhow::Result<()> {
    for process in running() {
        let pid = process
            .0
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let text = format!(
            "{}\n\n{}\n{}\n{}",
            process.words().join(" "),
            process.variables(),
            process.text("limits"),
            process.text("status")
        );
        archive.add(&format!("processes/{pid}.txt"), &text)?;
    }
    Ok(())
}

/// The configuration files and the logs in directories.
fn add_dirs(archive: &mut Archive, dirs: &[PathBuf]) -> anyhow::Result<()> {
    for (number, dir) in dirs.iter().enumerate() {
        let found = [files(dir, "toml"), files(dir, "log")].concat();
        for path in [links(dir, "toml"), links(dir, "log")].concat() {
            archive.missing(
                &path.display().to_string(),
                "it is a symbolic link, which is not followed; copy its file beside it to include it",
            );
        }
        if found.is_empty() {
            archive.missing(&dir.display().to_string(), "it has no *.toml and no *.log");
        }
        for path in found {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let text = format!("# {}\n", path.display());
            let text = read_end(&path).map(|end| text + &end);
            archive.add_or_missing(&format!("config/{number}/{name}"), text)?;
        }
    }
    Ok(())
}

/// The regular files in a directory with an extension. Links do not count: a program that may write
/// to a directory of logs could let root pack any file.
pub fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    entries(dir, extension, std::fs::FileType::is_file)
}

/// The symbolic links in a directory with an extension.
pub fn links(dir: &Path, extension: &str) -> Vec<PathBuf> {
    entries(dir, extension, std::fs::FileType::is_symlink)
}

fn entries(dir: &Path, extension: &str, is: fn(&std::fs::FileType) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let wanted = entries.filter(|entry| entry.file_type().is_ok_and(|it| is(&it)));
    let paths = wanted.map(|entry| entry.path());
    let wanted = paths.filter(|it| it.extension().is_some_and(|found| found == extension));
    let mut found: Vec<PathBuf> = wanted.take(FILES_MAX).collect();
    found.sort();
    found
}

/// Opens a regular file, and no link to one. Its name may have become a link since the directory was
/// read. `O_NONBLOCK` keeps the open of a FIFO from waiting.
fn open_regular(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::other("not a regular file"))
}

/// The state of the cluster, as the manager tells it.
fn add_cluster(archive: &mut Archive, args: &SupportBundleArgs) -> anyhow::Result<()> {
    let client = match manager_client(&args.client) {
        Ok(client) => client,
        Err(cause) => {
            archive.missing(CLUSTER, &format!("{cause:#}"));
            return Ok(());
        }
    };
    let events = format!("/api/v1/events?last={EVENTS}");
    let (mut figures, mut has_answer, mut first_cause) = (None, false, None);
    for (name, path) in [
        ("status.json", "/api/v1/status"),
        ("bricks.json", "/api/v1/bricks"),
        ("volumes.json", "/api/v1/volumes"),
        ("figures.json", "/api/v1/figures"),
        ("figures-1h.json", "/api/v1/figures/cluster?span=1h"),
        ("figures-24h.json", "/api/v1/figures/cluster?span=24h"),
        ("events.json", &events),
        ("metrics.txt", "/metrics"),
    ] {
        match ask(&client, path) {
            Ok(text) => {
                has_answer = true;
                archive.add(&format!("cluster/{name}"), &text)?;
                if name == "figures.json" {
                    figures = Some(text);
                }
            }
            Err(cause) => {
                archive.missing(&format!("cluster/{name}"), &cause.to_string());
                let is_away = matches!(cause, ManagerError::Unreachable { .. });
                first_cause.get_or_insert(cause);
                if is_away {
                    break;
                }
            }
        }
    }
    if let Some(cause) = first_cause.filter(|_| !has_answer) {
        archive.missing(CLUSTER, &cause.to_string());
        return Ok(());
    }
    for (volume, kind) in slowest(&figures.unwrap_or_default()) {
        let path = format!("/api/v1/why/volumes/{volume}?kind={kind}&quantile=0.99");
        let text = ask(&client, &path).map_err(|cause| cause.to_string());
        archive.add_or_missing(&format!("cluster/why/{volume}-{kind}.json"), text)?;
    }
    Ok(())
}

fn ask(client: &ManagerClient, path: &str) -> Result<String, ManagerError> {
    client.text_at(path, MANAGER_TIMEOUT, ITEM_BYTES_MAX as u64)
}

/// The slowest volumes of the last minute with their slowest kind of operation.
fn slowest(figures: &str) -> Vec<(String, String)> {
    let figures: Value = serde_json::from_str(figures).unwrap_or_default();
    let mut found = vec![];
    for volume in figures["volumes"].as_array().into_iter().flatten() {
        let kinds = volume["kinds"].as_array().into_iter().flatten();
        let slowest = kinds.filter_map(|it| Some((it["p99_ns"].as_u64()?, it["kind"].as_str()?)));
        let name = volume["name"].as_str();
        // A name with other characters is not one of pagemesh, and would change the path.
        let is_plain = |it: &&str| {
            it.bytes()
                .all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c))
        };
        if let (Some((p99_ns, kind)), Some(name)) = (slowest.max(), name.filter(is_plain)) {
            found.push((p99_ns, name.to_owned(), kind.to_owned()));
        }
    }
    found.sort_by(|one, other| other.cmp(one));
    let slowest = found.into_iter().take(SLOWEST_VOLUMES);
    slowest.map(|(_, name, kind)| (name, kind)).collect()
}

fn add_doctor(archive: &mut Archive, args: &SupportBundleArgs) -> anyhow::Result<()> {
    let report = doctor::report(Some(&args.client.manager), args.client.key.as_deref());
    archive.add("doctor.txt", &report)
}

fn add_journal(archive: &mut Archive) -> anyhow::Result<()> {
    let words = [
        "--unit=pagemesh*",
        "--no-pager",
        "--output=short-iso-precise",
        "--lines",
        JOURNAL_LINES,
    ];
    archive.add_or_missing("journal.txt", program("journalctl", &words))
}

fn add_units(archive: &mut Archive) -> anyhow::Result<()> {
    let words = ["show", "pagemesh*", "--all", "--no-pager"];
    archive.add_or_missing("units.txt", program("systemctl", &words))
}

/// The text of a file, or its beginning.
pub fn read_bounded(path: &Path) -> Result<String, String> {
    let read = || {
        let mut bytes = vec![];
        let file = std::fs::File::open(path)?;
        file.take(ITEM_BYTES_MAX as u64 + 1)
            .read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().map_err(|cause: std::io::Error| cause.to_string())
}

/// The end of a file: of a log the last lines matter. It begins with a whole line.
fn read_end(path: &Path) -> Result<String, String> {
    use std::io::{Seek, SeekFrom};
    let read = || {
        let mut file = open_regular(path)?;
        let skipped = file
            .metadata()?
            .len()
            .saturating_sub(ITEM_BYTES_MAX as u64 / 2);
        file.seek(SeekFrom::Start(skipped))?;
        let mut bytes = vec![];
        file.take(ITEM_BYTES_MAX as u64 / 2)
            .read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Ok(if skipped == 0 {
            text
        } else {
            let (_, rest) = text.split_once('\n').unwrap_or_default();
            format!("… {skipped} bytes before\n{rest}")
        })
    };
    read().map_err(|cause: std::io::Error| cause.to_string())
}

/// The output of a program.
fn program(name: &str, words: &[&str]) -> Result<String, String> {
    let output = program::output(name, words, PROGRAM_TIMEOUT, ITEM_BYTES_MAX)?;
    Ok(output.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A link or a FIFO that replaces a log must not reach the bundle, nor hold it up.
    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("secret"), "root:x").expect("written");
        std::fs::write(path("a.log"), "a line").expect("written");
        std::os::unix::fs::symlink(path("secret"), path("b.log")).expect("a link");
        std::os::unix::fs::symlink(path("nowhere"), path("c.log")).expect("a link");
        std::fs::create_dir(path("d.log")).expect("a directory");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, path("e.log"), mode).expect("a FIFO");
        assert_eq!(files(dir.path(), "log"), [path("a.log")]);
        assert_eq!(links(dir.path(), "log"), [path("b.log"), path("c.log")]);
        assert_eq!(read_end(&path("a.log")).as_deref(), Ok("a line"));
        for other in ["b.log", "c.log", "d.log", "e.log", "f.log"] {
            assert!(read_end(&path(other)).is_err(), "{other}");
        }
    }

    #[test]
    fn slowest_volumes_come_first_and_bad_figures_give_none() {
        let volume = |name: &str, p99_ns: u64| {
            format!(
                r#"{{"name":"{name}","kinds":[{{"kind":"read","p99_ns":1}},{{"kind":"write","p99_ns":{p99_ns}}}]}}"#
            )
        };
        let volumes: Vec<String> = (2..10).map(|n| volume(&format!("v{n}"), n * 10)).collect();
        let figures = format!(
            r#"{{"volumes":[{},{}]}}"#,
            volumes.join(","),
            volume("../x", 999)
        );
        let found = slowest(&figures);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["v9", "v8", "v7", "v6", "v5"]);
        assert!(found.iter().all(|(_, kind)| kind == "write"));
        for bad in [
            "",
            "[]",
            r#"{"volumes":7}"#,
            r#"{"volumes":[{"kinds":[{}]}]}"#,
        ] {
            assert!(slowest(bad).is_empty());
        }
    }
}
