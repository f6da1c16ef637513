//! The operations of workloads.

use super::harness::{CrashHarness, OpOutcome};
use super::model::{CheckFailure, Effect, ObjectEntry};
use super::tier::TierRange;
use super::{clones, snapshots};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_store::devices::DEVICE_BYTES_MIN;
use pagemesh_store::drain::NodeCursor;
use pagemesh_store::test_api::PoolInternals;
use uuid::Uuid;

pub(super) const MAIN: SliceId = SliceId(Uuid::from_u128(1));
pub(super) const OTHER: SliceId = SliceId(Uuid::from_u128(2));
/// The device that joins a pool.
const DEVICE: Uuid = Uuid::from_u128(4);
pub(super) const FILL: SliceId = SliceId(Uuid::from_u128(3));
/// Two leaves, so that nodes are linked.
pub(super) const MAIN_PAGES: u64 = 560;
pub(super) const OTHER_PAGES: u64 = 24;
const PAGE: u64 = PAGE_BYTES as u64;

/// A part of a transaction, in pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartSpec {
    pub(super) page: u64,
    pub(super) pages: u64,
    /// Whether the part is written; otherwise it is cleared.
    pub(super) is_written: bool,
}

/// One operation. Offsets and lengths are in bytes.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Write {
        client: usize,
        slice: SliceId,
        at: u64,
        len: u64,
        open: u32,
        death: Option<i64>,
    },
    Clear {
        client: usize,
        slice: SliceId,
        at: u64,
        len: u64,
        open: u32,
        death: Option<i64>,
    },
    Transact {
        client: usize,
        slice: SliceId,
        runs: Vec<PartSpec>,
        open: u32,
        death: Option<i64>,
    },
    Create,
    Grow(SliceId),
    Delete(SliceId),
    RaiseEpoch(SliceId),
    ClearInFlight(SliceId),
    Maintain,
    Checkpoint,
    Flush,
    Reopen,
    /// A device joins the pool.
    AddDevice,
    /// The device is drained: it gets no new data, its pages move, its nodes move, it leaves.
    StartDrain,
    MovePages,
    MoveNodes,
    RemoveDevice,
    /// Pages of the main object are copied to another tier, the copies are made durable, and records name them.
    StartMoves(TierRange),
    SyncMoves,
    EndMoves,
    /// A client ends, and a new one replaces it.
    Replace(usize),
    /// A snapshot, and a barrier at its epoch.
    Snapshot(SliceId),
    /// Drops the snapshot of this number.
    DropSnapshot(SliceId, u64),
    /// Clones the snapshot of this number of the main slice.
    Clone(u64),
    PromoteClone,
    /// Merges the version log, and sweeps.
    MergeVersions,
}

/// Bytes that no other operation writes. Half of the operations write whole pages that are nearly
/// alike. A torn page in a frame that held another of them then looks as if it had lost one or two
/// bits.
pub(super) fn bytes(tag: u64, len: usize) -> Vec<u8> {
    if tag.is_multiple_of(2) && len.is_multiple_of(PAGE_BYTES) {
        return (0..len / PAGE_BYTES)
            .flat_map(|page| nearly_alike(tag << 8 | page as u64))
            .collect();
    }
    unique_bytes(tag, len)
}

/// A page in which each bit of `name` is one bit in a line of its own.
fn nearly_alike(name: u64) -> Vec<u8> {
    let mut page = unique_bytes(0, PAGE_BYTES);
    for bit in 0..64 {
        page[bit * LINE_BYTES] ^= (name >> bit & 1) as u8;
    }
    page
}

fn unique_bytes(tag: u64, len: usize) -> Vec<u8> {
    let mut state = tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

fn part(run: &PartSpec, tag: u64) -> TransactionPart {
    let (offset, len) = (run.page * PAGE, run.pages * PAGE);
    match run.is_written {
        true => TransactionPart::Write {
            offset,
            data: bytes(tag, len as usize).into(),
        },
        false => TransactionPart::Clear { offset, len },
    }
}

/// Runs an operation; skips it if the state of the pool rules it out.
pub(super) fn run(world: &mut CrashHarness<'_>, op: &Op, tag: u64) -> Result<(), CheckFailure> {
    match *op {
        Op::Write {
            client,
            slice,
            at,
            len,
            open,
            death,
        } => {
            let Some((client, len)) = clip_range(world, client, slice, at, len) else {
                world.tally.inapplicable += 1;
                return Ok(());
            };
            let data = bytes(tag, len as usize);
            let end = world.write(client, slice, at, &data, open, death)?;
            count_outcome(world, end);
        }
        Op::Clear {
            client,
            slice,
            at,
            len,
            open,
            death,
        } => {
            let Some((client, len)) = clip_range(world, client, slice, at, len) else {
                world.tally.inapplicable += 1;
                return Ok(());
            };
            let end = world.clear(client, slice, at, len, open, death)?;
            count_outcome(world, end);
        }
        Op::Transact {
            client,
            slice,
            ref runs,
            open,
            death,
        } => {
            let size = world.entry(slice).map_or(0, |entry| entry.pages);
            let runs = runs.iter().filter(|run| run.page + run.pages <= size);
            let parts: Vec<TransactionPart> = (0..)
                .zip(runs)
                .map(|(number, run)| part(run, tag << 8 | number))
                .collect();
            if parts.is_empty() || client >= world.clients.len() {
                world.tally.inapplicable += 1;
                return Ok(());
            }
            let end = world.transact(client, slice, &parts, open, death)?;
            count_outcome(world, end);
        }
        Op::Create => {
            if world.entry(OTHER).is_none() {
                let entry = ObjectEntry {
                    pages: OTHER_PAGES,
                    epoch: 0,
                };
                put_entry(world, OTHER, Some(entry), |pool| {
                    pool.create(OTHER, OTHER_PAGES * PAGE)
                })?;
            }
        }
        Op::Grow(slice) => {
            if let Some(entry) = world.entry(slice) {
                let pages = entry.pages + 1;
                let grown = ObjectEntry { pages, ..entry };
                put_entry(world, slice, Some(grown), |pool| {
                    pool.resize(slice, pages * PAGE)
                })?;
            }
        }
        Op::Delete(slice) => {
            if world.entry(slice).is_some() {
                retire_dead_clients(world)?;
                put_entry(world, slice, None, |pool| pool.delete(slice))?;
                world.forget_open(slice);
                world.forget_leaves();
                world.oracle.snapshots.retain(|key, _| key.0 != slice);
            }
        }
        Op::RaiseEpoch(slice) => {
            if let Some(entry) = world.entry(slice) {
                retire_dead_clients(world)?;
                let epoch = entry.epoch + 1;
                let raised = ObjectEntry { epoch, ..entry };
                put_entry(world, slice, Some(raised), |pool| {
                    pool.raise_epoch(slice, Epoch(epoch))
                })?;
            }
        }
        Op::ClearInFlight(slice) => {
            if world.entry(slice).is_some() {
                retire_dead_clients(world)?;
                world.forget_open(slice);
                owner_op(world, false, |pool| pool.clear_in_flight(slice))?;
            }
        }
        Op::Maintain => owner_op(world, true, |pool| pool.maintain().map(drop))?,
        Op::Checkpoint => owner_op(world, true, |pool| Ok(pool.checkpoint()?))?,
        Op::Flush => owner_op(world, true, |pool| Ok(pool.flush()?))?,
        Op::Reopen => world.reopen()?,
        Op::AddDevice => owner_op(world, true, |pool| {
            let planned = pool.plan_device(DEVICE, DEVICE_BYTES_MIN)?;
            Ok(pool.add_device(planned)?)
        })?,
        Op::StartDrain => owner_op(world, true, |pool| pool.start_drain(DEVICE))?,
        Op::MovePages => world.owner_op(false, None, |pool| {
            super::devices::move_pages(pool).map_err(|cause| cause.to_string())
        })?,
        Op::MoveNodes => owner_op(world, true, |pool| {
            let mut next = Some(NodeCursor::default());
            while let Some(from) = next {
                next = pool.move_nodes(from)?;
            }
            Ok(())
        })?,
        Op::RemoveDevice => owner_op(world, true, |pool| pool.remove_device(DEVICE).map(drop))?,
        Op::StartMoves(range) => world.start_moves(range)?,
        Op::SyncMoves => world.sync_moves()?,
        Op::EndMoves => world.end_moves()?,
        Op::Snapshot(slice) => snapshots::create(world, slice)?,
        Op::DropSnapshot(slice, number) => snapshots::drop_one(world, slice, number)?,
        Op::Clone(number) => clones::create(world, number)?,
        Op::PromoteClone => clones::promote(world)?,
        Op::MergeVersions => owner_op(world, true, |pool| {
            pool.merge_versions_soon();
            for _ in 0..4 {
                pool.maintain()?;
            }
            Ok(())
        })?,
        Op::Replace(client) => {
            if client < world.clients.len() {
                let count = world.clients.len();
                world.end_client(client)?;
                world.open_clients(count)?;
            }
        }
    }
    Ok(())
}

type Pool = pagemesh_store::pool::Pool<super::medium::CrashMedium>;
type Outcome = Result<(), pagemesh_store::pool::ObjectError>;

fn owner_op(
    world: &mut CrashHarness<'_>,
    syncs: bool,
    run: impl FnOnce(&mut Pool) -> Outcome,
) -> Result<(), CheckFailure> {
    world.owner_op(syncs, None, |pool| {
        run(&mut pool.borrow_mut()).map_err(|cause| cause.to_string())
    })
}

fn put_entry(
    world: &mut CrashHarness<'_>,
    slice: SliceId,
    entry: Option<ObjectEntry>,
    run: impl FnOnce(&mut Pool) -> Outcome,
) -> Result<(), CheckFailure> {
    world.owner_op(true, Some(Effect::Put(slice, entry)), |pool| {
        run(&mut pool.borrow_mut()).map_err(|cause| cause.to_string())
    })
}

/// Ends every dead client, because barriers would wait for it.
pub(super) fn retire_dead_clients(world: &mut CrashHarness<'_>) -> Result<(), CheckFailure> {
    let count = world.clients.len();
    while let Some(dead) = world
        .clients
        .iter()
        .position(|client| client.died_in.is_some())
    {
        world.end_client(dead)?;
    }
    world.open_clients(count)
}

/// The client, and the part of the range that lies within the object.
fn clip_range(
    world: &CrashHarness<'_>,
    client: usize,
    slice: SliceId,
    at: u64,
    len: u64,
) -> Option<(usize, u64)> {
    let size = world.entry(slice)?.pages * PAGE;
    let len = len.min(size.checked_sub(at)?);
    (len > 0 && client < world.clients.len()).then_some((client, len))
}

fn count_outcome(world: &mut CrashHarness<'_>, end: Option<OpOutcome>) {
    match end {
        Some(_) => world.tally.operations += 1,
        None => world.tally.blocked += 1,
    }
}
