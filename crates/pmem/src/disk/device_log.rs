//! The requests that changed a device, for tests that cut its power.

use pagemesh_base::poison::lock;
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

thread_local! {
    static NEXT: RefCell<Option<Arc<DeviceLog>>> = const { RefCell::new(None) };
}

/// The requests to a device in the order of their start.
///
/// A power cut after any entry leaves the writes before the last [`DeviceEvent::Flush`], and of each 512 bytes of the
/// writes after it some version since then.
#[derive(Default)]
pub struct DeviceLog {
    events: Mutex<Vec<DeviceEvent>>,
}

/// An entry of a [`DeviceLog`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// A write is about to start.
    Write {
        /// The first byte.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A FLUSH has ended. All writes before it had ended when it began.
    Flush,
    /// The test's own note.
    Mark(u64),
}

impl DeviceLog {
    /// A log of the next device that this thread opens.
    #[must_use]
    pub fn of_next_device() -> Arc<DeviceLog> {
        let log = Arc::new(DeviceLog::default());
        NEXT.set(Some(log.clone()));
        log
    }

    pub(super) fn take_next() -> Option<Arc<DeviceLog>> {
        NEXT.take()
    }

    pub(super) fn push(&self, event: DeviceEvent) {
        lock(&self.events).push(event);
    }

    /// Adds a note after all requests that have started.
    pub fn mark(&self, note: u64) {
        self.push(DeviceEvent::Mark(note));
    }

    /// The entries so far.
    #[must_use]
    pub fn events(&self) -> Vec<DeviceEvent> {
        lock(&self.events).clone()
    }
}
