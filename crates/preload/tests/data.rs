//! Reads, writes and descriptors: the engine behaves as the kernel.

use crate::support;

/// Operations of `data.c` that the engine does.
const READS: u64 = 19;
const WRITES: u64 = 27;
/// Size queries of files that are not set to append later.
const SIZES: u64 = 9;

/// Writes of `numbers.c` that the engine does: none under a limit, at an end that moves, or at an
/// offset that was sent.
const NUMBERS_WRITES: u64 = 45;

use support::check;

#[test]
fn reads_and_writes_behave_as_in_the_kernel() {
    let counts = check("data", &[]);
    // The kernel does the others: errors, appends at a given offset, lengths, limits, rights.
    let done = (counts.reads, counts.writes, counts.sizes);
    assert_eq!(done, (READS, WRITES, SIZES), "{counts:?}");
}

#[test]
fn declined_calls_are_served_by_the_kernel() {
    for every in ["1", "2", "3"] {
        check("data", &[("DECLINE", every)]);
    }
}

#[test]
fn fd_number_taken_over_by_another_file_is_dropped() {
    let counts = check("numbers", &[]);
    assert_eq!(counts.writes, NUMBERS_WRITES, "{counts:?}");
}

#[test]
fn fd_number_leads_to_its_last_open() {
    let counts = check("descriptors", &[]);
    assert!(counts.reads > 20_000 && counts.writes > 900, "{counts:?}");
    // All files except those that the end of the process closed.
    assert!(counts.opens - counts.ends < 10, "{counts:?}");
}
