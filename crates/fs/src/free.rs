//! Freeing: what lies beyond the size of a file, and files without a name.
//!
//! The mark [`TRIM`] is there before the first page goes, and goes after the last one; what
//! is marked after a crash is finished in pieces ([`crate::left`]).

use crate::Fs;
use crate::core::Live;
use crate::data::{SPANS_FREED_MAX, discard, pages_of};
use crate::error::Result;
use crate::format::{Ino, Inode, Kind, TRIM};
use crate::io::Port;
use crate::map::{self, Piece};
use std::sync::Arc;

/// Spans that are given back together with their inode and its attributes.
const SPANS_WITH_INODE_MAX: usize = 8;
/// Mapped pages that are freed in the transaction of their inode.
const CLEARED_PAGES_MAX: u64 = 16;

impl Fs {
    /// Frees what lies beyond the size, and takes the mark away. Counts what is
    /// left, unless the caller knows. The caller holds the file alone, or nobody
    /// else can.
    pub(crate) fn trim(&self, port: &mut Port, ino: Ino, pages: Option<u64>) -> Result<()> {
        while self.trim_some(port, ino)? {}
        self.end_trim(port, ino, pages)
    }

    /// Frees some of what lies beyond the size. Returns whether more may be left.
    pub(crate) fn trim_some(&self, port: &mut Port, ino: Ino) -> Result<bool> {
        let (keep, pieces) = self.look(|core| {
            core.check_running()?;
            let inode = core.inode(ino)?;
            let keep = pages_of(inode.size);
            Ok((keep, core.pieces(&inode, keep, SPANS_FREED_MAX)?))
        })?;
        let shared = self.release_shared(port, ino, &pieces, &(keep..u64::MAX))?;
        if shared > 0 {
            return Ok(true);
        }
        // What lasts is counted on the way.
        let is_long = pieces.len() == SPANS_FREED_MAX;
        let whole = || pieces.iter().filter(|piece| piece.at >= keep);
        let mut mapped = 0;
        for Piece { span, .. } in whole().filter(|_| is_long) {
            mapped += port.count_mapped(span.page..span.end())?;
        }
        let own = pieces.iter().filter(|piece| !piece.is_shared);
        port.call_all(own.map(|piece| discard(piece, &(keep..u64::MAX))))?;
        if whole().next().is_none() {
            return Ok(false);
        }
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for piece in whole() {
                map::remove(tx, &mut inode, piece.at)?;
                tx.give_span(piece.span);
            }
            inode.pages = inode.pages.saturating_sub(mapped);
            tx.put(ino, &inode)
        })?;
        Ok(true)
    }

    /// Takes the mark away from a file of so many mapped pages; they are counted,
    /// unless the caller knows.
    pub(crate) fn end_trim(&self, port: &mut Port, ino: Ino, pages: Option<u64>) -> Result<()> {
        let pages = match pages {
            Some(pages) => pages,
            None => self.count_mapped(port, ino)?,
        };
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            inode.flags &= !TRIM;
            inode.pages = pages;
            tx.put(ino, &inode)
        })
    }

    /// Mapped pages of a file.
    pub(crate) fn count_mapped(&self, port: &mut Port, ino: Ino) -> Result<u64> {
        let pieces = self.look(|core| {
            let inode = core.inode(ino)?;
            core.pieces(&inode, 0, usize::MAX)
        })?;
        let mut count = 0;
        for Piece { span, .. } in pieces {
            count += port.count_mapped(span.page..span.end())?;
        }
        Ok(count)
    }

    /// Nobody uses the inode any more: without a name it goes, else its times are
    /// put into it.
    pub(crate) fn let_go(&self, ino: Ino) {
        self.let_go_by(ino, None);
    }

    /// The same for who may have a port.
    pub(crate) fn let_go_by(&self, ino: Ino, mut port: Option<&mut Port>) {
        let live = {
            let mut core = self.core();
            let is_used = |live: &Live| live.opens > 0 || live.lookups > 0;
            if core.live.get(&ino).is_some_and(is_used) {
                return;
            }
            let is_orphan = core.inode(ino).is_ok_and(|inode| inode.links == 0);
            if is_orphan && !core.going.insert(ino) {
                return;
            }
            if !is_orphan {
                drop(core);
                return self.forget_times(ino);
            }
            core.held.set(ino, 0);
            let live = core.live.remove(&ino);
            if !core.is_running() {
                // It goes with the next mount that takes changes.
                core.going.remove(&ino);
                return;
            }
            live
        };
        // A thread may write while another one closes the file.
        if let Some(live) = live {
            live.data.end();
        }
        let mut freed = Ok(true);
        while freed == Ok(true) {
            freed = self.making_room(|| self.free_some_of(ino, port.as_deref_mut()));
        }
        // It stays among what goes, and nobody hears of it.
        let _ = self.leave(ino, freed);
    }

    /// Puts the noted times of an inode into it, and forgets what was live of it.
    fn forget_times(&self, ino: Ino) {
        let data = {
            let core = self.core();
            core.live.get(&ino).map(|live| Arc::clone(&live.data))
        };
        if let Err(cause) = self.note_times(ino) {
            tracing::warn!(ino = ino.0, %cause, "the times of a file are lost");
        }
        if let Some(data) = data {
            let ended = data.end();
            let mut core = self.core();
            let is_over = |live: &Live| live.opens == 0 && live.lookups == 0;
            if core.live.get(&ino).is_some_and(is_over) {
                core.live.remove(&ino);
                core.held.set(ino, 0);
            } else {
                ended.resume();
            }
        }
    }

    /// Frees some of an orphan, and with the rest its inode. A crash in between leaves an
    /// orphan. Returns whether more is left.
    pub(crate) fn free_some_of(&self, ino: Ino, mut port: Option<&mut Port>) -> Result<bool> {
        let (inode, pieces) = self.look(|core| {
            let inode = core.inode(ino)?;
            let pieces = core.pieces(&inode, 0, SPANS_FREED_MAX)?;
            Ok((inode, pieces))
        })?;
        let shares = pieces.iter().any(|piece| piece.is_shared) || inode.spare.is_some();
        let goes_at_once = pieces.len() <= SPANS_WITH_INODE_MAX && !shares;
        let is_file = inode.kind() == Kind::File;
        let is_small = is_file && inode.is_dense() && inode.pages <= CLEARED_PAGES_MAX;
        if !goes_at_once {
            if inode.size > 0 || inode.flags != TRIM || inode.growth.is_some() {
                self.change(|tx| {
                    let mut inode = tx.inode(ino)?;
                    inode.size = 0;
                    inode.flags = TRIM;
                    inode.growth = None;
                    tx.put(ino, &inode)
                })?;
            }
            self.with_port(port, |port| {
                self.free_spare(port, ino)?;
                self.trim_some(port, ino)
            })?;
            return Ok(true);
        }
        if !is_small {
            let all = pieces.iter().map(|piece| discard(piece, &(0..u64::MAX)));
            self.with_port(port.as_deref_mut(), |port| Ok(port.call_all(all)?))?;
        }
        let log = inode.redo;
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            for &Piece { at, span, .. } in &pieces {
                if is_small {
                    let mapped = inode.pages.saturating_sub(at).min(1 << span.order);
                    (0..mapped).for_each(|page| tx.clear(span.page + page));
                }
                map::remove(tx, &mut inode, at)?;
                tx.give_span(span);
            }
            crate::xattrs::clear(tx, &mut inode);
            tx.put(ino, &Inode::free(inode.generation))?;
            tx.give_ino(ino);
            Ok(())
        })?;
        if let Some(log) = log {
            self.end_log(log, port);
        }
        Ok(false)
    }

    /// Runs something with the caller's port, or a borrowed one.
    pub(crate) fn with_port<T>(
        &self,
        port: Option<&mut Port>,
        run: impl FnOnce(&mut Port) -> Result<T>,
    ) -> Result<T> {
        match port {
            Some(port) => run(port),
            None => run(&mut *self.borrow()?),
        }
    }
}
