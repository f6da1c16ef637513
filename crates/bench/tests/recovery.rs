//! Simulated recoveries: order, ratios, and failures.

use pagemesh_bench::BenchError;
use pagemesh_bench::recovery::{RecoveryOptions, RecoverySample, run_recovery};
use pagemesh_bench::report::{Report, ReportCell};
use std::error::Error;
use std::time::Duration;

type RecoveryResult = Result<RecoverySample, Box<dyn Error + Send + Sync>>;

const SMALL: u64 = 8 << 30;
const LARGE: u64 = 64 << 30;

fn recovered(ms: u64, records: u64) -> RecoveryResult {
    Ok(RecoverySample {
        wall: Duration::from_millis(ms),
        records,
        held_bytes: 3 << 20,
        table_bytes: (3 << 20) / 200 * records,
    })
}

fn number(report: &Report, row: &str, column: &str) -> f64 {
    match report.cell(row, column) {
        Some(ReportCell::Number(number)) => *number,
        other => panic!("{row} {column}: {other:?}"),
    }
}

#[test]
fn sizes_alternate_and_ratios_are_per_round() {
    let mut seen = Vec::new();
    // The machine is ten times slower in round 2; large pools take 3 times as
    // long in every round.
    let mut make = |size, round: usize| {
        seen.push((size, round));
        let slow = if round == 2 { 10 } else { 1 };
        let large = if size == LARGE { 3 } else { 1 };
        recovered(10 * slow * large, round as u64)
    };
    let report = run_recovery(&mut make, &RecoveryOptions::default()).expect("a report");
    let wanted = [
        (SMALL, 1),
        (LARGE, 1),
        (LARGE, 2),
        (SMALL, 2),
        (SMALL, 3),
        (LARGE, 3),
        (LARGE, 4),
        (SMALL, 4),
        (SMALL, 5),
        (LARGE, 5),
    ];
    assert_eq!(seen, wanted);
    let row = |row: &str| {
        ["median", "min", "max", "to the first", "records replayed"]
            .map(|column| number(&report, row, column))
    };
    assert_eq!(row("8 GiB"), [10.0, 10.0, 100.0, 1.0, 3.0]);
    assert_eq!(row("64 GiB"), [30.0, 30.0, 300.0, 3.0, 3.0]);
    assert_eq!(number(&report, "8 GiB", "held"), 3.0);
    let share = number(&report, "8 GiB", "memory for tables");
    assert!((2.49..2.51).contains(&share), "{share}");
    let rounds = &report.raw["recoveries_by_size_round"][1];
    assert_eq!(rounds.as_array().map(Vec::len), Some(5));
    assert_eq!(rounds[0]["wall_ns"], 30_000_000);
    assert!(report.plots[0].svg("").contains("64 GiB"));
    assert!(!report.text().contains("beware"));
}

#[test]
fn recovery_without_replay_is_noted() {
    let mut make = |size, round: usize| {
        let idle = size == LARGE && round > 3;
        recovered(1, u64::from(!idle))
    };
    let report = run_recovery(&mut make, &RecoveryOptions::default()).expect("a report");
    let text = report.text();
    assert!(text.contains("2 of 10 recoveries had nothing"), "{text}");
}

#[test]
fn failed_recovery_ends_the_run_and_is_named() {
    let mut count = 0;
    let mut make = |_, round| -> RecoveryResult {
        count += 1;
        match round {
            2 => Err("the pool is damaged".into()),
            _ => recovered(1, 1),
        }
    };
    let error = run_recovery(&mut make, &RecoveryOptions::default()).expect_err("failed");
    let text = error.to_string();
    assert!(matches!(error, BenchError::Recovery { round: 2, .. }));
    assert!(
        text.contains("68719476736") && text.contains("damaged"),
        "{text}"
    );
    assert_eq!(count, 3);
}

fn check_refused(options: RecoveryOptions, word: &str) {
    let mut make = |_, _| -> RecoveryResult { panic!("nothing may be recovered") };
    let error = run_recovery(&mut make, &options).expect_err("refused");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn invalid_options_are_refused() {
    let with = |sizes_bytes| RecoveryOptions {
        sizes_bytes,
        ..RecoveryOptions::default()
    };
    check_refused(with(Vec::new()), "0 pool sizes");
    check_refused(with(vec![1 << 30; 17]), "17 pool sizes");
    check_refused(with(vec![1 << 30, 0]), "0 bytes");
    let few = RecoveryOptions {
        rounds: 4,
        ..RecoveryOptions::default()
    };
    check_refused(few, "4 rounds");
}
