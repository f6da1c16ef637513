//! Files that other processes read and write themselves, as guests (RFD 015): what they
//! are told of a file, and how they are kept away from it.
//!
//! Invariants: whoever holds a file's lock has its guests out. What changes a file's size
//! or pages outdates what they were told, before they are let in again. So guests meet
//! nobody but guests.

use crate::Fs;
use crate::core::{Core, Live};
use crate::data::pages_of;
use crate::error::Result;
use crate::format::{Growth, Ino, Kind, SMALL_PAGES, SPANS, Time, span_of, span_order};
use crate::held::Held;
use crate::kernel_pages::KernelPages;
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockWriteGuard, RawRwLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Boards up to which those of closed files are kept for the next who opens them.
const BOARDS_KEPT: usize = 1024;

/// What the guests of a file are told.
pub trait Board: Send + Sync {
    /// Keeps guests away until [`Board::reopen`], and returns once none is inside.
    fn close(&self);
    /// Lets guests in, but for others who keep them away.
    fn reopen(&self);
    /// What was told last is not so any more. Guests are away.
    fn outdate(&self);
    /// Tells how long the file is, and where each of its spans begins, in pages of the
    /// space; see [`span_index`]. Guests are away.
    fn show(&self, size: u64, spans: &[u64]);
    /// When a guest wrote last, if nobody took note of it; this does.
    fn take_written(&self) -> Option<Time>;
    /// Whether what was told last is not so any more.
    fn is_outdated(&self) -> bool {
        true
    }
    /// Lets guests make the file longer; told behind [`Board::show`]. `tail` is what its
    /// last page has below the end. Guests are away.
    fn lend(&self, _growth: Growth, _tail: &[u8]) {}
    /// Where guests say that the file ends, if they can be asked and were lent just this.
    fn end(&self, _growth: Growth) -> Option<u64> {
        None
    }
    /// A descriptor of the file was closed. From now on direct clients check which file a
    /// descriptor number leads to before they use the number again.
    fn note_closed(&self) {}
    /// Keeps direct clients from making the file longer until [`Board::release_end`]; they go
    /// on otherwise. False: one of them is about to.
    fn hold_end(&self) -> bool {
        true
    }
    /// Ends [`Board::hold_end`].
    fn release_end(&self) {}
}

/// In which span of a file its page lies, and where in it.
#[must_use]
pub fn span_index(page: u64) -> (usize, u64) {
    match page < SMALL_PAGES {
        true => {
            let (index, first) = span_of(page);
            (index, page - first)
        }
        false => {
            let chunk = (page / SMALL_PAGES - 1) as usize;
            (SPANS + chunk, page % SMALL_PAGES)
        }
    }
}

/// Pages of a span of this number.
#[must_use]
pub fn span_pages(index: usize) -> u64 {
    match index < SPANS {
        true => 1 << span_order(index),
        false => SMALL_PAGES,
    }
}

/// A file's lock: reading and overwriting, against what changes its size or pages; and
/// both against guests.
#[derive(Default)]
pub(crate) struct Data {
    pub(crate) lock: Arc<RwLock<()>>,
    board: OnceLock<Arc<dyn Board>>,
    /// The kernel keeps pages of the file, which guests would not change.
    is_mapped: AtomicBool,
    /// What came from mappings and was not synced.
    pub(crate) held: Mutex<Held>,
    /// What the kernel's page cache may have of the file.
    pub(crate) kernel_pages: Arc<KernelPages>,
}

/// Held, it keeps what changes a file's size or pages away. Of a file without guests.
pub(crate) type DataGuard = ArcRwLockReadGuard<RawRwLock, ()>;

/// Keeps guests out, if the file has any.
struct Out<'d>(Option<&'d Arc<dyn Board>>);

impl<'d> Out<'d> {
    /// With the lock held: a board comes with it held alone.
    fn of(data: &'d Data) -> Out<'d> {
        let board = data.board.get();
        if let Some(board) = board {
            board.close();
        }
        Out(board)
    }
}

/// Guests are kept out for good.
pub(crate) struct Ended<'d>(ManuallyDrop<Out<'d>>);

impl Ended<'_> {
    /// Somebody has opened the file meanwhile.
    pub(crate) fn resume(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}

impl Drop for Out<'_> {
    fn drop(&mut self) {
        if let Some(board) = self.0 {
            board.reopen();
        }
    }
}

/// The file is shared with those who leave its size and pages as they are.
pub(crate) struct Shared<'d> {
    _out: Out<'d>,
    _lock: RwLockReadGuard<'d, ()>,
}

/// Nobody else has the file.
pub(crate) struct Alone<'d> {
    out: Out<'d>,
    _lock: RwLockWriteGuard<'d, ()>,
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        if let Some(board) = self.out.0 {
            board.outdate();
        }
    }
}

impl Data {
    pub(crate) fn read(&self) -> Shared<'_> {
        let lock = self.lock.read();
        Shared {
            _out: Out::of(self),
            _lock: lock,
        }
    }

    pub(crate) fn write(&self) -> Alone<'_> {
        let lock = self.lock.write();
        Alone {
            out: Out::of(self),
            _lock: lock,
        }
    }

    /// The lock, if nobody is in the way, there are no guests, and nothing of it is held.
    pub(crate) fn try_read(&self) -> Option<DataGuard> {
        let guard = self.lock.try_read_arc()?;
        (self.board.get().is_none() && !self.has_held()).then_some(guard)
    }

    /// The lock alone, on the same conditions.
    pub(crate) fn try_write(&self) -> Option<ArcRwLockWriteGuard<RawRwLock, ()>> {
        let guard = self.lock.try_write_arc()?;
        (self.board.get().is_none() && !self.has_held()).then_some(guard)
    }

    /// For the same file, whose board goes.
    fn without_board(&self) -> Data {
        Data {
            kernel_pages: Arc::clone(&self.kernel_pages),
            ..Data::default()
        }
    }

    /// Whether direct clients may know where the file's pages are, or what it is like. The
    /// caller holds the lock in some way.
    pub(crate) fn is_shown(&self) -> bool {
        self.board.get().is_some_and(|board| !board.is_outdated())
    }

    /// Whether the kernel keeps pages of it.
    pub(crate) fn is_mapped(&self) -> bool {
        self.is_mapped.load(Ordering::Relaxed)
    }

    /// What its direct clients are told.
    pub(crate) fn board(&self) -> Option<&Arc<dyn Board>> {
        self.board.get()
    }

    /// Where guests say that the file ends.
    pub(crate) fn end_of_guests(&self, growth: Growth) -> Option<u64> {
        self.board.get()?.end(growth)
    }

    /// Keeps guests out for good: nobody has the file open, and whoever still has
    /// something of it, such as a thread whose descriptor another one closes, may do
    /// nothing any more. Gives what takes it back. The lock need not be held: a file whose
    /// board comes only then is open to its guests.
    pub(crate) fn end(&self) -> Ended<'_> {
        Ended(ManuallyDrop::new(Out::of(self)))
    }
}

impl Core {
    /// Where the spans of a file begin, up to the one that is lent, if guests can do with
    /// that: it has no holes, and shares nothing, and a write to it changes nothing else.
    fn plain_spans(&mut self, ino: Ino) -> Result<Option<(u64, Vec<u64>)>> {
        let inode = self.inode(ino)?;
        let is_sound = self.check_trusted(ino).is_ok() && self.is_running();
        if inode.kind() != Kind::File || !inode.is_whole() || !is_sound || inode.is_armed() {
            return Ok(None);
        }
        let pieces = self.pieces(&inode, 0, usize::MAX)?;
        let pages = match inode.growth {
            None => pages_of(inode.size),
            Some(growth) => growth.reach,
        };
        let needed = match pages.checked_sub(1) {
            None => 0,
            Some(last) => span_index(last).0 + 1,
        };
        if pieces.iter().any(|piece| piece.is_shared) || pieces.len() < needed {
            return Ok(None);
        }
        let numbered = pieces.iter().enumerate();
        let in_order = numbered
            .take(needed)
            .all(|(index, piece)| span_index(piece.at) == (index, 0));
        let spans = pieces.iter().map(|piece| piece.span.page);
        Ok(in_order.then(|| (inode.size, spans.take(needed).collect())))
    }
}

impl Core {
    /// A file was written to, and the kernel does not know it.
    pub(crate) fn note_beside(&mut self, ino: Ino) {
        self.beside.insert(ino);
        self.unseen.add(ino);
    }

    /// Notes when guests wrote to a file, if they did since, and that the kernel is to be
    /// told of it.
    pub(crate) fn note_guests(&mut self, ino: Ino) {
        let board = self.live.get(&ino).and_then(|live| live.data.board.get());
        if let Some(at) = board.and_then(|board| board.take_written()) {
            self.note_write(ino, at);
            self.note_beside(ino);
        }
    }

    /// The same of all files.
    pub(crate) fn note_all_guests(&mut self) {
        let mut boards = std::mem::take(&mut self.boards);
        boards.retain(|ino| self.live.contains_key(ino));
        boards.iter().for_each(|&ino| self.note_guests(ino));
        self.boards = boards;
    }
}

impl Fs {
    /// Tells guests what an open file is like now, by its board, or by the one that
    /// `make` makes if it has none. Returns the board; none: guests cannot have the file
    /// as it is.
    ///
    /// # Errors
    /// `ESTALE`, and what the volume says.
    pub fn show(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn Board>>,
    ) -> Result<Option<Arc<dyn Board>>> {
        self.show_for(ino, false, make)
    }

    /// The same for guests that want to make it longer, and may if there is room.
    ///
    /// # Errors
    /// As [`Fs::show`].
    pub fn grow(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn Board>>,
    ) -> Result<Option<Arc<dyn Board>>> {
        self.show_for(ino, true, make)
    }

    fn show_for(
        &self,
        ino: Ino,
        grows: bool,
        make: impl FnOnce() -> Option<Arc<dyn Board>>,
    ) -> Result<Option<Arc<dyn Board>>> {
        {
            let mut core = self.core();
            let live = core.live.get_mut(&ino).filter(|live| live.opens > 0);
            let Some(live) = live else { return Ok(None) };
            // Else it could be closed and freed meanwhile: who asks may be killed.
            live.opens += 1;
        }
        self.drop_kernel_pages(ino);
        let shown = self.show_open(ino, grows, make);
        self.release(ino);
        shown
    }

    /// The caller has the file open.
    fn show_open(
        &self,
        ino: Ino,
        grows: bool,
        make: impl FnOnce() -> Option<Arc<dyn Board>>,
    ) -> Result<Option<Arc<dyn Board>>> {
        let data = self.data_lock(ino)?;
        let _lock = data.lock.write();
        if data.is_mapped() || data.kernel_pages.keep_direct_clients_out() {
            return Ok(None);
        }
        let growth = self.look(|core| core.inode(ino))?.growth;
        if let (Some(growth), Some(board)) = (growth, data.board.get())
            && !board.is_outdated()
            && board.end(growth).is_some()
        {
            return Ok(Some(Arc::clone(board)));
        }
        let out = Out::of(&data);
        if let Some(board) = out.0 {
            board.outdate();
        }
        self.settle(ino)?;
        // Looked at first: a directory gets no board.
        if self.look(|core| core.plain_spans(ino))?.is_none() {
            return Ok(None);
        }
        if data.board.get().is_none()
            && let Some(board) = make()
        {
            // Nobody else can: the lock is held.
            let _ = data.board.set(board);
            self.core().boards.insert(ino);
        }
        let Some(board) = data.board.get() else {
            return Ok(None);
        };
        let lent = match grows {
            true => self.lend_room(ino, &data)?,
            false => None,
        };
        let Some((size, spans)) = self.look(|core| core.plain_spans(ino))? else {
            return Ok(None);
        };
        board.show(size, &spans);
        if let Some((growth, tail)) = lent {
            board.lend(growth, &tail);
        }
        Ok(Some(Arc::clone(board)))
    }

    /// A file will be mapped by the kernel, which keeps pages of it: it has no guests any more
    /// as long as somebody uses it.
    ///
    /// # Errors
    /// `ESTALE`, and what the volume says.
    pub fn bar_guests(&self, ino: Ino) -> Result<()> {
        let data = self.data_lock(ino)?;
        let _alone = data.lock.write();
        if !data.is_mapped.swap(true, Ordering::Relaxed) {
            data.end();
        }
        self.making_room(|| self.settle(ino))
    }

    /// Whether a program has said that it maps a file, or stored into a mapping of it.
    #[must_use]
    pub fn maps(&self, ino: Ino) -> bool {
        let data = self.data_lock(ino);
        data.is_ok_and(|data| data.is_mapped() || data.has_held())
    }

    /// A program closed a descriptor of a file: before this returns, the direct clients of the
    /// file are told to check their descriptor numbers.
    pub fn note_closed(&self, ino: Ino) {
        let data = self
            .core()
            .live
            .get(&ino)
            .map(|live| Arc::clone(&live.data));
        if let Some(board) = data.as_ref().and_then(|data| data.board.get()) {
            board.note_closed();
        }
    }

    /// Lets go of the board of a file that only the caller has open, who closes it, if closed
    /// files have many: each takes a descriptor, and there may be no more than some. The caller
    /// holds the file alone.
    pub(crate) fn spare_board(&self, ino: Ino, data: &Arc<Data>) {
        if data.is_mapped() || data.has_held() {
            return;
        }
        if self.core().boards.len() <= BOARDS_KEPT {
            return;
        }
        let ended = data.end();
        let mut core = self.core();
        core.note_guests(ino);
        // Whoever waits for the lock, or had it, has a reference; new ones come from the core.
        let is_unused = |live: &Live| live.opens == 1 && Arc::strong_count(data) == 2;
        let live = core.live.get_mut(&ino);
        if let Some(live) = live.filter(|live| is_unused(live) && Arc::ptr_eq(&live.data, data)) {
            live.data = Arc::new(data.without_board());
            core.boards.remove(&ino);
        } else {
            drop(core);
            ended.resume();
        }
    }

    /// Notes when guests wrote. To be called once in a while. Returns the files that they
    /// wrote to since, and that the kernel may be told of. Not while they make one longer: its
    /// attributes are not kept then, and the kernel takes no answer for the size that was asked
    /// for before it was told; who seeks the end would find that of the last time (Linux,
    /// `fuse_file_llseek` and `attr_version`).
    pub fn note_guests(&self) -> Vec<Ino> {
        let mut core = self.core();
        core.note_all_guests();
        let changed = std::mem::take(&mut core.beside);
        let grows = |ino: &Ino| core.inode(*ino).is_ok_and(|inode| inode.growth.is_some());
        let (later, now): (Vec<Ino>, Vec<Ino>) = changed.into_iter().partition(grows);
        core.beside.extend(later);
        now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicI64;

    #[derive(Default)]
    struct Counted(AtomicI64);

    impl Board for Counted {
        fn close(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn reopen(&self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }

        fn outdate(&self) {}

        fn show(&self, _size: u64, _spans: &[u64]) {}

        fn take_written(&self) -> Option<Time> {
            None
        }
    }

    /// Who opens a file has it shown to guests while it was just being forgotten.
    #[test]
    fn a_board_is_opened_as_often_as_it_was_closed() {
        for is_there_before in [false, true] {
            let data = Data::default();
            let counted = Arc::new(Counted::default());
            let show = || drop(data.board.set(counted.clone()));
            if is_there_before {
                show();
            }
            let ended = data.end();
            if !is_there_before {
                show();
            }
            let closed = || counted.0.load(Ordering::Relaxed);
            assert_eq!(closed(), i64::from(is_there_before));
            ended.resume();
            assert_eq!(closed(), 0);
        }
    }
}
