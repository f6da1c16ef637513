//! Bricks on real files: workers, epochs, births, the state after a dead connection, and files that
//! are no pools.

use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    BrickControl, InFlightOp, PageRun, SliceError, SliceReply, SliceRequest, Stamp, TransactionPart,
};
use pagemesh_base::space::Extent;
use pagemesh_brick::brick::{Brick, MaintenanceThread, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file::{self, FileError, NewPool};
use pagemesh_brick::service::BrickService;
use pagemesh_brick::worker::Worker;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_fabric::map;
use pagemesh_pmem::{Durability, MapError, Media, StatedClass};
use pagemesh_store::superblock::Superblock;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const SIZE: u64 = 4 << 20;

struct PoolDir {
    directory: TempDir,
}

impl PoolDir {
    /// On memory or on a disk: classes `process` and `file-sync`.
    fn new(parent: &str) -> PoolDir {
        let home = PoolDir {
            directory: tempfile::tempdir_in(parent).expect("a directory"),
        };
        file::create(&home.path(), 16 << 20).expect("a pool");
        home
    }

    /// A pool of a stated class; `is_trusted` if the medium does not show it.
    fn with_class(parent: &str, class: Durability, is_trusted: bool) -> PoolDir {
        let home = PoolDir {
            directory: tempfile::tempdir_in(parent).expect("a directory"),
        };
        let stated = StatedClass { class, is_trusted };
        let mut touched = 0;
        let mut progress = |done, of| {
            assert_eq!(of, 16 << 20);
            touched = done;
        };
        let made = file::create_with(
            &home.path(),
            NewPool {
                stated: Some(stated),
                ..NewPool::of_size(16 << 20)
            },
            &mut progress,
        );
        let (_, made) = made.expect("a pool");
        assert_eq!(made, class);
        assert_eq!(touched, if parent == "/dev/shm" { 16 << 20 } else { 0 });
        home
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// On the medium of its class.
    fn open_any(&self) -> OpenedPool {
        OpenedPool::open(&self.path(), OpenOptions::default()).expect("a brick")
    }

    fn open(&self) -> (Arc<Brick>, MaintenanceThread) {
        let (brick, keeper, _) = Brick::open(&self.path()).expect("a brick");
        (brick, keeper)
    }
}

fn stamp(epoch: u32, op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(epoch),
        op,
        open_ops: 0,
    }
}

fn write(offset: u64, data: Vec<u8>, stamp: Stamp) -> SliceRequest {
    SliceRequest::Write {
        offset,
        data: Bytes::from(data),
        stamp,
    }
}

fn worker<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>, epoch: u32) -> Worker<M> {
    let mut worker = Worker::open(brick, 1, 1).expect("a session");
    assert_eq!(worker.attach(SLICE, Epoch(epoch)), Ok((0, SIZE)));
    worker
}

#[track_caller]
fn check<M: Media + Send + Sync + 'static>(
    worker: &mut Worker<M>,
    request: SliceRequest,
    expected: Result<SliceReply, SliceError>,
) {
    assert_eq!(worker.execute(0, request), expected);
}

#[test]
fn slice_is_written_read_and_listed() {
    for parent in ["/dev/shm", "/var/tmp"] {
        let home = PoolDir::new(parent);
        match home.open_any() {
            OpenedPool::Mapped((brick, _maintenance, _)) => check_requests(&brick),
            OpenedPool::Disk((brick, _maintenance, _)) => check_requests(&brick),
            OpenedPool::Tiered((brick, _maintenance, _)) => check_requests(&brick),
        }
    }
}

fn check_requests<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>) {
    brick.create(SLICE, SIZE).expect("room");
    assert_eq!(
        brick.create(SLICE, SIZE),
        Err(SliceError::SliceExists(SLICE))
    );
    let mut one = worker(brick, 1);
    check(
        &mut one,
        write(8192, vec![7; 8192], stamp(1, 1)),
        Ok(SliceReply::Done),
    );
    check(&mut one, SliceRequest::Flush, Ok(SliceReply::Done));
    let read = SliceRequest::Read {
        offset: 12288,
        len: 8192,
    };
    let expected = [vec![7; 4096], vec![0; 4096]].concat();
    check(&mut one, read, Ok(SliceReply::Data(expected)));
    let extents = SliceRequest::Extents {
        offset: 100,
        len: 20000,
    };
    let list = [(8092, false), (8192, true), (3716, false)];
    let list = list.map(|(len, mapped)| Extent { len, mapped }).to_vec();
    check(&mut one, extents, Ok(SliceReply::Extents(list)));
    let clear = SliceRequest::Clear {
        offset: 8192,
        len: 4096,
        stamp: stamp(1, 2),
    };
    check(&mut one, clear, Ok(SliceReply::Done));
    let (page, len) = (4096, 4096);
    let part = |offset, fill| TransactionPart::Write {
        offset,
        data: vec![fill; 4096].into(),
    };
    let transact = |parts, op| SliceRequest::Transact {
        parts,
        stamp: stamp(1, op),
    };
    let parts = vec![
        part(9 * page, 8),
        TransactionPart::Clear {
            offset: 3 * page,
            len,
        },
    ];
    check(&mut one, transact(parts, 3), Ok(SliceReply::Done));
    let read = |offset| SliceRequest::Read { offset, len: 4096 };
    let holds = |fill| Ok(SliceReply::Data(vec![fill; 4096]));
    check(&mut one, read(9 * page), holds(8));
    check(&mut one, read(3 * page), holds(0));
    // One part beyond the end: none of the parts is applied.
    let beyond = one.execute(0, transact(vec![part(0, 5), part(SIZE, 5)], 4));
    assert!(
        matches!(beyond, Err(SliceError::OutOfRange(_))),
        "{beyond:?}"
    );
    check(&mut one, read(0), holds(0));
    let beyond = one.execute(0, write(SIZE - 1, vec![1; 2], stamp(1, 5)));
    assert!(
        matches!(beyond, Err(SliceError::OutOfRange(_))),
        "{beyond:?}"
    );
    let unknown = one.execute(9, SliceRequest::Flush);
    assert!(
        matches!(unknown, Err(SliceError::OutOfRange(_))),
        "{unknown:?}"
    );
    brick.delete(SLICE).expect("the slice");
    check(
        &mut one,
        SliceRequest::Read { offset: 0, len: 1 },
        Err(SliceError::NoSuchSlice(SLICE)),
    );
}

#[test]
fn epochs_fence_and_births_are_tracked() {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let (mut old, mut new) = (worker(&brick, 1), worker(&brick, 1));
    check(
        &mut old,
        write(0, vec![1; 4096], stamp(1, 1)),
        Ok(SliceReply::Done),
    );
    check(
        &mut new,
        SliceRequest::RaiseEpoch {
            epoch: Epoch(2),
            lost_since: Epoch(0),
        },
        Ok(SliceReply::Done),
    );
    let fenced = Err(SliceError::StaleEpoch { current: Epoch(2) });
    check(
        &mut old,
        write(0, vec![2; 4096], stamp(1, 2)),
        fenced.clone(),
    );
    check(
        &mut old,
        SliceRequest::Read {
            offset: 0,
            len: 4096,
        },
        fenced,
    );
    let told = InFlightOp {
        page: PageNo(0),
        count: 1,
        epoch: Epoch(1),
        op: 1,
    };
    check(
        &mut new,
        SliceRequest::InFlight,
        Ok(SliceReply::InFlight(Some(vec![told]))),
    );
    check(&mut new, SliceRequest::ForgetInFlight, Ok(SliceReply::Done));
    check(
        &mut new,
        SliceRequest::InFlight,
        Ok(SliceReply::InFlight(Some(vec![]))),
    );
    check(
        &mut new,
        write(40960, vec![3; 8192], stamp(2, 3)),
        Ok(SliceReply::Done),
    );
    let dirty = |worker: &mut Worker, since, expected: &[(u64, u64)]| {
        let (since, from) = (Epoch(since), PageNo(0));
        let run = |&(page, count)| PageRun {
            page: PageNo(page),
            count,
        };
        let runs = expected.iter().map(run).collect();
        let reply = SliceReply::Dirty { runs, next: None };
        check(worker, SliceRequest::Dirty { since, from }, Ok(reply));
    };
    // The page in flight was born before.
    dirty(&mut new, 2, &[(10, 2)]);
    dirty(&mut new, 1, &[(0, 1), (10, 2)]);
    // A barrier marks nothing. A part of a page counts as the whole.
    check(
        &mut new,
        SliceRequest::RaiseEpoch {
            epoch: Epoch(3),
            lost_since: Epoch(0),
        },
        Ok(SliceReply::Done),
    );
    dirty(&mut new, 3, &[]);
    check(
        &mut new,
        write(45056, vec![4; 1], stamp(3, 5)),
        Ok(SliceReply::Done),
    );
    dirty(&mut new, 3, &[(11, 1)]);
    dirty(&mut new, 2, &[(10, 2)]);
    let low = new.execute(
        0,
        SliceRequest::RaiseEpoch {
            epoch: Epoch(1),
            lost_since: Epoch(0),
        },
    );
    assert_eq!(low, Err(SliceError::StaleEpoch { current: Epoch(3) }));
}

#[test]
fn older_connection_is_refused_under_same_epoch() {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let raise = || SliceRequest::RaiseEpoch {
        epoch: Epoch(2),
        lost_since: Epoch(0),
    };
    let mut old = worker(&brick, 2);
    check(&mut old, raise(), Ok(SliceReply::Done));
    check(
        &mut old,
        write(0, vec![1; 4096], stamp(2, 1)),
        Ok(SliceReply::Done),
    );
    let (mut keeper, mut channel) = (worker(&brick, 2), worker(&brick, 2));
    check(&mut keeper, raise(), Ok(SliceReply::Done));
    for request in [
        write(0, vec![1; 4096], stamp(2, 1)),
        raise(),
        SliceRequest::ForgetInFlight,
    ] {
        let refused = old.execute(0, request);
        assert!(matches!(refused, Err(SliceError::Lost(_))), "{refused:?}");
    }
    // Sessions attached after the raising one stay valid, however often it raises.
    check(&mut keeper, raise(), Ok(SliceReply::Done));
    check(
        &mut channel,
        write(0, vec![2; 4096], stamp(2, 2)),
        Ok(SliceReply::Done),
    );
}

/// After a failed change the connection makes no further change: the client sent those before it
/// had the answer.
#[test]
fn ordered_connection_refuses_changes_after_a_failure() {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let (mut kept, mut free) = (worker(&brick, 2), worker(&brick, 2));
    check(&mut kept, SliceRequest::KeepOrder, Ok(SliceReply::Done));
    for (worker, first) in [(&mut free, 1), (&mut kept, 10)] {
        let page = |with, op| write(0, vec![with; 4096], stamp(2, op));
        check(worker, page(1, first), Ok(SliceReply::Done));
        // Neither a read nor a request that changes nothing breaks the order.
        let beyond = SliceRequest::Read {
            offset: SIZE,
            len: 4096,
        };
        assert!(worker.execute(0, beyond).is_err());
        check(worker, page(2, first + 1), Ok(SliceReply::Done));
        let beyond = write(SIZE, vec![3; 4096], stamp(2, first + 2));
        assert!(matches!(
            worker.execute(0, beyond),
            Err(SliceError::OutOfRange(_))
        ));
    }
    check(
        &mut free,
        write(0, vec![4; 4096], stamp(2, 20)),
        Ok(SliceReply::Done),
    );
    for behind in [
        write(0, vec![5; 4096], stamp(2, 21)),
        SliceRequest::Clear {
            offset: 0,
            len: 4096,
            stamp: stamp(2, 22),
        },
    ] {
        let refused = kept.execute(0, behind);
        assert!(
            matches!(refused, Err(SliceError::Refused(_))),
            "{refused:?}"
        );
    }
    check(&mut kept, SliceRequest::Flush, Ok(SliceReply::Done));
    let read = SliceRequest::Read {
        offset: 0,
        len: 4096,
    };
    check(&mut kept, read, Ok(SliceReply::Data(vec![4; 4096])));
}

/// A client that was stalled while another attached must not clear the in-flight operations of that
/// other client (seed 47880 of the cluster simulation as it then was).
#[test]
fn fenced_client_clears_no_in_flight_operations() {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let raise = |epoch| SliceRequest::RaiseEpoch {
        epoch: Epoch(epoch),
        lost_since: Epoch(0),
    };
    let mut old = worker(&brick, 1);
    check(&mut old, raise(1), Ok(SliceReply::Done));
    let mut new = worker(&brick, 2);
    check(&mut new, raise(2), Ok(SliceReply::Done));
    let mut one = worker(&brick, 2);
    let open = Stamp {
        open_ops: 1,
        ..stamp(2, 1)
    };
    check(
        &mut one,
        write(0, vec![1; 4096], open),
        Ok(SliceReply::Done),
    );
    drop(one);
    let current = Epoch(2);
    check(
        &mut old,
        SliceRequest::ForgetInFlight,
        Err(SliceError::StaleEpoch { current }),
    );
    for epoch in [1, 2] {
        let listed = brick.execute_as_owner(SLICE, Epoch(epoch), SliceRequest::InFlight);
        let Ok(SliceReply::InFlight(Some(listed))) = listed else {
            panic!("{listed:?}");
        };
        assert_eq!(listed.len(), 1);
        let settled = brick.execute_as_owner(SLICE, Epoch(epoch), SliceRequest::ForgetInFlight);
        assert_eq!(settled.is_ok(), epoch == 2, "{settled:?}");
    }
    let none = brick.execute_as_owner(SLICE, current, SliceRequest::InFlight);
    assert_eq!(none, Ok(SliceReply::InFlight(Some(vec![]))));
}

#[test]
fn closed_connection_leaves_its_open_operations() {
    let home = PoolDir::new("/dev/shm");
    let (brick, keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let mut one = worker(&brick, 1);
    for op in 1..=5 {
        let open = u32::from(op > 3);
        let stamp = Stamp {
            open_ops: open,
            ..stamp(1, op)
        };
        check(
            &mut one,
            write(op * 4096, vec![op as u8; 4096], stamp),
            Ok(SliceReply::Done),
        );
    }
    drop(one);
    let mut two = worker(&brick, 1);
    let told = |found: Result<SliceReply, SliceError>| match found {
        Ok(SliceReply::InFlight(Some(mut list))) => {
            list.sort_by_key(|entry| entry.op);
            list.iter().map(|entry| entry.op).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(told(two.execute(0, SliceRequest::InFlight)), [4, 5]);
    drop(two);
    // A new brick on the same pool has the same epoch.
    keeper.stop();
    drop(brick);
    let (brick, _keeper) = home.open();
    let mut three = worker(&brick, 1);
    assert_eq!(told(three.execute(0, SliceRequest::InFlight)), [4, 5]);
    check(
        &mut three,
        SliceRequest::Read {
            offset: 5 * 4096,
            len: 1,
        },
        Ok(SliceReply::Data(vec![5])),
    );
}

#[test]
fn sessions_run_out_with_an_error_and_come_back() {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let mut workers = Vec::new();
    let error = loop {
        match Worker::open(&brick, 1, 1) {
            Ok(worker) => workers.push(worker),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SliceError::NoSession(_)), "{error:?}");
    assert!(error.to_string().contains("sessions"), "{error}");
    assert_eq!(
        brick.status().expect("a status").sessions as usize,
        workers.len()
    );
    workers.pop();
    worker(&brick, 1);
}

#[test]
fn files_that_are_not_pools_are_refused_with_reason() {
    let home = PoolDir::new("/dev/shm");
    let path = home.path();
    let refused = |path: &PathBuf| match Brick::open(path) {
        Ok(_) => panic!("{path:?} opened"),
        Err(error) => error.to_string(),
    };
    assert!(matches!(
        file::create(&path, 16 << 20),
        Err(FileError::Exists(_))
    ));
    let (brick, keeper) = home.open();
    assert!(refused(&path).contains("in use"));
    keeper.stop();
    drop(brick);
    for (size, word) in [
        (0, "2M"),
        (4097, "multiple"),
        (u64::MAX - 4095, "too large"),
    ] {
        let error = file::create(&path.with_extension("new"), size).expect_err("no size of a pool");
        assert!(error.to_string().contains(word), "{error}");
        assert!(!path.with_extension("new").exists());
    }
    let whole = std::fs::read(&path).expect("the pool");
    let put = |bytes: &[u8]| std::fs::write(&path, bytes).expect("the pool");
    put(b"not a pool at all");
    assert!(refused(&path).contains("not a pagemesh pool"));
    put(&[]);
    assert!(refused(&path).contains("not a pagemesh pool"));
    put(&whole[..8 << 20]);
    assert!(refused(&path).contains("truncated"));
    let mut bad = whole.clone();
    for page in [0, 4096] {
        bad[page + 100] ^= 1;
    }
    put(&bad);
    assert!(refused(&path).contains("both superblocks are damaged"));
    // One damaged superblock: the other one is used.
    let mut one_bad = whole.clone();
    one_bad[100] ^= 1;
    put(&one_bad);
    drop(home.open());
    let missing = home.directory.path().join("missing");
    assert!(refused(&missing).contains("missing"));
}

/// A pool is of the class that was stated, also when it is opened again.
fn check_class(parent: &str, class: Durability, is_trusted: bool) {
    let home = PoolDir::with_class(parent, class, is_trusted);
    for turn in 1..=2 {
        match home.open_any() {
            OpenedPool::Mapped((brick, _maintenance, _)) => {
                assert_ne!(class, Durability::FileSync);
                check_opened(&brick, class, turn);
            }
            OpenedPool::Disk((brick, _maintenance, _)) => check_opened(&brick, class, turn),
            OpenedPool::Tiered((brick, _maintenance, _)) => check_opened(&brick, class, turn),
        }
    }
}

fn check_opened<M: Media + Send + Sync + 'static>(
    brick: &Arc<Brick<M>>,
    class: Durability,
    turn: u32,
) {
    assert_eq!(brick.durability(), class);
    assert_eq!(brick.can_be_mapped(), class != Durability::FileSync);
    let status = brick.status().expect("a status");
    assert_eq!(status.durability, class.to_string());
    if turn == 1 {
        brick.create(SLICE, SIZE).expect("room");
    }
    let mut worker = worker(brick, turn);
    let written = write(0, vec![turn as u8; 8192], stamp(turn, 1));
    check(&mut worker, written, Ok(SliceReply::Done));
    check(&mut worker, SliceRequest::Flush, Ok(SliceReply::Done));
    let read = SliceRequest::Read {
        offset: 0,
        len: 8192,
    };
    let expected = SliceReply::Data(vec![turn as u8; 8192]);
    check(&mut worker, read, Ok(expected));
}

#[test]
fn reopened_pool_has_stated_class() {
    check_class("/dev/shm", Durability::Eadr, true);
    check_class("/dev/shm", Durability::FileSync, true);
    check_class("/dev/shm", Durability::Process, false);
    check_class("/var/tmp", Durability::Eadr, true);
    check_class("/var/tmp", Durability::Pmem, true);
    check_class("/var/tmp", Durability::FileSync, false);
    check_class("/var/tmp", Durability::Process, false);
}

#[test]
fn pool_on_unsuitable_medium_is_refused() {
    // Made on a disk, and then copied to memory.
    let (disk, memory) = (
        PoolDir::with_class("/var/tmp", Durability::FileSync, false),
        PoolDir::new("/dev/shm"),
    );
    std::fs::copy(disk.path(), memory.path()).expect("a copy");
    let refused = Brick::open(&memory.path()).err().expect("a refusal");
    let (class, medium) = (Durability::FileSync, Durability::Process);
    assert!(
        matches!(&refused, FileError::Class { cause: MapError::ClassNotProvided { class: c, medium: m }, .. }
            if (*c, *m) == (class, medium)),
        "{refused}"
    );
    assert!(refused.to_string().contains("--trust-medium"), "{refused}");
}

/// Makes both superblocks of a file say that it was made in another boot.
fn move_to_another_boot(path: &PathBuf) {
    let mut bytes = std::fs::read(path).expect("the pool");
    for at in [0, 4096] {
        let page = bytes[at..at + 4096].try_into().expect("a page");
        let Ok(block) = Superblock::decode(page) else {
            continue;
        };
        let boot = block.boot.map(|_| Uuid::from_u128(7));
        let moved = Superblock { boot, ..block };
        bytes[at..at + 4096].copy_from_slice(&moved.encode());
    }
    std::fs::write(path, bytes).expect("the pool");
}

#[test]
fn process_pool_on_disk_is_refused_after_reboot() {
    let home = PoolDir::with_class("/var/tmp", Durability::Process, false);
    drop(home.open());
    move_to_another_boot(&home.path());
    let refused = Brick::open(&home.path()).err().expect("a refusal");
    assert!(matches!(refused, FileError::Restarted(_)), "{refused}");
    // Other classes survive a boot, or other media do not.
    for (parent, class) in [
        ("/var/tmp", Durability::FileSync),
        ("/dev/shm", Durability::Process),
    ] {
        let home = PoolDir::with_class(parent, class, false);
        drop(home.open_any());
        move_to_another_boot(&home.path());
        home.open_any();
    }
}

/// A brick that ends late must not remove the socket of its successor.
#[test]
fn map_socket_taken_over_by_another_brick_is_kept() {
    let homes = [PoolDir::new("/dev/shm"), PoolDir::new("/dev/shm")];
    let path = homes[0].directory.path().join("map");
    let [(old, _old_keeper), (new, _new_keeper)] = homes.each_ref().map(PoolDir::open);
    let serve =
        |brick: &Arc<Brick>| map::MapServer::bind(&path, Arc::new(BrickService(brick.clone())));
    let first = serve(&old).expect("a free path");
    let in_use = serve(&new).err().expect("it is served").to_string();
    assert!(in_use.contains("served by another process"), "{in_use}");
    std::fs::remove_file(&path).expect("the socket");
    let second = serve(&new).expect("a free path");
    drop(first);
    let (grant, _link) = map::connect(&path, Timeouts::default()).expect("a session");
    assert_eq!(grant.brick, new.id());
    drop(second);
    assert!(!path.exists(), "its own socket is removed");
}

fn spawn_mapping_process(pool: &Path) -> Child {
    const SCRIPT: &str = "import mmap, sys, time
pool = open(sys.argv[1], 'r+b')
there = mmap.mmap(pool.fileno(), 0)
print('mapped', flush=True)
time.sleep(600)";
    let mut command = Command::new("python3");
    command
        .args(["-c", SCRIPT])
        .arg(pool)
        .stdout(Stdio::piped());
    let mut child = command.spawn().expect("a process");
    let said = child.stdout.take().expect("its output");
    let mut line = String::new();
    BufReader::new(said).read_line(&mut line).expect("a line");
    assert_eq!(line, "mapped\n");
    child
}

/// A process that is killed when this is dropped.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Fails only if the process has ended.
        let _ = self.0.kill();
        self.0.wait().expect("our own child");
    }
}

impl KilledOnDrop {
    fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("our own child").is_none()
    }
}

/// An idle process, and its start time.
fn idle_process(maps: Option<&Path>) -> (KilledOnDrop, u64) {
    let child = KilledOnDrop(match maps {
        None => Command::new("sleep").arg("600").spawn().expect("a process"),
        Some(pool) => spawn_mapping_process(pool),
    });
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.0.id())).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    let started = fields.split_ascii_whitespace().nth(22 - 3);
    (
        child,
        started.expect("22 fields").parse().expect("a number"),
    )
}

/// The word of the control segment that is odd while a session is in an operation, see
/// docs/formats.md.
fn operation_word(brick: &Brick, number: u32) -> &AtomicU64 {
    let shared = brick.mapping().control().shared();
    shared.word(69632 + number as usize * (64 << 10))
}

/// Ends the session of a running process; returns whether the process survives.
fn survives_session_end(is_inside: bool, maps: bool) -> bool {
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    let pool = home.path();
    let (mut child, started) = idle_process(maps.then_some(pool.as_path()));
    let number = brick
        .open_session(child.0.id(), started)
        .expect("a session");
    operation_word(&brick, number).fetch_add(u64::from(is_inside), Ordering::SeqCst);
    brick.close_session(number);
    assert_eq!(brick.status().expect("a status").sessions, 0);
    child.is_running()
}

#[test]
fn session_end_kills_process_inside_operation() {
    assert!(survives_session_end(false, true));
    assert!(
        !survives_session_end(true, true),
        "its late stores would land"
    );
    assert!(
        survives_session_end(true, false),
        "it runs another program by now"
    );
}

/// Each session enters and leaves operations, for longer than the brick waits for one, and every
/// check finds one in an operation.
#[test]
fn busy_clients_survive_a_barrier() {
    const OPERATIONS: u32 = 12;
    const OVERLAP: Duration = Duration::from_millis(40);
    let home = PoolDir::new("/dev/shm");
    let (brick, _keeper) = home.open();
    brick.create(SLICE, SIZE).expect("room");
    let mut worker = worker(&brick, 1);
    let clients = [(); 2].map(|()| {
        let (child, started) = idle_process(Some(&home.path()));
        let number = brick
            .open_session(child.0.id(), started)
            .expect("a session");
        (child, operation_word(&brick, number))
    });
    let [(mut one, first), (mut other, second)] = clients;
    std::thread::scope(|scope| {
        let step = |word: &AtomicU64| word.fetch_add(1, Ordering::SeqCst);
        step(first);
        let busy = scope.spawn(move || {
            for _ in 0..OPERATIONS {
                std::thread::sleep(OVERLAP);
                step(second);
                std::thread::sleep(OVERLAP);
                step(first);
                std::thread::sleep(OVERLAP);
                step(first);
                std::thread::sleep(OVERLAP);
                step(second);
            }
            step(first);
        });
        let raise = SliceRequest::RaiseEpoch {
            epoch: Epoch(2),
            lost_since: Epoch(0),
        };
        check(&mut worker, raise, Ok(SliceReply::Done));
        busy.join().expect("no panic");
    });
    assert!(one.is_running() && other.is_running());
}
