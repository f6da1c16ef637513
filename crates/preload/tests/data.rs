//! Reading, writing and descriptors: what the kernel does, done by the engine.

mod support;

use support::check;

#[test]
fn every_way_to_read_and_write_is_the_kernels() {
    let counts = check("data", &[], &[]);
    assert!(
        counts.reads >= 18 && counts.writes >= 21 && counts.syncs >= 6,
        "{counts:?}"
    );
}

#[test]
fn what_the_engine_declines_the_kernel_does() {
    for every in ["1", "2", "3"] {
        check("data", &[], &[("DECLINE", every)]);
    }
}

#[test]
fn a_number_is_what_it_was_opened_as_last() {
    let counts = check("descriptors", &[], &[]);
    assert!(counts.reads > 20_000 && counts.writes > 900, "{counts:?}");
    // All but what the end of the process closed.
    assert!(counts.opens - counts.ends < 10, "{counts:?}");
}
