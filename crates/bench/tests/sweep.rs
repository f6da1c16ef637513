//! The ramp and the table on a space in memory.

use crate::support;
use pagemesh_bench::BenchError;
use pagemesh_bench::load::fill;
use pagemesh_bench::ramp::{self, run_ramp};
use pagemesh_bench::report::{Report, ReportCell};
use pagemesh_bench::sweep::{self, RUNTIME_MIN};
use pagemesh_bench::table::{self, TableRow, run_table};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use support::{CompletionMode, MemorySpace};

const SIZE: u64 = 1 << 20;

/// The shortest permitted run.
fn short_options() -> sweep::SweepOptions {
    sweep::SweepOptions {
        runtime: RUNTIME_MIN,
        threads: 2,
        fill: false,
        ..sweep::SweepOptions::default()
    }
}

fn small_ramp(readers: &[usize]) -> ramp::RampOptions {
    ramp::RampOptions {
        readers: readers.to_vec(),
        sweep_options: short_options(),
        ..ramp::RampOptions::default()
    }
}

fn small_table(sweep: sweep::SweepOptions) -> table::TableOptions {
    let row = |block_bytes, in_flight| TableRow {
        block_bytes,
        in_flight,
    };
    table::TableOptions {
        rows: vec![row(4096, 16), row(16384, 4), row(65536, 1)],
        sweep_options: sweep,
        ..table::TableOptions::default()
    }
}

fn number(report: &Report, row: &str, column: &str) -> f64 {
    match report.cell(row, column) {
        Some(ReportCell::Number(number)) => *number,
        other => panic!("{row} {column}: {other:?}"),
    }
}

/// A CPU clock of bricks that use a millisecond between two readings.
fn busy_bricks() -> impl FnMut() -> Duration {
    let mut used = Duration::ZERO;
    move || {
        used += Duration::from_millis(1);
        used
    }
}

#[test]
fn readers_are_spread_over_threads() {
    let space = MemorySpace::new(SIZE, CompletionMode::OnThread);
    let options = small_ramp(&[1, 3]);
    let report = run_ramp(&space, &mut busy_bricks(), &options).expect("a report");
    // One channel for one reader, two for three, in six rounds.
    assert_eq!(space.counters.channels.load(Relaxed), 6 * 3);
    assert_eq!(space.counters.depth_max.load(Relaxed), 2);
    assert_eq!(space.counters.writes.load(Relaxed), 0);
    let lens = space.counters.lens.lock().expect("not poisoned");
    assert!(lens.iter().all(|len| *len == 8192));
    for row in ["1", "3"] {
        let (iops, bandwidth) = (
            number(&report, row, "IOPS"),
            number(&report, row, "bandwidth"),
        );
        assert!((bandwidth / (iops * 8192.0 / 1e6) - 1.0).abs() < 0.001);
        for column in ["mean", "p50", "CPU", "brick CPU"] {
            assert!(number(&report, row, column) > 0.0, "{row} {column}");
        }
        let tail = ["p50", "p99", "p99.9"].map(|column| number(&report, row, column));
        assert!(tail.is_sorted(), "{tail:?}");
    }
}

#[test]
fn ramp_keeps_all_rounds_and_draws_two_charts() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let report = run_ramp(&space, &mut busy_bricks(), &small_ramp(&[1, 8])).expect("a report");
    let raw = &report.raw["samples_by_step_round"];
    for step in 0..2 {
        assert_eq!(raw[step].as_array().map(Vec::len), Some(5));
    }
    assert_eq!(report.plots.len(), 2);
    for plot in &report.plots {
        assert!(plot.svg("").contains("<polyline"));
    }
    let read: Report = serde_json::from_str(&report.json()).expect("JSON");
    assert_eq!(read.rows.len(), 2);
}

#[test]
fn default_ramp_ends_at_128_readers_of_8_kib() {
    let options = ramp::RampOptions::default();
    assert_eq!(options.readers, [1, 2, 4, 8, 16, 32, 64, 128]);
    assert_eq!(options.block_bytes, 8192);
}

#[test]
fn default_table_keeps_one_mib_in_flight() {
    let options = table::TableOptions::default();
    let rows: Vec<(u32, usize)> = options
        .rows
        .iter()
        .map(|row| (row.block_bytes, row.in_flight))
        .collect();
    let wanted = [
        (4 << 10, 256),
        (8 << 10, 128),
        (16 << 10, 64),
        (32 << 10, 32),
        (64 << 10, 16),
    ];
    assert_eq!(rows, wanted);
    assert_eq!(options.read_percent, 70);
}

#[test]
fn table_separates_reads_and_writes() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let report =
        run_table(&space, &mut busy_bricks(), &small_table(short_options())).expect("a report");
    for row in ["4K", "16K", "64K"] {
        let share = number(&report, row, "reads");
        assert!((share - 70.0).abs() < 10.0, "{share} % reads");
        for column in ["IOPS", "bandwidth", "read", "write", "stddev", "CPU"] {
            assert!(number(&report, row, column) > 0.0, "{row} {column}");
        }
    }
    assert_eq!(report.cell("4K", "in flight"), Some(&ReportCell::Count(16)));
    // One request in flight on one thread is in the space nearly all the time.
    let depth = number(&report, "64K", "queue depth");
    assert!(depth > 0.5 && depth < 1.01, "{depth}");
    assert_eq!(report.plots.len(), 3);
}

#[test]
fn read_only_table_has_no_write_latency() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let options = table::TableOptions {
        read_percent: 100,
        ..small_table(short_options())
    };
    let report = run_table(&space, &mut busy_bricks(), &options).expect("a report");
    assert_eq!(report.cell("4K", "write"), Some(&ReportCell::Missing));
    assert_eq!(number(&report, "4K", "reads"), 100.0);
}

#[test]
fn first_case_rotates_per_round() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    run_table(&space, &mut busy_bricks(), &small_table(short_options())).expect("a report");
    let mut lens = space.counters.lens.lock().expect("not poisoned").clone();
    lens.dedup();
    let (small, middle, large) = (4096, 16384, 65536);
    let rounds = [
        [small, middle, large],
        [middle, large, small],
        [large, small, middle],
    ];
    // If one round ended with the case that the next begins with, dedup would join them; here no
    // two adjacent cases are equal.
    let wanted: Vec<u64> = rounds.iter().cycle().take(6).flatten().copied().collect();
    assert_eq!(lens, wanted);
}

#[test]
fn span_is_written_once_before_reads() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let mut options = small_ramp(&[1]);
    options.sweep_options.fill = true;
    options.sweep_options.span_bytes = Some((512 << 10) + 5000);
    run_ramp(&space, &mut busy_bricks(), &options).expect("a report");
    // 512 KiB and one page: no block longer than a page divides it.
    let writes = space.counters.writes.load(Relaxed);
    assert_eq!(writes, 129);
    let offsets = space.counters.offsets.lock().expect("not poisoned");
    let (filled, read) = offsets.split_at(129);
    assert!((0..129).eq(filled.iter().map(|offset| offset / 4096)));
    assert!(read.iter().all(|offset| offset + 8192 <= 129 * 4096));
}

#[test]
fn filling_covers_each_byte_once() {
    for (pages, block) in [(1, 4096), (3, 4096), (64, 256 << 10), (96, 128 << 10)] {
        let space = MemorySpace::new(SIZE, CompletionMode::OnThread);
        fill(&space, pages * 4096).expect("filled");
        let offsets = space.counters.offsets.lock().expect("not poisoned").clone();
        let wanted: Vec<u64> = (0..pages * 4096 / block).map(|at| at * block).collect();
        assert_eq!(offsets, wanted);
        let lens = space.counters.lens.lock().expect("not poisoned");
        assert!(lens.iter().all(|len| *len == block));
    }
    for bytes in [0, 4095, SIZE + 4096] {
        let error =
            fill(&MemorySpace::new(SIZE, CompletionMode::Immediate), bytes).expect_err("refused");
        assert!(error.to_string().contains("fill"), "{error}");
    }
}

#[test]
fn failed_request_fails_the_ramp() {
    for good in [0, 100] {
        let mut space = MemorySpace::new(SIZE, CompletionMode::OnThread);
        space.requests_before_failure = good;
        let error = run_ramp(&space, &mut busy_bricks(), &small_ramp(&[4])).expect_err("failed");
        assert!(matches!(error, BenchError::Space { .. }), "{error}");
    }
}

fn check_refused(change: impl FnOnce(&mut ramp::RampOptions), word: &str) {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let mut options = small_ramp(&[1]);
    change(&mut options);
    let error = run_ramp(&space, &mut busy_bricks(), &options).expect_err("refused");
    assert!(matches!(error, BenchError::Option(_)), "{error}");
    assert!(error.to_string().contains(word), "{error}");
    assert_eq!(space.counters.reads.load(Relaxed), 0);
}

#[test]
fn invalid_options_are_refused() {
    check_refused(|o| o.readers.clear(), "0 steps");
    check_refused(|o| o.readers = vec![1; 65], "65 steps");
    check_refused(|o| o.readers = vec![0], "0 requests");
    check_refused(|o| o.readers = vec![2049], "queue depth");
    check_refused(|o| o.block_bytes = 0, "blocks of 0");
    check_refused(|o| o.block_bytes = 2 << 20, "larger volume");
    check_refused(|o| o.sweep_options.rounds = 4, "4 rounds");
    check_refused(|o| o.sweep_options.threads = 0, "threads");
    check_refused(|o| o.sweep_options.runtime = Duration::ZERO, "per step");
    check_refused(|o| o.sweep_options.runtime = Duration::MAX, "per step");
    check_refused(
        |o| o.sweep_options.span_bytes = Some(4095),
        "0 bytes to be used",
    );
}
