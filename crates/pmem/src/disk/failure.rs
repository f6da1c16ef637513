//! The end of a disk: what it holds is unknown, so nothing is written any more, and its pool must be recovered.
//!
//! A failure of one device fails the disk. [`Disk::hand_over`](super::media::Disk::hand_over) gives its other devices to the disk
//! that takes its place.

use super::device_map::DiskDevice;
use super::parts::DiskParts;
use super::writer::WriteFailure;
use crate::map_error::MapError;
use crate::unreadable::PAGES_MAX;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use std::io;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// A function that is called with the cause of a failure.
pub(super) type FailureHook = Box<dyn Fn(&str) + Send + Sync>;

/// The first failure of a disk, and its listener.
#[derive(Default)]
pub(super) struct DiskFailure {
    first: OnceLock<FirstFailure>,
    hook: Mutex<Option<FailureHook>>,
}

struct FirstFailure {
    cause: String,
    /// Whether a device failed, and not the disk as a whole.
    is_of_device: bool,
}

impl DiskFailure {
    /// The cause, if the disk has failed.
    pub(super) fn cause(&self) -> Option<&str> {
        self.first.get().map(|first| first.cause.as_str())
    }

    /// Whether the disk has failed because a device did.
    pub(super) fn is_of_device(&self) -> bool {
        self.first.get().is_some_and(|first| first.is_of_device)
    }

    /// Calls `hook` at a failure, or now if there was one.
    pub(super) fn set_hook(&self, hook: FailureHook) {
        *lock(&self.hook) = Some(hook);
        self.call_hook();
    }

    fn call_hook(&self) {
        if let (Some(cause), Some(hook)) = (self.cause(), &*lock(&self.hook)) {
            hook(cause);
        }
    }
}

impl DiskParts {
    /// Fails the disk as a whole. The listener hears of it before a waiting request does.
    pub(super) fn fail(&self, cause: String) {
        self.fail_first(FirstFailure {
            cause,
            is_of_device: false,
        });
    }

    /// Fails the disk because a device of it has failed.
    fn fail_device(&self, device: &DiskDevice, cause: String) {
        device.mark_failed();
        self.fail_first(FirstFailure {
            cause,
            is_of_device: true,
        });
    }

    fn fail_first(&self, failure: FirstFailure) {
        if self.failure.first.set(failure).is_ok() {
            self.failure.call_hook();
            self.cache.give_up_dirty();
            self.queue.fail();
        }
    }

    /// A page cannot be read: a damaged page of a frame, or the end of the disk.
    pub(super) fn note_unreadable(&self, page: usize, cause: &io::Error) {
        let Some(device) = self.devices.device_of(page * PAGE_BYTES) else {
            return;
        };
        let (at, name) = (device.byte_of(page * PAGE_BYTES), device.device.name());
        if device.is_in_head(page) && !device.is_page_of_header(page) {
            let cause = format!(
                "byte {at} of {name} cannot be read: {cause}; it is of the pool's journals or tables, so replace the brick; \
                 other copies go on"
            );
            self.fail_device(device, cause);
            return;
        }
        if is_gone(cause) {
            let cause = format!("{name} is gone: {cause}; {}", way_out(cause));
            self.fail_device(device, cause);
            return;
        }
        let count = self.list_unreadable(page, device);
        if count > PAGES_MAX {
            let cause = format!(
                "more than {PAGES_MAX} pages of {name} cannot be read: {cause}; {}",
                way_out(cause)
            );
            self.fail_device(device, cause);
            return;
        }
        tracing::warn!(%cause, "byte {at} of {name} cannot be read; its page counts as damaged");
    }

    /// A write or a FLUSH has failed.
    pub(super) fn note_unwritten(&self, failure: &WriteFailure) {
        let WriteFailure { first_byte, cause } = failure;
        let hint = match cause {
            MapError::System { cause, .. } => way_out(cause),
            _ => CHECK_DISK,
        };
        let of_device = first_byte.and_then(|at| self.devices.device_of(at));
        let device = of_device.or(self.devices.iter().next());
        let name = device.map_or("the disk", |device| device.device.name());
        let cause = format!("{name}: {cause}; what it holds is unknown; {hint}");
        match of_device {
            Some(device) => self.fail_device(device, cause),
            None => self.fail(cause),
        }
    }

    /// A request to a device has not ended for so long that the device counts as failed.
    pub(super) fn note_hung(&self, device: &DiskDevice, offset: u64, age: Duration) {
        let name = device.device.name();
        device.mark_hung();
        self.fail_device(
            device,
            format!(
                "a request at byte {offset} of {name} has not ended for {age:.0?}; check the disk and the kernel's log; \
                 the device stays locked until the request has ended"
            ),
        );
    }

    /// A part of a page that cannot be read would be changed.
    pub(super) fn check_change(&self, offset: usize) {
        if self.is_unreadable(offset)
            && let Some(device) = self.devices.device_of(offset)
        {
            let (at, name) = (device.byte_of(offset), device.device.name());
            let cause = format!(
                "byte {at} of {name} cannot be read, and a part of its page would be changed; {CHECK_DISK}"
            );
            self.fail_device(device, cause);
        }
    }

    /// A page of a device that has left would be changed: the pool still names it.
    pub(super) fn fail_change_of_left(&self, offset: usize) {
        self.fail(format!(
            "byte {offset} of the pool would be changed, and its device has left the pool; this is a defect of pagemesh: \
             please report it; the brick recovers the pool when it is started again"
        ));
    }
}

const CHECK_DISK: &str = "check the disk and the kernel's log; the brick recovers the pool when it is started again; \
     if it fails again, replace the brick";

/// The operator's way out.
fn way_out(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "the thin device or file system below the pool is full: make room there; the brick recovers the pool \
             when it is started again"
        }
        _ if is_gone(cause) => {
            "connect the device again; the brick recovers the pool when it is started again"
        }
        _ => CHECK_DISK,
    }
}

fn is_gone(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENODEV | libc::ENXIO))
}
