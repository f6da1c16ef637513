//! One client copies a large file to each server and reads it back, with `nfs-cp` and `nfs-cat` of libnfs.

use super::bar::{Bar, add_bars};
use super::setup::{NfsTarget, remove_file};
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::process::{ChildProcess, command_killed_with_thread, require_program};
use crate::report::{Report, ReportCell};
use crate::snapshots::{CaseSample, ComparedCase, ComparisonTexts, compare};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Limit of one copy.
const COPY_LIMIT: Duration = Duration::from_secs(600);
/// The least bandwidth, as a multiple of the peer's.
const RATIO_MIN: f64 = 1.5;
const PACKAGE: &str = "libnfs-utils";

/// The URL of a file for libnfs.
#[must_use]
pub fn file_url(target: &NfsTarget, file: &str) -> String {
    let (host, export) = (target.server.ip(), &target.export);
    let (port, mount_port) = (target.server.port(), target.mount_server.port());
    format!("nfs://{host}{export}/{file}?version=3&nfsport={port}&mountport={mount_port}")
}

fn copy(program: &str, args: &[&str], bytes: u64) -> Result<CaseSample, BenchError> {
    let mut command = command_killed_with_thread(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let began = Instant::now();
    ChildProcess::start(program, command)?.wait_for_success(COPY_LIMIT)?;
    let took = began.elapsed();
    Ok(CaseSample::of_time(bytes / 1_000_000, took))
}

/// Writes and reads `source` on each server, in turn. Ratios are to the first server's write.
///
/// # Errors
/// If libnfs is missing or a copy fails.
pub fn run_sequential(
    targets: &[NfsTarget],
    source: &Path,
    rounds: usize,
) -> Result<Report, BenchError> {
    // They know no --version, but they exist.
    for program in ["nfs-cp", "nfs-cat"] {
        let found = require_program(program, PACKAGE);
        if let Err(missing @ BenchError::Missing { .. }) = found {
            return Err(missing);
        }
    }
    let first = targets.first().ok_or_else(|| {
        let text = "there is no server to copy to; name at least one".into();
        BenchError::Option(text)
    })?;
    let bytes = std::fs::metadata(source);
    let bytes = bytes
        .map_err(BenchError::system("read the source of the copies"))?
        .len();
    let source = source.to_string_lossy().into_owned();
    let mut cases = Vec::new();
    for target in targets {
        let (url, from) = (file_url(target, "large"), source.clone());
        let name = format!("{} ({}) write", target.name, target.class);
        cases.push(ComparedCase::new(name, move || {
            // nfs-cp only creates files.
            remove_file(target, "large")?;
            copy("nfs-cp", &[&from, &url], bytes)
        }));
    }
    for target in targets {
        let url = file_url(target, "large");
        let name = format!("{} ({}) read", target.name, target.class);
        cases.push(ComparedCase::new(name, move || {
            copy("nfs-cat", &[&url], bytes)
        }));
    }
    let texts = ComparisonTexts {
        title: "one client of libnfs: nfs-cp to the server, nfs-cat from it",
        class: &first.class,
        operations: "bandwidth",
        unit: "MB/s",
    };
    let mut report = compare(&texts, rounds, &mut cases)?;
    report.plots.push(bandwidth_plot(&report));
    report.name = "nfs-sequential".into();
    let bars = bars(&report, targets);
    add_bars(&mut report, &bars);
    report.add_note(format!(
        "{bytes} bytes; the time has the start and the mount of the client"
    ));
    Ok(report)
}

/// The bandwidth of each case.
fn bandwidth_plot(report: &Report) -> Plot {
    let names = report.rows.iter().filter_map(|row| match row.first() {
        Some(ReportCell::Text(name)) => Some(name.clone()),
        _ => None,
    });
    let points = (0u32..).zip(&report.rows);
    let points = points.filter_map(|(at, row)| match row.get(1) {
        Some(ReportCell::Number(figure)) => Some((f64::from(at), *figure)),
        _ => None,
    });
    Plot {
        title: "One client of libnfs: bandwidth".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("MB/s"),
        categories: names.collect(),
        series: vec![PlotSeries {
            name: "bandwidth".to_owned(),
            points: points.collect(),
        }],
    }
}

/// The ratios of the first server's bandwidths to the last server's.
fn bars(report: &Report, targets: &[NfsTarget]) -> Vec<Bar> {
    let (Some(own), Some(peer)) = (targets.first(), targets.get(1..).and_then(<[_]>::last)) else {
        return Vec::new();
    };
    let bandwidth = |target: &NfsTarget, direction: &str| {
        let name = format!("{} ({}) {direction}", target.name, target.class);
        match report.cell(&name, "bandwidth") {
            Some(ReportCell::Number(figure)) => Some(*figure),
            _ => None,
        }
    };
    let bar = |direction: &str| {
        let own = bandwidth(own, direction).zip(bandwidth(peer, direction));
        let name = format!("{direction} bandwidth relative to {}", peer.name);
        Bar::ratio_at_least(name, RATIO_MIN, own.map(|(own, peer)| own / peer))
    };
    vec![bar("write"), bar("read")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_names_both_ports() {
        let target = NfsTarget {
            name: "x".into(),
            class: "process".into(),
            server: ([127, 0, 0, 1], 2049).into(),
            mount_server: ([127, 0, 0, 1], 20048).into(),
            export: "/data".into(),
            pids: vec![],
        };
        let wanted = "nfs://127.0.0.1/data/f?version=3&nfsport=2049&mountport=20048";
        assert_eq!(file_url(&target, "f"), wanted);
    }
}
