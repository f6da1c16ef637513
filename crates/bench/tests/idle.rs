//! Idle benchmark with processes that sleep, and with one that does not.

use pagemesh_bench::idle::{IdleOptions, ProcessGroup, run_idle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn group(name: &str, pids: &[u32]) -> ProcessGroup {
    ProcessGroup {
        name: name.into(),
        pids: pids.into(),
    }
}

fn options(rounds: usize, runtime: Duration) -> IdleOptions {
    IdleOptions {
        rounds,
        runtime,
        class: "process".into(),
    }
}

#[test]
fn busy_and_idle_processes_differ() {
    let work = AtomicBool::new(true);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            while work.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let groups = [group("busy", &[std::process::id()]), group("nobody", &[])];
        let report = run_idle(&groups, &options(5, Duration::from_millis(40)));
        work.store(false, Ordering::Relaxed);
        report
    })
    .unwrap();
    let samples = &report.raw["samples_by_group_round"];
    let of = |at: usize, round: usize| samples[at][round]["cpu_percent"].as_f64().unwrap();
    // One thread works all the time, on a machine that other programs may share.
    assert!((0..5).any(|round| of(0, round) > 5.0), "{samples}");
    assert!((0..5).all(|round| of(1, round) == 0.0), "{samples}");
}

#[test]
fn meaningless_options_are_refused() {
    let of = |pids: &[u32], rounds, ms| {
        let measured = run_idle(
            &[group("brick", pids)],
            &options(rounds, Duration::from_millis(ms)),
        );
        measured.map(drop).unwrap_err().to_string()
    };
    assert!(of(&[], 1, 1).contains("1 rounds"));
    assert!(of(&[], 5, 0).contains("no time"));
    assert!(of(&[u32::MAX], 5, 1).contains("brick is gone"));
}
