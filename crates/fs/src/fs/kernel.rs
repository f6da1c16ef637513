//! The calls for the kernel's page cache and for direct clients.

use super::Fs;
use crate::direct::unseen_writes::EndLock;
use crate::direct::{publish, unseen_writes};
use crate::error::Result;
use crate::file::attr::Attr;
use crate::file::{attr, kernel_pages};
use crate::format::inode::Ino;
use crate::live::kernel_hooks::{DropPages, ForgetName, NotifySize};
use crate::live::shared_file_map::SharedFileMap;
use rustix::io::Errno;
use std::ops::Range;
use std::sync::Arc;

impl Fs {
    /// Sets the calls into the kernel. They replace earlier ones.
    pub fn set_kernel_callbacks(&self, drop_pages: DropPages, tell_size: NotifySize) {
        self.hooks.set_callbacks(drop_pages, tell_size);
    }

    /// Sets the call that makes the kernel forget a name which another front has removed. It replaces an earlier one. It is called after
    /// the removal, with no lock held, and only if the kernel knows directory and inode. It must not wait for the kernel.
    pub fn set_name_hook(&self, forget: ForgetName) {
        self.hooks.set_forget_name(forget);
    }

    /// The kernel has no mount of the file system any more, and all its requests are answered: drops its lookups, its pages and the
    /// calls into it. Inodes without a name are freed. The caller has released the files that the kernel had open. Another mount may follow.
    pub fn forget_kernel(&self) {
        kernel_pages::forget_kernel(&self.txs, &self.hooks);
    }

    /// A program of this machine has opened a file for writes: it may store into mappings, which another front must not miss. The
    /// caller has the file open, and calls [`Fs::record_writable_close`] before it closes it.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn record_writable_open(&self, ino: Ino) -> Result<()> {
        kernel_pages::record_writable_open(&self.txs, ino)
    }

    /// Takes back one [`Fs::record_writable_open`].
    pub fn record_writable_close(&self, ino: Ino) {
        kernel_pages::record_writable_close(&self.txs, ino);
    }

    /// A file is opened for reads and writes through the kernel's page cache. When this returns,
    /// direct clients have left the file, it has all that they wrote, and the kernel knows its
    /// size. The caller has the file open, and calls [`Fs::end_caching`] before it closes it.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn begin_caching(&self, ino: Ino) -> Result<()> {
        kernel_pages::begin_caching(&self.txs, &self.hooks, ino)
    }

    /// An open of [`Fs::begin_caching`] reads only. The kernel reads pages that it has already without a request, so the open
    /// itself counts as a read.
    pub fn record_cached_read_open(&self, ino: Ino) {
        kernel_pages::record_cached_read_open(&self.txs, &self.hooks, ino);
    }

    /// Takes back one [`Fs::begin_caching`]: all requests of that open have been answered.
    pub fn end_caching(&self, ino: Ino) {
        kernel_pages::end_caching(&self.txs, ino);
    }

    /// A request fills the page cache, though its open bypasses the cache. Direct clients have left
    /// the file before the request is answered. They return when the kernel has dropped the pages.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn record_cached_request(&self, ino: Ino) -> Result<()> {
        kernel_pages::record_cached_request(&self.txs, ino)
    }

    /// A cached write went to another offset than the kernel assumed. The kernel drops its pages
    /// within a second ([`Fs::collect_direct_writes`]), and the next open gets the size.
    pub fn record_misplaced_write(&self, ino: Ino) {
        kernel_pages::record_misplaced_write(&self.txs, ino);
    }

    /// A request of a cached open is about to read pages into the cache. When this returns, a change that began before has ended,
    /// and later changes know of the pages.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn record_kernel_read(&self, ino: Ino) -> Result<()> {
        kernel_pages::record_kernel_read(&self.txs, ino)
    }

    /// A request of a cached open is about to leave pages in the cache.
    pub fn record_kernel_pages(&self, ino: Ino) {
        kernel_pages::record_kernel_pages(&self.txs, ino);
    }

    /// Whether an open goes through the cache: pages may come at any time.
    #[must_use]
    pub fn has_cached_open(&self, ino: Ino) -> bool {
        kernel_pages::has_cached_open(&self.txs, ino)
    }

    /// Drops pages of bytes that were changed past the cache, before the change is answered: pages
    /// that were read before the change must not stay. From then on stores into these bytes count. (The kernel drops pages before such a write.
    /// It does not drop them after an asynchronous write, or if the file is open for direct I/O.)
    pub fn drop_written_pages(&self, ino: Ino, bytes: Range<u64>) {
        kernel_pages::drop_written_pages(&self.txs, &self.hooks, ino, bytes);
    }

    /// Notifies the kernel of the size of a file, before a write past the page cache is answered.
    /// The write did not find the end where the kernel assumed it.
    pub fn notify_size(&self, ino: Ino) {
        kernel_pages::notify_size(&self.txs, &self.hooks, ino);
    }

    /// Notifies the kernel of the size of a file that a program maps, after its direct clients have
    /// left.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn notify_mmapped_size(&self, ino: Ino) -> Result<()> {
        kernel_pages::notify_mmapped_size(&self.txs, &self.hooks, ino)
    }

    /// Whether direct clients cannot have a file because of the kernel's page cache: a cached open,
    /// or pages that the kernel has not dropped.
    #[must_use]
    pub fn is_cached(&self, ino: Ino) -> bool {
        kernel_pages::is_cached(&self.txs, ino)
    }

    /// Sets the hook for the moments from which a file's attributes must not be cached
    /// ([`crate::Attr::has_volatile_size`]). It is called before direct clients get append space,
    /// and when the file gets its first mmap-dirty page; also when another front has changed attributes or ACLs. It replaces an
    /// earlier one, and makes the kernel drop its copies of both.
    pub fn set_append_hook(&self, tell: impl Fn(Ino) + Send + Sync + 'static) {
        self.hooks.set_append(Box::new(tell));
    }

    /// Sets a hook that is called before each open that did not come through the preload library,
    /// with the thread number that the kernel reports. It replaces an earlier one.
    pub fn set_open_hook(&self, tell: impl Fn(u32) + Send + Sync + 'static) {
        self.hooks.set_open(Box::new(tell));
    }

    /// Reports an open by a thread that did not come through the preload library.
    pub fn call_open_hook(&self, thread: u32) {
        self.hooks.call_open(thread);
    }

    /// Publishes the current state of an open file to direct clients, in its map, or in the one
    /// that `make` returns if it has none. Returns the map; `None` if direct clients cannot have
    /// the file in its current state.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn publish_file_map(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        kernel_pages::publish_file_map(&self.txs, &self.hooks, ino, false, make)
    }

    /// As [`Fs::publish_file_map`], and grants append space if there is room.
    ///
    /// # Errors
    /// As [`Fs::publish_file_map`].
    pub fn publish_file_map_for_append(
        &self,
        ino: Ino,
        make: impl FnOnce() -> Option<Arc<dyn SharedFileMap>>,
    ) -> Result<Option<Arc<dyn SharedFileMap>>> {
        kernel_pages::publish_file_map(&self.txs, &self.hooks, ino, true, make)
    }

    /// Disables direct access to a file that the kernel maps, for as long as the file is in use:
    /// the kernel caches pages of it.
    ///
    /// # Errors
    /// `ESTALE`, and errors of the volume.
    pub fn disable_direct_access(&self, ino: Ino) -> Result<()> {
        publish::disable_direct_access(&self.txs, ino)
    }

    /// Records that a program closed a descriptor of a file. When this returns, the direct clients
    /// of the file will check their descriptor numbers.
    pub fn record_close(&self, ino: Ino) {
        publish::record_close(&self.txs, ino);
    }

    /// Whether direct clients have, or had, the file. They may change its size at any time.
    #[must_use]
    pub fn has_direct_clients(&self, ino: Ino) -> bool {
        unseen_writes::has_direct_clients(&self.txs, ino)
    }

    /// Keeps direct clients from moving the end of a file. `None`: a client is about to move it.
    #[must_use]
    pub fn lock_end(&self, ino: Ino) -> Option<EndLock> {
        unseen_writes::lock_end(&self.txs, ino)
    }

    /// As [`Fs::attr`], without waiting for other operations.
    ///
    /// # Errors
    /// `EAGAIN` while another operation has the core; as [`Fs::attr`].
    pub fn try_attr(&self, ino: Ino) -> Result<Attr> {
        let core = self.txs.try_lock_core();
        let mut core = core.ok_or(Errno::AGAIN)?;
        let inode = core.inode(ino)?;
        attr::attr(&mut core, ino, &inode)
    }

    /// Records write times of direct clients. Call it periodically. Returns the files that they
    /// wrote to since the last call, for a notification of the kernel.
    ///
    /// A file with an append extent is left for later. Its attributes are not cached, and the
    /// kernel discards a size that it asked for before a notification. A seek to the end would then
    /// find the previous end (Linux, `fuse_file_llseek` and `attr_version`).
    pub fn collect_direct_writes(&self) -> Vec<Ino> {
        unseen_writes::collect(&self.txs)
    }

    /// Takes at most `max` files with unseen writes, as far as [`Fs::collect_direct_writes`] has
    /// found them. Files that no program uses any more are dropped: they have no watchers.
    pub fn take_unseen_writes(&self, max: usize) -> Vec<Ino> {
        unseen_writes::take(&self.txs, max)
    }

    /// Lists a file again after a failed notification.
    pub fn requeue_unseen_write(&self, ino: Ino) {
        self.txs.lock_core().unseen_writes.add(ino);
    }
}
