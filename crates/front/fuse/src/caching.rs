//! Which open files the kernel reads and writes through its page cache (RFD 023).
//!
//! A file that a program without the preload library opens goes through the page cache, where the
//! position moves as on other file systems. The preload library sets `O_DIRECT` on the files that it
//! opens: these bypass the cache, and direct clients may change such a file.

use crate::Caching;
use crate::abi;
use crate::answer::{self, Answer};
use crate::serve::{Asked, Served};
use pagemesh_base::mapping::OPENED_BY_LIBRARY;
use pagemesh_fs::{Attr, Ino, Result};
use rustix::fs::OFlags;

/// How the kernel uses a file that it opens.
pub(crate) fn opened_as(caching: Caching) -> abi::OpenOut {
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

impl Served {
    /// Whether an open file is read and written through the page cache.
    pub(crate) fn is_cached(&self, file: u64) -> bool {
        let is_by_mount = self.caching == Caching::Bypassed;
        is_by_mount || self.opened.get(file).is_some_and(|open| open.is_cached())
    }
}

impl Asked<'_> {
    /// The answer to an open with these flags. The caller has the file open.
    pub(crate) fn opened(&self, ino: Ino, flags: u32) -> Result<abi::OpenOut> {
        let is_by_library = flags & OPENED_BY_LIBRARY != 0;
        let is_cached = !is_by_library && self.served.caching == Caching::PageCache;
        if is_cached {
            self.fs.begin_caching(ino)?;
        }
        let is_synced = flags & OFlags::DSYNC.bits() != 0;
        let file = self.served.opened.add(self.fs.seen(), is_synced, is_cached);
        let opened = opened_as(self.served.caching);
        if is_by_library {
            let flags = opened.flags & !abi::OPEN_NO_FLUSH;
            return Ok(abi::OpenOut {
                file,
                flags,
                ..opened
            });
        }
        self.fs.note_open(self.thread);
        Ok(abi::OpenOut { file, ..opened })
    }

    /// The same for a file that was just made.
    pub(crate) fn made(&self, made: &Attr, flags: u32) -> Result<Answer> {
        let opened = self.opened(made.ino, flags).inspect_err(|_| {
            self.fs.release(made.ino);
            self.fs.forget(made.ino, 1);
        })?;
        Ok(Answer::both(&answer::entry(made), &opened))
    }

    /// An open file is released.
    pub(crate) fn released(&self, file: u64) {
        let open = self.served.opened.remove(file);
        if open.is_some_and(|open| open.is_cached()) {
            self.fs.end_caching(self.ino);
        }
    }

    /// The library has set `O_DIRECT` on an open file.
    pub(crate) fn bypass_cache(&self, file: u64) {
        let open = self.served.opened.get(file);
        if open.is_some_and(|open| open.bypass_cache()) {
            self.fs.end_caching(self.ino);
        }
    }

    /// The library takes `O_DIRECT` from an open file.
    pub(crate) fn use_cache(&self, file: u64) -> Result<()> {
        let Some(open) = self.served.opened.get(file) else {
            return Ok(());
        };
        if self.served.caching == Caching::Bypassed || open.is_cached() {
            return Ok(());
        }
        self.fs.begin_caching(self.ino)?;
        if open.use_cache() {
            // Another thread was first.
            self.fs.end_caching(self.ino);
        }
        Ok(())
    }

    /// A request on an open file caches pages. Direct clients must not have the file then: while an
    /// open caches it they have not.
    pub(crate) fn note_cached(&self, file: u64) -> Result<()> {
        match self.served.is_cached(file) {
            true => Ok(()),
            false => self.fs.note_cached(self.ino),
        }
    }
}
