//! The session's report on a space in memory and raw memory.

use crate::support;
use pagemesh_bench::report::{Report, ReportCell};
use pagemesh_bench::session::{RawCopies, RawMemory, SessionOptions, run_session};
use std::time::Duration;
use support::{CompletionMode, MemorySpace};

struct FakeCopies(u64);

impl RawCopies for FakeCopies {
    fn copy_pages(&mut self, count: u64) {
        self.0 += count;
    }

    fn class(&self) -> String {
        "process".to_owned()
    }
}

fn number(report: &Report, row: &str, column: &str) -> f64 {
    match report.cell(row, column) {
        Some(ReportCell::Number(number)) => *number,
        other => panic!("{row} {column}: {other:?}"),
    }
}

#[test]
fn rounds_alternate_and_ratios_are_per_round() {
    let space = MemorySpace::new(1 << 20, CompletionMode::Immediate);
    let dir = tempfile::tempdir().expect("a directory");
    let mut raw = RawMemory::create(dir.path(), 1 << 20).expect("memory");
    let options = SessionOptions {
        rounds: 5,
        operations: 1000,
        ..SessionOptions::default()
    };
    let mut brick = Duration::ZERO;
    let mut brick_cpu = || {
        brick += Duration::from_micros(10);
        brick
    };
    let report = run_session(&space, &mut raw, &mut brick_cpu, &options).expect("a report");
    assert_eq!(number(&report, "two raw copies", "to raw"), 1.0);
    assert!(number(&report, "write", "to raw") > 0.0);
    assert!(number(&report, "write", "brick CPU") > 0.0);
    assert_eq!(
        report.raw["write"]["wall_ns"].as_array().map(Vec::len),
        Some(5)
    );
    assert!(report.plots[0].svg("").contains("<rect"));
}

#[test]
fn every_round_copies_and_first_is_not_counted() {
    let space = MemorySpace::new(1 << 20, CompletionMode::Immediate);
    let mut raw = FakeCopies(0);
    let options = SessionOptions {
        rounds: 5,
        operations: 10,
        ..SessionOptions::default()
    };
    run_session(&space, &mut raw, &mut || Duration::ZERO, &options).expect("a report");
    assert_eq!(raw.0, 60);
    let writes = space
        .counters
        .writes
        .load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(writes, 60);
}

#[test]
fn too_few_rounds_are_refused() {
    let space = MemorySpace::new(1 << 20, CompletionMode::Immediate);
    let options = SessionOptions {
        rounds: 4,
        ..SessionOptions::default()
    };
    let none = &mut || Duration::ZERO;
    let error = run_session(&space, &mut FakeCopies(0), none, &options).expect_err("refused");
    assert!(error.to_string().contains("4 rounds"), "{error}");
}
