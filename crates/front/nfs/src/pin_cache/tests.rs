#![allow(clippy::unwrap_used)] // Tests.

use super::*;
use crate::testing::memory::{MemorySpace, wait};
use pagemesh_fs::{Caller, CreateMode, Credentials, Ino, MkfsOptions, SetAttributes, Time, mkfs};
use std::time::Duration;
use uuid::Uuid;

const OWNER: Credentials = Credentials { uid: 7, gid: 8 };

fn clock() -> Time {
    Time { sec: 1, nsec: 0 }
}

fn new_cache() -> PinCache {
    let memory = MemorySpace::new(1 << 32);
    let made = MkfsOptions {
        uuid: Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: 0,
        owner: OWNER,
        mode: 0o755,
    };
    mkfs(&memory.shared(), wait, clock, made).unwrap();
    let fs = Fs::mount(memory.shared(), wait, clock).unwrap();
    PinCache::new(Arc::new(fs))
}

/// A file without a name: it is removed once it is in the cache. Only the pin keeps it.
fn nameless(cache: &PinCache, now: Instant) -> FileId {
    let caller = Caller::trusted(OWNER.uid, OWNER.gid);
    let root = cache.fs.attr(Ino::ROOT).unwrap().file_id();
    let attrs = SetAttributes::default();
    let how = CreateMode::Guarded;
    let made = cache.fs.create_at(root, b"f", how, &attrs, &caller);
    let id = made.result.unwrap().attr.file_id();
    cache.get(id, now).unwrap();
    cache.fs.remove_at(root, b"f", &caller).result.unwrap();
    id
}

fn is_pinned(cache: &PinCache, id: FileId) -> bool {
    cache.fs.attr_of(id).is_ok()
}

#[test]
fn used_pin_is_kept_and_idle_one_is_dropped() {
    let cache = new_cache();
    let start = Instant::now();
    let id = nameless(&cache, start);
    let almost = start + PIN_IDLE_LIMIT - Duration::from_millis(1);
    cache.drop_idle(almost);
    assert!(is_pinned(&cache, id));
    let first = cache.get(id, almost).unwrap();
    assert!(Arc::ptr_eq(&first, &cache.get(id, almost).unwrap()));
    drop(first);
    cache.drop_idle(start + PIN_IDLE_LIMIT);
    assert!(is_pinned(&cache, id), "a use does not count");
    cache.drop_idle(almost + PIN_IDLE_LIMIT);
    assert!(!is_pinned(&cache, id));
}

#[test]
fn least_recently_used_pin_makes_room() {
    let cache = new_cache();
    let now = Instant::now();
    let first = nameless(&cache, now);
    let second = nameless(&cache, now);
    assert_ne!(first, second);
    for _ in 2..PINS_MAX {
        nameless(&cache, now);
    }
    cache.get(first, now).unwrap();
    let last = nameless(&cache, now);
    assert!(is_pinned(&cache, first) && is_pinned(&cache, last));
    assert!(!is_pinned(&cache, second));
    assert_eq!(poison::lock(&cache.pins).by_file.len(), PINS_MAX);
    assert_eq!(poison::lock(&cache.pins).by_use.len(), PINS_MAX);
}

#[test]
fn forgotten_and_closed_pins_are_dropped() {
    let cache = new_cache();
    let now = Instant::now();
    let forgotten = nameless(&cache, now);
    cache.forget(forgotten);
    assert!(!is_pinned(&cache, forgotten));
    let held = nameless(&cache, now);
    let pin = cache.get(held, now).unwrap();
    cache.close();
    assert!(is_pinned(&cache, held));
    drop(pin);
    assert!(!is_pinned(&cache, held));
    let root = cache.fs.attr(Ino::ROOT).unwrap().file_id();
    cache.get(root, now).unwrap();
    assert!(poison::lock(&cache.pins).by_file.is_empty());
}
