//! The session's report over a space in memory and raw memory.

mod support;

use pagemesh_bench::report::{Cell, Report};
use pagemesh_bench::session::{Options, RawCopies, RawMemory, run_session};
use std::time::Duration;
use support::{Kind, Memory};

struct Fake(u64);

impl RawCopies for Fake {
    fn copy_pages(&mut self, count: u64) {
        self.0 += count;
    }

    fn class(&self) -> String {
        "process".to_owned()
    }
}

fn number(report: &Report, row: &str, column: &str) -> f64 {
    match report.cell(row, column) {
        Some(Cell::Number(number)) => *number,
        other => panic!("{row} {column}: {other:?}"),
    }
}

#[test]
fn rounds_alternate_and_ratios_are_theirs() {
    let space = Memory::new(1 << 20, Kind::AtOnce);
    let dir = tempfile::tempdir().expect("a directory");
    let mut raw = RawMemory::create(dir.path(), 1 << 20).expect("memory");
    let options = Options {
        rounds: 5,
        operations: 1000,
        ..Options::default()
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
fn every_round_has_its_copies_and_one_does_not_count() {
    let space = Memory::new(1 << 20, Kind::AtOnce);
    let mut raw = Fake(0);
    let options = Options {
        rounds: 5,
        operations: 10,
        ..Options::default()
    };
    run_session(&space, &mut raw, &mut || Duration::ZERO, &options).expect("a report");
    assert_eq!(raw.0, 60);
    let writes = space.seen.writes.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(writes, 60);
}

#[test]
fn too_few_rounds_are_refused() {
    let space = Memory::new(1 << 20, Kind::AtOnce);
    let options = Options {
        rounds: 4,
        ..Options::default()
    };
    let none = &mut || Duration::ZERO;
    let error = run_session(&space, &mut Fake(0), none, &options).expect_err("refused");
    assert!(error.to_string().contains("4 rounds"), "{error}");
}
