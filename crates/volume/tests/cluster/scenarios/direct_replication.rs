//! Asynchronous replication of direct writes, and the death of direct clients.

use crate::world::cluster;
use crate::world::cluster::{REPLICA_SLICE, TestCluster, replicated_cluster};
use crate::world::manager::brick;
use crate::world::oracle::{PAGE_SECTORS, fill};
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use pagemesh_base::slice::PageRun;
use pagemesh_base::space::{Reply, Request};
use pagemesh_volume::direct_access::{DirectSegment, FileRange, TornOp};
use pagemesh_volume::limits::REPLICATION_AGE_MAX;
use pagemesh_volume::test_api::LOWERED_REPLICATION_CHANGES_MAX;
use pagemesh_volume::test_api::{CLAIM_PENDING, ControllerEvent, DirectAccess};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// A direct client, as the legs and the segment see it.
struct ScriptedClient {
    segment: Arc<DirectSegment>,
    row: usize,
}

impl ScriptedClient {
    fn of(world: &TestCluster, row: usize) -> ScriptedClient {
        let hub = &world.client.shared;
        let guests = hub
            .direct_access
            .get_or_init(|| DirectAccess::new(1 << 16).expect("memory"));
        hub.replication.attach_segment(&guests.segment);
        let segment = Arc::clone(&guests.segment);
        ScriptedClient { segment, row }
    }

    /// Claims a page and writes it to the first legs, without filling the claim.
    fn begin_write(&self, world: &TestCluster, page: u64, value: u64, legs: usize) -> u64 {
        let row = self.segment.row(self.row);
        let (file, offset, len) = (self.row as u64, page * 4096, 4096);
        row.begin_op(FileRange { file, offset, len });
        let place = self.segment.ring().claim(row, 1);
        let layout = world.manager.layout();
        for leg in &layout.segments[0].columns[0].legs[..legs] {
            let mut bricks = poison::lock(&world.fabric.0);
            let slice = bricks.slice_mut(leg.brick, leg.slice);
            slice.set_page(page as usize, &fill(value, PAGE_SECTORS));
        }
        place
    }

    /// Changes runs of pages atomically on this leg.
    fn begin_atomic(&self, world: &TestCluster, runs: &[(u64, u64)], value: u64, leg: usize) {
        let row = self.segment.row(self.row);
        let file = self.row as u64;
        let (offset, len) = (0, 0);
        row.begin_op(FileRange { file, offset, len });
        let run = |&(page, count)| PageRun {
            page: PageNo(page),
            count,
        };
        let runs: Vec<PageRun> = runs.iter().map(run).collect();
        row.set_runs(&runs);
        let layout = world.manager.layout();
        let leg = &layout.segments[0].columns[0].legs[leg];
        let mut bricks = poison::lock(&world.fabric.0);
        let slice = bricks.slice_mut(leg.brick, leg.slice);
        for page in runs.iter().flat_map(|it| it.page.0..it.page.0 + it.count) {
            slice.set_page(page as usize, &fill(value, PAGE_SECTORS));
        }
    }

    fn end_write(&self, world: &TestCluster, place: u64, page: u64, value: u64) {
        let ring = self.segment.ring();
        let stamp = world
            .client
            .shared
            .newest_stamp(world.manager.layout().epoch.into());
        if ring.fill(place, page * 4096, &fill(value, PAGE_SECTORS), stamp) {
            world.client.shared.wake_controller();
        }
        self.segment.row(self.row).end_op();
    }

    fn write(&self, world: &TestCluster, page: u64, value: u64) {
        let place = self.begin_write(world, page, value, 1);
        self.end_write(world, place, page, value);
    }

    /// Starts the reconciliation that the mount starts after a client's death.
    fn die(&self, world: &mut TestCluster) -> mpsc::Receiver<()> {
        let wound = TornOp::of_row(self.segment.row(self.row)).expect("inside");
        let (done, told) = mpsc::channel();
        let heal = ControllerEvent::Reconcile(self.row, wound, done);
        world.client.mailbox.post(heal);
        told
    }

    fn finish_reconcile(&self, world: &mut TestCluster, told: &mpsc::Receiver<()>) -> bool {
        world.advance_time(Duration::from_millis(100));
        let is_healed = told.try_recv().is_ok();
        if is_healed {
            self.segment.row(self.row).end_op();
        }
        is_healed
    }
}

/// Damages a page of a leg.
fn damage_page(world: &TestCluster, leg: usize, page: u64) {
    let leg = world.manager.layout().segments[0].columns[0].legs[leg].clone();
    let mut bricks = poison::lock(&world.fabric.0);
    bricks.slice_mut(leg.brick, leg.slice).damage_page(page);
}

fn replication_lag(world: &TestCluster) -> (u64, u64) {
    let lag = world
        .client
        .shared
        .replication
        .lag(world.client.now)
        .expect("it follows");
    (lag.changes, lag.bytes)
}

/// Changes through the kernel and direct changes are replicated in the order in which they were
/// made. A flush waits for both.
#[test]
fn replica_gets_direct_writes_in_order() {
    let mut world = replicated_cluster();
    let guest = ScriptedClient::of(&world, 3);
    world.set_frozen(1, true);
    world.write(0, 4096, 2);
    guest.write(&world, 0, 3);
    world.write(4096, 4096, 4);
    guest.write(&world, 1, 5);
    world.write(0, 512, 6);
    assert_eq!(replication_lag(&world), (5, 4 * 4096 + 512));
    let flush = world.submit(0, Request::Flush);
    assert_eq!(world.result_of(flush), None);
    world.set_frozen(1, false);
    assert_eq!(world.result_of(flush), Some(Ok(Reply::Done)));
    assert_eq!(replication_lag(&world), (0, 0));
    for page in 0..2 {
        assert!(
            world.page_bytes(0, 1, page) == world.page_bytes(0, 0, page),
            "{page}"
        );
    }
}

/// An unfilled claim blocks all later changes, and the requests that wait for them.
#[test]
fn unfilled_claim_blocks_later_changes() {
    let mut world = replicated_cluster();
    let guest = ScriptedClient::of(&world, 3);
    let before = world.page_bytes(0, 1, 1);
    let place = guest.begin_write(&world, 0, 2, 1);
    ScriptedClient::of(&world, 4).write(&world, 2, 3);
    world.write(4096, 4096, 4);
    let flush = world.submit(0, Request::Flush);
    world.advance_time(Duration::from_millis(100));
    assert_eq!(world.result_of(flush), None);
    assert!(world.page_bytes(0, 1, 1) == before);
    guest.end_write(&world, place, 0, 2);
    world.run_until_idle();
    assert_eq!(world.result_of(flush), Some(Ok(Reply::Done)));
    for page in 0..3 {
        assert!(
            world.page_bytes(0, 1, page) == world.page_bytes(0, 0, page),
            "{page}"
        );
    }
}

/// If the replica lags too far behind, direct clients write through the kernel, which waits.
#[test]
fn direct_clients_are_throttled_at_lag_limit() {
    let mut world = replicated_cluster();
    let guest = ScriptedClient::of(&world, 3);
    let has_room = |guest: &ScriptedClient| guest.segment.ring().has_room(&mut 0);
    assert!(has_room(&guest));
    world.set_frozen(1, true);
    guest.write(&world, 0, 2);
    world.advance_time(REPLICATION_AGE_MAX / 2);
    assert!(has_room(&guest));
    world.advance_time(REPLICATION_AGE_MAX);
    assert!(!has_room(&guest));
    let late = world.submit(0, cluster::write(4096, 4096, 3));
    assert_eq!(world.result_of(late), None);
    world.set_frozen(1, false);
    assert_eq!(world.result_of(late), Some(Ok(Reply::Done)));
    world.advance_time(Duration::from_millis(100));
    assert!(has_room(&guest));
    world.set_frozen(1, true);
    for value in 0..=LOWERED_REPLICATION_CHANGES_MAX as u64 {
        assert!(has_room(&guest), "{value}");
        guest.write(&world, value % 8, 4 + value);
        world.run_until_idle();
    }
    assert!(!has_room(&guest));
    world.set_frozen(1, false);
    world.run_until_idle();
    assert!(has_room(&guest));
    assert!(world.page_bytes(0, 1, 0) == world.page_bytes(0, 0, 0));
}

/// One copy has a dead client's write, and the other does not. After reconciliation all three
/// are equal, and the replica continues without a resync.
#[test]
fn replica_gets_result_of_dead_client_write() {
    for legs in [0, 1, 2] {
        let mut world = TestCluster::mirror(2);
        world.write(0, 4096, 1);
        world.add_replica(brick(2), REPLICA_SLICE);
        world.request_refresh();
        world.advance_time(Duration::from_secs(1));
        let (dead, other) = (ScriptedClient::of(&world, 3), ScriptedClient::of(&world, 4));
        let serial = world.client.shared.snapshot().1.replica_serial();
        dead.begin_write(&world, 0, 2, legs);
        other.segment.row(4).begin_op(FileRange {
            file: 3,
            offset: 4096,
            len: 4096,
        });
        let told = dead.die(&mut world);
        assert!(!dead.finish_reconcile(&mut world, &told), "a row is active");
        other.segment.row(4).end_op();
        assert!(dead.finish_reconcile(&mut world, &told), "{legs}");
        let flush = world.submit(0, Request::Flush);
        assert_eq!(world.result_of(flush), Some(Ok(Reply::Done)));
        assert_eq!(
            world.client.shared.snapshot().1.replica_serial(),
            serial,
            "the replica continues"
        );
        let first = world.page_bytes(0, 0, 0);
        assert!(first == world.page_bytes(0, 1, 0) && first == world.page_bytes(0, 2, 0));
    }
}

/// Other clients wrote over pages that a dead client may have written. The changes that the
/// replica lacks are unknown, so it is resynced.
#[test]
fn replica_resyncs_after_dead_client_was_overwritten() {
    for claims in [true, false] {
        let mut world = replicated_cluster();
        let (dead, other) = (ScriptedClient::of(&world, 3), ScriptedClient::of(&world, 4));
        dead.begin_write(&world, 0, 2, 1);
        match claims {
            true => other.write(&world, 0, 3),
            // The client did not record its claim.
            false => dead
                .segment
                .row(3)
                .claim()
                .store(CLAIM_PENDING, Ordering::Relaxed),
        }
        let serial = world.client.shared.snapshot().1.replica_serial();
        let told = dead.die(&mut world);
        assert!(dead.finish_reconcile(&mut world, &told));
        world.advance_time(Duration::from_secs(20));
        assert_ne!(world.client.shared.snapshot().1.replica_serial(), serial);
        assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
        assert!(world.page_bytes(0, 1, 0) == world.page_bytes(0, 0, 0));
        other.write(&world, 0, 4);
        world.advance_time(Duration::from_millis(100));
        assert!(world.page_bytes(0, 1, 0) == world.page_bytes(0, 0, 0));
    }
}

/// The client dies, and with it the direct changes in its ring.
#[test]
fn replica_resyncs_after_mount_died_with_direct_clients() {
    let mut world = replicated_cluster();
    let guest = ScriptedClient::of(&world, 3);
    world.set_frozen(1, true);
    guest.write(&world, 0, 2);
    guest.write(&world, 5, 3);
    guest.begin_write(&world, 6, 4, 1);
    world.crash();
    world.set_frozen(1, false);
    world.advance_time(Duration::from_secs(20));
    assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    for page in [0, 5, 6] {
        assert!(
            world.page_bytes(0, 1, page) == world.page_bytes(0, 0, page),
            "{page}"
        );
    }
}

/// A direct operation that began before replication started does not know of the replica.
#[test]
fn replication_starts_after_unaware_direct_ops_end() {
    let mut world = TestCluster::mirror(1);
    world.write(0, 8192, 1);
    let guest = ScriptedClient::of(&world, 3);
    let (file, offset, len) = (3, 4096, 4096);
    guest
        .segment
        .row(3)
        .begin_op(FileRange { file, offset, len });
    world.add_replica(brick(1), REPLICA_SLICE);
    world.request_refresh();
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.leg_status(1).state, LegState::Stale);
    let leg = world.manager.layout().segments[0].columns[0].legs[0].clone();
    poison::lock(&world.fabric.0)
        .slice_mut(leg.brick, leg.slice)
        .set_page(1, &fill(2, PAGE_SECTORS));
    guest.segment.row(3).end_op();
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.leg_status(1).state, LegState::AsyncReplica);
    assert!(world.page_bytes(0, 1, 1) == world.page_bytes(0, 0, 1));
}

/// All copies are lost while a torn operation is not reconciled. The reconciliation waits for
/// the recovery of the column, so the recovery must not wait for the reconciliation.
#[test]
fn all_legs_return_while_dead_client_awaits_reconcile() {
    let mut world = TestCluster::mirror(2);
    world.write(0, 4096, 1);
    let dead = ScriptedClient::of(&world, 3);
    dead.begin_write(&world, 0, 2, 2);
    world.kill(0);
    world.kill(1);
    world.run_until_idle();
    let told = dead.die(&mut world);
    world.advance_time(Duration::from_millis(500));
    world.restart(0);
    world.restart(1);
    world.advance_time(Duration::from_secs(20));
    assert!(dead.finish_reconcile(&mut world, &told));
    assert!(world.page_bytes(0, 1, 0) == world.page_bytes(0, 0, 0));
}

/// A client died during an atomic change of pages. The leg that has all of them is lost at each
/// step of the reconciliation.
#[test]
fn dead_client_transaction_is_reconciled_atomically() {
    let mut seen = [false; 2];
    for steps in 0..80 {
        let mut world = TestCluster::mirror(2);
        world.write(0, 5 * 4096, 1);
        let dead = ScriptedClient::of(&world, 3);
        let pages = [0, 2, 3];
        dead.begin_atomic(&world, &[(0, 1), (2, 2)], 2, 1);
        let told = dead.die(&mut world);
        world.run_steps(steps);
        world.kill(1);
        world.advance_time(Duration::from_secs(20));
        let new = fill(2, PAGE_SECTORS);
        let changed = pages.map(|page| world.page_bytes(0, 0, page) == new);
        assert!(changed == [changed[0]; 3], "{changed:?} after {steps}");
        seen[usize::from(changed[0])] = true;
        world.restart(1);
        assert!(dead.finish_reconcile(&mut world, &told));
        world.restore_and_compare();
    }
    assert_eq!(seen, [true; 2], "the loss came before and after the copy");
}

/// The same, with damage on the leg that has all pages, or on another one. The state that can
/// be read as a whole wins.
#[test]
fn dead_client_transaction_reconciles_beside_damage() {
    for (legs, changed, damaged, value) in [
        (2, 0, 1, 2),
        (2, 0, 0, 1),
        (2, 1, 0, 2),
        (2, 1, 1, 1),
        (3, 0, 2, 1),
        (3, 0, 1, 1),
        (3, 1, 2, 2),
    ] {
        let mut world = TestCluster::mirror(legs);
        world.write(0, 5 * 4096, 1);
        let dead = ScriptedClient::of(&world, 3);
        dead.begin_atomic(&world, &[(0, 1), (2, 2)], 2, changed);
        damage_page(&world, damaged, 2);
        let told = dead.die(&mut world);
        assert!(dead.finish_reconcile(&mut world, &told));
        world.assert_legs_equal();
        for page in [0, 2, 3] {
            world.assert_holds(page * 4096, 4096, value);
        }
    }
}

/// A client died, and the page is damaged on the leg that direct clients read, while the other
/// legs differ.
#[test]
fn dead_client_write_reconciles_beside_damage() {
    for damaged in 0..3 {
        let mut world = TestCluster::mirror(3);
        world.write(0, 4096, 1);
        let dead = ScriptedClient::of(&world, 3);
        dead.begin_write(&world, 0, 2, 1);
        damage_page(&world, damaged, 0);
        let told = dead.die(&mut world);
        assert!(dead.finish_reconcile(&mut world, &told));
        world.assert_legs_equal();
        world.assert_holds(0, 4096, 1);
    }
}
