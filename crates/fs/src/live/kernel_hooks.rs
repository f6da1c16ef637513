//! Calls from the file system into the front that serves the kernel. A later front replaces the calls of an earlier one.

use crate::format::inode::Ino;
use parking_lot::RwLock;
use std::ops::Range;
use std::sync::Arc;

/// Drops the pages of a file with some bytes, or all of them, from the kernel's page cache, and its
/// attributes. Returns whether the kernel did so. Called without a lock of the file: the kernel
/// waits for requests that read or write such pages.
pub type DropPages = Box<dyn Fn(Ino, Option<Range<u64>>) -> bool + Send + Sync>;

/// Notifies the kernel that a file has at least this size, and of its last byte.
pub type NotifySize = Box<dyn Fn(Ino, u64, u8) + Send + Sync>;

/// Makes the kernel forget a name of a directory that another front has removed: directory, name, and the inode if it
/// has no name left. It does not wait for the kernel.
pub type ForgetName = Box<ForgetNameFn>;
/// The call behind it.
type ForgetNameFn = dyn Fn(Ino, &[u8], Option<Ino>) + Send + Sync;

/// The calls into the kernel.
struct KernelCallbacks {
    drop_pages: DropPages,
    notify_size: NotifySize,
}

/// A call that a front has set. It runs without the lock: it may wait for the kernel, which may wait for a request.
struct Hook<T: ?Sized>(RwLock<Option<Arc<T>>>);

impl<T: ?Sized> Default for Hook<T> {
    fn default() -> Self {
        Hook(RwLock::new(None))
    }
}

impl<T: ?Sized> Hook<T> {
    fn get(&self) -> Option<Arc<T>> {
        self.0.read().clone()
    }

    fn set(&self, hook: Arc<T>) {
        *self.0.write() = Some(hook);
    }

    fn clear(&self) {
        *self.0.write() = None;
    }
}

/// The calls that a front has set.
#[derive(Default)]
pub(crate) struct KernelHooks {
    callbacks: Hook<KernelCallbacks>,
    forget_name: Hook<ForgetNameFn>,
    /// Called when direct clients begin to append to a file, or its first mmap-dirty page arrives.
    append: Hook<dyn Fn(Ino) + Send + Sync>,
    open: Hook<dyn Fn(u32) + Send + Sync>,
}

impl KernelHooks {
    pub(crate) fn set_callbacks(&self, drop_pages: DropPages, notify_size: NotifySize) {
        self.callbacks.set(Arc::new(KernelCallbacks {
            drop_pages,
            notify_size,
        }));
    }

    /// Whether a kernel uses the file system.
    pub(crate) fn has_callbacks(&self) -> bool {
        self.callbacks.0.read().is_some()
    }

    pub(crate) fn set_forget_name(&self, hook: ForgetName) {
        self.forget_name.set(Arc::from(hook));
    }

    pub(crate) fn set_append(&self, hook: Box<dyn Fn(Ino) + Send + Sync>) {
        self.append.set(Arc::from(hook));
    }

    pub(crate) fn set_open(&self, hook: Box<dyn Fn(u32) + Send + Sync>) {
        self.open.set(Arc::from(hook));
    }

    /// No kernel uses the file system any more.
    pub(crate) fn clear(&self) {
        self.callbacks.clear();
        self.forget_name.clear();
        self.append.clear();
        self.open.clear();
    }

    pub(crate) fn call_open(&self, thread: u32) {
        if let Some(hook) = self.open.get() {
            hook(thread);
        }
    }

    /// Attributes of the file must not be cached from now on.
    pub(crate) fn notify_uncacheable(&self, ino: Ino) {
        if let Some(hook) = self.append.get() {
            hook(ino);
        }
    }

    /// Makes the kernel drop the attributes and the ACLs of an inode. It waits for no request of the kernel.
    pub(crate) fn drop_attributes(&self, ino: Ino) {
        self.notify_uncacheable(ino);
    }

    /// Makes the kernel drop pages. Returns whether it did.
    pub(crate) fn drop_pages(&self, ino: Ino, bytes: Option<Range<u64>>) -> bool {
        let callbacks = self.callbacks.get();
        callbacks.is_some_and(|it| (it.drop_pages)(ino, bytes))
    }

    /// Notifies the kernel of a size and of the last byte.
    pub(crate) fn notify_size(&self, ino: Ino, size: u64, last: u8) {
        if let Some(callbacks) = self.callbacks.get() {
            (callbacks.notify_size)(ino, size, last);
        }
    }

    /// Makes the kernel forget a name.
    pub(crate) fn forget_name(&self, directory: Ino, name: &[u8], removed: Option<Ino>) {
        if let Some(hook) = self.forget_name.get() {
            hook(directory, name, removed);
        }
    }
}
