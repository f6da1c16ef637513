//! The report of the comparison.

use super::bars::{self, BarOutcome};
use super::rows::DiskRow;
use super::{DiskOptions, DiskSample, DiskSamples, DiskTarget, TargetKind};
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::report::{Report, ReportCell};
use crate::session::ROUNDS_MIN;
use crate::stats::{median, median_ratio};
use serde_json::json;

/// The class of pools on a disk.
const CLASS: &str = "file-sync";

pub(super) fn report(targets: &[DiskTarget], options: &DiskOptions, found: &DiskSamples) -> Report {
    let title = "fio on a disk and on block servers there, 4 KiB unless stated, all in one \
                 alternating run";
    let columns = [
        ("row", ""),
        ("target", ""),
        ("class", ""),
        ("IOPS", "1/s"),
        ("mean", "µs"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("p99.9", "µs"),
        ("fio CPU", "% of a core"),
        ("server CPU", "% of a core"),
        ("to raw disk", "× IOPS"),
        ("bar", ""),
        ("met", ""),
    ];
    let mut report = Report::new("disk", title, CLASS, &columns);
    let mut judged = Vec::new();
    for (row, of_row) in found.rows.iter().zip(&found.samples) {
        for (target, rounds) in targets.iter().zip(of_row) {
            let outcomes = bars::outcomes(found, row.id, target.kind);
            report.add_row(cells(row, target, rounds, found, &outcomes));
            judged.extend(outcomes);
        }
    }
    add_notes(&mut report, options);
    report.plots.push(plot(found));
    report.raw = json!({
        "rows": found.rows,
        "targets": found.targets,
        "bars": judged,
        "samples_by_row_target_round": found.samples,
    });
    report
}

fn iops_ratio(own: &[DiskSample], other: &[DiskSample]) -> Option<f64> {
    let iops = |rounds: &[DiskSample]| rounds.iter().map(|s| s.iops).collect::<Vec<_>>();
    median_ratio(&iops(own), &iops(other))
}

fn cells(
    row: &DiskRow,
    target: &DiskTarget,
    rounds: &[DiskSample],
    found: &DiskSamples,
    outcomes: &[BarOutcome],
) -> Vec<ReportCell> {
    let middle = |of: fn(&DiskSample) -> Option<f64>| {
        median(&rounds.iter().filter_map(of).collect::<Vec<_>>())
    };
    let us = |of| ReportCell::from(middle(of).map(|ns| ns / 1e3));
    let raw = found.rounds(row.id, TargetKind::Raw);
    let server = match target.pids.is_empty() {
        true => ReportCell::Missing,
        false => middle(|s| Some(s.server_cpu_percent)).into(),
    };
    let joined = |text: fn(&BarOutcome) -> String| match outcomes {
        [] => ReportCell::Missing,
        all => all.iter().map(text).collect::<Vec<_>>().join("; ").into(),
    };
    vec![
        row.title.into(),
        target.kind.title().into(),
        target.class.as_str().into(),
        middle(|s| Some(s.iops)).into(),
        us(|s| Some(s.mean_ns)),
        us(|s| s.p50_ns),
        us(|s| s.p99_ns),
        us(|s| s.p999_ns),
        middle(|s| Some(s.fio_cpu_percent)).into(),
        server,
        raw.and_then(|raw| iops_ratio(rounds, raw)).into(),
        joined(BarOutcome::bar),
        joined(BarOutcome::verdict),
    ]
}

fn add_notes(report: &mut Report, options: &DiskOptions) {
    report.add_note(format!(
        "medians of {} alternating rounds of {} ms per cell over {} MiB of each target, written \
         once before; ratios and differences are medians of the rounds' own",
        options.rounds,
        options.runtime.as_millis(),
        options.size_bytes >> 20
    ));
    if options.rounds < ROUNDS_MIN {
        report.add_note(format!(
            "fewer than {ROUNDS_MIN} rounds: the figures move too much to be published"
        ));
    }
    report.add_note(
        "70/30: operations per second are of reads and writes, latencies of reads; write and \
         flush, and FUA: an operation is a write with its flush",
    );
    report.add_note(
        "files: libaio with O_DIRECT; flush QD1: fdatasync; flush QD16: io_uring, so that flushes \
         overlap; FUA: O_DSYNC. NBD and RBD: a flush after each write",
    );
    report.add_note(
        "1 MiB rows without a remark: all rounds come first, on data that was written in order. Random writes scatter the \
         pages of a volume over its pool; a file stays in place",
    );
    report.add_note(format!(
        "each volume of pagemesh returned {} MiB of written data right before the run (crc32c)",
        options.verify_bytes >> 20
    ));
}

fn plot(found: &DiskSamples) -> Plot {
    let series = |(at, target): (usize, &TargetKind)| PlotSeries {
        name: target.title().to_owned(),
        points: (0u32..)
            .zip(found.rows.iter().zip(&found.samples))
            .filter_map(|(number, (row, of_row))| {
                let raw = found.rounds(row.id, TargetKind::Raw)?;
                Some((f64::from(number), iops_ratio(&of_row[at], raw)?))
            })
            .collect(),
    };
    let titles = found.rows.iter().map(|row| row.title.to_owned());
    Plot {
        title: "Block servers on one disk".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("operations per second, relative to the raw disk"),
        categories: titles.collect(),
        series: found.targets.iter().enumerate().map(series).collect(),
    }
}
