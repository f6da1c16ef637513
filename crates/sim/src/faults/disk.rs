//! The faults of disks.

use crate::cluster::tell;
use crate::scenario::Scenario;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{SimulatedDevice, SimulatedFault};
use pagemesh_store::geometry::Geometry;
use std::time::Duration;

/// Error numbers of Linux.
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// A request that hangs takes up to this long: more than the limit of its age, or less.
const HANG_S_MAX: u64 = 120;
/// Pages that are damaged at once.
const DAMAGED_PAGES: usize = 4;

impl Scenario {
    /// Whether a fault of this step is one of a disk.
    pub(super) fn wants_disk_fault(&mut self) -> bool {
        self.plan.has_disks() && self.disk_rng.one_in(3)
    }

    /// Gives a disk a fault, or ends its faults.
    pub(super) fn inject_disk_fault(&mut self) {
        let host = self.disk_rng.below(self.plan.pool_bytes.len() as u64) as usize;
        let Some(device) = self.cluster.device(host) else {
            return;
        };
        let rng = &mut self.disk_rng;
        let code = if rng.one_in(2) { EIO } else { ENOSPC };
        let (name, fault) = match rng.below(10) {
            0 => ("disk write failed", SimulatedFault::FailWrite(code)),
            1 => ("disk FLUSH failed", SimulatedFault::FailFlush(EIO)),
            2 => {
                let time = Duration::from_millis(rng.below(HANG_S_MAX * 1000));
                ("disk request hung", SimulatedFault::Hang(time))
            }
            3..=5 => {
                tell!(self.cluster, "the disk of brick {host} is slow");
                device.set_slow(true);
                return self.report.count("slow disk", 1);
            }
            _ => {
                tell!(self.cluster, "the disk of brick {host} has no faults");
                return device.clear_faults();
            }
        };
        tell!(self.cluster, "the disk of brick {host}: {fault:?}");
        device.add_fault(fault);
        self.report.count(name, 1);
    }

    /// Damages pages of data on a disk.
    pub(super) fn damage_disk(&mut self, device: &SimulatedDevice) {
        let pages = data_pages(device);
        // Most of them are of the past.
        for _ in 0..DAMAGED_PAGES {
            self.damage_page(device, &pages);
        }
    }

    fn damage_page(&mut self, device: &SimulatedDevice, pages: &[usize]) {
        let choice = self.disk_rng.next_u64();
        let Some(page) = self.disk_rng.pick(pages) else {
            return;
        };
        if self.disk_rng.one_in(3) {
            let bit = (choice >> 32) as u32 % 8;
            device.flip_bit(page * PAGE_BYTES + choice as usize % PAGE_BYTES, bit);
            tell!(self.cluster, "a bit of page {page} on a disk flips");
            return self.report.count("bit of a disk flipped", 1);
        }
        device.make_unreadable(page);
        tell!(self.cluster, "page {page} of a disk cannot be read");
        self.report.count("page of a disk unreadable", 1);
        self.frames_withheld += 1;
    }
}

/// The pages of frames that hold data: their sectors have one value each.
fn data_pages(device: &SimulatedDevice) -> Vec<usize> {
    let plan = Geometry::plan(device.len_bytes()).expect("the size of a pool");
    device.pages_of_values(plan.frames.start as usize / PAGE_BYTES)
}
