//! Redo logs: more pages than one transaction has room for go into a file as one.
//!
//! They are written to a file without a name first. The transaction by which the inode of
//! their own file names that one, the log, is the moment at which all of them have
//! changed; then they are copied, as often as it takes, and the log goes.
//!
//! - A file that names a log is changed by nothing else, and read by nobody who does not
//!   have what the log holds, before the log was copied.
//! - A crash leaves a log that is named, and copied at the next mount, or one that is
//!   not, and goes like any file without a name.

use crate::Fs;
use crate::core::damaged_inode;
use crate::data::{PAGE, TOGETHER_PAGES_MAX, pages_of};
use crate::error::{FsError, Result};
use crate::format::{Damaged, Ino, Inode, Kind, Page};
use crate::held::{HELD_PAGES_MAX, Pages, runs};
use crate::io::Port;
use crate::namespace::Caller;
use bytes::Bytes;
use pagemesh_base::bytes::{get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"pmeshlog";
/// Where the head says whose pages they are, how many, and which.
const INO_AT: usize = 8;
const GENERATION_AT: usize = 16;
const COUNT_AT: usize = 24;
const PAGES_AT: usize = 32;
/// Pages of a log: more than is held of one file.
const COUNT_MAX: u64 = 2 * HELD_PAGES_MAX;
/// Bytes that are written to a log at once.
const STEP_BYTES: usize = 1 << 20;

/// Bytes of the head of a log of so many pages.
fn head_bytes(count: u64) -> u64 {
    (PAGES_AT as u64 + 8 * count).next_multiple_of(PAGE)
}

impl Fs {
    /// Puts pages into a file by a log. The caller holds the file alone; there are spans
    /// for them that are its own.
    pub(crate) fn put_by_redo(&self, port: &mut Port, ino: Ino, pages: &Pages) -> Result<()> {
        if pages.len() as u64 > COUNT_MAX {
            // Once named, it would be taken for damaged.
            return Err(Errno::NOSPC.into());
        }
        // What copying the log takes, so that it needs no room once that is named.
        self.fill_holes(port, ino, pages)?;
        let log = self.create_unnamed(Ino::ROOT, 0o600, Caller { uid: 0, gid: 0 })?;
        let log = log.ino;
        self.core().logs.insert(log);
        let named = self
            .write_log(port, ino, log, pages)
            .and_then(|()| self.name_log(ino, Some(log)));
        if let Err(error) = named {
            self.end_log(log, Some(port));
            return Err(error);
        }
        self.finish_redo(port, ino)
    }

    /// Has a file name this log, or none any more.
    fn name_log(&self, ino: Ino, log: Option<Ino>) -> Result<()> {
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            inode.redo = log;
            tx.make_durable();
            tx.put(ino, &inode)
        })
    }

    /// Has all of these pages mapped, those that are not with zeroes.
    fn fill_holes(&self, port: &mut Port, ino: Ino, pages: &Pages) -> Result<()> {
        let zeroes = Arc::new([0; PAGE_BYTES]);
        for pages in pages.chunks(TOGETHER_PAGES_MAX as usize) {
            let holes = self.holes_of(port, ino, runs(pages))?;
            let holes = holes.into_iter().map(|page| (page, Arc::clone(&zeroes)));
            let holes: Vec<(u64, Arc<Page>)> = holes.collect();
            if !holes.is_empty() {
                self.put_pages(port, ino, &holes)?;
            }
        }
        Ok(())
    }

    fn write_log(&self, port: &mut Port, ino: Ino, log: Ino, pages: &Pages) -> Result<()> {
        let generation = self.look(|core| core.inode(ino))?.generation;
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
            let written = self.write(port, log, Some(at), &data, false)?;
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
        // Each is a transaction, and the one that names the log is behind them all.
        write(&mut bytes)
    }

    /// Finishes what guests and a long sync have left of a file, before it is changed
    /// otherwise. The caller holds it alone.
    pub(crate) fn settle_all(&self, port: &mut Port, ino: Ino) -> Result<()> {
        self.settle(ino)?;
        self.finish_redo(port, ino)
    }

    /// Copies what a log holds for a file, if it names one. The caller holds the file
    /// alone.
    pub(crate) fn finish_redo(&self, port: &mut Port, ino: Ino) -> Result<()> {
        let inode = self.look(|core| core.inode(ino))?;
        let Some(log) = inode.redo else {
            return Ok(());
        };
        let copied = self.copy_log(port, ino, &inode, log);
        self.core().note_damage(&copied);
        copied
    }

    fn copy_log(&self, port: &mut Port, ino: Ino, inode: &Inode, log: Ino) -> Result<()> {
        let is_log = |inode: &Inode| inode.kind() == Kind::File && inode.links == 0;
        let found = self.look(|core| core.inode(log))?;
        if !is_log(&found) || found.redo.is_some() {
            return Err(no_log(log, "it is none"));
        }
        let numbers = self.pages_of_log(port, log, (ino, inode.generation))?;
        self.making_room(|| self.take_spans(ino, numbers.iter().copied()))?;
        let mut at = head_bytes(numbers.len() as u64);
        for numbers in numbers.chunks(TOGETHER_PAGES_MAX as usize) {
            let len = numbers.len() * PAGE_BYTES;
            let bytes = self.read(port, log, at, len as u32)?;
            let (read, _) = bytes.as_chunks::<PAGE_BYTES>();
            if read.len() < numbers.len() {
                return Err(no_log(log, "it is cut short"));
            }
            let pages = numbers.iter().copied();
            let pages: Vec<(u64, Arc<Page>)> =
                pages.zip(read.iter().map(|&page| Arc::new(page))).collect();
            self.making_room(|| self.put_pages(port, ino, &pages))?;
            at += len as u64;
        }
        self.making_room(|| self.name_log(ino, None))?;
        self.end_log(log, Some(port));
        Ok(())
    }

    /// Which pages a log holds, of a file of this generation.
    fn pages_of_log(
        &self,
        port: &mut Port,
        log: Ino,
        (ino, generation): (Ino, u32),
    ) -> Result<Vec<u64>> {
        let head = self.read(port, log, 0, PAGE_BYTES as u32)?;
        if head.len() < PAGE_BYTES || head[..8] != MAGIC {
            return Err(no_log(log, "it does not begin like one"));
        }
        let is_its = get_u64(&head, INO_AT) == ino.0
            && get_u64(&head, GENERATION_AT) == u64::from(generation);
        let count = get_u64(&head, COUNT_AT);
        let size = self.look(|core| core.inode(log))?.size;
        let is_long = count <= COUNT_MAX && head_bytes(count) + count * PAGE <= size;
        if !is_its || !is_long {
            return Err(no_log(log, "it is of another file, or cut short"));
        }
        let len = (head_bytes(count) - PAGES_AT as u64) as u32;
        let numbers = self.read(port, log, PAGES_AT as u64, len)?;
        let numbers = numbers.as_chunks().0.iter().take(count as usize);
        let numbers: Vec<u64> = numbers.map(|number| u64::from_le_bytes(*number)).collect();
        let end = pages_of(self.look(|core| core.inode(ino))?.size);
        let is_sound = numbers.is_sorted_by(|one, next| one < next)
            && numbers.last().is_none_or(|&last| last < end);
        match is_sound {
            true => Ok(numbers),
            false => Err(no_log(log, "it names pages that the file does not have")),
        }
    }

    /// Nobody names the log any more, or nobody ever will.
    pub(crate) fn end_log(&self, log: Ino, port: Option<&mut Port>) {
        let mut core = self.core();
        // Else it goes by itself, and the number may be another file's by now.
        if !core.logs.remove(&log) {
            return;
        }
        // Nobody else ever had it.
        let live = core.live(log);
        (live.opens, live.lookups) = (0, 0);
        drop(core);
        self.let_go_by(log, port);
    }

    /// Copies what logs hold for files, which a crash left: each with its log. Nobody else
    /// uses them yet. A file without a name goes, and its log with it.
    pub(crate) fn redo(&self, files: &[(Ino, Ino)]) -> Result<()> {
        if files.is_empty() {
            return Ok(());
        }
        let mut port = self.borrow()?;
        self.core().logs.extend(files.iter().map(|&(_, log)| log));
        for &(ino, _) in files {
            let is_named = self
                .look(|core| core.inode(ino))
                .is_ok_and(|inode| inode.links > 0);
            if !is_named {
                continue;
            }
            match self.finish_redo(&mut port, ino) {
                // It stays with its file, which cannot be read, and is tried again then.
                Err(cause) if cause.errno() == Errno::NOSPC => {
                    tracing::error!(ino = ino.0, %cause, "a file cannot be used before there is room");
                }
                Err(FsError::Damaged { .. } | FsError::ReadOnly(_)) => {
                    self.core().distrusted.insert(ino);
                }
                done => done?,
            }
            self.let_go_by(ino, Some(&mut port));
        }
        Ok(())
    }
}

fn no_log(log: Ino, why: &str) -> FsError {
    damaged_inode(
        log,
        Damaged(format!("it is named as a redo log, and {why}")),
    )
}
