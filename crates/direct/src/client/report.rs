//! The report of a process about its operations, as text or JSON.

use super::mount_link::device_name;
use crate::shared::op_counters::{FileCounts, Level};
use pagemesh_base::mounts;
use rustix::process::getpid;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// How a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One line of JSON for each process.
    Json,
}

/// The name that a file had when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName {
    /// Its device number.
    pub device: u64,
    /// Its inode.
    pub ino: u64,
    /// Its path at that time.
    pub path: PathBuf,
}

#[derive(Serialize)]
struct ProcessReport<'a> {
    pid: i32,
    name: String,
    direct: u64,
    kernel: u64,
    files: Vec<FileReport<'a>>,
}

#[derive(Serialize)]
struct FileReport<'a> {
    path: Option<&'a Path>,
    mount: Option<PathBuf>,
    device: String,
    ino: u64,
    direct: u64,
    kernel: u64,
    reasons: BTreeMap<&'static str, u64>,
}

/// Whether a mount of pagemesh has this device number.
#[must_use]
pub fn is_mount(device: u64) -> bool {
    let (device, all) = (
        device_name(device),
        mounts::list_mounts().unwrap_or_default(),
    );
    all.iter().any(|known| known.device == device)
}

/// The level that `PAGEMESH_LOG` gives messages of the library: the last of its directives that is
/// for `pagemesh_preload`, or for all.
#[must_use]
pub fn log_level(text: &str) -> Level {
    let word = |word: &str| match word.to_ascii_lowercase().as_str() {
        "error" | "warn" => Some(Level::Warn),
        "info" => Some(Level::Info),
        "debug" | "trace" => Some(Level::Debug),
        "off" => Some(Level::Off),
        _ => None,
    };
    let level = |directive: &str| match directive.split_once('=') {
        Some(("pagemesh_preload", level)) => word(level),
        Some(_) => None,
        None => word(directive),
    };
    let mut directives = text.rsplit(',');
    let found = directives.find_map(|directive| level(directive.trim()));
    found.unwrap_or(Level::Off)
}

/// The report of this process.
#[must_use]
pub fn render(format: Format, file_counts: &[FileCounts], names: &[FileName]) -> String {
    let mounts = mounts::list_mounts().unwrap_or_default();
    let files = file_counts.iter().map(|file_counts| {
        let is_of =
            |name: &&FileName| (name.device, name.ino) == (file_counts.device, file_counts.ino);
        let device = device_name(file_counts.device);
        let mount = mounts.iter().find(|known| known.device == device);
        FileReport {
            path: names.iter().find(is_of).map(|name| name.path.as_path()),
            mount: mount.map(|known| known.dir.clone()),
            ino: file_counts.ino,
            direct: file_counts.direct,
            kernel: file_counts.kernel.iter().map(|(_, count)| count).sum(),
            reasons: file_counts
                .kernel
                .iter()
                .map(|(why, count)| (why.code(), *count))
                .collect(),
            device,
        }
    });
    let files: Vec<FileReport<'_>> = files.collect();
    let report = ProcessReport {
        pid: getpid().as_raw_pid(),
        name: std::fs::read_to_string("/proc/self/comm")
            .unwrap_or_default()
            .trim_end()
            .into(),
        direct: files.iter().map(|file| file.direct).sum(),
        kernel: files.iter().map(|file| file.kernel).sum(),
        files,
    };
    match format {
        Format::Json => serde_json::to_string(&report).unwrap_or_default() + "\n",
        Format::Text => render_text(&report, file_counts),
    }
}

fn render_text(report: &ProcessReport<'_>, file_counts: &[FileCounts]) -> String {
    let (pid, name) = (report.pid, &report.name);
    let (direct, kernel) = (report.direct, report.kernel);
    let mut text = format!(
        "pagemesh: {name} (process {pid}): {direct} operations directly, {kernel} by the kernel\n"
    );
    for (file, file_counts) in report.files.iter().zip(file_counts) {
        let shown = match (file.path, &file.mount, file.ino) {
            (Some(path), ..) => path.display().to_string(),
            (None, _, 0) => "further files".into(),
            (None, Some(mount), ino) => format!("inode {ino} of {}", mount.display()),
            (None, None, ino) => format!("inode {ino} of device {}", file.device),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {shown}: {} directly, {} by the kernel",
            file.direct, file.kernel
        );
        for (why, count) in &file_counts.kernel {
            let _ = writeln!(text, "    {count}: {}", why.text());
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::op_counters::Why;

    #[test]
    fn report_names_files_and_reasons() {
        let file_counts = [FileCounts {
            device: 1 << 8 | 5,
            ino: 7,
            direct: 3,
            kernel: vec![(Why::Patience, 2)],
        }];
        let names = [FileName {
            device: 1 << 8 | 5,
            ino: 7,
            path: "/mnt/file".into(),
        }];
        let text = render(Format::Text, &file_counts, &names);
        assert!(
            text.contains("/mnt/file: 3 directly, 2 by the kernel"),
            "{text}"
        );
        assert!(text.contains("2: first calls of the process"), "{text}");
        let line = render(Format::Json, &file_counts, &names);
        let json: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(json["files"][0]["reasons"]["patience"], 2);
        assert_eq!((&json["direct"], &json["kernel"]), (&3.into(), &2.into()));
    }

    #[test]
    fn level_is_that_of_the_library() {
        assert_eq!(log_level("warn"), Level::Warn);
        assert_eq!(log_level("pagemesh_volume=debug"), Level::Off);
        assert_eq!(log_level("warn,pagemesh_preload=debug"), Level::Debug);
        assert_eq!(log_level("nonsense"), Level::Off);
    }
}
