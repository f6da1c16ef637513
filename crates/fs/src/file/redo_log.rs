//! Redo logs: atomic writes of more pages than one transaction can hold.
//!
//! The pages are written to a file without a name first: the log. The transaction by which the
//! inode of their own file names the log commits all of them. Then they are copied into the file,
//! again after each crash, and the log is freed.
//!
//! - A file that names a log is not changed by other operations, and not read without the log's
//!   pages, until the log was applied.
//! - A crash leaves a log that is named, and applied at the next mount, or one that is not named,
//!   and freed like any file without a name.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::file::mmap_dirty::{MMAP_DIRTY_PAGES_MAX, NumberedPages, page_runs};
use crate::file::write::{ATOMIC_PAGES_MAX, PAGE, page_count};
use crate::format::inode::{Corruption, Ino, Inode, InodeKind, Page};
use crate::io::channel::IoChannel;
use crate::names::namespace::Credentials;
use crate::txn::core::damaged_inode;
use bytes::Bytes;
use pagemesh_base::bytes::{get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"pmeshlog";
/// Fields of the head: inode, generation, number of pages, page numbers.
const INO_AT: usize = 8;
const GENERATION_AT: usize = 16;
const COUNT_AT: usize = 24;
const PAGES_AT: usize = 32;
/// Most pages of a log: more than are buffered of one file.
const LOG_PAGES_MAX: u64 = 2 * MMAP_DIRTY_PAGES_MAX;
/// Bytes that are written to a log by one call.
const STEP_BYTES: usize = 1 << 20;

/// Bytes of the head of a log of `count` pages.
fn head_bytes(count: u64) -> u64 {
    (PAGES_AT as u64 + 8 * count).next_multiple_of(PAGE)
}

impl Fs {
    /// Writes pages into a file through a log. The caller holds the file exclusively, and the pages
    /// have spans of the file's own.
    pub(crate) fn write_through_redo_log(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        pages: &NumberedPages,
    ) -> Result<()> {
        if pages.len() as u64 > LOG_PAGES_MAX {
            // A named log of this length would count as damaged.
            return Err(Errno::NOSPC.into());
        }
        // Allocates the pages first: applying a named log must need no more room.
        self.fill_holes(channel, ino, pages)?;
        let log = self.create_unnamed(Ino::ROOT, 0o600, Credentials { uid: 0, gid: 0 })?;
        let log = log.ino;
        self.lock_core().redo_logs.insert(log);
        let named = self
            .write_log(channel, ino, log, pages)
            .and_then(|()| self.set_redo_log(ino, Some(log)));
        if let Err(error) = named {
            self.drop_log(log, Some(channel));
            return Err(error);
        }
        self.apply_redo_log(channel, ino)
    }

    /// Makes a file name this log, or none.
    fn set_redo_log(&self, ino: Ino, log: Option<Ino>) -> Result<()> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            inode.redo_log = log;
            tx.make_durable();
            tx.put_inode(ino, &inode)
        })
    }

    /// Maps all of these pages; fills holes with zeroes.
    fn fill_holes(&self, channel: &mut IoChannel, ino: Ino, pages: &NumberedPages) -> Result<()> {
        let zeroes = Arc::new([0; PAGE_BYTES]);
        for pages in pages.chunks(ATOMIC_PAGES_MAX as usize) {
            let holes = self.holes_in_ranges(channel, ino, page_runs(pages))?;
            let holes = holes.into_iter().map(|page| (page, Arc::clone(&zeroes)));
            let holes: Vec<(u64, Arc<Page>)> = holes.collect();
            if !holes.is_empty() {
                self.write_pages_atomic(channel, ino, &holes)?;
            }
        }
        Ok(())
    }

    fn write_log(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        log: Ino,
        pages: &NumberedPages,
    ) -> Result<()> {
        let generation = self.inspect(|core| core.inode(ino))?.generation;
        let count = pages.len() as u64;
        let mut bytes = vec![0; head_bytes(count) as usize];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, INO_AT, ino.0.to_le_bytes());
        put(
            &mut bytes,
            GENERATION_AT,
            u64::from(generation).to_le_bytes(),
        );
        put(&mut bytes, COUNT_AT, count.to_le_bytes());
        for (index, (page, _)) in pages.iter().enumerate() {
            put(&mut bytes, PAGES_AT + 8 * index, page.to_le_bytes());
        }
        let mut at = 0;
        let mut write = |bytes: &mut Vec<u8>| {
            let data = Bytes::from(std::mem::take(bytes));
            let written = self.write(channel, log, Some(at), &data, false)?;
            at += data.len() as u64;
            match written.end == at {
                true => Ok(()),
                false => Err(FsError::Posix(Errno::NOSPC)),
            }
        };
        for (_, page) in pages {
            if bytes.len() >= STEP_BYTES {
                write(&mut bytes)?;
            }
            bytes.extend_from_slice(&page[..]);
        }
        // Each write is a transaction, and precedes the one that names the log.
        write(&mut bytes)
    }

    /// Publishes the size that direct clients left, and applies a redo log, before another change
    /// of the file. The caller holds it exclusively.
    pub(crate) fn complete_pending(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        self.publish_size(ino)?;
        self.apply_redo_log(channel, ino)
    }

    /// Copies the pages of the log that a file names, if it names one. The caller holds the file
    /// exclusively.
    pub(crate) fn apply_redo_log(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        let inode = self.inspect(|core| core.inode(ino))?;
        let Some(log) = inode.redo_log else {
            return Ok(());
        };
        let copied = self.copy_log(channel, ino, &inode, log);
        self.lock_core().stop_if_damaged(&copied);
        copied
    }

    fn copy_log(&self, channel: &mut IoChannel, ino: Ino, inode: &Inode, log: Ino) -> Result<()> {
        let is_log = |inode: &Inode| inode.kind() == InodeKind::File && inode.links == 0;
        let found = self.inspect(|core| core.inode(log))?;
        if !is_log(&found) || found.redo_log.is_some() {
            return Err(invalid_log(log, "it is none"));
        }
        let numbers = self.log_pages(channel, log, (ino, inode.generation))?;
        self.with_reserve_fallback(|| self.ensure_spans(ino, numbers.iter().copied()))?;
        let mut at = head_bytes(numbers.len() as u64);
        for numbers in numbers.chunks(ATOMIC_PAGES_MAX as usize) {
            let len = numbers.len() * PAGE_BYTES;
            let bytes = self.read(channel, log, at, len as u32)?;
            let (read, _) = bytes.as_chunks::<PAGE_BYTES>();
            if read.len() < numbers.len() {
                return Err(invalid_log(log, "it is cut short"));
            }
            let pages = numbers.iter().copied();
            let pages: Vec<(u64, Arc<Page>)> =
                pages.zip(read.iter().map(|&page| Arc::new(page))).collect();
            self.with_reserve_fallback(|| self.write_pages_atomic(channel, ino, &pages))?;
            at += len as u64;
        }
        self.with_reserve_fallback(|| self.set_redo_log(ino, None))?;
        self.drop_log(log, Some(channel));
        Ok(())
    }

    /// The page numbers in a log for a file of this generation.
    fn log_pages(
        &self,
        channel: &mut IoChannel,
        log: Ino,
        (ino, generation): (Ino, u32),
    ) -> Result<Vec<u64>> {
        let head = self.read(channel, log, 0, PAGE_BYTES as u32)?;
        if head.len() < PAGE_BYTES || head[..8] != MAGIC {
            return Err(invalid_log(log, "it does not begin like one"));
        }
        let is_its = get_u64(&head, INO_AT) == ino.0
            && get_u64(&head, GENERATION_AT) == u64::from(generation);
        let count = get_u64(&head, COUNT_AT);
        let size = self.inspect(|core| core.inode(log))?.size;
        let is_long = count <= LOG_PAGES_MAX && head_bytes(count) + count * PAGE <= size;
        if !is_its || !is_long {
            return Err(invalid_log(log, "it is of another file, or cut short"));
        }
        let len = (head_bytes(count) - PAGES_AT as u64) as u32;
        let numbers = self.read(channel, log, PAGES_AT as u64, len)?;
        let numbers = numbers.as_chunks().0.iter().take(count as usize);
        let numbers: Vec<u64> = numbers.map(|number| u64::from_le_bytes(*number)).collect();
        let end = page_count(self.inspect(|core| core.inode(ino))?.size);
        let is_sound = numbers.is_sorted_by(|one, next| one < next)
            && numbers.last().is_none_or(|&last| last < end);
        match is_sound {
            true => Ok(numbers),
            false => Err(invalid_log(
                log,
                "it names pages that the file does not have",
            )),
        }
    }

    /// Frees a log that no file names.
    pub(crate) fn drop_log(&self, log: Ino, channel: Option<&mut IoChannel>) {
        let mut core = self.lock_core();
        // A log from before a failed mount is freed as an orphan, and its number may be reused.
        if !core.redo_logs.remove(&log) {
            return;
        }
        // No other caller had it open.
        let live = core.live_inode(log);
        (live.opens, live.lookups) = (0, 0);
        drop(core);
        self.release_if_unused_with(log, channel);
    }

    /// Applies the logs that a crash left; `files` has each file with its log. The mount is not in
    /// use yet. A file without a name is freed with its log.
    pub(crate) fn replay_redo_logs(&self, files: &[(Ino, Ino)]) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let mut channel = self.borrow_channel()?;
        self.lock_core()
            .redo_logs
            .extend(files.iter().map(|&(_, log)| log));
        for &(ino, _) in files {
            let is_named = self
                .inspect(|core| core.inode(ino))
                .is_ok_and(|inode| inode.links > 0);
            if !is_named {
                continue;
            }
            match self.apply_redo_log(&mut channel, ino) {
                // The log stays with its file. Reads fail until a retry succeeds.
                Err(cause) if cause.errno() == Errno::NOSPC => {
                    tracing::error!(ino = ino.0, %cause, "a file cannot be used before there is room");
                }
                Err(FsError::Damaged { .. } | FsError::ReadOnly(_)) => {
                    self.lock_core().untrusted.insert(ino);
                }
                done => done?,
            }
            self.release_if_unused_with(ino, Some(&mut channel));
        }
        Ok(())
    }
}

fn invalid_log(log: Ino, why: &str) -> FsError {
    damaged_inode(
        log,
        Corruption(format!("it is named as a redo log, and {why}")),
    )
}
