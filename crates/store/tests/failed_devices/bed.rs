//! Pools of two devices, and a client of them.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::check::{CheckOptions, PoolReport, RepairPlan, check};
use pagemesh_store::devices::DeviceState;
use pagemesh_store::pool::{FormatOptions, Pool, format_as};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::recovery::PoolError;
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::{LegSession, Session, write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

pub const PAGE: u64 = PAGE_BYTES as u64;
pub const SLICE: SliceId = SliceId(Uuid::from_u128(7));
pub const DEVICE: Uuid = Uuid::from_u128(2);
pub const FIRST_BYTES: u64 = 2 << 20;
pub const DEVICE_BYTES: u64 = 3 << 20;
/// Pages of the slice. The first device has room for fewer, and its leaf of the first 512 pages.
pub const PAGES: u64 = 800;
pub const FIRST_LEAF_PAGES: u64 = 500;
/// The first page below the second node of level 2, in slices that are so large.
pub const INNER_FIRST: u64 = 512 * 512;
/// Pages that are written after the last checkpoint.
pub const LATE_PAGES: u64 = 6;

/// The medium of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Memory,
    File,
}

impl Kind {
    pub fn recorder(self, image: Image) -> Arc<Recorder> {
        Arc::new(match self {
            Kind::Memory => Recorder::from_image(image),
            Kind::File => Recorder::for_file(image),
        })
    }

    pub fn open(self, media: &Arc<Recorder>, failed: &[Uuid]) -> Result<Pool<Recorder>, PoolError> {
        let overlay = match self {
            Kind::Memory => media.clone(),
            Kind::File => Arc::new(media.overlay()),
        };
        Ok(Pool::open_without(media.clone(), overlay, failed)?.0)
    }
}

/// The version of each page that was flushed last.
pub type Model = Vec<u8>;

pub fn page_bytes(page: u64, version: u8) -> Vec<u8> {
    let byte = |at: u64| (page * 31 + at * 7 + u64::from(version) * 101) as u8;
    (0..PAGE).map(byte).collect()
}

static NEXT_OP: AtomicU64 = AtomicU64::new(1);

/// A client of a pool.
pub struct Client {
    pub session: Session<Recorder>,
    pub handle: Handle,
}

impl Client {
    pub fn new(pool: &mut Pool<Recorder>) -> Client {
        let number = pool.open_session(1, 1).expect("a session");
        Client {
            session: Session::new(pool.mapping().clone(), number),
            handle: pool.handle(SLICE).expect("the slice"),
        }
    }

    pub fn stamp() -> Stamp {
        Stamp {
            epoch: Epoch(0),
            op: NEXT_OP.fetch_add(1, Ordering::Relaxed),
            open_ops: 0,
        }
    }

    pub fn execute(&mut self, request: SliceRequest) -> Result<SliceReply, SliceError> {
        match execute(&mut self.session, self.handle, Epoch(0), request) {
            ExecuteOutcome::Done(result) => result,
            ExecuteOutcome::NeedsOwner(request) => panic!("{request:?}"),
        }
    }

    pub fn write(&mut self, page: u64, version: u8) -> Result<(), StoreError> {
        let stamp = Client::stamp();
        let (session, handle) = (&mut self.session, self.handle);
        let mut legs = [LegSession { session, handle }];
        let written = write(&mut legs, page * PAGE, &page_bytes(page, version), stamp);
        written.map_err(|failure| failure.cause)
    }

    /// Writes a page of a pool, and lets its owner serve the session.
    pub fn write_maintained(&mut self, pool: &mut Pool<Recorder>, page: u64, model: &mut Model) {
        maintain(pool);
        model[page as usize] += 1;
        self.write(page, model[page as usize]).expect("room");
    }

    pub fn end(self, pool: &mut Pool<Recorder>) {
        pool.close_session(self.session.number()).expect("ended");
    }
}

pub fn maintain(pool: &mut Pool<Recorder>) {
    while pool.maintain().expect("a sound pool") {}
}

/// A crash image of a pool with flushed pages on both devices, and the versions of its pages.
pub fn crashed_pool(kind: Kind, pages: u64) -> (Image, Model) {
    let (_pool, media, _client, model) = written_pool(kind, PAGES, 0..pages);
    media.take_crash_points();
    (media.crash_point().image(0), model)
}

/// A pool with flushed pages on both devices, and the versions of its pages.
pub fn written_pool(
    kind: Kind,
    pages: u64,
    written: impl Iterator<Item = u64> + Clone,
) -> (Pool<Recorder>, Arc<Recorder>, Client, Model) {
    let len = (FIRST_BYTES + 2 * DEVICE_BYTES + (3 << 20)) as usize;
    let media = kind.recorder(Image::filled(len, 0xa5a5_5a5a_a5a5_5a5a));
    let options = FormatOptions {
        pool_bytes: FIRST_BYTES,
        ..FormatOptions::of(&*media)
    };
    format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
    let mut pool = kind.open(&media, &[]).expect("a pool");
    pool.create(SLICE, pages * PAGE).expect("room");
    let mut client = Client::new(&mut pool);
    let mut model = vec![0; pages as usize];
    client.write_maintained(&mut pool, 0, &mut model);
    add_device(&mut pool, DEVICE);
    let mut write = |page| client.write_maintained(&mut pool, page, &mut model);
    written.clone().for_each(&mut write);
    written.step_by(3).for_each(write);
    maintain(&mut pool);
    for page in 0..LATE_PAGES {
        model[page as usize] += 1;
        let written = client.write(page, model[page as usize]);
        written.expect("granted frames");
    }
    pool.flush().expect("a sound medium");
    (pool, media, client, model)
}

pub fn add_device(pool: &mut Pool<Recorder>, id: Uuid) {
    let planned = pool.plan_device(id, DEVICE_BYTES);
    let planned = planned.expect("a possible device");
    pool.add_device(planned).expect("a sound medium");
}

/// Reads all pages outside of a gap that is never written. Each has its flushed version, or is damaged. Returns the damaged ones.
pub fn damaged_pages(pool: &mut Pool<Recorder>, model: &Model) -> Result<Vec<u64>, String> {
    damaged_or_newer_pages(pool, model, 0..0)
}

/// The same, where the pages `newer` may have the next version.
pub fn damaged_or_newer_pages(
    pool: &mut Pool<Recorder>,
    model: &Model,
    newer: Range<u64>,
) -> Result<Vec<u64>, String> {
    let mut client = Client::new(pool);
    let mut found = vec![0; PAGE_BYTES];
    let mut damaged = Vec::new();
    let is_read = |(page, _): &(u64, &u8)| !(2 * PAGES..INNER_FIRST).contains(page);
    for (page, &version) in (0..).zip(model).filter(is_read) {
        let at = page * PAGE;
        let (session, handle) = (&mut client.session, client.handle);
        match session.read(&handle, at, &mut found, Epoch(0)) {
            Ok(()) if version == 0 && found.iter().all(|&byte| byte == 0) => {}
            Ok(()) if version > 0 && found == page_bytes(page, version) => {}
            Ok(()) if newer.contains(&page) && found == page_bytes(page, version + 1) => {}
            Ok(()) => return Err(format!("page {page} is not of version {version}")),
            Err(StoreError::Damaged { .. }) => damaged.push(page),
            Err(cause) => return Err(format!("page {page}: {cause}")),
        }
    }
    client.end(pool);
    Ok(damaged)
}

pub fn state_of(pool: &Pool<Recorder>) -> Option<DeviceState> {
    let devices = pool.mapping().geometry().devices;
    let device = devices.iter().find(|it| it.id == DEVICE);
    device.map(|it| it.state)
}

pub fn checked(media: &Recorder, kind: Kind) -> (PoolReport, RepairPlan) {
    let scratch = Recorder::unrecorded(media.visible_image());
    let mut options = CheckOptions {
        is_ordered: kind == Kind::Memory,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    check(&scratch, &mut options).expect("a pool")
}
