//! Calls from the file system into the front that serves the kernel. Each is set once.

use crate::format::inode::Ino;
use std::ops::Range;
use std::sync::OnceLock;

/// Drops the pages of a file with some bytes, or all of them, from the kernel's page cache, and its
/// attributes. Returns whether the kernel did so. Called without a lock of the file: the kernel
/// waits for requests that read or write such pages.
pub type DropPages = Box<dyn Fn(Ino, Option<Range<u64>>) -> bool + Send + Sync>;

/// Notifies the kernel that a file has at least this size, and of its last byte.
pub type NotifySize = Box<dyn Fn(Ino, u64, u8) + Send + Sync>;

/// The calls into the kernel.
struct KernelCallbacks {
    drop_pages: DropPages,
    notify_size: NotifySize,
}

/// The calls that a front has set.
#[derive(Default)]
pub(crate) struct KernelHooks {
    callbacks: OnceLock<KernelCallbacks>,
    /// Called when direct clients begin to append to a file, or its first mmap-dirty page arrives.
    append: OnceLock<Box<dyn Fn(Ino) + Send + Sync>>,
    open: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
}

impl KernelHooks {
    pub(crate) fn set_callbacks(&self, drop_pages: DropPages, notify_size: NotifySize) {
        let callbacks = KernelCallbacks {
            drop_pages,
            notify_size,
        };
        // The first ones stay.
        let _ = self.callbacks.set(callbacks);
    }

    /// Whether a kernel uses the file system.
    pub(crate) fn has_callbacks(&self) -> bool {
        self.callbacks.get().is_some()
    }

    pub(crate) fn set_append(&self, hook: Box<dyn Fn(Ino) + Send + Sync>) {
        // The first hook stays.
        let _ = self.append.set(hook);
    }

    pub(crate) fn set_open(&self, hook: Box<dyn Fn(u32) + Send + Sync>) {
        // The first hook stays.
        let _ = self.open.set(hook);
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

    /// Makes the kernel drop pages. Returns whether it did.
    pub(crate) fn drop_pages(&self, ino: Ino, bytes: Option<Range<u64>>) -> bool {
        let callbacks = self.callbacks.get();
        callbacks.is_some_and(|it| (it.drop_pages)(ino, bytes))
    }

    /// The call that notifies the kernel of a size.
    pub(crate) fn size_notifier(&self) -> Option<&NotifySize> {
        self.callbacks.get().map(|it| &it.notify_size)
    }
}
