//! Scenarios of changes with an unknown outcome: the results of reads before and after the
//! outcome is known.

use crate::world::client::Client;
use crate::world::cluster::{PAGE, RequestResult, TestCluster, part, transact, write};
use crate::world::manager::ManagerMode;
use crate::world::oracle::fill;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use pagemesh_base::slice::SliceRequest;
use pagemesh_base::space::{Request, SpaceError};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::DOWN_LIMIT;
use std::panic;
use std::time::Duration;

fn read(page: u64) -> Request {
    Request::Read {
        offset: page * PAGE,
        len: 512,
    }
}

fn is_unavailable(ending: &Option<RequestResult>) -> bool {
    matches!(ending, Some(Err(SpaceError::Unavailable(_))))
}

/// Reads on both channels, twice, so that each serving leg is asked.
#[track_caller]
fn assert_reads_fail(world: &mut TestCluster, page: u64) {
    for channel in [0, 1, 0, 1] {
        let token = world.submit(channel, read(page));
        match world.result_of(token) {
            Some(Err(SpaceError::Unavailable(why))) => {
                assert!(why.contains("one copy may have it"), "{why}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A write to page 0 that only the first leg has.
fn indeterminate_write() -> TestCluster {
    indeterminate_change(write(0, PAGE, 2))
}

/// A change of page 0 that one leg has. It failed: both legs were lost, only the first is back,
/// and the manager does not answer.
fn indeterminate_change(change: Request) -> TestCluster {
    let mut world = TestCluster::mirror(2);
    world.open();
    world.write(0, 8 * PAGE, 1);
    world.set_frozen(1, true);
    let late = world.submit(0, change);
    assert_eq!(world.result_of(late), None);
    assert_eq!(
        world.page_bytes(0, 0, 0),
        fill(2, PAGE / 512),
        "it is on one leg"
    );
    let beside = world.submit(1, read(0));
    world.manager.set_mode(ManagerMode::Down);
    world.kill(0);
    world.kill(1);
    world.set_frozen(1, false);
    world.run_until_state(VolumeState::Unavailable);
    world.restart(0);
    world.advance_time(DOWN_LIMIT / 2);
    let early = world.submit(1, read(0));
    assert_eq!(world.result_of(early), None, "the write may go on");
    world.advance_time(DOWN_LIMIT);
    for token in [late, beside, early] {
        let ending = world.result_of(token);
        assert!(is_unavailable(&ending), "{ending:?}");
    }
    world
}

/// Loses the first leg. A read detects the loss.
fn lose_first_leg(world: &mut TestCluster) {
    world.kill(0);
    let token = world.submit(0, read(4));
    let ending = world.result_of(token);
    assert!(is_unavailable(&ending), "{ending:?}");
}

#[test]
fn failed_write_on_one_leg_is_not_read() {
    let mut world = indeterminate_write();
    assert_reads_fail(&mut world, 0);
    world.assert_holds(PAGE, 7 * PAGE, 1);
    // A channel that is opened later fails such reads, too.
    world.open();
    let token = world.submit(2, read(0));
    let ending = world.result_of(token);
    assert!(is_unavailable(&ending), "{ending:?}");
    // A write that fails before it is sent leaves its range determinate.
    let token = world.submit(1, write(4 * PAGE, PAGE, 3));
    let ending = world.result_of(token);
    assert!(is_unavailable(&ending), "{ending:?}");
    world.assert_holds(4 * PAGE, PAGE, 1);
    // The manager leaves the other leg out: the data of the first one counts.
    world.manager.set_mode(ManagerMode::Up);
    world.run_until_state(VolumeState::Degraded);
    assert_eq!(world.leg_status(1).state, LegState::Stale);
    world.assert_holds(0, PAGE, 2);
    world.write(0, PAGE, 4);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 4);
}

#[test]
fn failed_transaction_is_not_read_in_part() {
    let mut world = indeterminate_change(transact(vec![part(0, 2), part(3, 2)]));
    assert_reads_fail(&mut world, 0);
    assert_reads_fail(&mut world, 3);
    world.assert_holds(PAGE, 2 * PAGE, 1);
    world.manager.set_mode(ManagerMode::Up);
    world.run_until_state(VolumeState::Degraded);
    for (page, value) in [(0, 2), (1, 1), (3, 2)] {
        world.assert_holds(page * PAGE, PAGE, value);
    }
    world.restore_and_compare();
}

#[test]
fn failed_write_counts_after_all_legs_return() {
    let mut world = indeterminate_write();
    assert_reads_fail(&mut world, 0);
    lose_first_leg(&mut world);
    // The legs are recovered without the manager.
    world.restart(0);
    world.restart(1);
    world.advance_time(Duration::from_secs(1));
    assert_eq!(world.leg_status(0).state, LegState::InSync);
    assert_eq!(world.leg_status(1).state, LegState::InSync);
    world.assert_holds(0, PAGE, 2);
    world.assert_legs_equal();
    world.restore_and_compare();
}

#[test]
fn failed_write_is_lost_with_its_only_leg() {
    let mut world = indeterminate_write();
    assert_reads_fail(&mut world, 0);
    lose_first_leg(&mut world);
    world.restart(1);
    world.advance_time(Duration::from_secs(1));
    assert_reads_fail(&mut world, 0);
    world.manager.set_mode(ManagerMode::Up);
    world.run_until_state(VolumeState::Degraded);
    world.assert_holds(0, PAGE, 1);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 1);
}

#[test]
fn next_client_keeps_data_that_reads_returned() {
    let mut world = indeterminate_write();
    assert_reads_fail(&mut world, 0);
    world.kill(0);
    world.restart(1);
    world.manager.set_mode(ManagerMode::Up);
    world.crash();
    world.assert_holds(0, PAGE, 1);
    world.restore_and_compare();
    world.assert_holds(0, PAGE, 1);
}

/// The channel of the write is closed. The controller drives the write to the same end.
#[test]
fn closed_channel_indeterminate_write_is_not_read() {
    let mut world = TestCluster::mirror(2);
    world.open();
    world.write(0, PAGE, 1);
    world.set_frozen(1, true);
    world.submit(0, write(0, PAGE, 2));
    world.run_until_idle();
    drop(world.channels.remove(0));
    world.manager.set_mode(ManagerMode::Down);
    let beside = world.submit(0, read(0));
    world.kill(0);
    world.kill(1);
    world.set_frozen(1, false);
    world.run_until_state(VolumeState::Unavailable);
    world.restart(0);
    world.advance_time(DOWN_LIMIT + Duration::from_secs(1));
    let later = world.submit(0, read(0));
    for token in [beside, later] {
        let ending = world.result_of(token);
        assert!(is_unavailable(&ending), "{ending:?}");
    }
    world.manager.set_mode(ManagerMode::Up);
    world.run_until_state(VolumeState::Degraded);
    world.assert_holds(0, PAGE, 2);
}

/// One channel hears that another client has attached. Its write is on a leg that the other
/// client did not reach, and the other channel still reads from that leg.
#[test]
fn fenced_channel_indeterminate_write_is_not_read() {
    let mut world = TestCluster::mirror(2);
    world.open();
    world.write(0, PAGE, 1);
    world.set_frozen(1, true);
    let late = world.submit(0, write(0, PAGE, 2));
    let reads = [0, 0].map(|page| world.submit(1, read(page)));
    world.run_until_idle();
    assert_eq!(
        world.page_bytes(0, 0, 0),
        fill(2, PAGE / 512),
        "the write is on one leg"
    );
    let mut delayed = poison::lock(&world.fabric.0).take_messages();
    delayed.retain(|(.., request)| matches!(request, SliceRequest::Write { .. }));
    // The other client has raised the epoch of the second leg, and waits for the first.
    let other = Client::new(&world.fabric, &world.manager);
    let mut other = std::mem::replace(&mut world.client, other);
    let channels = std::mem::take(&mut world.channels);
    world.set_frozen(0, true);
    world.set_frozen(1, false);
    world.run_until_idle();
    std::mem::swap(&mut world.client, &mut other);
    world.channels = channels;
    poison::lock(&world.fabric.0).restore_messages(delayed);
    world.run_until_idle();
    assert_eq!(world.result_of(late), Some(Err(SpaceError::Fenced)));
    for token in reads {
        let ending = world.result_of(token);
        assert!(!matches!(ending, Some(Ok(_))), "{ending:?}");
    }
    world.client = other;
    world.channels.clear();
    world.kill(0);
    world.attach();
    world.open();
    world.assert_holds(0, PAGE, 1);
}

#[test]
fn indeterminate_read_defect_is_caught() {
    defect::set(Some(Defect::IndeterminateRead));
    let told = panic::catch_unwind(failed_write_on_one_leg_is_not_read);
    defect::set(None);
    assert!(told.is_err(), "the defect is not caught");
}
