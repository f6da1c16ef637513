//! A brick with memory in front of a file: random histories over a set that is many times the memory.

mod client;
mod first_disk;
mod policies;

use client::{Client, PAGE, SLICE, TieredFiles};
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest};
use pagemesh_brick::brick::Brick;
use pagemesh_brick::tier::DEMOTION_START_PART;
use pagemesh_pmem::{Media, TieredMedia};
use pagemesh_store::object::TierPolicy;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Pages of memory and of the set.
const MEMORY_PAGES: u64 = 4096;
const SET_PAGES: u64 = 8 * MEMORY_PAGES;
const SEED: u64 = 11;
/// The files of a brick in another process.
const FILES: &str = "PAGEMESH_TEST_TIER";

fn is_sound(page: u64, version: u64, found: &[u8]) -> bool {
    match version {
        0 => found.iter().all(|&byte| byte == 0),
        _ => found == page_bytes(page, version),
    }
}

fn page_bytes(page: u64, version: u64) -> Vec<u8> {
    let mut rng = SplitMix64::new(page << 32 | version);
    let words = (0..PAGE / 8).flat_map(|_| rng.next_u64().to_le_bytes());
    words.collect()
}

/// The page of each operation of a history: first all pages, then mostly a small set.
fn page_of_op(op: u64) -> u64 {
    if op <= SET_PAGES {
        return op - 1;
    }
    let mut rng = SplitMix64::new(SEED ^ op);
    match rng.below(10) {
        0 => rng.below(SET_PAGES),
        _ => rng.below(MEMORY_PAGES / 4) * 7,
    }
}

fn write_op(client: &mut Client<TieredMedia>, op: u64) {
    write_page(client, page_of_op(op), op);
}

fn write_page<M: Media + Send + Sync + 'static>(client: &mut Client<M>, page: u64, version: u64) {
    let write = SliceRequest::Write {
        offset: page * PAGE,
        data: page_bytes(page, version).into(),
        stamp: client.stamp(),
    };
    assert_eq!(
        client.execute(write),
        Ok(SliceReply::Done),
        "version {version} of page {page}"
    );
}

fn read_page<M: Media + Send + Sync + 'static>(client: &mut Client<M>, page: u64) -> Vec<u8> {
    let read = SliceRequest::Read {
        offset: page * PAGE,
        len: PAGE as u32,
    };
    match client.execute(read) {
        Ok(SliceReply::Data(bytes)) => bytes,
        other => panic!("page {page}: {other:?}"),
    }
}

/// The version of each page after so many operations.
fn versions_after(ops: u64) -> Vec<u64> {
    let mut versions = vec![0; SET_PAGES as usize];
    for op in 1..=ops {
        versions[page_of_op(op) as usize] = op;
    }
    versions
}

/// Compares all pages; the operation after `ops` may be there or not.
fn check_contents(brick: &Arc<Brick<TieredMedia>>, epoch: u32, ops: u64) {
    let mut client = Client::new(brick, epoch);
    let versions = versions_after(ops);
    for (page, &version) in (0..).zip(&versions) {
        let found = read_page(&mut client, page);
        let is_last = page_of_op(ops + 1) == page && is_sound(page, ops + 1, &found);
        assert!(
            is_sound(page, version, &found) || is_last,
            "page {page} has not version {version} of {ops} operations"
        );
    }
}

/// Fewer pages than a batch of demotions has.
const FEW: SliceId = SliceId(Uuid::from_u128(6));
const FEW_PAGES: u64 = 100;

#[test]
fn few_cold_pages_are_copied_once() {
    let prepared = TieredFiles::prepared(|pool| {
        pool.create(FEW, FEW_PAGES * PAGE).expect("room");
        pool.create(SLICE, MEMORY_PAGES * PAGE).expect("room");
        let set = pool.set_tier(SLICE, TierPolicy::Memory);
        set.expect("the slice");
    });
    let Some(files) = prepared else {
        return;
    };
    let (brick, _maintenance) = files.open();
    let mut few = Client::of(&brick, FEW, 1);
    (0..FEW_PAGES).for_each(|page| write_page(&mut few, page, 1));
    // Of the other pages none may be demoted.
    let mut client = Client::new(&brick, 1);
    let mut written = 0;
    let began = Instant::now();
    loop {
        let figures = brick.tier_figures().unwrap_or_default();
        let usage = figures.usage;
        if figures.demoted == FEW_PAGES {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{figures:?}");
        match usage.memory_free > usage.memory_frames / (2 * DEMOTION_START_PART) {
            true => {
                write_page(&mut client, written, 1);
                written += 1;
            }
            false => std::thread::yield_now(),
        }
    }
    let figures = brick.tier_figures().expect("a tier");
    assert_eq!(figures.abandoned, 0, "{figures:?}");
}

#[test]
fn set_larger_than_memory_is_served_and_reopened() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let (brick, maintenance) = files.open();
    brick.create(SLICE, SET_PAGES * PAGE).expect("room");
    let mut client = Client::new(&brick, 1);
    let ops = SET_PAGES + 2 * MEMORY_PAGES;
    (1..=ops).for_each(|op| write_op(&mut client, op));
    let figures = brick.tier_figures().expect("a tier");
    assert!(figures.demoted > SET_PAGES - MEMORY_PAGES, "{figures:?}");
    check_contents(&brick, 1, ops);
    // A set that fits, read again and again, moves to memory.
    for round in 0..4 {
        for page in 0..MEMORY_PAGES / 4 {
            let found = read_page(&mut client, page * 3);
            assert!(found.len() == PAGE as usize, "round {round}");
        }
    }
    let figures = brick.tier_figures().expect("a tier");
    assert!(figures.promoted > 0 && figures.hits > 0, "{figures:?}");
    drop(client);
    maintenance.stop();
    drop(brick);
    let (brick, _maintenance) = files.open();
    check_contents(&brick, 2, ops);
}

/// The brick of `killed_brick_loses_nothing`, which counts its acknowledged operations in a file.
#[test]
#[ignore = "it runs in a process that is killed"]
fn brick_that_is_killed() {
    let Some(directory) = std::env::var_os(FILES) else {
        return;
    };
    let files = TieredFiles::at(PathBuf::from(directory));
    let (brick, _maintenance) = files.open();
    brick.create(SLICE, SET_PAGES * PAGE).expect("room");
    let mut client = Client::new(&brick, 1);
    let counter = std::fs::File::create(files.counter()).expect("a file");
    for op in 1.. {
        write_op(&mut client, op);
        let counted = counter.write_all_at(&u64::to_le_bytes(op), 0);
        counted.expect("a count");
    }
}

fn start_child(directory: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this test"));
    child.args(["--exact", "tier::brick_that_is_killed", "--ignored"]);
    let child = child.env(FILES, directory).stdout(Stdio::null()).spawn();
    child.expect("a process")
}

fn count(path: &Path) -> u64 {
    let bytes = std::fs::read(path).unwrap_or_default();
    bytes.try_into().map_or(0, u64::from_le_bytes)
}

#[test]
fn killed_brick_loses_nothing() {
    let Some(files) = TieredFiles::new() else {
        return;
    };
    let mut child = start_child(files.directory());
    let began = Instant::now();
    // Most pages were demoted by then, and pages move all the time.
    while count(&files.counter()) < SET_PAGES + MEMORY_PAGES {
        assert!(began.elapsed() < Duration::from_secs(300), "it is too slow");
        let ended = child.try_wait().expect("a status");
        assert!(ended.is_none(), "the brick ended: {ended:?}");
        std::thread::yield_now();
    }
    child.kill().expect("a process");
    child.wait().expect("its end");
    let ops = count(&files.counter());
    let (brick, _maintenance) = files.open();
    check_contents(&brick, 2, ops);
}
