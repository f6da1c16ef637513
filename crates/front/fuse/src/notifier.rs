//! Notifications of the kernel about changes by another front, such as an NFS server of the same process, that need no answer to
//! be waited for: names that are gone, and pages that a write left at another offset.
//!
//! The kernel caches no names and attributes of such a mount, so programs see the changes without these notifications. But its cached
//! entries are references: without a notification the pages of a removed file stay until the kernel needs their memory. Watchers (inotify) also learn
//! of removed names.
//!
//! Invariants:
//!
//! - A notification about a name takes the lock of the directory in the kernel (`fuse_reverse_inval_entry`). A program that holds the lock
//!   waits for a serving thread. So a thread of its own sends notifications: no serving thread waits for it, and neither does another front.
//! - At most [`QUEUE_MAX`] notifications wait. Further ones are dropped, with the effects above.

use crate::classic;
use crate::device::Device;
use pagemesh_base::poison::{self, recover};
use pagemesh_fs::Ino;
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

/// Notifications that wait. Each has a name of at most 255 bytes.
const QUEUE_MAX: usize = 4096;
/// How long the end of a mount waits for the thread. After that the thread goes on by itself: the kernel ends its call.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// A change that the kernel has to learn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notification {
    /// A name of a directory is gone.
    Name {
        directory: Ino,
        name: Vec<u8>,
        /// The inode, if it has no name left.
        removed: Option<Ino>,
    },
    /// The pages of a file have bytes at other offsets than the file.
    Pages(Ino),
}

impl Notification {
    fn send(&self, device: &Device) {
        match self {
            Notification::Name {
                directory,
                name,
                removed: None,
            } => {
                classic::invalidate_entry(&device.file, directory.0, name);
            }
            Notification::Name {
                directory,
                name,
                removed: Some(ino),
            } => {
                // The kernel refuses the second form for a directory that it believes to have entries.
                if !classic::notify_delete(&device.file, directory.0, ino.0, name) {
                    classic::invalidate_entry(&device.file, directory.0, name);
                }
            }
            Notification::Pages(ino) => {
                classic::invalidate_inode(&device.file, ino.0);
            }
        }
    }
}

/// Takes notifications, and drops them unless its thread runs.
#[derive(Default)]
pub(crate) struct KernelNotifier {
    state: Mutex<NotifierState>,
    changed: Condvar,
}

#[derive(Default)]
struct NotifierState {
    waiting: VecDeque<Notification>,
    is_running: bool,
    is_stopping: bool,
}

impl KernelNotifier {
    /// Queues a notification. Does not wait.
    pub(crate) fn queue(&self, notification: Notification) {
        let mut state = poison::lock(&self.state);
        if !state.is_running || state.is_stopping {
            return;
        }
        if state.waiting.len() >= QUEUE_MAX {
            tracing::debug!("the kernel is behind with notifications; one is dropped");
            return;
        }
        state.waiting.push_back(notification);
        self.changed.notify_all();
    }

    /// The next notification; none: the mount ends.
    fn next(&self) -> Option<Notification> {
        let idle = |state: &mut NotifierState| state.waiting.is_empty() && !state.is_stopping;
        let state = self.changed.wait_while(poison::lock(&self.state), idle);
        let mut state = recover(state);
        match state.is_stopping {
            true => None,
            false => state.waiting.pop_front(),
        }
    }

    fn run(&self, device: &Weak<Device>) {
        while let Some(next) = self.next() {
            let Some(device) = device.upgrade() else {
                break;
            };
            next.send(&device);
        }
        poison::lock(&self.state).is_running = false;
        self.changed.notify_all();
    }
}

/// The thread of a notifier. It ends when this is dropped.
pub(crate) struct NotifierThread(Arc<KernelNotifier>);

impl NotifierThread {
    pub(crate) fn start(
        notifier: &Arc<KernelNotifier>,
        device: &Arc<Device>,
    ) -> io::Result<NotifierThread> {
        let (served, device) = (Arc::clone(notifier), Arc::downgrade(device));
        let thread = std::thread::Builder::new().name("fuse-notify".into());
        thread.spawn(move || served.run(&device))?;
        poison::lock(&notifier.state).is_running = true;
        Ok(NotifierThread(Arc::clone(notifier)))
    }
}

impl Drop for NotifierThread {
    fn drop(&mut self) {
        let mut state = poison::lock(&self.0.state);
        state.is_stopping = true;
        state.waiting.clear();
        self.0.changed.notify_all();
        let runs = |state: &mut NotifierState| state.is_running;
        let waited = self.0.changed.wait_timeout_while(state, STOP_TIMEOUT, runs);
        let (state, _) = recover(waited);
        if state.is_running {
            tracing::debug!("the thread that notifies the kernel has not stopped in time");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(ino: u64) -> Notification {
        Notification::Pages(Ino(ino))
    }

    #[test]
    fn notifications_wait_in_order_up_to_a_limit() {
        let notifier = KernelNotifier::default();
        notifier.queue(pages(0));
        poison::lock(&notifier.state).is_running = true;
        for ino in 1..=QUEUE_MAX as u64 + 1 {
            notifier.queue(pages(ino));
        }
        for ino in 1..=QUEUE_MAX as u64 {
            assert_eq!(notifier.next(), Some(pages(ino)));
        }
        notifier.queue(pages(7));
        assert_eq!(notifier.next(), Some(pages(7)));
        notifier.queue(pages(8));
        poison::lock(&notifier.state).is_stopping = true;
        assert_eq!(notifier.next(), None, "the mount ends");
    }
}
