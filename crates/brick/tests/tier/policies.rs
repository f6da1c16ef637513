//! Policies of slices: pins, pins larger than memory, and slices that prefer flash.

use crate::tier::client::{Client, PAGE, SLICE, TieredFiles};
use crate::tier::{MEMORY_PAGES, is_sound, read_page, write_page};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::BrickControl;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::tier::{POLICY_CHANGES_MAX, SlicePages};
use pagemesh_pmem::TieredMedia;
use pagemesh_store::object::TierPolicy;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use uuid::Uuid;

const OTHER: SliceId = SliceId(Uuid::from_u128(6));
/// A part of memory that leaves room for another slice.
const PART_PAGES: u64 = MEMORY_PAGES / 4;
const LIMIT: Duration = Duration::from_secs(120);

fn set(brick: &Brick<TieredMedia>, policies: &[(SliceId, TierPolicy)]) {
    let policies: HashMap<SliceId, TierPolicy> = policies.iter().copied().collect();
    brick.set_tier_policies(&policies).expect("obeyed");
}

/// Reads pages, and returns how many were in memory and on flash.
fn read_pages(client: &mut Client<TieredMedia>, pages: u64, version: u64) -> (u64, u64) {
    let before = client.tier_reads();
    for page in 0..pages {
        let found = read_page(client, page);
        assert!(is_sound(page, version, &found), "page {page}");
    }
    let after = client.tier_reads();
    (after.0 - before.0, after.1 - before.1)
}

fn write_pages(client: &mut Client<TieredMedia>, pages: u64, version: u64) {
    (0..pages).for_each(|page| write_page(client, page, version));
}

#[test]
fn pinned_pages_stay_while_others_are_demoted() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, maintenance) = files.open();
    brick.create(SLICE, PART_PAGES * PAGE).expect("room");
    brick.create(OTHER, 4 * MEMORY_PAGES * PAGE).expect("room");
    set(&brick, &[(SLICE, TierPolicy::Memory)]);
    let mut pinned = Client::new(&brick, 1);
    let mut other = Client::of(&brick, OTHER, 1);
    write_pages(&mut pinned, PART_PAGES, 1);
    write_pages(&mut other, 4 * MEMORY_PAGES, 1);
    let figures = brick.tier_figures().expect("a tier");
    assert!(figures.demoted > 2 * MEMORY_PAGES, "{figures:?}");
    assert_eq!(read_pages(&mut pinned, PART_PAGES, 1), (PART_PAGES, 0));
    // The pin is in the pool.
    drop((pinned, other));
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = files.open();
    assert_eq!(brick.tier_policies(), [(SLICE, TierPolicy::Memory)]);
    let mut other = Client::of(&brick, OTHER, 2);
    write_pages(&mut other, 2 * MEMORY_PAGES, 2);
    let mut pinned = Client::new(&brick, 2);
    assert_eq!(read_pages(&mut pinned, PART_PAGES, 1), (PART_PAGES, 0));
}

#[test]
fn pinned_pages_return_with_their_first_use() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, PART_PAGES * PAGE).expect("room");
    brick.create(OTHER, 2 * MEMORY_PAGES * PAGE).expect("room");
    set(&brick, &[(SLICE, TierPolicy::Flash)]);
    let mut client = Client::new(&brick, 1);
    write_pages(&mut client, PART_PAGES, 1);
    write_pages(&mut Client::of(&brick, OTHER, 1), 2 * MEMORY_PAGES, 1);
    // The slice that prefers flash has left memory, and reads do not return it.
    let half = PART_PAGES / 2;
    for _ in 0..3 {
        assert_eq!(read_pages(&mut client, half, 1), (0, half));
    }
    assert_eq!(brick.tier_figures().expect("a tier").promoted, 0);
    set(&brick, &[(SLICE, TierPolicy::Memory)]);
    // No page of the other half was read before.
    let last = PART_PAGES - 1;
    assert!(is_sound(last, 1, &read_page(&mut client, last)));
    let began = Instant::now();
    while brick.tier_figures().expect("a tier").promoted == 0 {
        assert!(began.elapsed() < LIMIT, "one read returns no page");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The queue of promotions is bounded, so that some need a second use.
    while read_pages(&mut client, PART_PAGES, 1) != (PART_PAGES, 0) {
        let figures = brick.tier_figures();
        assert!(began.elapsed() < LIMIT, "{figures:?}");
    }
}

#[test]
fn slice_that_prefers_flash_is_demoted_first() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, MEMORY_PAGES / 2 * PAGE).expect("room");
    brick.create(OTHER, MEMORY_PAGES / 2 * PAGE).expect("room");
    set(&brick, &[(OTHER, TierPolicy::Flash)]);
    let mut auto = Client::new(&brick, 1);
    write_pages(&mut auto, MEMORY_PAGES / 2, 1);
    let mut flash = Client::of(&brick, OTHER, 1);
    // The newest pages go, although the others are older.
    write_pages(&mut flash, MEMORY_PAGES / 2, 1);
    let began = Instant::now();
    while brick.tier_figures().is_none_or(|it| it.demoted == 0) {
        assert!(began.elapsed() < LIMIT);
        write_pages(&mut flash, MEMORY_PAGES / 2, 1);
    }
    let pages = MEMORY_PAGES / 2;
    assert_eq!(read_pages(&mut auto, pages, 1), (pages, 0));
    assert!(read_pages(&mut flash, pages, 1).1 > 0);
}

/// One walk over the empty part must not count as a search without result.
#[test]
fn sparse_slice_that_prefers_flash_is_demoted() {
    const FIRST: u64 = (32 << 30) / PAGE;
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    let pages = 2 * MEMORY_PAGES;
    brick.create(SLICE, (FIRST + pages) * PAGE).expect("room");
    set(&brick, &[(SLICE, TierPolicy::Flash)]);
    let mut client = Client::new(&brick, 1);
    // An empty flash refuses no write.
    (FIRST..FIRST + pages).for_each(|page| write_page(&mut client, page, 1));
    let figures = brick.tier_figures().expect("a tier");
    assert!(figures.demoted > MEMORY_PAGES / 2, "{figures:?}");
    for page in FIRST..FIRST + pages {
        assert!(is_sound(page, 1, &read_page(&mut client, page)));
    }
}

#[test]
fn policy_of_a_missing_slice_is_reported() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    let wanted = [(OTHER, TierPolicy::Memory)];
    set(&brick, &wanted);
    assert_eq!(brick.tier_policies(), wanted);
    brick.create(OTHER, PAGE).expect("room");
    assert_eq!(brick.tier_policies(), [], "it is automatic yet");
    set(&brick, &wanted);
    assert_eq!(brick.tier_policies(), wanted);
    brick.delete(OTHER).expect("deleted");
    assert_eq!(brick.tier_policies(), []);
}

#[test]
fn many_policies_are_set_in_several_calls() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    let slices = (0..POLICY_CHANGES_MAX as u128 + 1).map(|it| SliceId(Uuid::from_u128(100 + it)));
    let wanted: Vec<_> = slices.map(|it| (it, TierPolicy::Flash)).collect();
    for (slice, _) in &wanted {
        brick.create(*slice, PAGE).expect("room");
    }
    set(&brick, &wanted);
    assert_eq!(brick.tier_policies().len(), POLICY_CHANGES_MAX);
    set(&brick, &wanted);
    assert_eq!(brick.tier_policies().len(), wanted.len());
}

/// The brick must neither refuse writes nor wait for ever, and must keep an unpinned slice working.
#[test]
fn pins_larger_than_memory_go_to_flash() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    let pages = 2 * MEMORY_PAGES;
    brick.create(SLICE, pages * PAGE).expect("room");
    brick.create(OTHER, MEMORY_PAGES * PAGE).expect("room");
    set(&brick, &[(SLICE, TierPolicy::Memory)]);
    let mut pinned = Client::new(&brick, 1);
    write_pages(&mut pinned, pages, 1);
    let mut other = Client::of(&brick, OTHER, 1);
    write_pages(&mut other, MEMORY_PAGES, 1);
    write_pages(&mut pinned, pages, 2);
    let (hits, misses) = read_pages(&mut pinned, pages, 2);
    assert!(
        hits > 0 && misses > 0,
        "{hits} in memory, {misses} on flash"
    );
    let (hits, misses) = read_pages(&mut other, MEMORY_PAGES, 1);
    assert_eq!(hits + misses, MEMORY_PAGES);
    let figures = brick.tier_figures().expect("a tier");
    assert!(figures.waits > 0, "{figures:?}");
}

/// Waits for counts of a walk that began after the call.
fn count_anew(brick: &Brick<TieredMedia>) -> Vec<SlicePages> {
    let wanted = brick.tier_counts().1 + 2;
    let began = Instant::now();
    while brick.tier_counts().1 < wanted {
        assert!(began.elapsed() < LIMIT, "no walk over the tables ends");
        std::thread::sleep(Duration::from_millis(20));
    }
    brick.tier_counts().0.to_vec()
}

#[test]
fn pages_of_slices_are_counted() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, PART_PAGES * PAGE).expect("room");
    brick.create(OTHER, 1 << 40).expect("room");
    let mut client = Client::new(&brick, 1);
    write_pages(&mut client, PART_PAGES / 2, 1);
    let mut other = Client::of(&brick, OTHER, 1);
    write_pages(&mut other, 2 * MEMORY_PAGES, 1);
    let counts = count_anew(&brick);
    let of = |slice| counts.iter().find(|it| it.slice == slice).expect("counted");
    let (part, other) = (of(SLICE), of(OTHER));
    assert_eq!(part.memory + part.flash, PART_PAGES / 2, "{counts:?}");
    assert_eq!(other.memory + other.flash, 2 * MEMORY_PAGES, "{counts:?}");
    let usage = brick.tier_figures().expect("a tier").usage;
    assert!(
        part.memory + other.memory < usage.memory_frames,
        "{counts:?}"
    );
    assert!(other.flash > MEMORY_PAGES / 2, "{counts:?}");
}

#[test]
fn marked_pages_stay_while_others_are_demoted() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, PART_PAGES * PAGE).expect("room");
    brick.create(OTHER, 4 * MEMORY_PAGES * PAGE).expect("room");
    let mut marked = Client::new(&brick, 1);
    marked.hint = TierHint::Memory;
    let mut other = Client::of(&brick, OTHER, 1);
    write_pages(&mut marked, PART_PAGES, 1);
    write_pages(&mut other, 4 * MEMORY_PAGES, 1);
    marked.hint = TierHint::None;
    assert_eq!(read_pages(&mut marked, PART_PAGES, 1), (PART_PAGES, 0));
    // The marks end with the reads of a file that is not pinned.
    marked.hint = TierHint::Automatic;
    read_pages(&mut marked, PART_PAGES, 1);
    write_pages(&mut other, 4 * MEMORY_PAGES, 2);
    assert_ne!(read_pages(&mut marked, PART_PAGES, 1).1, 0);
}

#[test]
fn marks_larger_than_memory_refuse_no_write() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, 3 * MEMORY_PAGES * PAGE).expect("room");
    let mut marked = Client::new(&brick, 1);
    marked.hint = TierHint::Memory;
    write_pages(&mut marked, 3 * MEMORY_PAGES, 1);
    for page in (0..3 * MEMORY_PAGES).step_by(97) {
        let found = read_page(&mut marked, page);
        assert!(is_sound(page, 1, &found), "page {page}");
    }
}
