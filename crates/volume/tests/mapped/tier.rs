//! A mapped leg of a pool with a disk behind its memory.

use pagemesh_base::ids::Epoch;
use pagemesh_base::key::Key;
use pagemesh_base::layout::SliceId;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{BrickControl, Leg, SliceError, SliceReply, SliceRequest, Stamp};
use pagemesh_base::wait::until_readable;
use pagemesh_brick::brick::{Brick, MaintenanceThread, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::service::BrickService;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::map::MapServer;
use pagemesh_pmem::{Media, NewDevice, TieredMedia};
use pagemesh_store::session::Session;
use pagemesh_volume::{MappedLeg, Transport, Transports};
use std::fs::File;
use std::sync::Arc;
use tempfile::TempDir;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGE: u64 = 4096;
const MEMORY_BYTES: u64 = 8 << 20;
const DISK_BYTES: u64 = 64 << 20;
const SLICE_BYTES: u64 = 4 * MEMORY_BYTES;

/// A brick with a disk, and its map socket.
struct TieredHost {
    brick: Arc<Brick<TieredMedia>>,
    _maintenance: MaintenanceThread<TieredMedia>,
    server: MapServer,
    _directories: [TempDir; 2],
}

impl TieredHost {
    fn start() -> TieredHost {
        let directories = ["/dev/shm", "/var/tmp"];
        let directories = directories.map(|it| tempfile::tempdir_in(it).expect("a directory"));
        let [in_memory, on_disk] = directories.each_ref().map(|it| it.path());
        let path = in_memory.join("pool");
        file::create(&path, MEMORY_BYTES).expect("a pool");
        let options = OpenOptions {
            takes_disks: true,
            ..OpenOptions::default()
        };
        let opened = OpenedPool::open(&path, options).expect("a brick");
        let OpenedPool::Tiered((brick, maintenance, _)) = opened else {
            panic!("the pool takes no disk");
        };
        let mut new = File::options();
        let file = new.read(true).write(true).create_new(true);
        let file = file.open(on_disk.join("disk")).expect("a file");
        file.set_len(DISK_BYTES).expect("its length");
        let added = brick.add_disk(Uuid::from_u128(9), DISK_BYTES, |planned, media| {
            media.attach_device(NewDevice {
                file,
                bytes: planned.bytes(),
                head_len: planned.head_len(),
                frame_table: planned.frame_table_bytes(),
            })
        });
        added.expect("a disk");
        brick.create(SLICE, SLICE_BYTES).expect("room");
        let service = Arc::new(BrickService(brick.clone()));
        let server = MapServer::bind(&in_memory.join("map"), service).expect("a socket");
        TieredHost {
            brick,
            _maintenance: maintenance,
            server,
            _directories: directories,
        }
    }

    fn map(&self) -> MappedLeg {
        // The key proves nothing on this transport.
        let transports = Transports::new(
            Key::from_bytes([7; 32]),
            Transport::Map,
            Timeouts::default(),
        );
        let leg = transports.map(self.brick.id(), self.server.path(), SLICE, Epoch(1));
        leg.expect("a leg")
    }
}

fn call(leg: &mut MappedLeg, request: SliceRequest) -> Result<SliceReply, SliceError> {
    leg.submit(1, request);
    let mut done = Vec::new();
    loop {
        leg.reap(&mut done);
        if let Some(completion) = done.pop() {
            return completion.result;
        }
        assert_eq!(leg.poll_closed(), None);
        let mut fds = Vec::new();
        leg.poll_fds(&mut fds);
        until_readable(&fds, leg.deadline()).expect("a wait");
    }
}

#[test]
fn mapped_leg_reads_and_changes_pages_on_disk() {
    let host = TieredHost::start();
    let mut leg = host.map();
    let mut model = vec![0; SLICE_BYTES as usize];
    let mut rng = SplitMix64::new(7);
    for op in 1..=SLICE_BYTES / PAGE * 2 {
        let is_partial = op > SLICE_BYTES / PAGE && op % 3 == 0;
        let (offset, len) = match is_partial {
            true => (rng.below(SLICE_BYTES - PAGE), 1 + rng.below(PAGE)),
            false => ((op - 1) * PAGE % SLICE_BYTES, PAGE),
        };
        let data: Vec<u8> = (0..len).map(|_| rng.below(256) as u8).collect();
        model[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 0,
        };
        let data = data.into();
        let write = SliceRequest::Write {
            offset,
            data,
            stamp,
        };
        assert_eq!(
            call(&mut leg, write),
            Ok(SliceReply::Done),
            "operation {op}"
        );
    }
    let figures = host.brick.tier_figures().expect("a tier");
    assert!(figures.demoted > SLICE_BYTES / PAGE / 2, "{figures:?}");
    let len = 64 << 10;
    for offset in (0..SLICE_BYTES).step_by(len) {
        let found = call(
            &mut leg,
            SliceRequest::Read {
                offset,
                len: len as u32,
            },
        );
        let wanted = &model[offset as usize..offset as usize + len];
        assert!(
            found == Ok(SliceReply::Data(wanted.to_vec())),
            "at {offset}"
        );
    }
    // The brick does not know the hits of a program that maps the pool, so it does not count its misses.
    let figures = host.brick.tier_figures().expect("a tier");
    assert_eq!((figures.hits, figures.misses), (0, 0), "{figures:?}");
}

/// The passes of the clock that the page stays in memory.
fn passes_until_cold(host: &TieredHost, page: u64) -> usize {
    let number = host.brick.open_session(1, 1).expect("a session");
    let mapping = host.brick.mapping().clone();
    let mut session = Session::new(mapping.clone(), number);
    let (object, _) = host.brick.attach(SLICE, Epoch(1)).expect("the slice");
    let handle = mapping.handle(object, SLICE).expect("the slice");
    let mut frame = None;
    let range = page..page + 1;
    let visited = session.visit_slots(&handle, range, Epoch(u32::MAX), |_, _, slot| {
        frame = slot.and_then(|slot| slot.frame());
        true
    });
    visited.expect("the slice");
    let frame = frame.expect("a page that was written");
    let control = mapping.control();
    let passes = (0..10).take_while(|_| !control.cool_frame(frame)).count();
    drop(session);
    host.brick.close_session(number);
    passes
}

#[test]
fn uses_of_mapped_leg_warm_its_pages() {
    let host = TieredHost::start();
    let mut leg = host.map();
    let mut op = 0;
    let mut write = |leg: &mut MappedLeg, offset, len: usize| {
        op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 0,
        };
        let data = vec![7; len].into();
        let write = SliceRequest::Write {
            offset,
            data,
            stamp,
        };
        assert_eq!(call(leg, write), Ok(SliceReply::Done));
    };
    for page in 0..3 {
        write(&mut leg, page * PAGE, PAGE as usize);
    }
    assert_eq!(passes_until_cold(&host, 0), 1, "written once");
    for _ in 0..2 {
        let read = SliceRequest::Read {
            offset: PAGE,
            len: PAGE as u32,
        };
        assert!(call(&mut leg, read).is_ok());
    }
    assert_eq!(passes_until_cold(&host, 1), 3, "read twice");
    write(&mut leg, 2 * PAGE, PAGE as usize);
    write(&mut leg, 2 * PAGE + 8, 8);
    assert_eq!(passes_until_cold(&host, 2), 3, "written in place, too");
}
