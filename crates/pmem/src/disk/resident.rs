//! The comparison of the pages of the heads with their devices: the memory has the right bytes, and the device may have
//! lost some.
//!
//! A session may be storing to a page at any moment, and marks it dirty afterwards. So a line counts as damaged
//! only if it differs from the device before and after a whole group of the writer, with the same bytes on both sides.
//! It is then marked dirty, and the next group rewrites its page.

use super::device_map::DiskDevice;
use super::parts::DiskParts;
use crate::disk_figures::ResidentCheck;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};

/// Pages of a step.
const STEP_PAGES: usize = 256;
/// Pages that are compared while the writer waits.
const LOCKED_PAGES: usize = 16;

/// A line that differs.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DifferentLine {
    offset: usize,
    in_memory: [u8; LINE_BYTES],
    on_device: [u8; LINE_BYTES],
}

impl DiskParts {
    /// Does a step of the comparison from a byte on.
    pub(super) fn compare_resident(&self, from: usize) -> ResidentCheck {
        let devices = self.devices.iter().filter(|it| it.bytes.end > from);
        let Some(device) = devices.min_by_key(|it| it.bytes.start) else {
            return ResidentCheck::default();
        };
        let first = device.first_page();
        let end = first + device.head.len() / PAGE_BYTES;
        let mut suspects = Vec::new();
        let mut page = (from / PAGE_BYTES).max(first);
        let mut compared = 0;
        while page < end && compared < STEP_PAGES {
            // No group runs, so a page without mark is on the device.
            let _no_group = self.lock_writer();
            for _ in 0..LOCKED_PAGES.min(end - page) {
                // A run of the head may have loaded pages that the cache has since changed.
                if device.is_page_resident(page) && device.head.is_resident_clean(page - first) {
                    self.compare_page(device, page, &mut suspects);
                    compared += 1;
                }
                page += 1;
            }
        }
        let others_end = self.devices.iter().map(|it| it.bytes.end).max();
        let next = match page < end {
            true => page * PAGE_BYTES,
            false => device.bytes.end,
        };
        ResidentCheck {
            damaged_lines: self.rewrite_damaged(suspects),
            next: others_end.is_some_and(|end| next < end).then_some(next),
        }
    }

    fn compare_page(&self, device: &DiskDevice, page: usize, different: &mut Vec<DifferentLine>) {
        if device.has_left() {
            return;
        }
        let mut on_device = [0; PAGE_BYTES];
        // Zeroes in place of a page that cannot be read: it is rewritten, too.
        if DiskParts::try_read_page(device, page, &mut on_device).is_err() {
            on_device.fill(0);
        }
        let mut in_memory = [0; PAGE_BYTES];
        let own_page = page - device.first_page();
        device.head.read_page(own_page, &mut in_memory);
        let lines = in_memory.as_chunks().0.iter().zip(on_device.as_chunks().0);
        for (number, (&in_memory, &on_device)) in lines.enumerate() {
            if in_memory != on_device {
                different.push(DifferentLine {
                    offset: page * PAGE_BYTES + number * LINE_BYTES,
                    in_memory,
                    on_device,
                });
            }
        }
    }

    /// Rewrites the lines that still differ after a group. Returns their offsets.
    fn rewrite_damaged(&self, suspects: Vec<DifferentLine>) -> Vec<usize> {
        let mut damaged = Vec::new();
        // After an error the pool fails with its next sync.
        let write_all = || self.wait_for_group(self.queue.request_flush()).is_ok();
        if suspects.is_empty() || !write_all() {
            return damaged;
        }
        let pages =
            suspects.chunk_by(|one, next| one.offset / PAGE_BYTES == next.offset / PAGE_BYTES);
        for lines in pages {
            let _no_group = self.lock_writer();
            let page = lines[0].offset / PAGE_BYTES;
            let Some(device) = self.devices.device_of(page * PAGE_BYTES) else {
                continue;
            };
            let own_page = page - device.first_page();
            if !device.head.is_resident_clean(own_page) {
                continue;
            }
            let mut again = Vec::new();
            self.compare_page(device, page, &mut again);
            let still = lines.iter().filter(|line| again.contains(line));
            damaged.extend(still.map(|line| line.offset));
            if lines.iter().any(|line| again.contains(line)) {
                device.head.mark_dirty(own_page * PAGE_BYTES, PAGE_BYTES);
            }
        }
        if !damaged.is_empty() {
            write_all();
        }
        damaged
    }
}
