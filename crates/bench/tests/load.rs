//! The driver on a space that answers within `submit`, and on one that answers later.

use crate::support;
use pagemesh_bench::BenchError;
use pagemesh_bench::load::{AccessOrder, LoadWorker, RequestMix, RunLimit, run};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use support::{CompletionMode, MemorySpace};

const SIZE: u64 = 1 << 20;

fn check_count(kind: CompletionMode, threads: usize, queue_depth: usize, read_percent: u8) {
    let space = MemorySpace::new(SIZE, kind);
    let mix = RequestMix {
        queue_depth,
        read_percent,
        ..RequestMix::default()
    };
    let outcome = run(&space, &mix, threads, RunLimit::Operations(5003)).expect("a run");
    let (reads, writes) = (&space.counters.reads, &space.counters.writes);
    assert_eq!(outcome.operations(), 5003);
    assert_eq!(outcome.reads.count(), reads.load(Relaxed));
    assert_eq!(outcome.writes.count(), writes.load(Relaxed));
    assert_eq!(outcome.bytes, 5003 * 4096);
    assert_eq!(space.counters.channels.load(Relaxed), threads);
    assert_eq!(space.counters.depth_max.load(Relaxed), queue_depth);
    assert!(outcome.wall > Duration::ZERO && outcome.cpu > Duration::ZERO);
    let share = outcome.reads.count() as f64 / 50.03;
    assert!((share - f64::from(read_percent)).abs() < 4.0, "{share} %");
}

#[test]
fn counts_are_exact_when_requests_complete_at_once() {
    check_count(CompletionMode::Immediate, 1, 1, 0);
    check_count(CompletionMode::Immediate, 3, 1, 100);
    check_count(CompletionMode::Immediate, 2, 16, 70);
}

#[test]
fn counts_are_exact_when_requests_complete_later() {
    check_count(CompletionMode::OnThread, 1, 1, 50);
    check_count(CompletionMode::OnThread, 2, 16, 70);
}

#[test]
fn timed_run_lasts_its_limit() {
    for kind in [CompletionMode::Immediate, CompletionMode::OnThread] {
        let space = MemorySpace::new(SIZE, kind);
        let time = Duration::from_millis(50);
        let outcome = run(&space, &RequestMix::default(), 1, RunLimit::Time(time)).expect("a run");
        assert!(outcome.wall >= time && outcome.operations() > 0);
    }
}

#[test]
fn seed_determines_requests() {
    let offsets = |seed| {
        let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
        let mix = RequestMix {
            seed,
            ..RequestMix::default()
        };
        run(&space, &mix, 1, RunLimit::Operations(200)).expect("a run");
        space.counters.offsets.lock().expect("not poisoned").clone()
    };
    assert_eq!(offsets(1), offsets(1));
    assert_ne!(offsets(1), offsets(2));
    assert!(offsets(1).iter().all(|at| at % 4096 == 0));
}

#[test]
fn sequential_threads_start_in_separate_parts() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let mix = RequestMix {
        order: AccessOrder::Sequential,
        block_bytes: 1 << 16,
        ..RequestMix::default()
    };
    run(&space, &mix, 2, RunLimit::Operations(16)).expect("a run");
    let mut offsets = space.counters.offsets.lock().expect("not poisoned").clone();
    offsets.sort_unstable();
    let wanted: Vec<u64> = (0..16).map(|block| block << 16).collect();
    assert_eq!(offsets, wanted);
}

#[test]
fn span_bounds_requests() {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let mix = RequestMix {
        span_bytes: Some(8192),
        ..RequestMix::default()
    };
    run(&space, &mix, 1, RunLimit::Operations(100)).expect("a run");
    let offsets = space.counters.offsets.lock().expect("not poisoned").clone();
    assert!(offsets.contains(&0) && offsets.contains(&4096));
    assert!(offsets.iter().all(|at| *at < 8192));
}

#[test]
fn failed_request_fails_the_run() {
    for (kind, queue_depth) in [
        (CompletionMode::Immediate, 1),
        (CompletionMode::Immediate, 8),
        (CompletionMode::OnThread, 8),
    ] {
        let mut space = MemorySpace::new(SIZE, kind);
        space.requests_before_failure = 100;
        let mix = RequestMix {
            queue_depth,
            ..RequestMix::default()
        };
        let error = run(&space, &mix, 2, RunLimit::Operations(1000)).expect_err("a failure");
        assert!(matches!(error, BenchError::Space { .. }), "{error}");
    }
}

#[test]
fn worker_runs_again_with_another_mix() {
    let space = MemorySpace::new(SIZE, CompletionMode::OnThread);
    let mut worker = LoadWorker::open(&space, &RequestMix::default(), 0, 1).expect("a worker");
    let writes = worker.run(RunLimit::Operations(10)).expect("a run");
    worker.set_read_percent(100);
    let reads = worker.run(RunLimit::Operations(20)).expect("a run");
    assert_eq!((writes.writes.count(), writes.reads.count()), (10, 0));
    assert_eq!((reads.writes.count(), reads.reads.count()), (0, 20));
    assert_eq!(space.counters.channels.load(Relaxed), 1);
}

fn check_refused(mix: RequestMix, threads: usize, word: &str) {
    let space = MemorySpace::new(SIZE, CompletionMode::Immediate);
    let error = run(&space, &mix, threads, RunLimit::Operations(1)).expect_err("refused");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn invalid_options_are_refused() {
    let base = RequestMix::default;
    check_refused(
        RequestMix {
            queue_depth: 0,
            ..base()
        },
        1,
        "queue depth",
    );
    check_refused(
        RequestMix {
            queue_depth: 1025,
            ..base()
        },
        1,
        "queue depth",
    );
    check_refused(
        RequestMix {
            block_bytes: 0,
            ..base()
        },
        1,
        "blocks of 0",
    );
    check_refused(
        RequestMix {
            read_percent: 101,
            ..base()
        },
        1,
        "101 %",
    );
    check_refused(
        RequestMix {
            span_bytes: Some(10),
            ..base()
        },
        1,
        "larger volume",
    );
    check_refused(base(), 0, "threads");
}
