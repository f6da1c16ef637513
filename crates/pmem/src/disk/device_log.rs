//! The requests that changed the devices of a disk, for tests that cut their power.

use pagemesh_base::poison::lock;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

thread_local! {
    static NEXT: RefCell<VecDeque<LoggedDevice>> = const { RefCell::new(VecDeque::new()) };
}

/// The requests to devices in the order of their start.
///
/// A power cut after any entry leaves the writes that had ended when the last FLUSH of their device that has ended began, and
/// of each 512 bytes of other writes some version since then.
#[derive(Default)]
pub struct DeviceLog {
    events: Mutex<Vec<DeviceEvent>>,
}

/// An entry of a [`DeviceLog`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceEvent {
    /// A write is about to start.
    Write {
        /// The number of the device, in the order in which they were opened.
        device: usize,
        /// The first byte.
        offset: u64,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A write has ended.
    WriteEnd {
        /// The number of the device.
        device: usize,
        /// The first byte.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// A FLUSH of a device is about to start.
    FlushStart {
        /// The number of the device.
        device: usize,
    },
    /// It has ended.
    Flush {
        /// The number of the device.
        device: usize,
    },
    /// The test's own note.
    Mark(u64),
}

/// A device with a log.
pub(super) struct LoggedDevice {
    log: Arc<DeviceLog>,
    device: usize,
}

impl LoggedDevice {
    pub(super) fn take_next() -> Option<LoggedDevice> {
        NEXT.with_borrow_mut(VecDeque::pop_front)
    }

    pub(super) fn push_write(&self, offset: u64, bytes: Vec<u8>) {
        let device = self.device;
        self.log.push(DeviceEvent::Write {
            device,
            offset,
            bytes,
        });
    }

    pub(super) fn push_write_end(&self, offset: u64, len: usize) {
        let device = self.device;
        self.log.push(DeviceEvent::WriteEnd {
            device,
            offset,
            len,
        });
    }

    pub(super) fn push_flush_start(&self) {
        let device = self.device;
        self.log.push(DeviceEvent::FlushStart { device });
    }

    pub(super) fn push_flush(&self) {
        let device = self.device;
        self.log.push(DeviceEvent::Flush { device });
    }
}

impl DeviceLog {
    /// A log of the next devices that this thread opens.
    #[must_use]
    pub fn of_next_devices(count: usize) -> Arc<DeviceLog> {
        let log = Arc::new(DeviceLog::default());
        let logged = (0..count).map(|device| LoggedDevice {
            log: log.clone(),
            device,
        });
        NEXT.with_borrow_mut(|next| next.extend(logged));
        log
    }

    /// Goes on with the next devices that this thread opens, under these numbers.
    pub fn follow_next_devices(self: &Arc<DeviceLog>, devices: &[usize]) {
        let logged = devices.iter().map(|&device| LoggedDevice {
            log: self.clone(),
            device,
        });
        NEXT.with_borrow_mut(|next| next.extend(logged));
    }

    fn push(&self, event: DeviceEvent) {
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
