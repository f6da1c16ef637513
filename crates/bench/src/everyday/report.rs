//! The report: a row for each case, with its bars.

use super::cases::verdict;
use super::steps::{FILES_PER_DIRECTORY, SMALL_READS_BYTES};
use super::{
    DBENCH_CLIENTS, EXEC, EXT4, EverydayCase, EverydayOptions, EverydayPlaces, EverydaySample,
    EverydaySamples, MOUNT, PLACES,
};
use crate::report::{Report, ReportCell};
use crate::stats::median;
use serde_json::json;

const COLUMNS: [(&str, &str); 11] = [
    ("case", ""),
    ("unit", ""),
    ("mount", ""),
    ("exec", ""),
    ("ext4", ""),
    ("mount to ext4", "× slower"),
    ("bar", "at most"),
    ("met", ""),
    ("exec to mount", "× slower"),
    ("exec bar", "at most"),
    ("exec met", ""),
];

pub(super) fn report(
    places: &EverydayPlaces,
    options: &EverydayOptions,
    found: &EverydaySamples,
) -> Report {
    let title = "everyday work on files, without a sync, all in one alternating run";
    let mut report = Report::new("everyday", title, &places.mount.class, &COLUMNS);
    for (case, of_case) in found.cases.iter().zip(&found.samples) {
        report.add_row(cells(*case, of_case));
    }
    add_notes(&mut report, options, found);
    report.raw = json!({
        "cases": found.cases,
        "places": places.all().map(|place| &place.name),
        "samples_by_case_place_round": found.samples,
        "load_averages": found.loads,
    });
    report
}

fn cells(case: EverydayCase, of_case: &[Vec<EverydaySample>; PLACES]) -> Vec<ReportCell> {
    let figures = of_case.each_ref().map(|rounds| {
        let figures = rounds.iter().map(|sample| sample.figure);
        figures.collect::<Vec<f64>>()
    });
    let to_ext4 = case.slowness(&figures[MOUNT], &figures[EXT4]);
    let to_mount = case.slowness(&figures[EXEC], &figures[MOUNT]);
    let judged = |measured: Option<f64>, bar: Option<f64>| match measured.zip(bar) {
        Some((measured, bar)) => verdict(measured, bar).into(),
        None => ReportCell::Missing,
    };
    vec![
        case.title().into(),
        case.unit().into(),
        median(&figures[MOUNT]).into(),
        median(&figures[EXEC]).into(),
        median(&figures[EXT4]).into(),
        to_ext4.into(),
        case.mount_bar().into(),
        judged(to_ext4, Some(case.mount_bar())),
        to_mount.into(),
        case.exec_bar().into(),
        judged(to_mount, case.exec_bar()),
    ]
}

fn add_notes(report: &mut Report, options: &EverydayOptions, found: &EverydaySamples) {
    report.add_note(format!(
        "medians of {} alternating rounds; ratios are medians of the rounds' own, above 1: slower",
        options.rounds
    ));
    report.add_note(format!(
        "tar, cp, grep and rm work on a tree of {} files; one program creates {} files of 4 KiB in \
         directories of {FILES_PER_DIRECTORY}, and others read, lstat and rename them; caches are \
         warm: the files were just created",
        options.tree_files, options.files
    ));
    report.add_note(format!(
        "small reads: read(2) of 4 bytes in a row over {} MiB that were just written; dbench: \
         {DBENCH_CLIENTS} clients, {} s; its Flush is an fsync",
        SMALL_READS_BYTES >> 20,
        options.runtime.as_secs(),
    ));
    report.add_note(
        "exec: all programs of the case and of the cases before it run under pagemesh exec on the \
         same mount; the times of tar, cp, grep and rm contain its start",
    );
    report.add_note(format!(
        "load averages of 1, 5 and 15 minutes: before {}, after {}",
        found.loads[0], found.loads[1]
    ));
    if found.lacks_dbench {
        report.add_note(
            "dbench is left out: it is not installed; `apt-get install dbench` provides it",
        );
    }
}
