//! Bricks, and the manager, die.

use crate::load::{Load, Mix, Plan};
use crate::nbd::{Command, EIO, Nbd};
use crate::oracle::BLOCK;
use crate::rig::{READ_MAX, Rig, STALL_MAX, VOLUME, counter, legs};
use crate::support::{Pools, until};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The bar for a brick on a disk that stands still: 10 s, and what it takes to
/// leave it out.
const DISK_STALL_MAX: Duration = Duration::from_secs(11);

/// The bar for any request while the manager alone is away.
pub const MANAGER_STALL_MAX: Duration = Duration::from_secs(1);

/// A load that leaves most of the volume alone while a brick is away.
fn steady() -> Plan {
    Plan {
        rate: Some(1500),
        flush_every: Some(32),
        ..Plan::default()
    }
}

/// A brick dies under load and comes back; nobody notices more than a pause,
/// and only what it missed is copied.
fn a_brick_dies(pools: Pools, transport: &str, seed: u64) {
    let mut rig = Rig::new(pools, 2, 128, &[], seed);
    rig.serve(transport);
    // Flushed: else what a dead disk loses counts as missed, too.
    let filled = rig.load(&Plan {
        rate: None,
        ..steady()
    });
    filled.await_answers(10_000);
    filled.finish().expect_good();

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
    report.expect_good();
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
fn a_mapped_brick_dies_under_load() {
    a_brick_dies(Pools::Memory, "map", 0xa1);
}

#[test]
fn a_brick_over_tcp_dies_under_load() {
    a_brick_dies(Pools::Memory, "tcp", 0xa2);
}

#[test]
fn a_brick_on_a_disk_dies_under_load() {
    a_brick_dies(Pools::Disk, "auto", 0xa3);
}

/// A brick dies again and again while little is written, by clients that come
/// and go: each time what was missed is copied, and not what came long before.
fn a_brick_dies_often(transport: &str, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 2, 32, &[], seed);
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
        // The write before may still be in flight when the brick dies.
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
fn a_mapped_brick_dies_often() {
    a_brick_dies_often("map", 0xa6);
}

#[test]
fn a_brick_over_tcp_dies_often() {
    a_brick_dies_often("tcp", 0xa7);
}

/// A brick that stands still: reads are asked of the other copy soon, writes
/// wait as long as for a dead one, then it is left out. What it still has to
/// say when it goes on counts for nothing, and it gets what it missed.
fn a_brick_stands_still(
    pools: Pools,
    transport: &str,
    writers_read: u64,
    stall_max: Duration,
    seed: u64,
) {
    let mut rig = Rig::new(pools, 2, 64, &[], seed);
    rig.serve(transport);
    let plan = Plan {
        connections: 3,
        readers: 1,
        mix: Mix {
            reads: writers_read,
            ..Mix::default()
        },
        rate: match transport {
            // As many requests as one connection can have arrive with the first that
            // finds the brick still.
            "map" => None,
            _ => steady().rate,
        },
        ..steady()
    };
    let filled = rig.load(&Plan {
        readers: 0,
        rate: None,
        ..plan
    });
    filled.await_answers(6000);
    filled.finish().expect_good();
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
    report.expect_good();
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
fn a_brick_over_tcp_stands_still_under_load() {
    a_brick_stands_still(Pools::Memory, "tcp", 30, STALL_MAX, 0xa4);
}

/// A disk may take its time before it is taken for dead.
#[test]
fn a_brick_on_a_disk_stands_still_under_load() {
    a_brick_stands_still(Pools::Disk, "auto", 30, DISK_STALL_MAX, 0xa8);
}

/// A mapped write is done by the connection's thread: what was sent behind it
/// on that connection waits with it.
#[test]
fn a_mapped_brick_stands_still_under_load() {
    a_brick_stands_still(Pools::Memory, "map", 0, STALL_MAX, 0xa5);
}

/// Bricks die and start again at once, one after the other, then both.
fn bricks_restart(transport: &str, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 2, 32, &[], seed);
    rig.serve(transport);
    let load = rig.load(&Plan::default());
    for brick in [0, 1, 0, 1] {
        load.await_answers(1000);
        rig.cluster.kill_brick(brick);
        rig.cluster.restart_brick(brick);
        rig.export().await_state("healthy");
    }
    load.await_answers(1000);
    rig.cluster.kill_brick(0);
    rig.cluster.kill_brick(1);
    rig.cluster.restart_brick(1);
    rig.cluster.restart_brick(0);
    rig.export().await_state("healthy");
    load.await_answers(1000);
    let report = load.finish();
    report.expect_good();
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
    bricks_restart("map", 0xc1);
}

#[test]
fn bricks_restart_under_clients_over_tcp() {
    bricks_restart("tcp", 0xc2);
}

/// Nobody asks anything that would show that a brick is dead. Its clients notice
/// all the same: a pool that stays mapped keeps its brick from coming back.
fn a_brick_dies_under_an_idle_volume(transport: &str, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 2, 16, &[], seed);
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
fn a_mapped_brick_dies_under_an_idle_volume() {
    a_brick_dies_under_an_idle_volume("map", 0xc3);
}

#[test]
fn a_brick_over_tcp_dies_under_an_idle_volume() {
    a_brick_dies_under_an_idle_volume("tcp", 0xc4);
}

/// Waits until nothing is answered any more.
pub fn await_stall(load: &Load) {
    let mut last = None;
    until("writes wait", || {
        let answered = load.answered();
        std::thread::sleep(Duration::from_millis(200));
        last.replace(answered) == Some(answered) && answered == load.answered()
    });
}

/// Without the manager I/O goes on; a leg that is lost then makes writes wait,
/// but never fail.
fn the_manager_is_away(transport: &str, seed: u64) {
    let mut rig = Rig::new(Pools::Memory, 2, 32, &[], seed);
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
    let mut nbd = Nbd::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
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
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn the_manager_is_away_when_a_mapped_leg_is_lost() {
    the_manager_is_away("map", 0xd1);
}

#[test]
fn the_manager_is_away_when_a_leg_over_tcp_is_lost() {
    the_manager_is_away("tcp", 0xd2);
}

/// A manager that stands still is like one that is away: I/O goes on, a loss
/// waits for it, and people are told within a bound.
#[test]
fn the_manager_stands_still() {
    let mut rig = Rig::new(Pools::Memory, 2, 32, &[], 0xd3);
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
    report.expect_good();
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
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// What is discarded while a leg is away is gone from it when it is back.
#[test]
fn discards_while_a_leg_is_away() {
    let mut rig = Rig::new(Pools::Memory, 2, 64, &[], 0x91);
    rig.serve("auto");
    let filled = rig.load(&Plan::default());
    filled.await_answers(15_000);
    filled.finish().expect_good();
    rig.cluster.kill_brick(0);
    let load = rig.load(&Plan {
        mix: Mix {
            reads: 10,
            trims: 40,
            zeroes: 10,
            fua: 0,
        },
        ..Plan::default()
    });
    load.await_answers(5000);
    rig.cluster.restart_brick(0);
    rig.export().await_state("healthy");
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "auto");
}

/// All bricks of a volume on disks die: what was acknowledged is there, flushed
/// or not, since the system below lives.
fn bricks_on_disks_die(layout: &[&str], bricks: usize, seed: u64) {
    let mut rig = Rig::new(Pools::Disk, bricks, 32, layout, seed);
    rig.serve("auto");
    for _ in 0..3 {
        let load = rig.load(&Plan {
            mix: Mix {
                reads: 10,
                trims: 10,
                zeroes: 5,
                fua: 5,
            },
            flush_every: Some(32),
            ..Plan::default()
        });
        load.await_answers(2000);
        (0..bricks).for_each(|brick| rig.cluster.kill_brick(brick));
        (0..bricks).for_each(|brick| rig.cluster.restart_brick(brick));
        load.await_answers(500);
        rig.export().await_state("healthy");
        let report = load.finish();
        // A client cannot know that: it says that writes may be gone.
        report.expect_at_worst(EIO, "Flush");
        assert_eq!(report.broken, 0);
        rig.verify();
    }
    rig.end_and_check();
}

#[test]
fn a_brick_on_a_disk_dies_alone_and_has_everything() {
    bricks_on_disks_die(&["--layout", "concat"], 1, 0x11);
}

#[test]
fn all_bricks_on_disks_die_and_have_everything() {
    bricks_on_disks_die(&[], 2, 0x12);
}
