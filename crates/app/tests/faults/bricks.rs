//! Deaths and stalls of bricks and of the manager.

use crate::faults::load::{LoadPlan, RequestMix, RunningLoad};
use crate::faults::nbd::{Command, EIO, NbdConnection};
use crate::faults::oracle::BLOCK;
use crate::faults::rig::{READ_MAX, STALL_MAX, VOLUME, VolumeRig, counter, legs};
use crate::support::{Export, Pools, until};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The limit for a request while a brick on a disk is stalled: 10 s, and the time to detach it.
const DISK_STALL_MAX: Duration = Duration::from_secs(11);

/// The limit for any request while only the manager is away.
pub const MANAGER_STALL_MAX: Duration = Duration::from_secs(1);

/// A load that leaves most of the volume alone while a brick is away.
fn steady() -> LoadPlan {
    LoadPlan {
        rate: Some(1500),
        flush_every: Some(32),
        ..LoadPlan::default()
    }
}

/// A brick dies under load and returns. Clients see only a pause, and resync copies only the missed
/// writes.
fn check_brick_death(pools: Pools, transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(pools, 2, 128, &[], seed);
    rig.serve(transport);
    // Flushed: otherwise the writes that a dead disk loses count as missed, too.
    let filled = rig.load(&LoadPlan {
        rate: None,
        ..steady()
    });
    filled.await_answers(10_000);
    filled.finish().assert_success();

    let load = rig.load(&steady());
    load.await_answers(1000);
    let mark = rig.oracle.mark();
    rig.cluster.kill_brick(0);
    load.await_answers(2000);
    assert!(legs(&rig.export().await_state("degraded")).contains(&"stale".into()));
    rig.cluster.restart_brick(0);
    until("the leg is written again", || {
        !legs(&rig.export().status()).contains(&"stale".into())
    });
    let missed = rig.oracle.bytes_changed_since(mark);
    let status = rig.export().await_state("healthy");
    load.await_answers(500);
    let report = load.finish();
    report.assert_success();
    let moved = counter(&status, "bytes_resynced");
    let ratio = moved as f64 / missed as f64;
    println!(
        "{pools:?} {transport}: longest {:?} of {} requests; {moved} bytes moved of {missed} missed: {ratio:.2}",
        report.longest, report.requests
    );
    assert!(report.longest < STALL_MAX, "stalled {:?}", report.longest);
    assert!(ratio < 1.3, "{moved} bytes were moved for {missed}");
    assert!(moved > 0, "nothing was moved");
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn mapped_brick_dies_under_load() {
    check_brick_death(Pools::Memory, "map", 0xa1);
}

#[test]
fn tcp_brick_dies_under_load() {
    check_brick_death(Pools::Memory, "tcp", 0xa2);
}

#[test]
fn disk_brick_dies_under_load() {
    check_brick_death(Pools::Disk, "auto", 0xa3);
}

/// A brick dies again and again while clients that come and go write little. Each resync copies the
/// missed writes, and not the older ones.
fn check_repeated_brick_deaths(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], seed);
    rig.serve(transport);
    rig.cluster.kill_brick(0);
    rig.export().io(&["write -P 1 0 2M"]);
    rig.cluster.restart_brick(0);
    let mut moved = counter(&rig.export().await_state("healthy"), "bytes_resynced");
    for round in 2..6 {
        rig.export().io(&["write -P 1 4M 64k"]);
        rig.cluster.kill_brick(0);
        rig.export().io(&[&format!("write -P {round} 8M 4k")]);
        rig.cluster.restart_brick(0);
        let now = counter(&rig.export().await_state("healthy"), "bytes_resynced");
        // The previous write may still be in flight when the brick dies.
        assert!(
            now - moved <= 4096 + 65536,
            "{} of loss {round}",
            now - moved
        );
        moved = now;
    }
    rig.export().io(&["read -P 1 0 2M", "read -P 5 8M 4k"]);
    rig.end_and_check();
}

#[test]
fn mapped_brick_dies_repeatedly() {
    check_repeated_brick_deaths("map", 0xa6);
}

#[test]
fn tcp_brick_dies_repeatedly() {
    check_repeated_brick_deaths("tcp", 0xa7);
}

/// A stalled brick: reads soon go to the other copy. Writes wait as long as for a dead brick, then
/// the leg is detached. Late answers of the brick are ignored, and resync copies the missed writes.
fn check_stalled_brick(
    pools: Pools,
    transport: &str,
    writers_read: u64,
    stall_max: Duration,
    seed: u64,
) {
    let mut rig = VolumeRig::new(pools, 2, 64, &[], seed);
    rig.serve(transport);
    let plan = LoadPlan {
        connections: 3,
        readers: 1,
        mix: RequestMix {
            reads: writers_read,
            ..RequestMix::default()
        },
        rate: match transport {
            // The first request that finds the brick stalled can come with as many others as one
            // connection holds.
            "map" => None,
            _ => steady().rate,
        },
        ..steady()
    };
    let filled = rig.load(&LoadPlan {
        readers: 0,
        rate: None,
        ..plan
    });
    filled.await_answers(6000);
    filled.finish().assert_success();
    let load = rig.load(&plan);
    load.await_answers(500);
    let mark = rig.oracle.mark();
    rig.cluster.brick(0).signal("STOP");
    let stopped = Instant::now();
    rig.export().await_state("degraded");
    let noticed = stopped.elapsed();
    load.await_answers(500);
    rig.cluster.brick(0).signal("CONT");
    until("the leg is written again", || {
        !legs(&rig.export().status()).contains(&"stale".into())
    });
    let missed = rig.oracle.bytes_changed_since(mark);
    let status = rig.export().await_state("healthy");
    load.await_answers(500);
    let report = load.finish();
    report.assert_success();
    let (moved, hedged) = (
        counter(&status, "bytes_resynced"),
        counter(&status, "reads_hedged"),
    );
    println!(
        "{pools:?} {transport}, stopped: left out after {noticed:?}, longest {:?}, longest read {:?}, \
        {hedged} reads hedged, {moved} bytes moved of {missed}",
        report.longest, report.longest_read
    );
    assert!(report.longest < stall_max, "stalled {:?}", report.longest);
    let read = report.longest_read;
    assert!(read < READ_MAX, "a read took {read:?}");
    assert!(transport == "map" || hedged > 0, "no read was hedged");
    let ratio = moved as f64 / missed as f64;
    assert!(moved > 0 && ratio < 1.3, "{moved} were moved for {missed}");
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn tcp_brick_stalls_under_load() {
    check_stalled_brick(Pools::Memory, "tcp", 30, STALL_MAX, 0xa4);
}

/// A disk gets more time before its brick counts as dead.
#[test]
fn disk_brick_stalls_under_load() {
    check_stalled_brick(Pools::Disk, "auto", 30, DISK_STALL_MAX, 0xa8);
}

/// The connection's thread does a mapped write, so later requests on that connection wait with it.
#[test]
fn mapped_brick_stalls_under_load() {
    check_stalled_brick(Pools::Memory, "map", 0, STALL_MAX, 0xa5);
}

/// Waits until the client has noticed that it lost so many legs in all, and all are in sync again. A
/// brick that restarts at once can be back before the client notices, while it still is "healthy".
fn await_return(export: &Export, legs_lost: u64) {
    until("the lost legs are back", || {
        let status = export.status();
        status["state"] == "healthy" && counter(&status, "legs_lost") >= legs_lost
    });
}

/// Bricks die and restart at once, one after the other, then both.
fn check_brick_restarts(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], seed);
    rig.serve(transport);
    let load = rig.load(&LoadPlan::default());
    for (lost, brick) in (1..).zip([0, 1, 0, 1]) {
        load.await_answers(1000);
        rig.cluster.kill_brick(brick);
        rig.cluster.restart_brick(brick);
        await_return(rig.export(), lost);
    }
    load.await_answers(1000);
    rig.cluster.kill_brick(0);
    rig.cluster.kill_brick(1);
    rig.cluster.restart_brick(1);
    rig.cluster.restart_brick(0);
    await_return(rig.export(), 6);
    load.await_answers(1000);
    let report = load.finish();
    report.assert_success();
    println!(
        "{transport}: longest {:?} of {}",
        report.longest, report.requests
    );
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn bricks_restart_under_mapped_clients() {
    check_brick_restarts("map", 0xc1);
}

#[test]
fn bricks_restart_under_clients_over_tcp() {
    check_brick_restarts("tcp", 0xc2);
}

/// No request reveals the death of the brick. Its clients notice it all the same: a pool that stays
/// mapped prevents the brick's restart.
fn check_brick_death_when_idle(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 16, &[], seed);
    rig.serve(transport);
    let held = UnixStream::connect(rig.socket()).expect("a client that asks nothing");
    for brick in [0, 1] {
        rig.export().io(&["write -P 7 0 64k"]);
        rig.cluster.kill_brick(brick);
        rig.export().await_state("degraded");
        rig.cluster.restart_brick(brick);
        rig.export().await_state("healthy");
        let log = rig.cluster.brick(brick).log();
        assert!(!log.contains("ending a client"), "{log}");
    }
    drop(held);
    rig.end_and_check();
}

#[test]
fn mapped_brick_dies_under_idle_volume() {
    check_brick_death_when_idle("map", 0xc3);
}

#[test]
fn tcp_brick_dies_under_idle_volume() {
    check_brick_death_when_idle("tcp", 0xc4);
}

/// Waits until no request is answered any more.
pub fn await_stall(load: &RunningLoad) {
    let mut last = None;
    until("writes wait", || {
        let answered = load.answered();
        std::thread::sleep(Duration::from_millis(200));
        last.replace(answered) == Some(answered) && answered == load.answered()
    });
}

/// I/O continues without the manager. A lost leg then makes writes wait, and they never fail.
fn check_manager_outage(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], seed);
    rig.serve(transport);
    let load = rig.load(&steady());
    load.await_answers(500);
    rig.cluster.stop_manager();
    load.await_answers(1000);
    let create = ["volume", "create", "other", "--size", "8M"];
    rig.cluster
        .refused(&create, &["manager", rig.cluster.manager_address()]);
    rig.cluster.kill_brick(0);
    let status = rig.export().await_state("awaiting-manager");
    assert!(legs(&status).iter().all(|leg| leg == "in-sync"), "{status}");
    await_stall(&load);
    let mut nbd = NbdConnection::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    nbd.send(1, (Command::Read, 0), 0, BLOCK as u32, &[])
        .expect("sent");
    assert_eq!(nbd.reply().expect("reads go on").errno, 0);
    drop(nbd);
    assert_eq!(rig.export().status()["state"], "awaiting-manager");
    rig.cluster.start_manager();
    rig.export().await_state("degraded");
    load.await_answers(500);
    rig.cluster.restart_brick(0);
    rig.export().await_state("healthy");
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn mapped_leg_is_lost_while_manager_is_down() {
    check_manager_outage("map", 0xd1);
}

#[test]
fn tcp_leg_is_lost_while_manager_is_down() {
    check_manager_outage("tcp", 0xd2);
}

/// A stalled manager has the effect of a dead one: I/O continues, a lost leg waits for the manager,
/// and users get an error within a limit.
#[test]
fn stalled_manager_does_not_stop_io() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 32, &[], 0xd3);
    rig.serve("tcp");
    let load = rig.load(&steady());
    load.await_answers(500);
    rig.cluster.manager().signal("STOP");
    load.await_answers(1000);
    rig.cluster
        .refused(&["status"], &["manager", rig.cluster.manager_address()]);
    load.await_answers(1000);
    assert_eq!(rig.export().status()["state"], "healthy");
    let report = load.finish();
    report.assert_success();
    assert!(report.longest < MANAGER_STALL_MAX, "{:?}", report.longest);
    let load = rig.load(&steady());
    load.await_answers(500);
    rig.cluster.kill_brick(0);
    rig.export().await_state("awaiting-manager");
    await_stall(&load);
    rig.cluster.manager().signal("CONT");
    rig.export().await_state("degraded");
    load.await_answers(500);
    rig.cluster.restart_brick(0);
    rig.export().await_state("healthy");
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// Blocks that were discarded while a leg was away are gone from the leg after its return.
#[test]
fn discards_reach_leg_that_was_away() {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 64, &[], 0x91);
    rig.serve("auto");
    let filled = rig.load(&LoadPlan::default());
    filled.await_answers(15_000);
    filled.finish().assert_success();
    rig.cluster.kill_brick(0);
    let load = rig.load(&LoadPlan {
        mix: RequestMix {
            reads: 10,
            trims: 40,
            zeroes: 10,
            fua: 0,
        },
        ..LoadPlan::default()
    });
    load.await_answers(5000);
    rig.cluster.restart_brick(0);
    rig.export().await_state("healthy");
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "auto");
}

/// All bricks of a volume on disks die. Acknowledged writes are there, flushed or not, since the
/// operating system survives.
fn check_disk_brick_deaths(layout: &[&str], bricks: usize, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Disk, bricks, 32, layout, seed);
    rig.serve("auto");
    for _ in 0..3 {
        let load = rig.load(&LoadPlan {
            mix: RequestMix {
                reads: 10,
                trims: 10,
                zeroes: 5,
                fua: 5,
            },
            flush_every: Some(32),
            ..LoadPlan::default()
        });
        load.await_answers(2000);
        (0..bricks).for_each(|brick| rig.cluster.kill_brick(brick));
        (0..bricks).for_each(|brick| rig.cluster.restart_brick(brick));
        load.await_answers(500);
        rig.export().await_state("healthy");
        let report = load.finish();
        // The client cannot know that, so it reports that writes may be lost.
        report.assert_only_errors(EIO, "Flush");
        assert_eq!(report.broken, 0);
        rig.verify();
    }
    rig.end_and_check();
}

#[test]
fn killed_disk_brick_keeps_all_writes() {
    check_disk_brick_deaths(&["--layout", "concat"], 1, 0x11);
}

#[test]
fn killed_disk_bricks_keep_all_writes() {
    check_disk_brick_deaths(&[], 2, 0x12);
}
