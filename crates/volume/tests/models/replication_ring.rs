//! A model of two direct clients, a write through the kernel, and the sender that sends their
//! changes to an asynchronous replica. The first client may die at any step.
//!
//! Properties:
//! - The replica gets the values of each page in the order in which the page had them.
//! - It gets no value before the values that the value's writer had read.
//! - In the end it has all values, unless the ring is marked incomplete.
//! - The sender is woken for every change.

use crate::{explore_product, step};
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceRequest, Stamp};
use pagemesh_models::{Model, has_ended, pause_until, run_threads};
use pagemesh_volume::direct_access::{DirectSegment, FileRange};
use pagemesh_volume::test_api::{ReplicationQueue, RingEntry, UnfilledClaim};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

const SERIAL: u64 = 7;
const PAGE: u64 = 4096;
/// The page of the write through the kernel.
const KERNEL_PAGE: usize = 2;
/// The pages that direct clients write lie in one file.
const FILE: u64 = 1;
const MORTAL: usize = 0;

#[derive(Default)]
struct PageHistory {
    /// By page: the holder of its lock, and its values so far.
    locked: [Option<usize>; 3],
    values: [Vec<u64>; 3],
    /// By value: the version of the first page that its writer had read.
    first_page_seen: Vec<(u64, usize)>,
    /// By page: the number of its values that the replica has.
    copied: [usize; 3],
}

struct RingModel {
    segment: Arc<DirectSegment>,
    queue: ReplicationQueue,
    memory: Mutex<PageHistory>,
    sender_woken: AtomicBool,
}

impl RingModel {
    fn new() -> RingModel {
        let world = RingModel {
            segment: Arc::new(DirectSegment::create(0).expect("a segment")),
            queue: ReplicationQueue::default(),
            memory: Mutex::default(),
            sender_woken: AtomicBool::new(false),
        };
        world.queue.attach_segment(&world.segment);
        world.queue.open(SERIAL);
        world
    }

    /// Calls `look` with the memory locked. No thread waits inside.
    fn with_memory<T>(&self, look: impl FnOnce(&mut PageHistory) -> T) -> T {
        look(&mut self.memory.lock().expect("no panic"))
    }

    fn lock(&self, me: usize, page: usize) {
        step("lock words");
        pause_until(|| {
            self.with_memory(|memory| {
                let locked = &mut memory.locked[page];
                // A brick frees the locks of dead clients.
                let is_free = locked.is_none_or(has_ended);
                if is_free {
                    *locked = Some(me);
                }
                is_free
            })
        });
    }

    fn first_page_version(&self) -> usize {
        step("memory");
        self.with_memory(|memory| memory.values[0].len())
    }

    fn store(&self, page: usize, value: u64, seen: usize) {
        step("memory");
        self.with_memory(|memory| {
            memory.values[page].push(value);
            memory.first_page_seen.push((value, seen));
        });
    }

    /// Writes as a direct client does.
    fn write(&self, me: usize, page: usize, value: u64) {
        let (row, ring) = (self.segment.row(me), self.segment.ring());
        let (file, offset, len) = (FILE, page as u64 * PAGE, 8);
        step("rows");
        row.begin_op(FileRange { file, offset, len });
        step("rows");
        if self.segment.is_closed() || !ring.has_room(&mut 0) {
            return row.end_op();
        }
        let seen = self.first_page_version();
        self.lock(me, page);
        let place = ring.claim(row, 1);
        self.store(page, value, seen);
        step("lock words");
        self.with_memory(|memory| memory.locked[page] = None);
        if ring.fill(place, offset, &value.to_le_bytes(), Epoch(1)) {
            step("calls");
            self.sender_woken.store(true, Ordering::SeqCst);
        }
        step("rows");
        row.end_op();
    }

    fn kernel_write(&self, value: u64) {
        let seen = self.first_page_version();
        self.store(KERNEL_PAGE, value, seen);
        let (epoch, op, open) = (Epoch(1), 1, 0);
        let change = SliceRequest::Write {
            offset: KERNEL_PAGE as u64 * PAGE,
            data: Bytes::copy_from_slice(&value.to_le_bytes()),
            stamp: Stamp {
                epoch,
                op,
                open_ops: open,
            },
        };
        if self
            .queue
            .append(SERIAL, change)
            .expect("it follows")
            .must_wake
        {
            step("calls");
            self.sender_woken.store(true, Ordering::SeqCst);
        }
    }

    /// Applies a change to the replica.
    fn apply(&self, change: SliceRequest) {
        let SliceRequest::Write { offset, data, .. } = change else {
            return;
        };
        let bytes = data[..].try_into().expect("a value");
        let (page, value) = ((offset / PAGE) as usize, u64::from_le_bytes(bytes));
        self.with_memory(|memory| {
            // After a client's death the page may be as before its write.
            let had = memory.values[page].iter().position(|&had| had == value);
            let copied = had.map_or(0, |at| at + 1);
            assert!(copied >= memory.copied[page], "replica got an older value");
            memory.copied[page] = copied;
            let seen = memory.first_page_seen.iter().find(|(of, _)| *of == value);
            let seen = seen.map_or(0, |(_, seen)| *seen);
            assert!(memory.copied[0] >= seen, "it lacks a value that was read");
        });
    }

    /// Reconciles as the mount does after a client's death.
    fn reconcile(&self) {
        let (row, ring) = (self.segment.row(MORTAL), self.segment.ring());
        let Some(about) = row.active_range() else {
            return;
        };
        self.segment.close();
        let is_quiet = || {
            self.segment
                .active_ops()
                .all(|(number, _)| number == MORTAL)
        };
        step("rows");
        pause_until(is_quiet);
        match ring.unfilled_claim_of(row) {
            UnfilledClaim::Absent => {}
            UnfilledClaim::Unknown => {
                ring.mark_incomplete();
                assert!(ring.fill_unowned_claims(&self.segment, |number| number == MORTAL));
            }
            UnfilledClaim::FromSlot(place) => {
                let page = (about.offset / PAGE) as usize;
                let value = self.with_memory(|memory| memory.values[page].last().copied());
                let left = RingEntry {
                    slot: place,
                    slot_count: 1,
                    offset: about.offset,
                    data: Bytes::copy_from_slice(&value.unwrap_or(0).to_le_bytes()),
                    epoch: Epoch(1),
                };
                if ring.has_later_overlap(&self.segment, &left) {
                    ring.mark_incomplete();
                }
                let _ = ring.fill(place, left.offset, &left.data, left.epoch);
            }
        }
        row.end_op();
        self.segment.reopen();
    }

    /// Sends as the controller does.
    fn send(&self) {
        let is_over = || (0..3).all(has_ended);
        loop {
            while let Some(next) = self.queue.take_change(SERIAL, false) {
                self.apply(next.change);
                self.queue.record_done(SERIAL, next.number);
            }
            if has_ended(MORTAL) && self.segment.row(MORTAL).active_range().is_some() {
                self.reconcile();
                continue;
            }
            if is_over() {
                match self.sender_woken.swap(false, Ordering::SeqCst) {
                    true => continue,
                    false => break,
                }
            }
            let is_woken = Cell::new(false);
            pause_until(|| {
                let died = has_ended(MORTAL) && self.segment.row(MORTAL).active_range().is_some();
                is_woken.set(self.sender_woken.swap(false, Ordering::SeqCst) || died);
                is_woken.get() || is_over()
            });
            let next = self.queue.take_change(SERIAL, false);
            assert!(
                is_woken.get() || next.is_none(),
                "the sender sleeps, and a change waits"
            );
            if let Some(next) = next {
                self.apply(next.change);
                self.queue.record_done(SERIAL, next.number);
            }
        }
    }
}

fn direct_and_kernel_writes(pages: [usize; 2], second: &[u64]) {
    let world = RingModel::new();
    run_threads(vec![
        Box::new(|| world.write(MORTAL, pages[0], 11)),
        Box::new(|| {
            // Each value is written as by a new owner of the row.
            for value in second {
                world.write(1, pages[1], *value);
            }
        }),
        Box::new(|| world.kernel_write(33)),
        Box::new(|| world.send()),
    ]);
    assert!(world.segment.is_idle(), "a row is left");
    if world.queue.is_incomplete() {
        return;
    }
    assert!(
        world.queue.is_done(world.queue.last_number()),
        "not all is done"
    );
    assert!(!world.queue.is_behind());
    world.with_memory(|memory| {
        for page in 0..3 {
            let had = memory.values[page].len();
            assert_eq!(memory.copied[page], had, "page {page} differs");
        }
    });
}

#[test]
fn direct_writes_replicate_in_order() {
    explore_product();
    let alone = Model::new("a ring", 2);
    let found = alone.check(|| direct_and_kernel_writes([0, 1], &[22]));
    assert!(found.executions > 1000, "{found:?}");
    let mortal = Model::new("a ring with a dying client", 1).with_mortal(MORTAL);
    for pages in [[0, 1], [0, 0], [1, 0]] {
        let found = mortal.check(move || direct_and_kernel_writes(pages, &[22]));
        assert!(found.executions > 500, "{found:?}");
    }
    let again = Model::new("a ring with a reused row", 1);
    let found = again.check(|| direct_and_kernel_writes([0, 1], &[22, 44]));
    assert!(found.executions > 500, "{found:?}");
}

/// While a scan looks for later claims on a dead client's pages, a claim in between goes on to
/// its next record. The scan still finds the overlap.
#[test]
fn later_overlap_scan_survives_concurrent_progress() {
    explore_product();
    let model = Model::new("a walk over claims", 2);
    let found = model.check(|| {
        let segment = DirectSegment::create(0).expect("a segment");
        let ring = segment.ring();
        let claim = |row: usize, page: u64| {
            let (file, offset, len) = (row as u64, page * PAGE, PAGE);
            segment.row(row).begin_op(FileRange { file, offset, len });
            ring.claim(segment.row(row), 1)
        };
        let (dead, living, behind) = (claim(0, 0), claim(1, 10), claim(2, 0));
        let page = [1; PAGE as usize];
        let _ = ring.fill(behind, 0, &page, Epoch(1));
        segment.row(2).end_op();
        let left = RingEntry {
            slot: dead,
            slot_count: 1,
            offset: 0,
            data: Bytes::copy_from_slice(&page),
            epoch: Epoch(1),
        };
        run_threads(vec![
            Box::new(|| {
                let _ = ring.fill(living, 10 * PAGE, &page, Epoch(1));
                step("second row");
                segment.row(1).set_range(20 * PAGE, 4 * PAGE);
            }),
            Box::new(|| assert!(ring.has_later_overlap(&segment, &left))),
        ]);
    });
    assert!(found.executions > 5, "{found:?}");
}
