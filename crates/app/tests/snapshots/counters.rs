//! Counters in the blocks of a volume, for images that must hold a prefix of the writes.

use super::PAGE;
use super::support;
use super::wire::{Command, NbdConnection};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Places of the counters, far enough from each other for several columns.
pub const SLOTS: u64 = 48;
const SLOT_BYTES: u64 = 160 << 10;
/// Counters of an even slot fill a page, those of an odd slot change a part of it.
const PART: u64 = 100;

/// The offset and the bytes of a counter.
fn counter(value: u64) -> (u64, Vec<u8>) {
    let slot = value % SLOTS;
    let bytes = value.to_le_bytes();
    match slot % 2 {
        0 => (slot * SLOT_BYTES, bytes.repeat(PAGE as usize / 8)),
        _ => (slot * SLOT_BYTES + PART, bytes.to_vec()),
    }
}

/// Counters in order, each acknowledged before the next one is sent, over two connections in turn.
pub struct CounterLoad {
    pub is_over: AtomicBool,
    pub sent: AtomicU64,
    acknowledged: AtomicU64,
}

impl CounterLoad {
    pub fn new() -> CounterLoad {
        CounterLoad {
            is_over: AtomicBool::new(false),
            sent: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
        }
    }

    pub fn run(&self, socket: &Path, export: &str) {
        let connect = || NbdConnection::connect(socket, export, true).unwrap();
        let mut connections = [connect(), connect()];
        let mut value = 0;
        while !self.is_over.load(Ordering::Relaxed) {
            value += 1;
            let (offset, data) = counter(value);
            let nbd = &mut connections[value as usize % 2];
            self.sent.store(value, Ordering::SeqCst);
            let len = data.len() as u32;
            nbd.send(value, (Command::Write, 0), offset, len, &data)
                .unwrap();
            assert_eq!(nbd.reply().unwrap().errno, 0, "counter {value}");
            self.acknowledged.store(value, Ordering::SeqCst);
        }
    }

    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Waits until the load has written this many more.
    pub fn await_more(&self, count: u64) {
        let wanted = self.acknowledged() + count;
        support::until("the load goes on", || self.acknowledged() >= wanted);
    }
}

/// Ends a load, also when an assertion fails.
pub struct EndGuard<'a>(pub &'a AtomicBool);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Asserts that an image holds each counter up to one, and none after it. Returns that counter.
#[track_caller]
pub fn prefix_of(image: &[u8]) -> u64 {
    let at = |offset: u64, len: u64| &image[offset as usize..(offset + len) as usize];
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
    let found = (0..SLOTS).map(|slot| match slot % 2 {
        0 => {
            let page = at(slot * SLOT_BYTES, PAGE);
            let value = number(&page[..8]);
            assert_eq!(page, value.to_le_bytes().repeat(512), "slot {slot} is torn");
            value
        }
        _ => number(at(slot * SLOT_BYTES + PART, 8)),
    });
    let found: Vec<u64> = found.collect();
    let last = found.iter().copied().max().unwrap();
    for (slot, found) in (0..).zip(found) {
        // The distance to the last counter of this slot.
        let behind = (last % SLOTS + SLOTS - slot) % SLOTS;
        let wanted = last.saturating_sub(behind);
        assert_eq!(found, wanted, "slot {slot}, up to {last}");
    }
    last
}
