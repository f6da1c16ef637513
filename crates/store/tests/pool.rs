//! A pool against a model: sessions write, read and clear, the owner maintains the pool, and the
//! pool is closed or crashes and is opened again.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MappedMedia, Media, Recorder};
use pagemesh_store::pool::{ObjectError, Pool, format};
use pagemesh_store::pool_mapping::{Handle, StoreError};
use pagemesh_store::session::{LegSession, Session, clear, write};
use proptest::prelude::*;
use std::sync::Arc;
use uuid::Uuid;

const POOL_BYTES: usize = 4 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(77));
const SIZE: u64 = 1 << 20;

fn stamp(op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(1),
        op,
        open_ops: 0,
    }
}

fn recorder() -> Arc<Recorder> {
    let media = Arc::new(Recorder::new(POOL_BYTES));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    media
}

fn open<M: Media>(media: &Arc<M>) -> Pool<M> {
    Pool::open(media.clone(), media.clone())
        .expect("a sound pool")
        .0
}

fn session<M: Media>(pool: &mut Pool<M>) -> Session<M> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

fn write_bytes<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    offset: u64,
    data: &[u8],
    op: u64,
) -> Result<(), StoreError> {
    write(
        &mut [LegSession { session, handle }],
        offset,
        data,
        stamp(op),
    )
    .map_err(|f| f.cause)
}

fn clear_bytes<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    offset: u64,
    len: u64,
    op: u64,
) -> Result<(), StoreError> {
    clear(
        &mut [LegSession { session, handle }],
        offset,
        len,
        stamp(op),
    )
    .map_err(|f| f.cause)
}

fn contents<M: Media>(session: &mut Session<M>, handle: Handle) -> Vec<u8> {
    let mut found = vec![0xee; SIZE as usize];
    session
        .read(&handle, 0, &mut found, Epoch(1))
        .expect("a sound object");
    found
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        session: bool,
        offset: u64,
        len: usize,
        byte: u8,
    },
    Clear {
        session: bool,
        offset: u64,
        len: u64,
    },
    Maintain,
    Reopen {
        cleanly: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let range = (0..SIZE, 1u64..100_000).prop_map(|(offset, len)| (offset, len.min(SIZE - offset)));
    let aligned = (0..SIZE / 4096, 1u64..40)
        .prop_map(|(page, count)| (page * 4096, (count * 4096).min(SIZE - page * 4096)));
    let range = prop_oneof![range, aligned];
    let step = prop_oneof![
        8 => (any::<bool>(), range.clone(), any::<u8>()).prop_map(|(session, (offset, len), byte)| {
            Step::Write { session, offset, len: len as usize, byte }
        }),
        3 => (any::<bool>(), range).prop_map(|(session, (offset, len))| Step::Clear { session, offset, len }),
        2 => Just(Step::Maintain),
        1 => any::<bool>().prop_map(|cleanly| Step::Reopen { cleanly }),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn slice_behaves_like_byte_array(steps in steps()) {
        let media = recorder();
        let mut pool = open(&media);
        pool.create(SLICE, SIZE).expect("an object");
        let mut model = vec![0u8; SIZE as usize];
        let mut sessions = [session(&mut pool), session(&mut pool)];
        let mut handle = pool.handle(SLICE).expect("the object");
        for (op, step) in (1..).zip(steps) {
            pool.maintain().expect("a sound pool");
            match step {
                Step::Write { session, offset, len, byte } => {
                    let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add(i as u8)).collect();
                    write_bytes(&mut sessions[usize::from(session)], handle, offset, &data, op).expect("a write");
                    model[offset as usize..][..len].copy_from_slice(&data);
                }
                Step::Clear { session, offset, len } => {
                    clear_bytes(&mut sessions[usize::from(session)], handle, offset, len, op).expect("a clear");
                    model[offset as usize..][..len as usize].fill(0);
                }
                Step::Maintain => drop(pool.maintain().expect("a sound pool")),
                Step::Reopen { cleanly } => {
                    let old = pool;
                    if cleanly { old.close().expect("a sound pool") } else { drop(old) }
                    pool = open(&media);
                    handle = pool.handle(SLICE).expect("the object");
                    sessions = [session(&mut pool), session(&mut pool)];
                }
            }
            prop_assert!(contents(&mut sessions[0], handle) == model, "op {}", op);
        }
        // Everything is deleted: all frames must be free again.
        for number in [1, 2] {
            pool.close_session(number).expect("a sound pool");
        }
        pool.delete(SLICE).expect("the object");
        while pool.maintain().expect("a sound pool") {}
        pool.checkpoint().expect("a sound pool");
        while pool.maintain().expect("a sound pool") {}
        pool.checkpoint().expect("a sound pool");
        let usage = pool.usage();
        prop_assert_eq!(usage.free_bytes, usage.capacity_bytes);
    }
}

#[test]
fn full_pool_refuses_writes_and_still_deletes() {
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, 64 << 20).expect("thin");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    let pool = std::sync::Mutex::new(pool);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let view = pool.lock().expect("no panic").mapping().clone();
            let is_ending = || stop.load(std::sync::atomic::Ordering::Acquire);
            view.control().serve_doorbell(is_ending, || {
                let maintained = pool.lock().expect("no panic").maintain();
                maintained.expect("a sound pool");
                None
            });
        });
        let mut written = 0;
        let error = loop {
            match write_bytes(
                &mut one,
                handle,
                written * 4096,
                &[7; PAGE_BYTES],
                written + 1,
            ) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error, StoreError::NoSpace);
        assert!(
            written * 4096 > (POOL_BYTES as u64) * 7 / 10,
            "{written} pages"
        );
        clear_bytes(&mut one, handle, 0, 10 * 4096, written + 2).expect("a full pool discards");
        write_bytes(&mut one, handle, 0, &[8; PAGE_BYTES], written + 3)
            .expect("there is room again");
        stop.store(true, std::sync::atomic::Ordering::Release);
        pool.lock()
            .expect("no panic")
            .mapping()
            .control()
            .ring_doorbell();
    });
    let mut pool = pool.into_inner().expect("no panic");
    pool.delete(SLICE).expect("a full pool deletes");
    for _ in 0..100 {
        pool.maintain().expect("a sound pool");
    }
    assert!(pool.usage().free_bytes > (POOL_BYTES as u64) * 7 / 10);
}

#[test]
fn old_epoch_is_refused_and_in_flight_is_listed() {
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    write_bytes(&mut one, handle, 0, &[1; PAGE_BYTES], 5).expect("a write");
    let late = Stamp {
        epoch: Epoch(1),
        op: 6,
        open_ops: 1,
    };
    write(
        &mut [LegSession {
            session: &mut one,
            handle,
        }],
        8192,
        &[1; 2 * PAGE_BYTES],
        late,
    )
    .expect("a write");
    pool.raise_epoch(SLICE, Epoch(2)).expect("a barrier");
    let error = write_bytes(&mut one, handle, 0, &[2; PAGE_BYTES], 7).expect_err("fenced");
    assert_eq!(error, StoreError::StaleEpoch { current: Epoch(2) });
    let mut found = pool.in_flight(SLICE).expect("the object").expect("few");
    found.sort_by_key(|entry| entry.op);
    let reported: Vec<_> = found.iter().map(|e| (e.page, e.count, e.op)).collect();
    assert_eq!(reported, [(PageNo(0), 1, 5), (PageNo(2), 2, 6)]);
    // The barrier marks no page.
    let births = one.births(&handle, PageNo(0), 4, Epoch(2));
    assert_eq!(births, Ok([1, 0, 1, 1].map(Epoch).to_vec()));
    assert!(matches!(
        pool.raise_epoch(SLICE, Epoch(1)),
        Err(ObjectError::StaleEpoch { .. })
    ));
    // The in-flight list survives a crash, and ends when it is resolved.
    drop(pool);
    let mut pool = open(&media);
    assert_eq!(
        pool.in_flight(SLICE)
            .expect("the object")
            .expect("few")
            .len(),
        2
    );
    pool.clear_in_flight(SLICE).expect("the object");
    drop(pool);
    let pool = open(&media);
    assert_eq!(pool.in_flight(SLICE).expect("the object"), Some(vec![]));
}

/// A new object takes over the table entry of a deleted one. Late records of the deleted object's
/// operations must not be listed for the new object.
#[test]
fn in_flight_of_deleted_object_is_not_inherited() {
    const KEPT: SliceId = SliceId(Uuid::from_u128(76));
    const OTHER: SliceId = SliceId(Uuid::from_u128(77));
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    write_bytes(&mut one, handle, 3 * PAGE_BYTES as u64, &[1; PAGE_BYTES], 5).expect("a write");
    pool.delete(SLICE).expect("the object");
    while pool.maintain().expect("sound") {}
    // Checkpoints pass the deletion, so its table entry can be reused.
    pool.create(KEPT, SIZE).expect("an object");
    let kept = pool.handle(KEPT).expect("the object");
    let mut two = session(&mut pool);
    for op in 1..2000 {
        write_bytes(&mut two, kept, 0, &[1; PAGE_BYTES], op).expect("a write");
        while pool.maintain().expect("sound") {}
    }
    pool.create(OTHER, PAGE_BYTES as u64).expect("an object");
    let other = pool.handle(OTHER).expect("the object");
    assert_eq!(other.object(), handle.object(), "its place in the table");
    drop(one);
    pool.close_session(1).expect("a session");
    for _ in 0..2 {
        pool.raise_epoch(OTHER, Epoch(2))
            .expect("no page is missing");
        let reported = pool.in_flight(OTHER).expect("the object").expect("few");
        assert!(
            reported.iter().all(|it| it.page == PageNo(0)),
            "{reported:?}"
        );
        drop(pool);
        pool = open(&media);
    }
}

#[test]
fn completed_operation_is_no_longer_in_flight() {
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    let ops = |pool: &Pool<Recorder>| {
        let found = pool.in_flight(SLICE).expect("the object").expect("few");
        found.iter().map(|entry| entry.op).collect::<Vec<_>>()
    };
    for op in 5..50 {
        write_bytes(&mut one, handle, 0, &[1; PAGE_BYTES], op).expect("a write");
        pool.raise_epoch(SLICE, Epoch(1)).expect("a barrier");
        assert_eq!(ops(&pool), [op], "the barrier removes completed operations");
    }
    // After a crash the incomplete operation is listed, and each completed one left in the table.
    let crashed = Arc::new(Recorder::from_image(media.crash_point().all_persisted()));
    let after = open(&crashed);
    assert_eq!(ops(&after), [49]);
    // A stamp without open operations clears the list, while the session lives and when it ends.
    let all = Stamp {
        epoch: Epoch(1),
        op: 50,
        open_ops: 0,
    };
    let mut members = [LegSession {
        session: &mut one,
        handle,
    }];
    clear(&mut members, 0, 0, all).expect("a change of nothing");
    assert_eq!(ops(&pool), []);
    write_bytes(&mut one, handle, 0, &[1; PAGE_BYTES], 51).expect("a write");
    pool.raise_epoch(SLICE, Epoch(1)).expect("a barrier");
    drop(one);
    pool.close_session(1).expect("a session");
    assert_eq!(
        ops(&pool),
        [51],
        "the session died with this operation open"
    );
    pool.raise_epoch(SLICE, Epoch(1)).expect("a barrier");
    assert_eq!(ops(&pool), [51], "no session completes it any more");
}

/// A leg that lost its power may lack what it acknowledged before its loss, and only the table
/// names the page. What is born after the loss, the births tell.
#[test]
fn completed_operation_is_listed_while_leg_is_behind() {
    let mut pool = open(&recorder());
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    let ops = |pool: &Pool<Recorder>| {
        let found = pool.in_flight(SLICE).expect("the object").expect("few");
        found.iter().map(|entry| entry.op).collect::<Vec<_>>()
    };
    let write_at = |one: &mut Session<Recorder>, op, epoch| {
        let stamp = Stamp {
            epoch: Epoch(epoch),
            op,
            open_ops: 0,
        };
        let mut members = [LegSession {
            session: one,
            handle,
        }];
        write(&mut members, 0, &[1; PAGE_BYTES], stamp).expect("a write");
    };
    let barrier = |pool: &mut Pool<Recorder>, epoch, lost_since| {
        pool.raise_epoch_after_loss(SLICE, Epoch(epoch), Epoch(lost_since))
            .expect("a barrier");
    };
    write_at(&mut one, 5, 1);
    barrier(&mut pool, 2, 2);
    for op in 6..50 {
        write_at(&mut one, op, 2);
        barrier(&mut pool, 2, 2);
        assert_eq!(ops(&pool), [5, op], "the table does not fill up");
    }
    let refused = pool.raise_epoch(SLICE, Epoch(1));
    assert!(matches!(refused, Err(ObjectError::StaleEpoch { .. })));
    assert_eq!(ops(&pool), [5, 49], "an older client changes nothing");
    barrier(&mut pool, 3, 0);
    assert_eq!(ops(&pool), [49], "no leg is behind");
}

#[test]
fn damage_is_found_and_never_read() {
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    write_bytes(&mut one, handle, 4096, &[0x5a; PAGE_BYTES], 1).expect("a write");
    let frames = pool.mapping().geometry().first_frames();
    let hit = frames
        .map(|frame| frame as usize * PAGE_BYTES)
        .find(|&at| media.load(at) == 0x5a5a_5a5a_5a5a_5a5a)
        .expect("the frame");
    media.store(hit + 800, 1);
    let error = one
        .read(&handle, 0, &mut [0; 8192], Epoch(1))
        .expect_err("damage");
    assert_eq!(error, StoreError::Damaged { offset: 4096 });
    write_bytes(&mut one, handle, 4096, &[1; PAGE_BYTES], 2)
        .expect("a write of the whole page repairs it");
    one.read(&handle, 0, &mut [0; 8192], Epoch(1))
        .expect("repaired");
}

/// The position of a page full of this byte.
fn frame_of(media: &Recorder, pool: &Pool<Recorder>, byte: u8) -> usize {
    let frames = pool.mapping().geometry().first_frames();
    let mut frames = frames.map(|frame| frame as usize * PAGE_BYTES);
    let word = u64::from_le_bytes([byte; 8]);
    let found = frames.find(|&at| media.load(at) == word);
    found.expect("the frame")
}

/// Counts the frames that are marked as used.
fn used_frame_count(media: &Recorder, pool: &Pool<Recorder>) -> u32 {
    let bitmap = pool.mapping().geometry().bitmap;
    let words = (bitmap.start..bitmap.start + bitmap.len).step_by(8);
    // The last word of a line holds its checksum.
    let words = words.filter(|at| at % 64 != 56);
    words.map(|at| media.load(at as usize).count_ones()).sum()
}

/// Regression test. The medium lost the page of the last record of a journal. Recovery took that
/// record for an incomplete one although a record of another journal followed it, and then counted
/// the frames wrongly. (Found with seeds 90, 602 and 606 of an earlier cluster simulation.)
#[test]
fn superseded_record_counts_as_committed() {
    let media = recorder();
    let mut pool = open(&media);
    pool.create(SLICE, SIZE).expect("an object");
    let handle = pool.handle(SLICE).expect("the object");
    write_bytes(&mut session(&mut pool), handle, 4096, &[1; PAGE_BYTES], 1).expect("a write");
    let mut pool = open(&media);
    let handle = pool.handle(SLICE).expect("the object");
    let in_use = used_frame_count(&media, &pool);
    let (mut one, mut two) = (session(&mut pool), session(&mut pool));
    write_bytes(&mut one, handle, 4096, &[0x5a; PAGE_BYTES], 2).expect("a write");
    let lost = frame_of(&media, &pool, 0x5a);
    write_bytes(&mut two, handle, 4096, &[3; PAGE_BYTES], 3).expect("a write");
    media.store(lost + 800, 1);
    // The process ends without closing the pool or its sessions.
    let left = Arc::new(media.fork());
    drop((one, two, pool));
    let mut pool = open(&left);
    assert_eq!(used_frame_count(&left, &pool), in_use);
    let handle = pool.handle(SLICE).expect("the object");
    let mut one = session(&mut pool);
    assert_eq!(contents(&mut one, handle)[4096..8192], [3; PAGE_BYTES]);
    write_bytes(&mut one, handle, 4096, &[4; PAGE_BYTES], 4).expect("a write");
    pool.checkpoint().expect("a sound pool");
}

#[test]
fn mapped_file_and_file_sync_pools_survive_reopening() {
    for directory in ["/dev/shm", "/var/tmp"] {
        let file = tempfile::tempfile_in(directory).expect("a file");
        file.set_len(POOL_BYTES as u64).expect("a size");
        let media = Arc::new(MappedMedia::new(file, POOL_BYTES).expect("a mapping"));
        format(&*media, Uuid::from_u128(3)).expect("a pool");
        let data: Vec<u8> = (0..SIZE).map(|i| (i / 999) as u8).collect();
        for round in 0..3u64 {
            let overlay = match directory {
                "/dev/shm" => media.clone(),
                _ => Arc::new(media.overlay().expect("an overlay")),
            };
            let (mut pool, _) = Pool::open(media.clone(), overlay).expect("a sound pool");
            if round == 0 {
                pool.create(SLICE, SIZE).expect("an object");
            }
            let handle = pool.handle(SLICE).expect("the object");
            let mut one = session(&mut pool);
            if round > 0 {
                assert!(
                    contents(&mut one, handle) == data,
                    "{directory}, round {round}"
                );
            }
            for (i, chunk) in data.chunks(70_000).enumerate() {
                let op = round * 100 + i as u64 + 1;
                write_bytes(&mut one, handle, i as u64 * 70_000, chunk, op).expect("a write");
                pool.maintain().expect("a sound pool");
            }
            pool.flush().expect("a sound medium");
            assert!(
                contents(&mut one, handle) == data,
                "{directory}, round {round}"
            );
        }
    }
}
