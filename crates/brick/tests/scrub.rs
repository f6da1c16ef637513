//! When a brick scrubs its pool, and its reports.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, SliceReply, SliceRequest, Stamp};
use pagemesh_brick::brick::{Brick, OpenedBrick, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file;
use pagemesh_brick::scrub::{SCRUB_DELAY, SCRUB_PAUSE, ScrubState};
use pagemesh_brick::worker::Worker;
use pagemesh_pmem::{Durability, Media, Recorder};
use pagemesh_store::pool::{Pool, format};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A brick without threads: the test is the maintenance thread and its clock.
fn brick() -> Brick<Recorder> {
    let media = Arc::new(Recorder::new(4 << 20));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (pool, _) = Pool::open(media.clone(), media).expect("a sound pool");
    let brick = Brick::new(pool, Durability::Process);
    brick
        .create(SliceId(Uuid::from_u128(5)), 1 << 20)
        .expect("a slice");
    brick
}

/// Does the due steps until the pass has ended; returns their number and the end time.
fn pass(brick: &Brick<Recorder>, mut now: Instant) -> (u32, Instant) {
    let before = brick.scrub_status(now).passes;
    let mut percent = 0;
    for steps in 1..100 {
        let wait = brick.scrub_if_due(now);
        let status = brick.scrub_status(now);
        if status.passes > before {
            assert_eq!(status.percent, None);
            assert!(percent > 50, "{percent} % before the end");
            return (steps, now);
        }
        assert_eq!(status.state, ScrubState::Running);
        assert_eq!(wait, Some(SCRUB_PAUSE), "a pause between two steps");
        let done = status.percent.expect("one is under way");
        assert!((percent..100).contains(&done), "{percent} %, then {done} %");
        percent = done;
        let early = now + SCRUB_PAUSE / 2;
        assert_eq!(brick.scrub_if_due(early), Some(SCRUB_PAUSE / 2));
        assert_eq!(
            brick.scrub_status(early).pass,
            status.pass,
            "no step before its time"
        );
        now += SCRUB_PAUSE;
    }
    panic!("a pass does not end");
}

#[test]
fn scrubs_keep_their_schedule() {
    let brick = brick();
    let start = Instant::now();
    assert_eq!(brick.scrub_if_due(start), None, "none is planned");
    assert_eq!(brick.scrub_status(start).state, ScrubState::Off);
    brick.plan_scrubs(Some(DAY), start);
    assert_eq!(brick.scrub_if_due(start), Some(SCRUB_DELAY));
    assert_eq!(brick.scrub_status(start).state, ScrubState::Waiting);
    let (steps, now) = pass(&brick, start + SCRUB_DELAY);
    assert!(steps > 3, "{steps}");
    let status = brick.scrub_status(now);
    assert_eq!(status.next_in, Some(DAY));
    let (found, ago) = status.last.expect("one ended");
    assert_eq!((found.corrected(), found.damaged), (0, 0));
    assert!(found.checked > 0 && ago.is_zero());
    assert_eq!(brick.scrub_if_due(now + DAY / 2), Some(DAY / 2));
    let (_, now) = pass(&brick, now + DAY);
    brick.plan_scrubs(None, now);
    assert_eq!(brick.scrub_if_due(now + DAY * 100), None);
    // On request all the same; and stopped before its end.
    brick.start_scrub(now);
    assert_eq!(brick.scrub_if_due(now), Some(SCRUB_PAUSE));
    brick.stop_scrub(now);
    let status = brick.scrub_status(now);
    assert_eq!((status.state, status.passes), (ScrubState::Off, 2));
    brick.start_scrub(now);
    let (again, now) = pass(&brick, now);
    assert_eq!(again, steps, "from its begin");
    assert_eq!(brick.scrub_status(now).passes, 3);
}

#[test]
fn scrub_corrects_served_pool() {
    for parent in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        let directory = tempfile::tempdir_in(parent).expect("a directory");
        let path = directory.path().join("pool");
        file::create(&path, 16 << 20).expect("a pool");
        match OpenedPool::open(&path, OpenOptions::default()).expect("a brick") {
            OpenedPool::Mapped(opened) => check_scrub(&path, opened),
            OpenedPool::Disk(opened) => check_scrub(&path, opened),
            OpenedPool::Tiered(opened) => check_scrub(&path, opened),
        }
        let recovered = match OpenedPool::open(&path, OpenOptions::default()).expect("a brick") {
            OpenedPool::Mapped((_brick, _maintenance, recovered)) => recovered,
            OpenedPool::Disk((_brick, _maintenance, recovered)) => recovered,
            OpenedPool::Tiered((_brick, _maintenance, recovered)) => recovered,
        };
        assert!(!recovered.is_damaged(), "{recovered:?}");
    }
}

/// Frames of a line of the bitmap.
const LINE_FRAMES: u64 = 448;

/// Uses frames of the first line of the bitmap with frames, and of the next one. A scrub reads used lines only.
fn write_two_lines_of_frames<M: Media + Send + Sync + 'static>(brick: &Arc<Brick<M>>) {
    let slice = SliceId(Uuid::from_u128(5));
    brick.create(slice, 4 << 20).expect("a slice");
    let mut worker = Worker::open(brick, std::process::id(), 0).expect("a session");
    let (number, _) = worker.attach(slice, Epoch(1)).expect("the slice");
    for part in 0..4 {
        let write = SliceRequest::Write {
            offset: part << 20,
            data: vec![7; 1 << 20].into(),
            stamp: Stamp {
                epoch: Epoch(1),
                op: part + 1,
                open_ops: 0,
            },
        };
        let written = worker.execute(number, write);
        assert_eq!(written, Ok(SliceReply::Done));
    }
    // The end of the session is a checkpoint, which marks the frames.
    drop(worker);
    while brick.maintain() {}
}

fn check_scrub<M: Media + Send + Sync + 'static>(path: &Path, (brick, keeper, _): OpenedBrick<M>) {
    write_two_lines_of_frames(&brick);
    // A checkpoint would rewrite a superblock, too.
    assert!(!brick.maintain());
    let geometry = brick.mapping().geometry();
    let first_line = geometry.first_frames().start / LINE_FRAMES;
    let bitmap = geometry.bitmap.start + first_line * 64;
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("the pool");
    // Damage of both superblocks would be too much.
    let bytes = [4096 + 40, bitmap + 9, bitmap + 64 + 56];
    for at in bytes {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 16], at)
            .expect("a flipped bit");
    }
    brick.start_scrub(Instant::now());
    let end = Instant::now() + Duration::from_secs(30);
    let found = loop {
        if let Some((found, _)) = brick.scrub_status(Instant::now()).last {
            break found;
        }
        assert!(Instant::now() < end, "no scrub has run");
        std::thread::yield_now();
    };
    assert_eq!((found.superblocks, found.bitmap_lines), (1, 2), "{found:?}");
    assert_eq!((found.corrected(), found.damaged), (3, 0), "{found:?}");
    keeper.stop();
}
