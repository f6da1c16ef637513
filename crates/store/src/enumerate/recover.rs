//! What a crash image is put through: opened, read, used again, emptied.

use super::medium::Medium;
use super::model::{Bytes, Entry, Found, Thing, Wrong, wrong};
use super::owner::{self, Owned};
use crate::bitmap::Bitmap;
use crate::pool::Pool;
use crate::session::{Member, Session, write};
use crate::view::{Handle, StoreError};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use uuid::Uuid;

/// Later than every epoch of a workload.
pub(super) const LAST: Epoch = Epoch(1 << 20);
/// Free frames with which a write of two pages must succeed: they, and the
/// nodes above them.
const ROOM_FRAMES: u64 = 24;
/// Far more than the deletion of everything takes.
const TENDS_MAX: u32 = 500;
const FRESH: SliceId = SliceId(Uuid::from_u128(77));

/// What kind of medium a pool lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Class `pmem`.
    Memory,
    /// Class `file-sync`.
    File,
}

impl Kind {
    /// A medium whose crashes can be enumerated.
    pub(super) fn recorded(self, image: Image) -> Recorder {
        match self {
            Kind::Memory => Recorder::from_image(image),
            Kind::File => Recorder::of_file(image),
        }
    }
}

/// Opens a pool on a medium.
pub(super) fn open(kind: Kind, recorder: Recorder) -> Result<(Arc<Medium>, Owned), Wrong> {
    let data = Arc::new(Medium::new(recorder));
    Ok((data.clone(), reopen(kind, &data)?))
}

/// Opens the pool of a medium whose owner is gone.
pub(super) fn reopen(kind: Kind, data: &Arc<Medium>) -> Result<Owned, Wrong> {
    let overlay = match kind {
        Kind::Memory => data.clone(),
        Kind::File => Arc::new(data.overlay()),
    };
    match Pool::open(data.clone(), overlay) {
        // What a crash leaves is torn, but never damaged.
        Ok((_, found)) if found.damaged > 0 => {
            wrong("damage", format!("recovery believes in it: {found:?}"))
        }
        Ok((pool, _)) => Ok(Rc::new(RefCell::new(pool))),
        Err(cause) => wrong("opening", cause.to_string()),
    }
}

pub(super) fn session(pool: &Owned) -> Session<Medium> {
    let mut pool = pool.borrow_mut();
    let number = pool.open_session(1, 1).expect("a session is free");
    Session::new(pool.view().clone(), number)
}

/// Reads what the pool holds; of `unread` objects it takes the given sums.
pub(super) fn look(
    pool: &Owned,
    session: &mut Session<Medium>,
    unread: &BTreeMap<SliceId, BTreeMap<u64, u32>>,
) -> Result<Found, Wrong> {
    let mut found = Found::default();
    let objects: Vec<_> = pool.borrow().list().collect();
    for object in objects {
        let handle = pool.borrow().handle(object.slice).expect("it is listed");
        let entry = Entry {
            pages: object.size_bytes / PAGE_BYTES as u64,
            epoch: object.epoch.0,
            round: object.round,
        };
        let pages = match unread.get(&object.slice) {
            Some(pages) => pages.clone(),
            None => read(session, &handle, entry.pages)?,
        };
        found.things.insert(object.slice, Thing { entry, pages });
        let listed = pool.borrow().in_flight(object.slice).expect("it is there");
        found.listed.insert(object.slice, listed);
    }
    Ok(found)
}

fn read(
    session: &mut Session<Medium>,
    handle: &Handle,
    pages: u64,
) -> Result<BTreeMap<u64, u32>, Wrong> {
    let mut mapped = Vec::new();
    let visited = session.visit_slots(handle, 0..pages, LAST, |page, _, slot| {
        if slot.is_none_or(|slot| slot.frame().is_some()) {
            mapped.push(page.0);
        }
        true
    });
    if let Err(cause) = visited {
        return wrong("reading", cause.to_string());
    }
    let mut found = BTreeMap::new();
    for page in mapped {
        match session.checksums(handle, PageNo(page), 1, LAST) {
            Ok(sums) => found.insert(page, sums[0]),
            Err(cause) => return wrong("reading", cause.to_string()),
        };
    }
    Ok(found)
}

/// Puts an image through everything; what it held.
pub(super) fn recover(
    kind: Kind,
    image: Image,
    unread: &BTreeMap<SliceId, BTreeMap<u64, u32>>,
) -> Result<Found, Wrong> {
    let (_, pool) = open(kind, Recorder::unrecorded(image))?;
    examine(&pool, unread)
}

/// Reads a pool, uses it again and empties it; what it held.
pub(super) fn examine(
    pool: &Owned,
    unread: &BTreeMap<SliceId, BTreeMap<u64, u32>>,
) -> Result<Found, Wrong> {
    let mut one = session(pool);
    let found = look(pool, &mut one, unread)?;
    for &slice in found.things.keys() {
        write_again(pool, &mut one, slice)?;
    }
    empty(pool, vec![one], found.things.keys().copied())?;
    pool.borrow_mut()
        .create(FRESH, 2 * PAGE_BYTES as u64)
        .expect("an emptied pool has room");
    let mut one = session(pool);
    write_again(pool, &mut one, FRESH)?;
    Ok(found)
}

fn write_again(pool: &Owned, session: &mut Session<Medium>, slice: SliceId) -> Result<(), Wrong> {
    let handle = pool.borrow().handle(slice).expect("it is there");
    let has_room = pool.borrow().usage().free_bytes >= ROOM_FRAMES * PAGE_BYTES as u64;
    let stamp = Stamp {
        epoch: LAST,
        op: 1 << 40,
        open: 0,
    };
    let pages = (session.view().size_bytes(&handle) as usize / PAGE_BYTES).min(2);
    let fresh = [0xab; 2 * PAGE_BYTES];
    let fresh = &fresh[..pages * PAGE_BYTES];
    let written = owner::with(pool, || {
        write(&mut [Member { session, handle }], 0, fresh, stamp)
    });
    match written.map_err(|failure| failure.cause) {
        Ok(()) => {}
        Err(StoreError::NoSpace) if !has_room => return Ok(()),
        Err(cause) => return wrong("writing again", cause.to_string()),
    }
    let mut found: [Bytes; 2] = [[0; PAGE_BYTES]; 2];
    let found = &mut found.as_flattened_mut()[..fresh.len()];
    match session.read(&handle, 0, found, LAST) {
        Ok(()) if found == fresh => Ok(()),
        Ok(()) => wrong("writing again", "what was written is not read"),
        Err(cause) => wrong("writing again", cause.to_string()),
    }
}

/// Deletes everything: every frame must be free then.
pub(super) fn empty(
    pool: &Owned,
    sessions: Vec<Session<Medium>>,
    slices: impl Iterator<Item = SliceId>,
) -> Result<(), Wrong> {
    let mut pool = pool.borrow_mut();
    for session in sessions {
        let closed = pool.close_session(session.number());
        closed.or_else(|cause| wrong("ending a session", cause.to_string()))?;
    }
    for slice in slices {
        let deleted = pool.delete(slice);
        deleted.or_else(|cause| wrong("deleting", cause.to_string()))?;
    }
    // A deletion, and the freeing of its entry, each need a checkpoint.
    let (mut quiet, mut tended) = (0, 0);
    while quiet < 6 {
        match pool.tend() {
            Ok(true) => {}
            Ok(false) => quiet += 1,
            Err(cause) => return wrong("tending", cause.to_string()),
        }
        tended += 1;
        if tended > TENDS_MAX {
            return wrong("tending", "it does not come to an end");
        }
    }
    let (bitmap, bad) = Bitmap::load(&*pool.view.data, &pool.view.geometry, pool.view.pool);
    if !bad.is_empty() {
        return wrong("the bitmap", format!("{bad:?}"));
    }
    if bitmap.used() > 0 {
        return wrong(
            "frames in use",
            format!("{} are, and nothing names them", bitmap.used()),
        );
    }
    let usage = pool.usage();
    match usage.free_bytes == usage.capacity_bytes {
        true => Ok(()),
        false => wrong(
            "counting frames",
            format!(
                "{} of {} bytes are free",
                usage.free_bytes, usage.capacity_bytes
            ),
        ),
    }
}
