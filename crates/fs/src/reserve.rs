//! The reserve: pages that are written and hold nothing, given up when something gives
//! room back and finds none for the pages that it changes. A limit keeps a file system
//! from filling its pool alone; other volumes of the pool can.
//!
//! - The head names the span; the reserve is what of it is mapped. So giving it up and
//!   taking it changes nothing else, and mounting counts what a crash left of it.
//! - It counts as in use while it is there.
//! - Whoever gives it up or takes it holds [`Fs::reserve`] meanwhile, and goes the way of
//!   the batches: who needs room has a port already, and must not wait for a second one.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::spans::Span;
use bytes::Bytes;
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_base::units::PAGE_BYTES;
use std::sync::{MutexGuard, PoisonError};

const PAGE: u64 = PAGE_BYTES as u64;
/// The part of its limit that a file system keeps.
const LIMIT_PART: u64 = 64;
/// A volume has so many times the limit as addresses: what stands for one, if there is none.
const ADDRESS_FACTOR: u64 = 16;
/// Enough for several deletions of the longest files at once.
const PAGES_MAX: u64 = 256;
/// What a deletion changes: pages of directory, inodes and maps. Below 4 MiB a file
/// system has no reserve: that would be a large part of it.
const PAGES_MIN: u64 = 16;

/// The order of the span for a file system that may take so many pages, if it has a
/// reserve.
fn reserve_order(pages: u64) -> Option<u8> {
    let pages = (pages / LIMIT_PART).min(PAGES_MAX);
    (pages >= PAGES_MIN).then(|| pages.ilog2() as u8)
}

impl Fs {
    fn lock_reserve(&self) -> MutexGuard<'_, u64> {
        self.reserved_pages
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what gives room back; once more without the reserve, if there was no room
    /// for it. What failed must bear that.
    pub(crate) fn with_reserve_fallback<T>(&self, mut run: impl FnMut() -> Result<T>) -> Result<T> {
        match run() {
            Err(FsError::Space(SpaceError::NoSpace(_))) => {
                // Somebody else may have given it up a moment ago: that helps, too.
                self.release_reserve()?;
                run()
            }
            done => done,
        }
    }

    fn release_reserve(&self) -> Result<()> {
        let mut held = self.lock_reserve();
        let span = self.lock_core().head.reserve;
        match span {
            Some(span) if *held > 0 => self.discard_reserve(span, &mut held),
            _ => Ok(()),
        }
    }

    fn discard_reserve(&self, span: Span, held: &mut u64) -> Result<()> {
        self.lock_commit_channel().call(Request::Discard {
            offset: span.page * PAGE,
            len: PAGE << span.order,
        })?;
        let mut core = self.lock_core();
        core.used_pages = core.used_pages.saturating_sub(*held);
        *held = 0;
        Ok(())
    }

    /// Takes what is missing of the reserve, as far as there is room.
    pub(crate) fn refill_reserve(&self) {
        if !self.lock_core().is_running() {
            return;
        }
        let mut held = self.lock_reserve();
        let filled = self
            .reserve_span(&mut held)
            .and_then(|span| span.map_or(Ok(()), |span| self.fill_reserve(span, &mut held)));
        if let Err(cause) = filled {
            tracing::debug!(%cause, "there is no reserve, or less than there should be");
        }
    }

    /// The span of the reserve: another one where the limit has risen.
    fn reserve_span(&self, held: &mut u64) -> Result<Option<Span>> {
        let (now, most) = {
            let core = self.lock_core();
            let most = match core.head.limit_bytes {
                0 => core.total_pages / ADDRESS_FACTOR,
                limit => limit / PAGE,
            };
            (core.head.reserve, most)
        };
        let Some(order) = reserve_order(most) else {
            return Ok(now);
        };
        if now.is_some_and(|span| span.order >= order) {
            return Ok(now);
        }
        if let Some(span) = now {
            self.discard_reserve(span, held)?;
        }
        self.change(|tx| {
            let span = tx.allocate_span(order)?;
            if let Some(old) = now {
                tx.free_span(old);
            }
            tx.set_reserve(span)?;
            Ok(Some(span))
        })
    }

    fn fill_reserve(&self, span: Span, held: &mut u64) -> Result<()> {
        let pages = 1 << span.order;
        let missing = pages - *held;
        {
            let mut core = self.lock_core();
            let limit = core.head.limit_bytes / PAGE;
            if missing == 0 || limit > 0 && core.used_pages + missing > limit {
                return Ok(());
            }
            // Before they are written: others count meanwhile.
            core.used_pages += missing;
        }
        let mut channel = self.lock_commit_channel();
        let written = channel.call(Request::Write {
            offset: span.page * PAGE,
            data: Bytes::from(vec![0; (pages * PAGE) as usize]),
            durable: false,
        });
        *held = match &written {
            Ok(_) => pages,
            // It may have them all; whoever gives it up finds out.
            Err(_) => channel
                .count_mapped_pages(span.page..span.end())
                .unwrap_or(pages),
        };
        drop(channel);
        let mut core = self.lock_core();
        core.used_pages = core.used_pages.saturating_sub(pages - *held);
        Ok(written.map(drop)?)
    }
}
