//! `pagemesh mount status`: shows the direct clients of a mount.

use crate::args::Output;
use crate::commands::mount::MountCommand;
use crate::output::{self, table};
use anyhow::Context;
use pagemesh_base::mounts::{self, MountEntry};
use pagemesh_direct::client::query_mount;
use pagemesh_direct::op_counters::Why;
use pagemesh_direct::status::{ClientStatus, DirectStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
struct MountReport {
    dir: PathBuf,
    device: String,
    /// `None` if the mount process does not report.
    #[serde(flatten)]
    status: Option<DirectStatus>,
    trouble: Option<String>,
}

/// Shows one mount or all.
pub fn run(command: &MountCommand, output: Output) -> anyhow::Result<()> {
    let MountCommand::Status { dir } = command;
    let all = mounts::list_mounts().context("cannot read the mounts")?;
    let shown = match dir.as_os_str() == "all" {
        true => all.iter().map(report_or_error).collect(),
        false => vec![mount_report(&find_mount(all, dir)?)?],
    };
    output::print(output, &shown, || reports_text(&shown))
}

fn find_mount(all: Vec<MountEntry>, dir: &Path) -> anyhow::Result<MountEntry> {
    let place = dir.canonicalize();
    let place = place.with_context(|| format!("there is no directory {}", dir.display()))?;
    let found = all.into_iter().rev().find(|known| known.dir == place);
    found.with_context(|| {
        format!(
            "no file system of pagemesh is mounted on {}; pagemesh mount status all shows all mounts",
            dir.display()
        )
    })
}

/// The report of one of several mounts; an error appears in its place.
fn report_or_error(known: &MountEntry) -> MountReport {
    mount_report(known).unwrap_or_else(|cause| MountReport {
        dir: known.dir.clone(),
        device: known.device.clone(),
        status: None,
        trouble: Some(format!("{cause:#}")),
    })
}

fn mount_report(known: &MountEntry) -> anyhow::Result<MountReport> {
    let shown = known.dir.display();
    let dir = File::open(&known.dir).with_context(|| format!("cannot open {shown}"))?;
    let device = dir.metadata()?.dev();
    let status = query_mount(device, dir.as_raw_fd()).with_context(|| {
        format!(
            "the process of the mount on {shown} does not tell; run this as its user or as root, with \
             its version of pagemesh. Without a direct path there is nothing to tell: see its log"
        )
    })?;
    Ok(MountReport {
        dir: known.dir.clone(),
        device: known.device.clone(),
        status: Some(status),
        trouble: None,
    })
}

fn reports_text(all: &[MountReport]) -> String {
    if all.is_empty() {
        return "no file system of pagemesh is mounted here".into();
    }
    let texts: Vec<String> = all.iter().map(report_text).collect();
    texts.join("\n\n")
}

fn report_text(shown: &MountReport) -> String {
    let Some(status) = &shown.status else {
        let trouble = shown.trouble.as_deref().unwrap_or("nothing is known");
        return format!("{}: {trouble}", shown.dir.display());
    };
    let path = match &status.closed {
        Some(code) => format!("closed: {}", reason_text(code)),
        None => "open".into(),
    };
    let mut lines = vec![format!(
        "{}: direct path {path}; {} files on it, {} threads of {} processes",
        shown.dir.display(),
        status.files.len(),
        status.rows_taken,
        status.processes.len()
    )];
    if !status.refused.is_empty() {
        lines.push(format!(
            "refused: {}",
            counts_text(&status.refused, str::to_owned)
        ));
    }
    for killed in &status.killed {
        let (name, pid, reason) = (&killed.name, killed.pid, &killed.reason);
        lines.push(format!("killed at {}: {name} ({pid}): {reason}", killed.at));
    }
    if !status.processes.is_empty() {
        lines.push(process_table(&status.processes));
    }
    lines.join("\n")
}

fn process_table(all: &[ClientStatus]) -> String {
    let row = |process: &ClientStatus| {
        vec![
            process.pid.to_string(),
            process.name.clone(),
            process.connected_at.to_string(),
            process.direct.to_string(),
            process.kernel.to_string(),
            counts_text(&process.reasons, reason_text),
        ]
    };
    let head = [
        ">PID",
        "NAME",
        ">SINCE",
        ">DIRECT",
        ">KERNEL",
        "WHY BY THE KERNEL",
    ];
    table(&head, all.iter().map(row))
}

/// The text of a reason's code.
fn reason_text(code: &str) -> String {
    let known = Why::ALL.iter().find(|why| why.code() == code);
    known.map_or_else(|| code.to_owned(), |why| why.text().to_owned())
}

fn counts_text(all: &BTreeMap<String, u64>, said: impl Fn(&str) -> String) -> String {
    let each = all
        .iter()
        .map(|(code, count)| format!("{count} {}", said(code)));
    each.collect::<Vec<_>>().join(", ")
}

/// A direct client of a mount on this host.
#[derive(Clone, Debug, Serialize)]
pub struct DirectClientRow {
    pub name: String,
    pub pid: i32,
    pub mount: String,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations by the kernel, and the most frequent reason.
    pub kernel: u64,
    pub main_reason: Option<String>,
}

/// The direct clients of all mounts on this host that report.
pub fn direct_clients() -> Vec<DirectClientRow> {
    let mounts = mounts::list_mounts().unwrap_or_default();
    let reports = mounts.iter().map(report_or_error);
    let rows = reports.flat_map(|report| {
        let mount = report.dir.display().to_string();
        let clients = report.status.map(|status| status.processes);
        clients.unwrap_or_default().into_iter().map(move |client| {
            let most = client.reasons.iter().max_by_key(|(_, count)| **count);
            DirectClientRow {
                name: client.name.clone(),
                pid: client.pid,
                mount: mount.clone(),
                direct: client.direct,
                kernel: client.kernel,
                main_reason: most.map(|(why, _)| why.clone()),
            }
        })
    });
    rows.collect()
}
