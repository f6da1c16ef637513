//! Conversions between the kernel's attributes and the file system's.

use crate::abi;
use crate::request::TimeUpdate;
use pagemesh_fs::{Attr, InodeKind, Time};
use rustix::fs::StatxFlags;
use rustix::time::{ClockId, clock_gettime};

/// How long the kernel may use names and attributes without asking again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheTimeout {
    pub(crate) seconds: u64,
}

impl CacheTimeout {
    /// Names and attributes change through this mount only, and the kernel tracks the effects of its own calls: it may
    /// cache them for any time.
    pub(crate) const LONG: CacheTimeout = CacheTimeout { seconds: 86_400 };
    /// Another front changes them, too.
    pub(crate) const NONE: CacheTimeout = CacheTimeout { seconds: 0 };
}

const BLOCK_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
const SET_ID: u16 = 0o6000;
/// The bit position of the kind in a mode.
const KIND_SHIFT: u32 = 12;

/// How long the kernel may cache attributes. It caches none of a file with set-id bits, as a write
/// clears them without a notification, nor of a file that direct clients extend.
pub(crate) fn attr_timeout_s(attr: &Attr, cache: CacheTimeout) -> u64 {
    let is_armed = attr.kind == InodeKind::File && attr.mode & SET_ID != 0;
    match is_armed || attr.has_volatile_size {
        true => 0,
        false => cache.seconds,
    }
}

/// The kind as in a directory listing.
pub(crate) fn dirent_type(kind: InodeKind) -> u32 {
    u32::from(kind.bits()) >> KIND_SHIFT
}

pub(crate) fn attributes(attr: &Attr) -> abi::Attributes {
    abi::Attributes {
        node: attr.ino.0,
        size: attr.size,
        blocks: attr.pages * (PAGE_BYTES / BLOCK_BYTES),
        atime: attr.atime.sec,
        mtime: attr.mtime.sec,
        ctime: attr.ctime.sec,
        atime_ns: attr.atime.nsec,
        mtime_ns: attr.mtime.nsec,
        ctime_ns: attr.ctime.nsec,
        mode: u32::from(attr.kind.bits() | attr.mode),
        links: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        device: attr.device,
        block_bytes: PAGE_BYTES as u32,
        flags: 0,
    }
}

/// The attributes as statx(2) returns them, with the creation time.
pub(crate) fn statx(attr: &Attr) -> abi::Statx {
    let time = |time: Time| abi::StatxTime {
        sec: time.sec,
        nsec: time.nsec,
        unused: 0,
    };
    abi::Statx {
        mask: (StatxFlags::BASIC_STATS | StatxFlags::BTIME).bits(),
        block_bytes: PAGE_BYTES as u32,
        links: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        mode: attr.kind.bits() | attr.mode,
        node: attr.ino.0,
        size: attr.size,
        blocks: attr.pages * (PAGE_BYTES / BLOCK_BYTES),
        atime: time(attr.atime),
        btime: time(attr.btime),
        ctime: time(attr.ctime),
        mtime: time(attr.mtime),
        ..abi::Statx::default()
    }
}

/// The time of day, as coarse as the clock of direct clients: otherwise a client's write could seem
/// older than an earlier one.
#[must_use]
pub fn now() -> Time {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    Time {
        sec: now.tv_sec,
        nsec: now.tv_nsec as u32,
    }
}

/// A time that a program sets.
pub(crate) fn resolve_time(wish: TimeUpdate) -> Time {
    match wish {
        TimeUpdate::Now => now(),
        TimeUpdate::At(time) => time,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_clock_matches_direct_client_clock() {
        let told = || {
            let now = clock_gettime(ClockId::RealtimeCoarse);
            (now.tv_sec, now.tv_nsec as u32)
        };
        let before = told();
        let now = now();
        assert!((before..=told()).contains(&(now.sec, now.nsec)));
    }
}
