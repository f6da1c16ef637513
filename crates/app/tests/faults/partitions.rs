//! The network between machines loses packets: in both directions or one, to one machine or to all.
//! Each process is in a network namespace of its own.

use crate::faults::bricks::{MANAGER_STALL_MAX, await_stall};
use crate::faults::load::{LoadPlan, LoadReport, RequestMix};
use crate::faults::nbd::{Command, NbdConnection};
use crate::faults::oracle::BLOCK;
use crate::faults::rig::{READ_MAX, STALL_MAX, VOLUME, VolumeRig, counter, legs};
use crate::support::net::Host;
use crate::support::until;
use std::time::{Duration, Instant};

const CLIENT: Host = Host::Client(0);
/// The latest time at which a client that has lost the manager continues after the manager's
/// return: the longest call of the manager, its longest pause, and some reserve.
const MANAGER_BACK_MAX: Duration = Duration::from_secs(15);

/// Writers that leave most of the volume alone, and one connection that only reads.
fn steady() -> LoadPlan {
    LoadPlan {
        connections: 3,
        readers: 1,
        rate: Some(800),
        ..LoadPlan::default()
    }
}

/// Writes everywhere, so that readers find data.
fn fill(rig: &VolumeRig) {
    let filled = rig.load(&LoadPlan {
        connections: 3,
        depth: 16,
        ..LoadPlan::default()
    });
    filled.await_answers(6000);
    filled.finish().assert_success();
}

fn assert_short_stalls(what: &str, report: &LoadReport, stall_max: Duration) {
    report.assert_success();
    let (longest, read) = (report.longest, report.longest_read);
    println!(
        "{what}: {} requests, longest {longest:?}, longest read {read:?}",
        report.requests
    );
    assert!(longest < stall_max, "{what}: stalled {longest:?}");
    assert!(read < READ_MAX, "{what}: a read took {read:?}");
}

/// A client loses a brick, in either direction or both. It waits as long as for a dead brick,
/// continues without it, and resyncs the missed writes afterwards.
#[test]
fn client_cut_off_from_brick_continues() {
    let Some(mut rig) = VolumeRig::on_separate_hosts((2, 1), 64, &[], 0x71) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let brick = Host::Brick(0);
    let losses = [
        ("both ways", vec![(CLIENT, brick), (brick, CLIENT)]),
        ("to the brick", vec![(CLIENT, brick)]),
        ("from the brick", vec![(brick, CLIENT)]),
    ];
    for (what, losses) in losses {
        let before = counter(&rig.export().await_state("healthy"), "bytes_resynced");
        let load = rig.load(&steady());
        load.await_answers(500);
        let mark = rig.oracle.mark();
        let net = rig.cluster.net();
        losses
            .iter()
            .for_each(|&(from, to)| net.drop_packets(from, to));
        let status = rig.export().await_state("degraded");
        assert_eq!(legs(&status).iter().filter(|it| *it == "stale").count(), 1);
        load.await_answers(500);
        losses
            .iter()
            .for_each(|&(from, to)| net.restore_packets(from, to));
        until("the leg is written again", || {
            !legs(&rig.export().status()).contains(&"stale".into())
        });
        let missed = rig.oracle.bytes_changed_since(mark);
        let moved = counter(&rig.export().await_state("healthy"), "bytes_resynced") - before;
        load.await_answers(200);
        assert_short_stalls(what, &load.finish(), STALL_MAX);
        let ratio = moved as f64 / missed as f64;
        println!("{what}: {moved} bytes moved of {missed} missed: {ratio:.2}");
        assert!(moved > 0 && ratio < 1.3, "{moved} were moved for {missed}");
        rig.verify();
    }
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// Two of three copies are lost at once, each in another direction; then all three, for a while.
#[test]
fn client_cut_off_from_most_bricks_continues() {
    let Some(mut rig) = VolumeRig::on_separate_hosts((3, 1), 32, &["--copies", "3"], 0x72) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let load = rig.load(&steady());
    load.await_answers(500);
    let net = rig.cluster.net();
    net.drop_packets(CLIENT, Host::Brick(0));
    net.drop_packets(Host::Brick(1), CLIENT);
    until("two copies are left out", || {
        let legs = legs(&rig.export().status());
        legs.iter().filter(|leg| *leg == "stale").count() == 2
    });
    load.await_answers(500);
    net.restore_packets(CLIENT, Host::Brick(0));
    net.restore_packets(Host::Brick(1), CLIENT);
    rig.export().await_state("healthy");
    load.await_answers(500);
    // The client detects the loss of each leg separately.
    assert_short_stalls("two of three", &load.finish(), STALL_MAX * 2);

    let load = rig.load(&steady());
    load.await_answers(500);
    net.unplug(CLIENT);
    rig.export().await_state("unavailable");
    net.plug(CLIENT);
    rig.export().await_state("healthy");
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(3, "tcp");
}

/// Without the manager a lost leg cannot be detached: writes wait and name the brick, and reads
/// continue. All I/O continues when the manager is reachable again.
#[test]
fn writes_wait_if_manager_and_brick_are_cut_off() {
    let Some(mut rig) = VolumeRig::on_separate_hosts((2, 1), 32, &[], 0x73) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let load = rig.load(&LoadPlan {
        rate: Some(800),
        ..LoadPlan::default()
    });
    load.await_answers(500);
    let net = rig.cluster.net();
    net.cut(CLIENT, Host::Manager);
    net.cut(CLIENT, Host::Brick(0));
    let status = rig.export().await_state("awaiting-manager");
    assert!(legs(&status).iter().all(|leg| leg == "in-sync"), "{status}");
    await_stall(&load);
    let mut nbd = NbdConnection::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    nbd.send(1, (Command::Read, 0), 0, BLOCK as u32, &[])
        .expect("sent");
    assert_eq!(nbd.reply().expect("reads go on").errno, 0);
    drop(nbd);
    assert_eq!(rig.export().status()["state"], "awaiting-manager");
    net.heal(CLIENT, Host::Manager);
    let healed = Instant::now();
    rig.export().await_state("degraded");
    let took = healed.elapsed();
    println!("writes went on {took:?} after the manager was heard again");
    assert!(took < MANAGER_BACK_MAX, "{took:?}");
    load.await_answers(500);
    net.heal(CLIENT, Host::Brick(0));
    rig.export().await_state("healthy");
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// The manager reaches neither a brick nor the client. It reports the brick, and nothing else
/// changes.
#[test]
fn io_continues_if_manager_is_cut_off() {
    let Some(mut rig) = VolumeRig::on_separate_hosts((2, 1), 32, &[], 0x74) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let load = rig.load(&steady());
    let net = rig.cluster.net();
    net.cut(Host::Brick(0), Host::Manager);
    net.cut(CLIENT, Host::Manager);
    rig.cluster.await_bricks(1);
    load.await_answers(500);
    assert_eq!(rig.export().status()["state"], "healthy");
    net.heal(Host::Brick(0), Host::Manager);
    net.heal(CLIENT, Host::Manager);
    rig.cluster.await_bricks(2);
    load.await_answers(500);
    assert_short_stalls("the manager", &load.finish(), MANAGER_STALL_MAX);
    rig.verify();
    rig.end_and_check();
}

/// Client, manager and one of two bricks, in every combination of lost directions. If the client
/// cannot reach the brick, it detaches the leg as soon as the manager allows it. Otherwise it
/// continues unchanged.
#[test]
fn every_partition_of_client_manager_and_brick_heals() {
    let Some(mut rig) = VolumeRig::on_separate_hosts((2, 1), 32, &[], 0x77) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let (manager, brick) = (Host::Manager, Host::Brick(0));
    let links = [(CLIENT, brick), (CLIENT, manager), (manager, brick)];
    for which in 1..1 << links.len() {
        let is_cut = |link: usize| which & 1 << link != 0;
        let cut = || (0..links.len()).filter(|&link| is_cut(link));
        let load = rig.load(&steady());
        load.await_answers(500);
        let net = rig.cluster.net();
        cut().for_each(|link| net.cut(links[link].0, links[link].1));
        let state = match (is_cut(0), is_cut(1)) {
            (true, true) => "awaiting-manager",
            (true, false) => "degraded",
            (false, _) => "healthy",
        };
        rig.cluster.await_bricks(2 - usize::from(is_cut(2)));
        rig.export().await_state(state);
        if state != "awaiting-manager" {
            load.await_answers(1000);
        }
        assert_eq!(rig.export().status()["state"], state, "{which:03b}");
        cut().for_each(|link| net.heal(links[link].0, links[link].1));
        rig.cluster.await_bricks(2);
        rig.export().await_state("healthy");
        load.await_answers(500);
        load.finish().assert_success();
        rig.verify();
        println!("{which:03b}: {state}");
    }
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// A client reaches no other machine, and another client attaches elsewhere. After the first one's
/// return, none of its writes reach a leg, neither those sent before nor later ones, and all fail.
fn check_superseded_client(heals_after: Duration, seed: u64) {
    let Some(mut rig) = VolumeRig::on_separate_hosts((2, 2), 32, &[], seed) else {
        return;
    };
    rig.serve("tcp");
    let mut late = NbdConnection::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    let load = rig.load(&LoadPlan {
        depth: 16,
        mix: RequestMix {
            reads: 10,
            trims: 8,
            zeroes: 4,
            fua: 4,
        },
        ..LoadPlan::default()
    });
    load.await_answers(2000);
    rig.cluster.net().unplug(CLIENT);
    let cut = Instant::now();
    load.ask_to_stop();
    // These bytes are in the client's sockets when the export serves others already.
    let write = |late: &mut NbdConnection, block: u64| {
        let (at, data) = (block * BLOCK as u64, [0xee; BLOCK]);
        late.send(block, (Command::Write, 0), at, BLOCK as u32, &data)
            .expect("sent");
    };
    let early = 0..rig.oracle.len().min(64);
    early.clone().for_each(|block| write(&mut late, block));
    let mut old = rig.take_export();
    rig.serve_from(1, "tcp");
    println!("another client was served after {:?}", cut.elapsed());
    rig.verify();
    std::thread::sleep(heals_after.saturating_sub(cut.elapsed()));
    rig.cluster.net().plug(CLIENT);
    old.await_fenced();
    for _ in early {
        // The connection ends after the first error.
        let Ok(reply) = late.reply() else { break };
        assert_ne!(reply.errno, 0, "a fenced client wrote {}", reply.cookie);
    }
    let report = load.finish();
    let lost = report.failures.iter().find(|what| what.contains("lost"));
    assert_eq!(lost, None);
    rig.verify();
    let load = rig.load(&steady());
    load.await_answers(500);
    load.finish().assert_success();
    rig.verify();
    old.kill();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// The client's connections are still alive, and the kernel retransmits their data.
#[test]
fn briefly_partitioned_client_is_superseded() {
    check_superseded_client(Duration::ZERO, 0x75);
}

/// The client has already dropped its bricks.
#[test]
fn long_partitioned_client_is_superseded() {
    check_superseded_client(Duration::from_secs(4), 0x76);
}
