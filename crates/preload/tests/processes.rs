//! Children, threads, signals and cancellation.

use crate::support;
use support::check;

#[test]
fn children_share_offsets_as_without_the_library() {
    let counts = check("processes", &[]);
    assert!(counts.forks >= 5 && counts.writes > 300, "{counts:?}");
    check("processes", &[("DECLINE", "3")]);
}

#[test]
fn threads_share_descriptors_and_offsets() {
    let counts = check("threads", &[]);
    assert!(
        counts.writes > 10_000 && counts.reads > 10_000,
        "{counts:?}"
    );
    check("threads", &[("DECLINE", "3")]);
    check("threads", &[("DWELL_US", "5")]);
}

#[test]
fn no_handler_runs_inside_the_engine() {
    let counts = check("signals", &[("DWELL_US", "200")]);
    assert!(counts.writes > 1000 && counts.reads > 1000, "{counts:?}");
    check("signals", &[("DECLINE", "3")]);
}

#[test]
fn thread_is_not_cancelled_inside_the_engine() {
    let counts = check("cancel", &[("DWELL_US", "20")]);
    assert!(counts.writes > 200, "{counts:?}");
}
