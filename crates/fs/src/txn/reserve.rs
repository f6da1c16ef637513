//! The reserve: preallocated pages that let unlink and truncate commit on a full pool. These
//! operations free pages, but must first write the pages that they change. A limit keeps one file
//! system from filling its pool; other volumes of the pool may still fill it.
//!
//! - The head names the span of the reserve. The reserve is the mapped pages of that span. So
//!   releasing and filling it changes no other page, and mounting counts the pages that a crash
//!   left.
//! - The mapped pages of the reserve count as in use.
//! - A thread that releases or fills it holds `TxManager::reserved_pages`, and uses the commit channel. A
//!   thread that needs room holds a channel already, and must not wait for a second one.
//! - One thread at a time fills it (`TxManager::reserve_filler`). That thread may wait for a batch, but not while it
//!   holds `reserved_pages`: the thread that sends the batch may release the reserve.

use crate::error::{FsError, Result};
use crate::format::PAGE;
use crate::format::page_map::Span;
use crate::txn::manager::TxManager;
use bytes::Bytes;
use pagemesh_base::poison;
use pagemesh_base::space::{Request, SpaceError};
use std::sync::MutexGuard;

/// The reserve's share of the limit.
const LIMIT_PART: u64 = 64;
/// A volume has this many times the limit as addresses. Without a limit, the addresses divided by
/// this stand for it.
const ADDRESS_FACTOR: u64 = 16;
/// Enough for several deletions of the longest files at once.
const PAGES_MAX: u64 = 256;
/// Pages that one deletion may change: directory, inodes and maps. A file system below 4 MiB has no
/// reserve: it would be a large part of it.
const PAGES_MIN: u64 = 16;

/// The order of the reserve's span, for a limit of `pages` pages; `None` if there is no reserve.
fn reserve_order(pages: u64) -> Option<u8> {
    let pages = (pages / LIMIT_PART).min(PAGES_MAX);
    (pages >= PAGES_MIN).then(|| pages.ilog2() as u8)
}

/// The request that releases the reserve.
pub(super) fn reserve_discard(span: Span) -> Request {
    Request::Discard {
        offset: span.page * PAGE,
        len: PAGE << span.order,
    }
}

impl TxManager {
    pub(super) fn lock_reserve(&self) -> MutexGuard<'_, u64> {
        poison::lock(&self.reserved_pages)
    }

    /// Runs an operation that frees room. If it fails for lack of room, releases the reserve and
    /// runs it once more. It must be safe to run again after such an error.
    pub(crate) fn with_reserve_fallback<T>(&self, mut run: impl FnMut() -> Result<T>) -> Result<T> {
        match run() {
            Err(FsError::Space(SpaceError::NoSpace(_))) => {
                // Another thread may have released the reserve meanwhile: the retry helps then,
                // too.
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
        self.lock_commit_channel().call(reserve_discard(span))?;
        self.record_released_reserve(held);
        Ok(())
    }

    pub(super) fn record_released_reserve(&self, held: &mut u64) {
        let mut core = self.lock_core();
        core.used_pages = core.used_pages.saturating_sub(*held);
        *held = 0;
        core.reserved_pages = 0;
    }

    /// Fills the reserve, if there is room.
    pub(crate) fn refill_reserve(&self) {
        if !self.lock_core().is_running() {
            return;
        }
        let _filler = poison::lock(&self.reserve_filler);
        let filled = self
            .reserve_span()
            .and_then(|span| span.map_or(Ok(()), |span| self.fill_reserve(span)));
        if let Err(cause) = filled {
            tracing::debug!(%cause, "there is no reserve, or less than there should be");
        }
    }

    /// The span of the reserve. Allocates a larger one if the limit has risen.
    fn reserve_span(&self) -> Result<Option<Span>> {
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
        self.release_reserve()?;
        self.change(|tx| {
            let span = tx.allocate_span(order)?;
            if let Some(old) = now {
                tx.free_span(old);
            }
            tx.set_reserve(span)?;
            Ok(Some(span))
        })
    }

    fn fill_reserve(&self, span: Span) -> Result<()> {
        let mut held = self.lock_reserve();
        let pages = 1 << span.order;
        let missing = pages - *held;
        {
            let mut core = self.lock_core();
            let limit = core.head.limit_bytes / PAGE;
            if missing == 0 || limit > 0 && core.used_pages + missing > limit {
                return Ok(());
            }
            // Counted before the write, so that other threads see the pages as used.
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
            // A failed count assumes all pages; releasing the reserve corrects it.
            Err(_) => channel
                .count_mapped_pages(span.page..span.end())
                .unwrap_or(pages),
        };
        drop(channel);
        let mut core = self.lock_core();
        core.used_pages = core.used_pages.saturating_sub(pages - *held);
        core.reserved_pages = *held;
        Ok(written.map(drop)?)
    }
}
