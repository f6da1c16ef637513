//! Decides which open files the kernel reads and writes through its page cache (RFD 023).
//!
//! A file that a program opens without the preload library goes through the page cache, where its
//! position moves as on other file systems. A file that the library opens bypasses the cache, so
//! that direct clients may change it.

use crate::Caching;
use crate::abi;
use crate::notifier::Notification;
use crate::open_files::OpenFile;
use crate::reply::{self, FuseReply};
use crate::serve::{FsHandler, RequestContext, has_flag};
use pagemesh_base::proc_maps::PRELOAD_OPEN_FLAG;
use pagemesh_fs::{Attr, Ino, Result};
use rustix::fs::OFlags;
use std::ops::Range;

/// How the kernel uses a file that it opens.
pub(crate) fn open_reply(caching: Caching) -> abi::OpenOut {
    let how = match caching {
        Caching::Bypassed => abi::OPEN_DIRECT_IO | abi::OPEN_PARALLEL_DIRECT_WRITES,
        Caching::PageCache => abi::OPEN_KEEP_CACHE,
    };
    abi::OpenOut {
        file: 0,
        flags: how | abi::OPEN_NO_FLUSH,
        backing: 0,
    }
}

impl FsHandler {
    /// Whether an open file goes through the page cache.
    fn is_cached(&self, file: u64) -> bool {
        self.open_files.get(file).is_some_and(|open| open.is_cached)
    }
}

impl RequestContext<'_> {
    /// The answer to an open with these flags. The caller has the file open.
    pub(crate) fn open_file(&self, ino: Ino, flags: u32) -> Result<abi::OpenOut> {
        let is_by_library = flags & PRELOAD_OPEN_FLAG != 0;
        let is_cached = !is_by_library && self.handler.caching == Caching::PageCache;
        if is_cached {
            self.fs.begin_caching(ino)?;
        }
        // The kernel sends all parts of a long write with `O_DIRECT` at once, and each of them
        // would be appended at the current end of the file.
        let appends_directly = OFlags::APPEND.bits() | OFlags::DIRECT.bits();
        let caching = match is_cached && flags & appends_directly != appends_directly {
            true => Caching::PageCache,
            false => Caching::Bypassed,
        };
        let access = OFlags::from_bits_retain(flags) & OFlags::ACCMODE;
        if is_cached && access == OFlags::RDONLY && !has_flag(flags, OFlags::NOATIME) {
            self.fs.record_cached_read_open(ino);
        }
        let is_writable = self.handler.is_shared() && access != OFlags::RDONLY;
        if is_writable {
            self.fs.record_writable_open(ino)?;
        }
        let open = OpenFile::new(ino, self.fs.lost_write_cursor(), is_cached, is_writable);
        let is_synced = self.handler.is_sync || has_flag(flags, OFlags::DSYNC);
        let file = self.handler.open_files.add(open, is_synced);
        let opened = abi::OpenOut {
            file,
            ..open_reply(caching)
        };
        if is_by_library {
            let flags = opened.flags & !abi::OPEN_NO_FLUSH;
            return Ok(abi::OpenOut { flags, ..opened });
        }
        self.fs.call_open_hook(self.thread);
        Ok(opened)
    }

    /// The answer for a file that was just created.
    pub(crate) fn created_reply(&self, made: &Attr, flags: u32) -> Result<FuseReply> {
        let opened = self.open_file(made.ino, flags).inspect_err(|_| {
            self.fs.release(made.ino);
            self.fs.forget(made.ino, 1);
        })?;
        Ok(FuseReply::from_pair(
            &reply::entry(made, self.handler.cache),
            &opened,
        ))
    }

    /// Runs before a request that reads pages into the cache. While a cached open exists, direct clients have no
    /// access; a page fault through another open ends their access.
    pub(crate) fn before_cached_read(&self, file: u64) -> Result<()> {
        match self.handler.is_cached(file) {
            true => self.fs.record_kernel_read(self.ino),
            false => self.fs.record_cached_request(self.ino),
        }
    }

    /// The same before a write through the cache.
    pub(crate) fn before_cached_write(&self, file: u64) -> Result<()> {
        if self.handler.is_cached(file) {
            self.fs.record_kernel_pages(self.ino);
            return Ok(());
        }
        self.fs.record_cached_request(self.ino)
    }

    /// Runs before the answer to a failed write. After a failed asynchronous append with direct I/O
    /// the kernel truncates the file to the size that it knows (Linux, `fuse_do_truncate`), so it
    /// gets the current size first.
    pub(crate) fn before_failed_write_reply(&self, how: u32) {
        let is_exact =
            self.handler.caching == Caching::Bypassed || self.fs.has_cached_open(self.ino);
        if how & abi::WRITE_LOCK_OWNER != 0 && !is_exact {
            self.fs.notify_size(self.ino);
        }
    }

    /// Runs after a write that the kernel expected at `offset`, and before its answer.
    pub(crate) fn before_write_reply(&self, how: u32, offset: u64, bytes: Range<u64>) {
        let is_past_cache = how & abi::WRITE_LOCK_OWNER != 0;
        if self.handler.caching == Caching::Bypassed {
            self.fs.drop_written_pages(self.ino, bytes);
            return;
        }
        match (is_past_cache, bytes.start == offset) {
            (true, is_in_place) => {
                if !is_in_place {
                    self.fs.notify_size(self.ino);
                }
                self.fs.drop_written_pages(self.ino, bytes);
            }
            (false, false) => {
                self.fs.record_misplaced_write(self.ino);
                // The kernel holds the lock of the pages until this answer.
                self.handler.notifier.queue(Notification::Pages(self.ino));
            }
            (false, true) => {}
        }
    }
}
