//! The steps of a crash image: opened, read, used again, emptied.

use super::POOL_BYTES;
use super::medium::CrashMedium;
use super::model::{
    CheckFailure, ObjectContents, ObjectEntry, PageBytes, PageWord, RecoveredContents, fail,
};
use super::owner::{self, SharedPool};
use super::{clones, snapshots};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::frame_word::FrameWord;
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::test_api::PoolInternals;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

/// Later than every epoch of a workload.
pub(super) const LAST_EPOCH: Epoch = Epoch(1 << 20);
/// Free frames with which a write of two pages must succeed: its data frames and the nodes above
/// them.
const ROOM_FRAMES: u64 = 24;
/// Far above the number of rounds that deleting everything takes.
const MAINTENANCE_MAX: u32 = 500;
const NEW_SLICE: SliceId = SliceId(Uuid::from_u128(77));

/// The kind of medium under a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MediumKind {
    /// Class `pmem`.
    Memory,
    /// Class `file-sync`.
    File,
    /// Class `pmem`, with a disk behind it.
    Tier,
}

impl MediumKind {
    /// A medium with enumerable crashes.
    pub(super) fn recorder(self, image: Image) -> Recorder {
        match self {
            MediumKind::Memory => Recorder::from_image(image),
            MediumKind::File => Recorder::for_file(image),
            MediumKind::Tier => Recorder::tiered(image, POOL_BYTES),
        }
    }
}

/// Opens a pool on a medium.
pub(super) fn open(
    kind: MediumKind,
    recorder: Recorder,
) -> Result<(Arc<CrashMedium>, SharedPool), CheckFailure> {
    let data = Arc::new(CrashMedium::new(recorder));
    Ok((data.clone(), reopen(kind, &data)?))
}

/// Reopens the pool of a medium after its owner is gone.
pub(super) fn reopen(
    kind: MediumKind,
    data: &Arc<CrashMedium>,
) -> Result<SharedPool, CheckFailure> {
    let overlay = match kind {
        MediumKind::Memory | MediumKind::Tier => data.clone(),
        MediumKind::File => Arc::new(data.overlay()),
    };
    match Pool::open(data.clone(), overlay) {
        // A crash leaves torn data, never damaged data.
        Ok((_, found)) if found.damaged > 0 => {
            fail("damage", format!("recovery reports it: {found:?}"))
        }
        Ok((pool, _)) => Ok(Rc::new(RefCell::new(pool))),
        Err(cause) => fail("opening", cause.to_string()),
    }
}

pub(super) fn session(pool: &SharedPool) -> Session<CrashMedium> {
    let mut pool = pool.borrow_mut();
    let number = pool.open_session(1, 1).expect("a session is free");
    Session::new(pool.mapping().clone(), number)
}

/// Reads the contents of the pool; takes the given checksums for the `unread` objects.
pub(super) fn read_contents(
    pool: &SharedPool,
    session: &mut Session<CrashMedium>,
    unread: &BTreeMap<SliceId, BTreeMap<u64, PageWord>>,
) -> Result<RecoveredContents, CheckFailure> {
    let mut found = RecoveredContents::default();
    clones::fill_all(pool)?;
    let objects: Vec<_> = pool.borrow().list().collect();
    for object in objects {
        let handle = pool.borrow().handle(object.slice).expect("it is listed");
        let entry = ObjectEntry {
            pages: object.size_bytes / PAGE_BYTES as u64,
            epoch: object.epoch.0,
        };
        let pages = match unread.get(&object.slice) {
            Some(pages) => pages.clone(),
            None => read(session, &handle, entry.pages, object.base)?,
        };
        found
            .objects
            .insert(object.slice, ObjectContents { entry, pages });
        let listed = pool.borrow().in_flight(object.slice).expect("it is there");
        found.in_flight.insert(object.slice, listed);
        snapshots::read_all(pool, object.slice, entry.pages, &mut found)?;
    }
    Ok(found)
}

fn read(
    session: &mut Session<CrashMedium>,
    handle: &Handle,
    pages: u64,
    base: Epoch,
) -> Result<BTreeMap<u64, PageWord>, CheckFailure> {
    let mut mapped = Vec::new();
    let visited = session.visit_slots(handle, 0..pages, LAST_EPOCH, |page, _, slot| {
        if slot.is_none_or(|slot| slot.frame().is_some()) {
            mapped.push(page.0);
        }
        true
    });
    if let Err(cause) = visited {
        return fail("reading", cause.to_string());
    }
    let mut found = BTreeMap::new();
    for page in mapped {
        let births = session.births(handle, PageNo(page), 1, LAST_EPOCH);
        let births = births.or_else(|cause| fail("reading", cause.to_string()))?;
        match session.checksums(handle, PageNo(page), 1, LAST_EPOCH) {
            Ok(sums) => found.insert(page, FrameWord::new(sums[0], births[0].max(base)).bits()),
            Err(cause) => return fail("reading", cause.to_string()),
        };
    }
    Ok(found)
}

/// Recovers an image, uses it again and empties it; returns its contents.
pub(super) fn recover(
    kind: MediumKind,
    image: Image,
    unread: &BTreeMap<SliceId, BTreeMap<u64, PageWord>>,
) -> Result<RecoveredContents, CheckFailure> {
    let (_, pool) = open(kind, Recorder::unrecorded(image))?;
    read_use_and_empty(&pool, unread)
}

/// Reads a pool, uses it again and empties it; returns its contents.
pub(super) fn read_use_and_empty(
    pool: &SharedPool,
    unread: &BTreeMap<SliceId, BTreeMap<u64, PageWord>>,
) -> Result<RecoveredContents, CheckFailure> {
    let mut one = session(pool);
    let found = read_contents(pool, &mut one, unread)?;
    for &slice in found.objects.keys() {
        write_again(pool, &mut one, slice)?;
    }
    snapshots::check_after_writes(pool, &found)?;
    empty(pool, vec![one], found.objects.keys().copied())?;
    pool.borrow_mut()
        .create(NEW_SLICE, 2 * PAGE_BYTES as u64)
        .expect("an emptied pool has room");
    let mut one = session(pool);
    write_again(pool, &mut one, NEW_SLICE)?;
    Ok(found)
}

fn write_again(
    pool: &SharedPool,
    session: &mut Session<CrashMedium>,
    slice: SliceId,
) -> Result<(), CheckFailure> {
    let handle = pool.borrow().handle(slice).expect("it is there");
    let has_room = pool.borrow().tier_usage().memory_free >= ROOM_FRAMES;
    let stamp = Stamp {
        epoch: LAST_EPOCH,
        op: 1 << 40,
        open_ops: 0,
    };
    let pages = (session.mapping().size_bytes(&handle) as usize / PAGE_BYTES).min(2);
    let fresh = [0xab; 2 * PAGE_BYTES];
    let fresh = &fresh[..pages * PAGE_BYTES];
    let written = owner::with_owner(pool, || {
        write(&mut [LegSession { session, handle }], 0, fresh, stamp)
    });
    match written.map_err(|failure| failure.cause) {
        Ok(()) => {}
        Err(StoreError::NoSpace) if !has_room => return Ok(()),
        Err(cause) => return fail("writing again", cause.to_string()),
    }
    let mut found: [PageBytes; 2] = [[0; PAGE_BYTES]; 2];
    let found = &mut found.as_flattened_mut()[..fresh.len()];
    match session.read(&handle, 0, found, LAST_EPOCH) {
        Ok(()) if found == fresh => Ok(()),
        Ok(()) => fail("writing again", "a read does not return the written bytes"),
        Err(cause) => fail("writing again", cause.to_string()),
    }
}

/// Deletes everything; every frame must be free then.
pub(super) fn empty(
    pool: &SharedPool,
    sessions: Vec<Session<CrashMedium>>,
    slices: impl Iterator<Item = SliceId>,
) -> Result<(), CheckFailure> {
    let mut pool = pool.borrow_mut();
    for session in sessions {
        let closed = pool.close_session(session.number());
        closed.or_else(|cause| fail("ending a session", cause.to_string()))?;
    }
    // An origin goes when the entry of its clone is free.
    let mut left: Vec<SliceId> = slices.collect();
    for _ in 0..MAINTENANCE_MAX {
        let mut waiting = Vec::new();
        for slice in left {
            match pool.delete(slice) {
                Err(ObjectError::HasClone { .. }) => waiting.push(slice),
                deleted => deleted.or_else(|cause| fail("deleting", cause.to_string()))?,
            }
        }
        left = waiting;
        if left.is_empty() {
            break;
        }
        let kept = pool.maintain();
        kept.or_else(|cause| fail("maintenance", cause.to_string()))?;
    }
    // A deletion needs one checkpoint, and the freeing of its entry another.
    let (mut quiet, mut tended) = (0, 0);
    while quiet < 6 {
        match pool.maintain() {
            Ok(true) => {}
            Ok(false) => quiet += 1,
            Err(cause) => return fail("maintenance", cause.to_string()),
        }
        tended += 1;
        if tended > MAINTENANCE_MAX {
            return fail("maintenance", "no end after the maximum of rounds");
        }
    }
    let (used, is_damaged) = pool.stored_used_frames();
    if is_damaged {
        return fail("the bitmap", "a line is damaged");
    }
    let of_log = pool.superblock().version_log.runs().map(|run| run.len);
    let of_log: u64 = of_log.sum();
    if used > of_log {
        return fail(
            "frames in use",
            format!("{used} are, and nothing names them"),
        );
    }
    let usage = pool.usage();
    match usage.free_bytes + of_log * PAGE_BYTES as u64 == usage.capacity_bytes {
        true => Ok(()),
        false => fail(
            "counting frames",
            format!(
                "{} of {} bytes are free",
                usage.free_bytes, usage.capacity_bytes
            ),
        ),
    }
}
