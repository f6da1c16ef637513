//! A device joins a pool that is nearly full, and takes the next writes.

use super::CheckCounts;
use super::budget::{Budget, WorkloadShare};
use super::fixed::{BasePool, base, check};
use super::model::{CheckFailure, fail};
use super::ops::{self, FILL, MAIN, Op};
use super::owner::{self, SharedPool};
use super::recover::{self, MediumKind};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::defect;
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Image;
use pagemesh_store::devices::DEVICE_BYTES_MIN;
use pagemesh_store::frame_word::FrameWord;
use pagemesh_store::pool_mapping::StoreError;

const PAGE: u64 = PAGE_BYTES as u64;
const CLIENTS: usize = 2;
/// More pages than the first device has free frames.
const WRITTEN_PAGES: u64 = 64;
/// A page under the second leaf, which the base pool does not have.
const LATE_PAGE: u64 = 520;
/// The first device's end, rounded up to whole lines of the bitmap.
const MEDIUM_BYTES: usize = 896 * PAGE_BYTES + DEVICE_BYTES_MIN as usize;

/// Each byte of the device before it joins.
const OLD_BYTE: u8 = 0x5a;
/// The frame table of the device: behind two pages of headers and one of the bitmap.
const OLD_TABLE_AT: usize = (896 + 3) * PAGE_BYTES;

pub(super) const DEVICES: WorkloadShare = WorkloadShare {
    budget: Budget {
        all_max: 64,
        sampled: 8,
    },
    images_min: 1_000,
    percent: 2,
};

/// The nearly full pool, on a medium with room for another device.
pub(super) fn base_with_room(kind: MediumKind, is_full: bool) -> BasePool {
    let mut found = base(kind, is_full).clone();
    found.kind = kind;
    let mut bytes = found.image.to_bytes();
    bytes.resize(MEDIUM_BYTES, OLD_BYTE);
    // The device was used before: words of its frame table match the old pages of its frames.
    let old_page = FrameWord::new(crc32c(&[OLD_BYTE; PAGE_BYTES]), Epoch(1));
    for word in bytes[OLD_TABLE_AT..][..PAGE_BYTES].as_chunks_mut().0 {
        *word = old_page.bits().to_le_bytes();
    }
    found.image = Image::from_bytes(&bytes);
    found
}

fn write(page: u64) -> Op {
    Op::Write {
        client: page as usize % CLIENTS,
        slice: MAIN,
        at: page * PAGE,
        len: 4 * PAGE,
        open: 0,
        death: None,
    }
}

/// Moves every page off the draining device.
pub(super) fn move_pages(pool: &SharedPool) -> Result<(), StoreError> {
    let mut session = recover::session(pool);
    let slices: Vec<_> = pool.borrow().list().collect();
    for object in slices {
        let handle = pool.borrow().handle(object.slice).expect("it is listed");
        let pages = object.size_bytes / PAGE;
        let mut page = 0;
        while page < pages {
            let mapping = session.mapping().clone();
            let is_leaving =
                |frame: FrameNo| mapping.geometry().devices.device_of(frame.0).is_some();
            let moved = owner::with_owner(pool, || {
                session.move_pages(&handle, page..pages, is_leaving)
            })?;
            page = moved.next.0;
        }
    }
    let closed = pool.borrow_mut().close_session(session.number());
    closed.map_err(|_| StoreError::OwnerGone)
}

/// The device gets data and a leaf, the first device gets room, and the data moves there.
fn drained() -> Vec<Op> {
    let mut list: Vec<Op> = (0..WRITTEN_PAGES / 4)
        .map(|number| write(number * 4))
        .collect();
    // Pages of three births, so that some move together and some alone.
    list.insert(9, Op::RaiseEpoch(MAIN));
    list.insert(5, Op::RaiseEpoch(MAIN));
    list.extend([write(LATE_PAGE), Op::Flush, Op::Delete(FILL)]);
    list.extend([const { Op::Maintain }; 12]);
    list.extend([
        Op::StartDrain,
        Op::RemoveDevice,
        write(LATE_PAGE),
        Op::MovePages,
    ]);
    list.extend([
        Op::MoveNodes,
        write(LATE_PAGE + 4),
        Op::Checkpoint,
        Op::Reopen,
        Op::StartDrain,
    ]);
    list.extend([
        Op::MovePages,
        Op::MoveNodes,
        Op::Checkpoint,
        Op::RemoveDevice,
    ]);
    list.extend([write(LATE_PAGE), Op::Flush, Op::Reopen, write(4), Op::Flush]);
    list
}

/// The operations after the device has joined.
fn lists() -> Vec<Vec<Op>> {
    let writes = || (0..WRITTEN_PAGES / 4).map(|number| write(number * 4));
    let mut kept: Vec<Op> = writes().collect();
    kept.extend([Op::Checkpoint, write(8), Op::Reopen, write(16), Op::Flush]);
    let mut flushed: Vec<Op> = writes().collect();
    flushed.extend([Op::Flush, Op::Reopen, Op::Checkpoint, write(4), Op::Reopen]);
    let empty = vec![
        Op::StartDrain,
        Op::RemoveDevice,
        write(0),
        Op::Reopen,
        Op::Flush,
    ];
    vec![
        vec![Op::Reopen, write(0), Op::Flush],
        kept,
        flushed,
        empty,
        drained(),
    ]
}

pub(super) fn devices(
    kind: MediumKind,
    budget: Budget,
    counts: &mut CheckCounts,
) -> Result<(), CheckFailure> {
    let base = base_with_room(kind, true);
    for list in lists() {
        counts.sequences += 1;
        let mut world = base.open(CLIENTS, None, counts)?;
        world.budget = Some(budget);
        ops::run(&mut world, &Op::AddDevice, 0)?;
        let geometry = *world.pool.borrow().mapping().geometry();
        assert_eq!(geometry.frame_entry_at(FrameNo(896)), OLD_TABLE_AT);
        for (tag, op) in (1..).zip(&list) {
            ops::run(&mut world, op, tag)?;
        }
        if world.tally.pool_full > 0 {
            return fail("the device", "its frames were not granted");
        }
        let is_drained = list.iter().any(|op| matches!(op, Op::MoveNodes));
        let devices = world
            .pool
            .borrow()
            .mapping()
            .geometry()
            .devices
            .iter()
            .count();
        if is_drained && devices > 0 && defect::present().is_none() {
            return fail("the device", "it did not leave");
        }
        world.empty_pool()?;
    }
    Ok(())
}

#[test]
fn device_that_joins_survives_crashes_in_memory() {
    check("a device in memory", DEVICES, |budget, counts| {
        devices(MediumKind::Memory, budget, counts)
    });
}

#[test]
fn device_that_joins_survives_crashes_in_a_file() {
    check("a device in a file", DEVICES, |budget, counts| {
        devices(MediumKind::File, budget, counts)
    });
}
