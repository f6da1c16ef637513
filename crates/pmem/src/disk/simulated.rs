//! A disk without threads, for simulations: the real cache, head, overlay, writer and requests over a
//! [`SimulatedDevice`]. The simulation says when the writer and the flusher go on and when requests end.
//!
//! Not simulated: io_uring, the threads of a disk, further devices, and the clock that finds requests too old; the simulation
//! calls [`Disk::fail`] in its place. A caller that blocks, for example a checkpoint in its sync, has the device to itself: other
//! connections do not run meanwhile.

use super::device::Device;
use super::device_map::DiskDevice;
use super::device_sim::SimulatedDevice;
use super::group_queue::{GroupNo, SteppedFlush};
use super::groups::is_flush_skipped;
use super::media::{Disk, DiskOptions};
use super::parts::DiskParts;
use super::watch::WatchedRequests;
use super::writer::WriteFailure;
use super::writer::stepwise::WriterStep;
use crate::map_error::MapError;
use crate::mapped_media::system;
use crate::media::NewDevice;
use pagemesh_base::poison::lock;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

impl Disk {
    /// A disk over a simulated device, of which `head_len` bytes stay in memory, but for `frame_table`. [`Disk::step_writer`] and
    /// [`Disk::step_flusher`] take the place of its threads.
    ///
    /// # Errors
    /// As [`Disk::start`].
    pub fn simulated(
        device: &Arc<SimulatedDevice>,
        head_len: usize,
        frame_table: Range<usize>,
        options: DiskOptions,
    ) -> Result<Disk, MapError> {
        let watched = Arc::new(WatchedRequests::new());
        let place = NewDevice {
            file: File::open("/dev/null").map_err(system("open a file"))?,
            bytes: 0..device.len_bytes() as usize,
            head_len,
            frame_table,
        };
        let device = Device::simulated(device)?.placed_at(0, &watched);
        Disk::without_threads(Some(DiskDevice::new(device, place)?), watched, options)
    }

    /// A step of the writer: it begins a group, takes writes that have ended, or ends the writes of a group. False: there is
    /// nothing to do, or it waits for the device.
    pub fn step_writer(&self) -> bool {
        self.parts().step_writer()
    }

    /// A step of the flusher: it begins a FLUSH, or ends one. False: there is nothing to do, or it waits for the device.
    pub fn step_flusher(&self) -> bool {
        self.parts().step_flusher()
    }

    /// Fails the disk, as the watch over its requests does.
    pub fn fail(&self, cause: String) {
        self.parts().fail(cause);
    }
}

impl DiskParts {
    fn step_writer(&self) -> bool {
        let step = lock(&self.writer).step(self.target());
        match step {
            WriterStep::None => return false,
            WriterStep::Some => {}
            WriterStep::Written(result) => self.end_writes(&result),
        }
        true
    }

    fn step_flusher(&self) -> bool {
        let first = self.simulated_device();
        let running = lock(&self.stepped_flush).take();
        let Some(SteppedFlush { group, number }) = running else {
            let Some(group) = self.queue.try_next_flush() else {
                return false;
            };
            if is_flush_skipped(group) {
                self.end_flush(group, &Ok(()), Duration::ZERO);
                return true;
            }
            self.devices.take_unflushed();
            let number = first.device.start_simulated_flush();
            *lock(&self.stepped_flush) = Some(SteppedFlush { group, number });
            return true;
        };
        let Some(result) = first.device.simulated_flush_result(number) else {
            *lock(&self.stepped_flush) = Some(SteppedFlush { group, number });
            return false;
        };
        let result = result.map_err(system("flush the medium (fdatasync)"));
        let result = result.map_err(|cause| WriteFailure::of(first, cause));
        self.end_flush(group, &result, Duration::ZERO);
        true
    }

    fn simulated_device(&self) -> &DiskDevice {
        self.devices.first().expect("a simulated device")
    }

    /// Goes on, for a caller that waits for the disk alone.
    fn step_blocking(&self) {
        if !self.step_writer() && !self.step_flusher() {
            let has_ended = self.simulated_device().device.end_first_simulated();
            assert!(has_ended, "a wait for the disk has no end");
        }
    }

    /// Ends the writes of the group that is running.
    pub(super) fn finish_writes(&self) {
        while lock(&self.writer).is_in_group() {
            self.step_blocking();
        }
    }

    /// Waits for the end of a group.
    pub(super) fn wait_in_steps(&self, group: GroupNo) -> Result<(), MapError> {
        loop {
            if let Some(result) = self.queue.result(group) {
                return result;
            }
            self.step_blocking();
        }
    }

    /// Waits until a group was written. False: the disk has failed.
    pub(super) fn clean_in_steps(&self) -> bool {
        self.wait_in_steps(self.queue.request_group()).is_ok()
    }
}
