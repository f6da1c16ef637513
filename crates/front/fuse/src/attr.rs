//! What the kernel calls things, and what the file system calls them.

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use pagemesh_fs::{Attr, Ino, Kind, Time};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Names and attributes change through this mount only, and the kernel sees to
/// what its own calls change: it may keep them for as long as it likes.
pub(crate) const KEPT: Duration = Duration::from_secs(86_400);

const BLOCK_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
const SET_ID: u16 = 0o6000;

pub(crate) fn ino(number: INodeNo) -> Ino {
    Ino(number.0)
}

/// How long the kernel may keep attributes. Of a file with set-id bits it keeps
/// none: a write takes them away without telling it.
pub(crate) fn kept(attr: &Attr) -> Duration {
    match attr.kind == Kind::File && attr.mode & SET_ID != 0 {
        true => Duration::ZERO,
        false => KEPT,
    }
}

pub(crate) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
        Kind::Socket => FileType::Socket,
    }
}

pub(crate) fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size,
        blocks: attr.pages * (PAGE_BYTES / BLOCK_BYTES),
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: system_time(attr.btime),
        kind: file_type(attr.kind),
        perm: attr.mode,
        nlink: attr.links,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.device,
        blksize: PAGE_BYTES as u32,
        flags: 0,
    }
}

fn system_time(time: Time) -> SystemTime {
    let whole = Duration::from_secs(time.sec.unsigned_abs());
    let second = match time.sec < 0 {
        true => UNIX_EPOCH.checked_sub(whole),
        false => UNIX_EPOCH.checked_add(whole),
    };
    let nanoseconds = Duration::from_nanos(time.nsec.into());
    let time = second.and_then(|second| second.checked_add(nanoseconds));
    time.unwrap_or(UNIX_EPOCH)
}

/// The time of day.
#[must_use]
pub fn now() -> Time {
    let now = clock_gettime(ClockId::Realtime);
    Time {
        sec: now.tv_sec,
        nsec: now.tv_nsec as u32,
    }
}

/// A time that a program sets.
pub(crate) fn time(wish: TimeOrNow) -> Time {
    let time = match wish {
        TimeOrNow::Now => return now(),
        TimeOrNow::SpecificTime(time) => time,
    };
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => Time {
            sec: since.as_secs().cast_signed(),
            nsec: since.subsec_nanos(),
        },
        // fuser has subtracted the nanoseconds, which the kernel had added to
        // the second.
        Err(before) => Time {
            sec: before.duration().as_secs().cast_signed().wrapping_neg(),
            nsec: before.duration().subsec_nanos(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(sec: i64, nsec: u32, since: Result<Duration, Duration>) {
        let told = system_time(Time { sec, nsec }).duration_since(UNIX_EPOCH);
        assert_eq!(told.map_err(|before| before.duration()), since);
    }

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        check(3, 5, Ok(Duration::new(3, 5)));
        check(-2, 0, Err(Duration::new(2, 0)));
        check(-2, 800_000_000, Err(Duration::new(1, 200_000_000)));
        // As fuser hands them over: second and nanoseconds both subtracted.
        let wish = UNIX_EPOCH - Duration::new(2, 800_000_000);
        let (sec, nsec) = (-2, 800_000_000);
        assert_eq!(time(TimeOrNow::SpecificTime(wish)), Time { sec, nsec });
    }
}
