//! Reads of snapshots from mapped memory: what the owner is asked, and that no read returns another page's bytes.

use crate::world::{BrickHost, MIB, OwnerConnection, PAGE, slice};
use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::{
    BrickControl, Leg, SliceCompletion, SliceError, SliceReply, SliceRequest, Stamp,
};
use pagemesh_brick::brick::Brick;
use pagemesh_store::session::Session;
use pagemesh_volume::MappedLeg;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const PAGES: u64 = 2048;

/// Counts the reads that reach the owner.
struct CountedOwner {
    owner: OwnerConnection,
    reads: Arc<AtomicUsize>,
}

impl Leg for CountedOwner {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        let is_read = matches!(request, SliceRequest::ReadVersion { .. });
        self.reads
            .fetch_add(usize::from(is_read), Ordering::Relaxed);
        self.owner.submit(tag, request);
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        self.owner.reap(into);
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        self.owner.poll_closed()
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.owner.poll_fds(into);
    }

    fn deadline(&self) -> Option<Instant> {
        self.owner.deadline()
    }
}

struct SnapshotReader {
    leg: MappedLeg,
    owner_reads: Arc<AtomicUsize>,
    _theirs: UnixStream,
}

impl SnapshotReader {
    fn new(brick: &Arc<Brick>) -> SnapshotReader {
        let (object, _) = brick.attach(slice(0), Epoch(1)).expect("attached");
        let handle = brick.mapping().handle(object, slice(0)).expect("a handle");
        let number = brick.open_session(1, 1).expect("a session");
        let session = Session::new(brick.mapping().clone(), number);
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let owner = OwnerConnection {
            brick: Arc::clone(brick),
            slice: slice(0),
            session: number,
            done: vec![],
            lifeline: ours.try_clone().expect("a descriptor").into(),
        };
        let owner_reads = Arc::new(AtomicUsize::new(0));
        let owner = CountedOwner {
            owner,
            reads: Arc::clone(&owner_reads),
        };
        let leg = MappedLeg::new(session, handle, Epoch(1), Box::new(owner), ours.into());
        SnapshotReader {
            leg: leg.expect("a watcher"),
            owner_reads,
            _theirs: theirs,
        }
    }

    fn execute(&mut self, request: SliceRequest) -> Result<SliceReply, SliceError> {
        self.leg.submit(5, request);
        let mut done = vec![];
        self.leg.reap(&mut done);
        let [answer] = <[_; 1]>::try_from(done).expect("one answer, and none of a question");
        assert_eq!(answer.tag, 5);
        answer.result
    }

    fn write(&mut self, page: u64, (epoch, op): (u32, u64), byte: u8) {
        let request = SliceRequest::Write {
            offset: page * PAGE,
            data: Bytes::from(vec![byte; PAGE as usize]),
            stamp: Stamp {
                epoch: Epoch(epoch),
                op,
                open_ops: 0,
            },
        };
        assert_eq!(self.execute(request), Ok(SliceReply::Done));
    }

    fn prepare(&mut self, snapshot: u32) {
        let snapshot = Epoch(snapshot);
        let prepared = self.execute(SliceRequest::PrepareSnapshot { snapshot });
        assert_eq!(prepared, Ok(SliceReply::Done));
    }

    fn read(&mut self, snapshot: u32, offset: u64, len: u32) -> Result<Vec<u8>, SliceError> {
        let snapshot = Epoch(snapshot);
        let request = SliceRequest::ReadVersion {
            snapshot,
            offset,
            len,
        };
        match self.execute(request)? {
            SliceReply::Data(data) => Ok(data),
            other => panic!("{other:?}"),
        }
    }

    fn owner_reads(&self) -> usize {
        self.owner_reads.load(Ordering::Relaxed)
    }
}

fn host() -> (BrickHost, Arc<Brick>) {
    let host = BrickHost::new(0, 64 * MIB, PAGES * PAGE);
    let brick = host.with_running(|running| Arc::clone(&running.brick));
    (host, brick)
}

#[test]
fn owner_is_asked_once_for_each_leaf() {
    let (_host, brick) = host();
    let mut reader = SnapshotReader::new(&brick);
    reader.write(1, (1, 1), 7);
    reader.write(513, (1, 2), 8);
    reader.prepare(2);
    reader.write(1, (2, 3), 9);
    for _ in 0..3 {
        assert_eq!(reader.read(2, PAGE, 4096), Ok(vec![7; 4096]));
        assert_eq!(reader.read(2, 2 * PAGE, 512), Ok(vec![0; 512]));
        assert_eq!(reader.owner_reads(), 1);
    }
    // Parts of pages, of two leaves, of which one is known.
    let parts = [vec![0; 100], vec![8; 50]].concat();
    for _ in 0..3 {
        assert_eq!(reader.read(2, 513 * PAGE - 100, 150), Ok(parts.clone()));
        assert_eq!(reader.owner_reads(), 2);
    }
    let beyond = reader.read(2, PAGES * PAGE - 100, 200);
    assert!(
        matches!(beyond, Err(SliceError::OutOfRange(_))),
        "{beyond:?}"
    );
}

#[test]
fn dropped_snapshot_is_not_read_from_memory() {
    let (_host, brick) = host();
    let mut reader = SnapshotReader::new(&brick);
    reader.write(1, (1, 1), 7);
    for snapshot in [2, 3] {
        reader.prepare(snapshot);
        reader.write(1, (snapshot, u64::from(snapshot)), snapshot as u8);
    }
    for _ in 0..2 {
        assert_eq!(reader.read(2, PAGE, 4096), Ok(vec![7; 4096]));
        assert_eq!(reader.read(3, PAGE, 4096), Ok(vec![2; 4096]));
    }
    brick
        .drop_snapshots(slice(0), &[Epoch(2)])
        .expect("dropped");
    let gone = reader.read(2, PAGE, 4096);
    assert!(matches!(gone, Err(SliceError::Refused(_))), "{gone:?}");
    assert_eq!(reader.read(3, PAGE, 4096), Ok(vec![2; 4096]));
}

/// Other snapshots come and go, and their frames get other pages, while one snapshot is read.
#[test]
fn kept_snapshot_reads_the_same_while_frames_are_reused() {
    const KEPT: u32 = 2;
    const READS: u64 = 20_000;
    let (_host, brick) = host();
    let mut writer = SnapshotReader::new(&brick);
    let byte_of = |page: u64| (page % 251 + 1) as u8;
    let mut op = 0;
    for page in 0..PAGES / 2 {
        op += 1;
        writer.write(page, (1, op), byte_of(page));
    }
    writer.prepare(KEPT);
    let from_memory = std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let mut reader = SnapshotReader::new(&brick);
            let mut random = SplitMix64::new(3);
            let mut from_memory = 0;
            for _ in 0..READS {
                let page = random.next_u64() % PAGES;
                let expected = match page < PAGES / 2 {
                    true => byte_of(page),
                    false => 0,
                };
                let before = reader.owner_reads();
                let found = reader.read(KEPT, page * PAGE, 4096).expect("kept");
                assert!(found == vec![expected; 4096], "page {page}");
                from_memory += u64::from(reader.owner_reads() == before);
            }
            from_memory
        });
        let mut random = SplitMix64::new(4);
        let mut epoch = KEPT;
        while !reading.is_finished() {
            epoch += 1;
            for _ in 0..50 {
                op += 1;
                writer.write(random.next_u64() % PAGES, (epoch - 1, op), 255);
            }
            writer.prepare(epoch);
            if epoch > KEPT + 3 {
                let oldest = Epoch(epoch - 3);
                brick.drop_snapshots(slice(0), &[oldest]).expect("dropped");
            }
        }
        reading.join().expect("sound")
    });
    assert!(from_memory > 0, "all reads went to the owner");
}
