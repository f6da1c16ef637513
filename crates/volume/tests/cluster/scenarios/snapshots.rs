//! Cuts of snapshots: all legs see the same, writers go on, and a cut that may not be sound fails.

use crate::world::cluster::{PAGE, TestCluster, write};
use crate::world::manager::{brick, segment};
use crate::world::oracle::value_of;
use pagemesh_base::authority::ResolvedLayout;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::SliceError;
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::wait::until_readable;
use pagemesh_volume::direct_access::{DirectSegment, FileRange, TornOp};
use pagemesh_volume::limits::{CUT_LIMIT, MANAGER_RETRY_MAX};
use pagemesh_volume::test_api::ControllerEvent;
use pagemesh_volume::{Authority, CopyReport, CutError, SnapshotSpace};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};
use uuid::Uuid;

type CutResult = Result<(), CutError>;

fn start_cut(world: &TestCluster, snapshot: Epoch) -> Receiver<CutResult> {
    let (answer, result) = mpsc::channel();
    let cut = ControllerEvent::Cut(snapshot, answer);
    world.client.mailbox.post(cut);
    result
}

#[track_caller]
fn cut(world: &mut TestCluster) -> Epoch {
    let snapshot = world.manager.reserve_epoch();
    let result = start_cut(world, snapshot);
    world.run_until_idle();
    assert_eq!(result.try_recv(), Ok(Ok(())));
    snapshot
}

#[track_caller]
fn assert_pending(result: &Receiver<CutResult>) {
    assert_eq!(result.try_recv(), Err(TryRecvError::Empty));
}

/// The value of the first sector of each page, as the snapshot sees it on each in-sync leg of the
/// first column, after a comparison of the legs.
#[track_caller]
pub(super) fn snapshot_values(world: &TestCluster, snapshot: Epoch) -> Vec<u64> {
    let layout = world.manager.layout();
    let legs = layout.segments[0].columns[0].legs.iter();
    let in_sync = legs.filter(|leg| leg.state == LegState::InSync);
    let bricks = poison::lock(&world.fabric.0);
    let slices = in_sync.map(|leg| bricks.slice(leg.brick, leg.slice));
    let mut seen: Option<Vec<_>> = None;
    for slice in slices.filter(|slice| slice.has_snapshot(snapshot)) {
        let pages = slice.snapshot_pages(snapshot);
        let first = seen.get_or_insert_with(|| pages.clone());
        assert!(*first == pages, "legs differ in snapshot {snapshot}");
    }
    let value = |bytes: &[u8; 4096]| value_of(&bytes[..512]).expect("not torn");
    let pages = seen.expect("a leg with the snapshot");
    pages
        .iter()
        .map(|it| it.as_deref().map_or(0, value))
        .collect()
}

#[test]
fn snapshot_holds_earlier_changes_only() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 3 * PAGE, 1);
    let first = cut(&mut world);
    world.write(PAGE, PAGE, 2);
    world.write(2 * PAGE + 512, 512, 3);
    world.discard(0, PAGE);
    let second = cut(&mut world);
    world.write(0, 4 * PAGE, 4);
    assert_eq!(snapshot_values(&world, first)[..4], [1, 1, 1, 0]);
    assert_eq!(snapshot_values(&world, second)[..4], [0, 2, 1, 0]);
    world.assert_holds(0, 4 * PAGE, 4);
}

/// Random writes of several channels while snapshots are cut, one message at a time.
fn cut_under_load(seed: u64, loses_legs: bool) -> u32 {
    const PAGES: u64 = 6;
    let mut world = TestCluster::mirror(2);
    let mut rng = SplitMix64::new(seed);
    world.open();
    let (mut value, mut cuts, mut is_up) = (0, vec![], true);
    // By page: the values that were complete, or begun, at some time.
    let mut pending: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut complete = [0; PAGES as usize];
    let mut running: Option<(Epoch, [u64; PAGES as usize], Receiver<CutResult>)> = None;
    for _ in 0..600 {
        match rng.below(12) {
            0..=2 if pending.len() < 6 => {
                let page = rng.below(PAGES);
                value += 1;
                let channel = rng.below(2) as usize;
                let token = world.submit(channel, write(page * PAGE, PAGE, value));
                pending.insert(token, (page, value));
            }
            3 if running.is_none() => {
                let snapshot = world.manager.reserve_epoch();
                running = Some((snapshot, complete, start_cut(&world, snapshot)));
            }
            4 if loses_legs && rng.one_in(8) => {
                match is_up {
                    true => world.kill(1),
                    false => world.restart(1),
                }
                is_up = !is_up;
            }
            5 => {
                world.client.now += Duration::from_millis(5);
                world.client.poll();
                world.client.run_call();
            }
            6 => {
                world.reap();
            }
            _ => world.run_steps(1),
        }
        for (token, result) in std::mem::take(&mut world.results) {
            let (page, value) = pending.remove(&token).expect("a write");
            assert_eq!(result, Ok(Reply::Done));
            complete[page as usize] = value.max(complete[page as usize]);
        }
        if let Some((snapshot, before, result)) = &running {
            match result.try_recv() {
                Ok(Ok(())) => cuts.push((*snapshot, *before, value)),
                Ok(Err(error)) => assert!(loses_legs, "{error}"),
                Err(_) => continue,
            }
            running = None;
        }
    }
    world.restart(1);
    world.advance_time(Duration::from_secs(30));
    for (snapshot, before, begun) in &cuts {
        let seen = snapshot_values(&world, *snapshot);
        for (page, seen) in seen[..PAGES as usize].iter().enumerate() {
            assert!(*seen <= *begun, "page {page} has {seen} of the time after");
            let is_old = *seen == 0 && before[page] != 0;
            assert!(!is_old, "page {page} lacks {}", before[page]);
        }
    }
    world.assert_legs_equal();
    cuts.len() as u32
}

#[test]
fn legs_agree_on_snapshots_under_load() {
    let cuts: u32 = (0..60).map(|seed| cut_under_load(seed, false)).sum();
    assert!(cuts > 60, "{cuts} cuts");
}

#[test]
fn legs_agree_on_snapshots_while_legs_are_lost() {
    let cuts: u32 = (0..120).map(|seed| cut_under_load(seed, true)).sum();
    assert!(cuts > 60, "{cuts} cuts");
}

/// All legs have made the write, but its channel does not know that yet.
#[test]
fn cut_waits_for_older_change() {
    let mut world = TestCluster::mirror(2);
    let token = world.submit(0, write(0, PAGE, 1));
    let snapshot = world.manager.reserve_epoch();
    let result = start_cut(&world, snapshot);
    for _ in 0..50 {
        world.run_steps(1);
    }
    assert_pending(&result);
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    world.advance_time(Duration::from_millis(10));
    assert_eq!(result.try_recv(), Ok(Ok(())));
    assert_eq!(snapshot_values(&world, snapshot)[0], 1);
}

#[test]
fn change_without_end_fails_the_cut_late() {
    let mut world = TestCluster::mirror(2);
    let token = world.submit(0, write(0, PAGE, 1));
    let result = start_cut(&world, world.manager.reserve_epoch());
    world.run_steps(50);
    world.client.now += CUT_LIMIT;
    world.run_steps(4);
    assert_eq!(result.try_recv(), Ok(Err(CutError::Late(CUT_LIMIT))));
    assert_eq!(world.result_of(token), Some(Ok(Reply::Done)));
    cut(&mut world);
}

#[test]
fn lost_leg_fails_the_cut_and_later_one_works() {
    let mut world = TestCluster::mirror(2);
    world.write(0, PAGE, 1);
    world.set_frozen(1, true);
    let result = start_cut(&world, world.manager.reserve_epoch());
    world.run_until_idle();
    assert_pending(&result);
    world.kill(1);
    world.advance_time(MANAGER_RETRY_MAX);
    let lost = result.try_recv().expect("an answer").expect_err("lost");
    assert!(
        matches!(
            lost,
            CutError::Leg {
                cause: SliceError::Lost(_),
                ..
            }
        ),
        "{lost}"
    );
    assert!(lost.is_transient());
    let snapshot = cut(&mut world);
    world.write(0, PAGE, 2);
    assert_eq!(snapshot_values(&world, snapshot)[0], 1);
}

/// The manager has made a layout of which the client does not know. Its epoch lies below the snapshot.
#[test]
fn cut_adopts_the_newest_layout_first() {
    let mut world = TestCluster::mirror(1);
    world.write(0, PAGE, 1);
    let before = world.client.shared.snapshot().1.epoch;
    world.add_copy(brick(1), SliceId(Uuid::from_u128(77)));
    let snapshot = world.manager.reserve_epoch();
    let result = start_cut(&world, snapshot);
    world.run_until_idle();
    let shared = &world.client.shared;
    assert_eq!(
        shared.newest_stamp(before),
        before,
        "the barrier refuses it"
    );
    match result.try_recv().expect("an answer") {
        Ok(()) => assert!(shared.snapshot().1.epoch > before),
        // The new copy is syncing by now, under a layout that is newer than the snapshot.
        Err(error) => assert!(error.is_transient(), "{error}"),
    }
}

#[test]
fn old_epoch_is_refused() {
    let mut world = TestCluster::mirror(2);
    let snapshot = cut(&mut world);
    let result = start_cut(&world, snapshot);
    world.run_until_idle();
    let present = snapshot;
    let old = CutError::OldEpoch { snapshot, present };
    assert_eq!(result.try_recv(), Ok(Err(old)));
}

#[test]
fn second_cut_at_once_is_refused() {
    let mut world = TestCluster::mirror(2);
    let first = start_cut(&world, world.manager.reserve_epoch());
    let second = start_cut(&world, world.manager.reserve_epoch());
    world.run_until_idle();
    assert_eq!(first.try_recv(), Ok(Ok(())));
    assert_eq!(second.try_recv(), Ok(Err(CutError::Busy)));
}

#[test]
fn cut_flushes_legs_that_buffer() {
    let column = segment(0, 1, 2, STRIPE_BYTES);
    let mut world = TestCluster::of_class(vec![column], "file-sync");
    world.write(0, PAGE, 1);
    let snapshot = cut(&mut world);
    world.write(0, PAGE, 2);
    world.kill(0);
    world.kill(1);
    world.restart(0);
    world.restart(1);
    assert_eq!(snapshot_values(&world, snapshot)[0], 1);
}

/// A volume that serves direct clients, and its segment.
pub(super) fn world_with_direct_access() -> (TestCluster, Arc<DirectSegment>) {
    let mut world = TestCluster::mirror(2);
    let shared = Arc::clone(&world.client.shared);
    let access = shared.enable_direct_access().expect("memory");
    let enabled = ControllerEvent::DirectAccessEnabled;
    world.client.mailbox.post(enabled);
    world.run_until_idle();
    let segment = Arc::clone(&access.segment);
    assert_ne!(segment.generation(), 0, "direct clients have access");
    (world, segment)
}

pub(super) fn begin_op(segment: &DirectSegment) {
    segment.row(3).begin_op(FileRange {
        file: 1,
        offset: 0,
        len: PAGE,
    });
}

#[test]
fn direct_clients_keep_their_lease_over_a_cut() {
    let (mut world, segment) = world_with_direct_access();
    let lease = || world.client.shared.direct_access.get()?.lease();
    let (before, generation) = (lease().expect("a lease"), segment.generation());
    assert_eq!(segment.stamp_epoch(before.epoch), before.epoch);
    let snapshot = cut(&mut world);
    let access = world.client.shared.direct_access.get().expect("enabled");
    assert_eq!(access.lease().as_ref(), Some(&before));
    assert_eq!(segment.generation(), generation);
    assert!(!segment.is_closed());
    assert_eq!(segment.next_stamp(before.epoch).0, snapshot);
}

#[test]
fn access_granted_after_a_cut_has_its_stamp() {
    let mut world = TestCluster::mirror(2);
    let snapshot = cut(&mut world);
    let shared = Arc::clone(&world.client.shared);
    let access = shared.enable_direct_access().expect("memory");
    let enabled = ControllerEvent::DirectAccessEnabled;
    world.client.mailbox.post(enabled);
    world.run_until_idle();
    let lease = access.lease().expect("a lease");
    assert_eq!(access.segment.stamp_epoch(lease.epoch), snapshot);
}

#[test]
fn cut_waits_for_direct_operation() {
    let (mut world, segment) = world_with_direct_access();
    begin_op(&segment);
    let result = start_cut(&world, world.manager.reserve_epoch());
    world.advance_time(Duration::from_millis(20));
    assert_pending(&result);
    segment.row(3).end_op();
    // An operation that begins after the cut does not hold it up.
    begin_op(&segment);
    world.advance_time(Duration::from_millis(20));
    assert_eq!(result.try_recv(), Ok(Ok(())));
}

#[test]
fn torn_direct_operation_fails_the_cut() {
    let (mut world, segment) = world_with_direct_access();
    begin_op(&segment);
    let result = start_cut(&world, world.manager.reserve_epoch());
    world.advance_time(Duration::from_millis(20));
    let torn = TornOp::of_row(segment.row(3)).expect("an operation");
    let (done, told) = mpsc::channel();
    let reconcile = ControllerEvent::Reconcile(3, torn, done);
    world.client.mailbox.post(reconcile);
    world.advance_time(Duration::from_millis(20));
    assert_eq!(told.try_recv(), Ok(()));
    segment.row(3).end_op();
    world.advance_time(Duration::from_millis(20));
    assert_eq!(result.try_recv(), Ok(Err(CutError::TornOperation)));
    cut(&mut world);
}

/// Sends a request to a snapshot, and waits for its result as a front does.
fn ask(world: &TestCluster, channel: &mut dyn Channel, request: Request) -> Completion {
    channel.submit(Token(9), request);
    let (mut completions, mut rng) = (vec![], SplitMix64::new(1));
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        let busy = poison::lock(&world.fabric.0).busy();
        for connection in &busy {
            poison::lock(&world.fabric.0).step(*connection, &mut rng);
        }
        channel.reap(&mut completions);
        if let Some(completion) = completions.pop() {
            return completion;
        }
        assert!(Instant::now() < limit, "no answer");
        let is_idle = poison::lock(&world.fabric.0).busy().is_empty();
        if is_idle && !poison::lock(&world.fabric.0).has_unreaped() {
            let mut fds = vec![];
            channel.poll_fds(&mut fds);
            until_readable(&fds, Some(limit)).expect("waited");
        }
    }
}

fn resolved_layout(world: &TestCluster) -> ResolvedLayout {
    let name = world.manager.layout().name;
    let attachment = world.client.shared.attachment();
    let report = CopyReport::default();
    let layout = world.manager.clone();
    Authority::layout(&layout, &name, attachment, &report).expect("a layout")
}

fn snapshot_space(world: &TestCluster, snapshot: Epoch) -> SnapshotSpace {
    let layout = resolved_layout(world);
    let connector = Arc::new(world.fabric.clone());
    SnapshotSpace::new(connector, &layout, snapshot).expect("copies")
}

#[test]
fn snapshot_space_reads_the_time_of_its_cut() {
    let mut world = TestCluster::new(vec![segment(0, 2, 2, 4 * STRIPE_BYTES)]);
    let (offset, len) = (STRIPE_BYTES - 2 * PAGE, 4 * PAGE);
    world.write(offset, len, 1);
    let snapshot = cut(&mut world);
    world.write(offset, len, 2);
    let space = snapshot_space(&world, snapshot);
    assert_eq!(space.size_bytes(), 4 * STRIPE_BYTES);
    let mut channel = space.open().expect("a channel");
    let read = Request::Read {
        offset: offset - 512,
        len: len as u32 + 1024,
    };
    let Ok(Reply::Data(data)) = ask(&world, &mut *channel, read).result else {
        panic!("no data");
    };
    let values: Vec<u64> = data
        .chunks(512)
        .map(|it| value_of(it).expect("whole"))
        .collect();
    assert_eq!((values[0], values[values.len() - 1]), (0, 0));
    assert!(
        values[1..values.len() - 1].iter().all(|it| *it == 1),
        "{values:?}"
    );
    let (offset, len) = (0, space.size_bytes());
    let listed = ask(&world, &mut *channel, Request::Extents { offset, len });
    let Ok(Reply::Extents(extents)) = listed.result else {
        panic!("no extents");
    };
    let extents: Vec<_> = extents.iter().map(|it| (it.len, it.mapped)).collect();
    let hole = STRIPE_BYTES - 2 * PAGE;
    assert_eq!(extents[..2], [(hole, false), (4 * PAGE, true)]);
    assert_eq!(extents.iter().map(|it| it.0).sum::<u64>(), len);
    let refused = ask(&world, &mut *channel, write(0, PAGE, 3));
    assert!(matches!(refused.result, Err(SpaceError::Unsupported(_))));
    // The client of the volume is not fenced.
    world.write(0, PAGE, 4);
}

/// The changed ranges of a whole space, by their offsets.
fn listed_changes(world: &TestCluster, space: &SnapshotSpace) -> Vec<(u64, u64)> {
    let mut channel = space.open().expect("a channel");
    let (offset, len) = (0, space.size_bytes());
    let listed = ask(world, &mut *channel, Request::Extents { offset, len });
    let Ok(Reply::Extents(extents)) = listed.result else {
        panic!("no extents");
    };
    let (mut at, mut found) = (0, vec![]);
    for extent in extents {
        if extent.mapped {
            found.push((at, extent.len));
        }
        at += extent.len;
    }
    assert_eq!(at, len);
    found
}

#[test]
fn changes_between_snapshots_are_listed_across_columns() {
    let mut world = TestCluster::new(vec![segment(0, 2, 2, 4 * STRIPE_BYTES)]);
    world.write(0, 4 * PAGE, 1);
    let first = cut(&mut world);
    world.write(STRIPE_BYTES - PAGE, 2 * PAGE, 2);
    world.discard(PAGE, PAGE);
    let second = cut(&mut world);
    world.write(2 * PAGE, PAGE, 3);
    let layout = resolved_layout(&world);
    let space = snapshot_space(&world, second);
    let changes = space.changes_since(&layout, first).expect("copies");
    let expected = [(PAGE, PAGE), (STRIPE_BYTES - PAGE, 2 * PAGE)];
    assert_eq!(listed_changes(&world, &changes), expected);
    let refused = space.changes_since(&layout, second).err();
    assert!(matches!(refused, Some(SpaceError::Unsupported(_))));
    // A copy that was not in sync in the earlier snapshot is not asked.
    let mut other = layout.clone();
    for column in &mut other.layout.segments[0].columns {
        for leg in &mut column.legs {
            leg.state = LegState::Syncing;
        }
    }
    let refused = space.changes_since(&other, first).err();
    assert!(matches!(refused, Some(SpaceError::Unavailable(_))));
}

#[test]
fn snapshot_space_falls_back_to_another_copy() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 2 * PAGE, 1);
    let snapshot = cut(&mut world);
    let space = snapshot_space(&world, snapshot);
    let mut channel = space.open().expect("a channel");
    let mut read = |world: &TestCluster, offset| {
        let len = PAGE as u32;
        let done = ask(world, &mut *channel, Request::Read { offset, len });
        match done.result {
            Ok(Reply::Data(data)) => Ok(value_of(&data[..512]).expect("whole")),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error),
        }
    };
    let damage = |number: usize| {
        let leg = world.manager.layout().segments[0].columns[0].legs[number].clone();
        let mut bricks = poison::lock(&world.fabric.0);
        bricks.slice_mut(leg.brick, leg.slice).damage_page(0);
    };
    damage(0);
    assert_eq!(read(&world, 0), Ok(1), "the other copy is sound");
    damage(1);
    assert!(matches!(
        read(&world, 0),
        Err(SpaceError::Damaged { offset: 0, .. })
    ));
    poison::lock(&world.fabric.0).kill(brick(0));
    assert_eq!(read(&world, PAGE), Ok(1));
    poison::lock(&world.fabric.0).kill(brick(1));
    assert!(matches!(
        read(&world, PAGE),
        Err(SpaceError::Unavailable(_))
    ));
    poison::lock(&world.fabric.0).restart(brick(1));
    assert_eq!(read(&world, PAGE), Ok(1), "a brick that is back serves");
}
