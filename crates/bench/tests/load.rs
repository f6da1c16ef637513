//! The driver against a space that answers at once and one that answers later.

mod support;

use pagemesh_bench::BenchError;
use pagemesh_bench::load::{Limit, Mix, Order, Worker, run};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use support::{Kind, Memory};

const SIZE: u64 = 1 << 20;

fn check_count(kind: Kind, threads: usize, queue_depth: usize, read_percent: u8) {
    let space = Memory::new(SIZE, kind);
    let mix = Mix {
        queue_depth,
        read_percent,
        ..Mix::default()
    };
    let outcome = run(&space, &mix, threads, Limit::Operations(5003)).expect("a run");
    let (reads, writes) = (&space.seen.reads, &space.seen.writes);
    assert_eq!(outcome.operations(), 5003);
    assert_eq!(outcome.reads.count(), reads.load(Relaxed));
    assert_eq!(outcome.writes.count(), writes.load(Relaxed));
    assert_eq!(outcome.bytes, 5003 * 4096);
    assert_eq!(space.seen.channels.load(Relaxed), threads);
    assert_eq!(space.seen.depth_max.load(Relaxed), queue_depth);
    assert!(outcome.wall > Duration::ZERO && outcome.cpu > Duration::ZERO);
    let share = outcome.reads.count() as f64 / 50.03;
    assert!((share - f64::from(read_percent)).abs() < 4.0, "{share} %");
}

#[test]
fn counts_are_exact_when_requests_complete_at_once() {
    check_count(Kind::AtOnce, 1, 1, 0);
    check_count(Kind::AtOnce, 3, 1, 100);
    check_count(Kind::AtOnce, 2, 16, 70);
}

#[test]
fn counts_are_exact_when_requests_complete_later() {
    check_count(Kind::Later, 1, 1, 50);
    check_count(Kind::Later, 2, 16, 70);
}

#[test]
fn a_run_by_time_lasts_as_long() {
    for kind in [Kind::AtOnce, Kind::Later] {
        let space = Memory::new(SIZE, kind);
        let time = Duration::from_millis(50);
        let outcome = run(&space, &Mix::default(), 1, Limit::Time(time)).expect("a run");
        assert!(outcome.wall >= time && outcome.operations() > 0);
    }
}

#[test]
fn the_seed_determines_the_requests() {
    let offsets = |seed| {
        let space = Memory::new(SIZE, Kind::AtOnce);
        let mix = Mix {
            seed,
            ..Mix::default()
        };
        run(&space, &mix, 1, Limit::Operations(200)).expect("a run");
        space.seen.offsets.lock().expect("not poisoned").clone()
    };
    assert_eq!(offsets(1), offsets(1));
    assert_ne!(offsets(1), offsets(2));
    assert!(offsets(1).iter().all(|at| at % 4096 == 0));
}

#[test]
fn sequential_threads_start_in_parts_of_their_own() {
    let space = Memory::new(SIZE, Kind::AtOnce);
    let mix = Mix {
        order: Order::Sequential,
        block_bytes: 1 << 16,
        ..Mix::default()
    };
    run(&space, &mix, 2, Limit::Operations(16)).expect("a run");
    let mut offsets = space.seen.offsets.lock().expect("not poisoned").clone();
    offsets.sort_unstable();
    let wanted: Vec<u64> = (0..16).map(|block| block << 16).collect();
    assert_eq!(offsets, wanted);
}

#[test]
fn the_span_bounds_the_requests() {
    let space = Memory::new(SIZE, Kind::AtOnce);
    let mix = Mix {
        span_bytes: Some(8192),
        ..Mix::default()
    };
    run(&space, &mix, 1, Limit::Operations(100)).expect("a run");
    let offsets = space.seen.offsets.lock().expect("not poisoned").clone();
    assert!(offsets.contains(&0) && offsets.contains(&4096));
    assert!(offsets.iter().all(|at| *at < 8192));
}

#[test]
fn a_failed_request_fails_the_run() {
    for (kind, queue_depth) in [(Kind::AtOnce, 1), (Kind::AtOnce, 8), (Kind::Later, 8)] {
        let mut space = Memory::new(SIZE, kind);
        space.good = 100;
        let mix = Mix {
            queue_depth,
            ..Mix::default()
        };
        let error = run(&space, &mix, 2, Limit::Operations(1000)).expect_err("a failure");
        assert!(matches!(error, BenchError::Space { .. }), "{error}");
    }
}

#[test]
fn a_worker_can_run_again_and_change_its_mix() {
    let space = Memory::new(SIZE, Kind::Later);
    let mut worker = Worker::open(&space, &Mix::default(), 0, 1).expect("a worker");
    let writes = worker.run(Limit::Operations(10)).expect("a run");
    worker.set_read_percent(100);
    let reads = worker.run(Limit::Operations(20)).expect("a run");
    assert_eq!((writes.writes.count(), writes.reads.count()), (10, 0));
    assert_eq!((reads.writes.count(), reads.reads.count()), (0, 20));
    assert_eq!(space.seen.channels.load(Relaxed), 1);
}

fn check_refused(mix: Mix, threads: usize, word: &str) {
    let space = Memory::new(SIZE, Kind::AtOnce);
    let error = run(&space, &mix, threads, Limit::Operations(1)).expect_err("refused");
    assert!(error.to_string().contains(word), "{error}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let base = Mix::default;
    check_refused(
        Mix {
            queue_depth: 0,
            ..base()
        },
        1,
        "queue depth",
    );
    check_refused(
        Mix {
            queue_depth: 1025,
            ..base()
        },
        1,
        "queue depth",
    );
    check_refused(
        Mix {
            block_bytes: 0,
            ..base()
        },
        1,
        "blocks of 0",
    );
    check_refused(
        Mix {
            read_percent: 101,
            ..base()
        },
        1,
        "101 %",
    );
    check_refused(
        Mix {
            span_bytes: Some(10),
            ..base()
        },
        1,
        "larger volume",
    );
    check_refused(base(), 0, "threads");
}
