//! The calls for the content of files.

use super::Fs;
use crate::direct::publish;
use crate::error::Result;
use crate::file::allocate::AllocateMode;
use crate::file::attr::Attr;
use crate::file::seek::SeekTarget;
use crate::file::stored_pages::ReadTime;
use crate::file::sync::LostWriteCursor;
use crate::file::{
    allocate, atomic, copy, deferred_free, extents, mmap_dirty, read, resize, seek, service_file,
    sync, times, write,
};
use crate::format::inode::Ino;
use crate::io::channel::IoChannel;
use crate::io::write_queue::WriteQueue;
use crate::live::kernel_pages::WritePath;
use bytes::Bytes;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Fs {
    /// Reads bytes of a file; fewer at its end.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and errors of the volume.
    pub fn read(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<Vec<u8>> {
        let bytes = (offset, len);
        read::read(&self.txs, channel, ino, bytes, ReadTime::Recorded)
    }

    /// As [`Fs::read`], for a file that was opened with `O_NOATIME`.
    ///
    /// # Errors
    /// As [`Fs::read`].
    pub fn read_without_time(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        len: u32,
    ) -> Result<Vec<u8>> {
        let bytes = (offset, len);
        read::read(&self.txs, channel, ino, bytes, ReadTime::Unchanged)
    }

    /// Writes bytes at an offset, or at the end. Returns the range that was written. It is shorter
    /// than `data` if a later piece failed, or if the file would exceed its longest size (POSIX,
    /// `write`).
    ///
    /// # Errors
    /// `EFBIG`, `ENOSPC`, and errors of the volume. Existing bytes before the page that failed
    /// may be overwritten.
    pub fn write(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: Option<u64>,
        data: &Bytes,
        durable: bool,
    ) -> Result<Range<u64>> {
        let how = (durable, WritePath::ThroughCache);
        write::write(&self.txs, channel, ino, offset, data, how)
    }

    /// As [`Fs::write`], for a write that the kernel's page cache does not have. The caller then calls
    /// [`Fs::drop_written_pages`], before it reports the end of the write.
    ///
    /// # Errors
    /// As [`Fs::write`].
    pub fn write_past_cache(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: Option<u64>,
        data: &Bytes,
        durable: bool,
    ) -> Result<Range<u64>> {
        let how = (durable, WritePath::PastCache);
        write::write(&self.txs, channel, ino, offset, data, how)
    }

    /// Creates a queue for several concurrent writes ([`Fs::begin_write`]). Drop it when it is
    /// empty and no write follows: other calls may wait for its channel.
    ///
    /// # Errors
    /// As [`Fs::borrow_channel`].
    pub fn write_queue(&self) -> Result<WriteQueue<'_>> {
        let channel = self.txs.channels.borrow()?;
        Ok(WriteQueue::new(channel, &self.txs))
    }

    /// As [`Fs::write_queue`], without waiting; `None` if there is no idle channel.
    pub fn try_write_queue(&self) -> Option<WriteQueue<'_>> {
        let channel = self.txs.channels.try_borrow()?;
        Some(WriteQueue::new(channel, &self.txs))
    }

    /// Begins an overwrite; the queue reports its end under `id`. Returns false if the write
    /// changes more than existing bytes, or may have to wait for other operations. Then nothing has
    /// begun, and [`Fs::write`] can do it once the queue is empty.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and errors of the volume.
    pub fn begin_write(
        &self,
        pipe: &mut WriteQueue<'_>,
        id: u64,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        let how = (durable, WritePath::ThroughCache);
        write::begin_write(&self.txs, pipe, id, ino, offset, data, how)
    }

    /// As [`Fs::begin_write`], for a write that the kernel's page cache does not have. Returns false if the cache may have
    /// pages of the file.
    ///
    /// # Errors
    /// As [`Fs::begin_write`].
    pub fn begin_write_past_cache(
        &self,
        pipe: &mut WriteQueue<'_>,
        id: u64,
        ino: Ino,
        offset: u64,
        data: &Bytes,
        durable: bool,
    ) -> Result<bool> {
        let how = (durable, WritePath::PastCache);
        write::begin_write(&self.txs, pipe, id, ino, offset, data, how)
    }

    /// Overwrites several byte ranges of a file atomically, for readers and across a crash. The
    /// ranges lie within the file and in at most [`ATOMIC_PAGES_MAX`](crate::ATOMIC_PAGES_MAX) pages, and do not overlap.
    ///
    /// **Lost update:** `is_wanted` is called under the exclusive lock of the file. It must return
    /// false if the issuer of the request has exited. A late request would overwrite later writes.
    ///
    /// # Errors
    /// `EINTR` if `is_wanted` returns false; `EINVAL` for ranges that break the rules above;
    /// `EOPNOTSUPP` for a file that the kernel maps, or that has set-id bits or extended
    /// attributes; and as [`Fs::write`].
    pub fn write_atomic(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        parts: &[(u64, Bytes)],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<()> {
        atomic::write_atomic(&self.txs, &self.hooks, channel, ino, parts, is_wanted)
    }

    /// Truncates a file, or extends it by a hole.
    ///
    /// # Errors
    /// `EFBIG`, `EISDIR`, `EINVAL`.
    pub fn set_size(&self, channel: &mut IoChannel, ino: Ino, size: u64) -> Result<Attr> {
        resize::set_size(&self.txs, channel, ino, size)
    }

    /// Reserves, frees or zeroes a range. The caller then calls [`Fs::drop_written_pages`], also after an error.
    ///
    /// # Errors
    /// `EFBIG`, `EINVAL` for an empty range, `ENOSPC`.
    pub fn allocate(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        how: AllocateMode,
        offset: u64,
        len: u64,
    ) -> Result<()> {
        allocate::allocate(&self.txs, channel, ino, how, offset, len)
    }

    /// The next offset at which data or a hole begins.
    ///
    /// # Errors
    /// `ENXIO` at or beyond the end, and for data if there is none.
    pub fn seek(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        what: SeekTarget,
    ) -> Result<u64> {
        seek::seek(&self.txs, channel, ino, offset, what)
    }

    /// Where the mapped bytes of a file lie in the space: byte of the file, byte of the space, length. Holes are left out.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, and errors of the volume.
    pub fn extents(&self, ino: Ino) -> Result<Vec<(u64, u64, u64)>> {
        self.txs.inspect(|core| {
            let inode = core.regular_file(ino)?;
            let bytes = 0..inode.size;
            let (runs, _) = extents::file_extents(&inode, bytes, &mut |page| core.page(page))?;
            Ok(runs)
        })
    }

    /// Copies bytes from one file to another, or within one where source and target do not overlap;
    /// fewer at the end of the source. Whole spans are shared if both ranges have the same
    /// alignment and the target has no span there. Returns the number of bytes copied. The caller then calls
    /// [`Fs::drop_written_pages`] for the target, also after an error.
    ///
    /// # Errors
    /// `EINVAL` for ranges of one file that overlap; `EOPNOTSUPP` for a part of a page that the
    /// kernel may have; and as [`Fs::write`].
    pub fn copy(
        &self,
        channel: &mut IoChannel,
        (from, source): (Ino, u64),
        (to, target): (Ino, u64),
        len: u64,
    ) -> Result<u64> {
        copy::copy(&self.txs, channel, (from, source), (to, target), len)
    }

    /// Writes all pending times into their inodes, also from direct clients. Call it
    /// periodically: a crash loses the times recorded since the last call.
    ///
    /// # Errors
    /// The first error. The next call retries the inodes that failed.
    pub fn flush_all_times(&self) -> Result<()> {
        times::flush_all_times(&self.txs)
    }

    /// From now on, a crash that must keep the bytes of an overwrite leaves times no earlier than the reported ones: mtime and ctime
    /// are stored up to 2 s ahead with the first overwrite after each flush of times, and that overwrite waits for a
    /// transaction. [`Fs::flush_all_times`] stores the real times. Servers of clients that compare times with cached ones call it first.
    ///
    /// Writes of direct clients, and stores into mappings that are not synced, are not covered.
    pub fn keep_write_times(&self) {
        self.txs.keeps_write_times.store(true, Ordering::Relaxed);
    }

    /// The cursor for a file that is opened now.
    #[must_use]
    pub fn lost_write_cursor(&self) -> LostWriteCursor {
        self.reported_losses.duplicate()
    }

    /// Whether completed writes need a sync to survive power loss.
    #[must_use]
    pub fn has_write_cache(&self) -> bool {
        self.txs.channels.space().has_write_cache()
    }

    /// Makes completed changes of a file durable, as the pool's class promises, with its times and
    /// its mmap-dirty pages. The mmap-dirty pages enter the file as one atomic change.
    ///
    /// # Errors
    /// Errors of the volume, among them that earlier changes may be lost, unless another sync
    /// reported it.
    pub fn sync(&self, channel: &mut IoChannel, ino: Ino) -> Result<()> {
        sync::sync_open_file(
            &self.txs,
            &self.reported_losses,
            channel,
            ino,
            &self.reported_losses,
        )
    }

    /// As [`Fs::sync`], for an open file with its own cursor.
    ///
    /// # Errors
    /// Errors of the volume; once, that earlier changes may be lost. `EIO` after mmap-dirty pages
    /// were refused, until all programs have closed the file.
    pub fn sync_open_file(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        seen: &LostWriteCursor,
    ) -> Result<()> {
        sync::sync_open_file(&self.txs, &self.reported_losses, channel, ino, seen)
    }

    /// Whether [`Fs::sync_data`] has nothing to do.
    #[must_use]
    pub fn has_nothing_to_sync(&self, ino: Ino, seen: &LostWriteCursor) -> bool {
        sync::has_nothing_to_sync(&self.txs, ino, seen)
    }

    /// As [`Fs::sync_open_file`] without the times, as fdatasync does it. The kernel also sends such a sync
    /// after a durable write, which does not store its time either.
    ///
    /// # Errors
    /// As [`Fs::sync_open_file`].
    pub fn sync_data(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        seen: &LostWriteCursor,
    ) -> Result<()> {
        sync::sync_data(&self.txs, &self.reported_losses, channel, ino, seen)
    }

    /// Flushes mmap-dirty pages and pending times of all files, and makes everything durable.
    ///
    /// # Errors
    /// As [`Fs::sync`].
    pub fn sync_all(&self, channel: &mut IoChannel) -> Result<()> {
        sync::sync_all(&self.txs, &self.reported_losses, channel)
    }

    /// Buffers bytes that the kernel writes back from a mapping. Bytes beyond the end of the file
    /// are ignored.
    ///
    /// **Data loss:** refused bytes are lost. Every sync of the file fails with `EIO` until all
    /// programs have closed it.
    ///
    /// # Errors
    /// `EISDIR`, `EINVAL`, errors of the volume, and as [`Fs::sync`] if too much is buffered.
    pub fn buffer_mmap_write(
        &self,
        channel: &mut IoChannel,
        ino: Ino,
        offset: u64,
        data: &Bytes,
    ) -> Result<()> {
        mmap_dirty::buffer_write(&self.txs, &self.hooks, channel, ino, offset, data)
    }

    /// Flushes files with old buffered pages. Call it periodically.
    ///
    /// # Errors
    /// Errors of the volume.
    pub fn flush_old_mmap_dirty(&self) -> Result<()> {
        mmap_dirty::flush_old(&self.txs)
    }

    /// Buffered pages of all files.
    #[must_use]
    pub fn mmap_dirty_pages(&self) -> u64 {
        self.txs.lock_core().mmap_dirty.total_pages
    }

    /// Whether a program maps a file, or stored into a mapping of it.
    #[must_use]
    pub fn is_mmapped(&self, ino: Ino) -> bool {
        publish::is_mmapped(&self.txs, ino)
    }

    /// The number of the service file, in which servers of this file system keep their own state. With `create` an empty one is
    /// made if there is none; it is committed when the call returns. Without, the result is `None` then. Programs and clients never
    /// see the file: it has no name, and [`Fs::lookup_ino`], [`Fs::open`] and [`Fs::pin`] return `ESTALE` for its number. It is
    /// read, written and measured by its number, and needs no open: [`Fs::read`], [`Fs::write`], [`Fs::set_size`], [`Fs::sync`],
    /// [`Fs::attr`]. The number stays the same while the file system is mounted.
    ///
    /// A durable [`Fs::write`] of at most 48 pages that extends the file is atomic, and each page of an overwrite is.
    ///
    /// **Lost update:** a rollback to a snapshot brings old content back, and a clone begins with the content of its snapshot: nothing in
    /// the file system tells. Its user stores an identity of the volume's state in the file, and ignores the content of another one. A
    /// mount by a release without service files frees the file.
    ///
    /// # Errors
    /// With `create`, as [`Fs::create`]; errors of the volume.
    pub fn service_file(&self, create: bool) -> Result<Option<Ino>> {
        match create {
            true => service_file::find_or_create(&self.txs).map(Some),
            false => service_file::find(&self.txs),
        }
    }

    /// Frees a piece of a deferred inode. If there is none, fills the reserve if there is room.
    /// Returns whether another call may succeed now. Inodes that failed are tried again by later
    /// calls. Call it until it returns false, and then periodically.
    pub fn free_deferred_piece(&self) -> bool {
        deferred_free::free_deferred_piece(&self.txs)
    }

    /// Number of inodes with pages to be freed.
    #[must_use]
    pub fn deferred_inodes(&self) -> usize {
        self.txs.lock_core().deferred_free.count()
    }
}
