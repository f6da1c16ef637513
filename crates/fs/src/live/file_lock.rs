//! The lock of a file, and how it keeps direct clients away from the file.
//!
//! Invariants: a thread that holds a file's lock has its direct clients blocked. A change of a
//! file's size or pages invalidates the published map before direct clients are unblocked. So
//! direct clients run concurrently with other direct clients only.

use crate::format::inode::AppendExtent;
use crate::live::kernel_pages::KernelPages;
use crate::live::mmap_dirty::MmapDirtyPages;
use crate::live::shared_file_map::SharedFileMap;
use parking_lot::{
    ArcRwLockReadGuard, ArcRwLockWriteGuard, Mutex, RawRwLock, RwLock, RwLockReadGuard,
    RwLockWriteGuard,
};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A file's lock. Readers and overwriters share it; changes of size or pages take it exclusively.
/// Both block direct clients.
#[derive(Default)]
pub(crate) struct FileLock {
    pub(crate) lock: Arc<RwLock<()>>,
    file_map: OnceLock<Arc<dyn SharedFileMap>>,
    /// The kernel caches pages of a mapping of the file; a direct write would not change them.
    is_mmapped: AtomicBool,
    /// Pages stored into mappings and not synced. In a box, because few files have some.
    pub(crate) mmap_dirty: Mutex<Option<Box<MmapDirtyPages>>>,
    /// The state of the kernel's page cache for the file, from the first use by the kernel or by direct clients on.
    kernel_pages: OnceLock<Arc<KernelPages>>,
    /// See [`crate::live::tail_pages`].
    keeps_tail_page: AtomicBool,
    /// The last write to a file with holes filled some. A hint: the next one does not ask the volume first whether it would.
    pub(crate) fills_holes: AtomicBool,
}

/// A shared lock of a file without direct clients: its size and pages do not change.
pub(crate) type FileReadGuard = ArcRwLockReadGuard<RawRwLock, ()>;

/// Blocks direct clients, if the file has any.
pub(crate) struct DirectBlock<'d>(Option<&'d Arc<dyn SharedFileMap>>);

impl<'d> DirectBlock<'d> {
    /// The caller holds the lock: a file map is set only under the exclusive lock.
    fn new(data: &'d FileLock) -> DirectBlock<'d> {
        let file_map = data.file_map.get();
        if let Some(file_map) = file_map {
            file_map.close();
        }
        DirectBlock(file_map)
    }

    /// Invalidates the published map.
    pub(crate) fn outdate(&self) {
        if let Some(file_map) = self.0 {
            file_map.outdate();
        }
    }
}

/// Direct clients are blocked for good.
pub(crate) struct PermanentDirectBlock<'d>(ManuallyDrop<DirectBlock<'d>>);

impl PermanentDirectBlock<'_> {
    /// Another thread has opened the file meanwhile.
    pub(crate) fn unblock(self) {
        drop(ManuallyDrop::into_inner(self.0));
    }
}

impl Drop for DirectBlock<'_> {
    fn drop(&mut self) {
        if let Some(file_map) = self.0 {
            file_map.reopen();
        }
    }
}

/// A shared lock of a file, with its direct clients blocked.
pub(crate) struct SharedFileGuard<'d> {
    _direct_block: DirectBlock<'d>,
    _lock: RwLockReadGuard<'d, ()>,
}

/// An exclusive lock of a file, with its direct clients blocked.
pub(crate) struct ExclusiveFileGuard<'d> {
    direct_block: DirectBlock<'d>,
    _lock: RwLockWriteGuard<'d, ()>,
}

impl Drop for ExclusiveFileGuard<'_> {
    fn drop(&mut self) {
        self.direct_block.outdate();
    }
}

impl FileLock {
    pub(crate) fn read(&self) -> SharedFileGuard<'_> {
        let lock = self.lock.read();
        self.drop_tail_page();
        SharedFileGuard {
            _direct_block: DirectBlock::new(self),
            _lock: lock,
        }
    }

    pub(crate) fn write(&self) -> ExclusiveFileGuard<'_> {
        let lock = self.lock.write();
        self.drop_tail_page();
        ExclusiveFileGuard {
            direct_block: DirectBlock::new(self),
            _lock: lock,
        }
    }

    /// The shared lock, if it is free and the file has no map and no mmap-dirty pages.
    pub(crate) fn try_read(&self) -> Option<FileReadGuard> {
        let guard = self.lock.try_read_arc()?;
        self.drop_tail_page();
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    /// The exclusive lock, on the same conditions. Only for appends: it keeps the tail page.
    pub(crate) fn try_write(&self) -> Option<ArcRwLockWriteGuard<RawRwLock, ()>> {
        let guard = self.lock.try_write_arc()?;
        (self.file_map.get().is_none() && !self.has_mmap_dirty()).then_some(guard)
    }

    pub(crate) fn keeps_tail_page(&self) -> bool {
        self.keeps_tail_page.load(Ordering::Relaxed)
    }

    /// The caller holds the lock exclusively.
    pub(crate) fn keep_tail_page(&self) {
        self.keeps_tail_page.store(true, Ordering::Relaxed);
    }

    /// The caller holds the lock, which orders this with the appends.
    fn drop_tail_page(&self) {
        if self.keeps_tail_page() {
            self.keeps_tail_page.store(false, Ordering::Relaxed);
        }
    }

    /// The state of the kernel's page cache, for a change or a lock of it.
    pub(crate) fn kernel_pages(&self) -> &KernelPages {
        self.kernel_pages.get_or_init(Arc::default)
    }

    /// The state of the kernel's page cache; `None` is its default.
    pub(crate) fn used_kernel_pages(&self) -> Option<&KernelPages> {
        self.kernel_pages.get().map(Arc::as_ref)
    }

    /// A lock for the same file without its map.
    pub(crate) fn without_file_map(&self) -> FileLock {
        FileLock {
            kernel_pages: self.kernel_pages.clone(),
            ..FileLock::default()
        }
    }

    /// Whether direct clients may know the file's pages or attributes. The caller holds the lock,
    /// shared or exclusively.
    pub(crate) fn has_current_map(&self) -> bool {
        self.file_map
            .get()
            .is_some_and(|file_map| !file_map.is_outdated())
    }

    /// Whether the kernel maps the file, and so caches pages of it.
    pub(crate) fn is_mmapped(&self) -> bool {
        self.is_mmapped.load(Ordering::Relaxed)
    }

    /// Sets [`FileLock::is_mmapped`] for as long as the file is in use. Returns the value before.
    pub(crate) fn set_mmapped(&self) -> bool {
        self.is_mmapped.swap(true, Ordering::Relaxed)
    }

    /// The map that its direct clients share.
    pub(crate) fn file_map(&self) -> Option<&Arc<dyn SharedFileMap>> {
        self.file_map.get()
    }

    /// Gives a file without a map this one. The caller holds the lock exclusively, so no other
    /// thread can.
    pub(crate) fn set_file_map(&self, map: Arc<dyn SharedFileMap>) {
        let _ = self.file_map.set(map);
    }

    /// Blocks direct clients, if the file has any. The caller holds the lock.
    pub(crate) fn block_direct(&self) -> DirectBlock<'_> {
        DirectBlock::new(self)
    }

    /// The end of the file that direct clients report.
    pub(crate) fn direct_append_end(&self, extent: AppendExtent) -> Option<u64> {
        self.file_map.get()?.append_end(extent)
    }

    /// Blocks direct clients for good: no program has the file open. A thread that still uses a
    /// descriptor which another thread closes can do nothing any more. Returns the guard that can
    /// unblock them. The caller need not hold the lock: a map that is set only later is not
    /// blocked.
    pub(crate) fn block_direct_permanently(&self) -> PermanentDirectBlock<'_> {
        PermanentDirectBlock(ManuallyDrop::new(DirectBlock::new(self)))
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::inode::Time;
    use std::sync::atomic::AtomicI64;

    #[derive(Default)]
    struct CloseCounter(AtomicI64);

    impl SharedFileMap for CloseCounter {
        fn close(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn reopen(&self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }

        fn outdate(&self) {}

        fn publish(&self, _size: u64, _spans: &[u64]) {}

        fn take_write_time(&self) -> Option<Time> {
            None
        }
    }

    /// A file may be opened and published to direct clients while the mount forgets it.
    #[test]
    fn file_map_reopens_match_closes() {
        for is_there_before in [false, true] {
            let data = FileLock::default();
            let counted = Arc::new(CloseCounter::default());
            let show = || drop(data.file_map.set(counted.clone()));
            if is_there_before {
                show();
            }
            let ended = data.block_direct_permanently();
            if !is_there_before {
                show();
            }
            let closed = || counted.0.load(Ordering::Relaxed);
            assert_eq!(closed(), i64::from(is_there_before));
            ended.unblock();
            assert_eq!(closed(), 0);
        }
    }
}
