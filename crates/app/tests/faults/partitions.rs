//! The network between machines loses packets: both ways or one, to one
//! machine or to all. Each process is in a network namespace of its own.

use crate::bricks::{MANAGER_STALL_MAX, await_stall};
use crate::load::{Mix, Plan, Report};
use crate::nbd::{Command, Nbd};
use crate::oracle::BLOCK;
use crate::rig::{READ_MAX, Rig, STALL_MAX, VOLUME, counter, legs};
use crate::support::net::Host;
use crate::support::until;
use std::time::{Duration, Instant};

const CLIENT: Host = Host::Client(0);
/// Within this a client that has lost the manager, too, goes on when it is
/// back: the longest call of the manager, its longest pause, and some.
const MANAGER_BACK_MAX: Duration = Duration::from_secs(15);

/// Writers that leave most of the volume alone, and one who only reads.
fn steady() -> Plan {
    Plan {
        connections: 3,
        readers: 1,
        rate: Some(800),
        ..Plan::default()
    }
}

/// Writes everywhere, for readers to find something.
fn fill(rig: &Rig) {
    let filled = rig.load(&Plan {
        connections: 3,
        depth: 16,
        ..Plan::default()
    });
    filled.await_answers(6000);
    filled.finish().expect_good();
}

fn expect_short(what: &str, report: &Report, stall_max: Duration) {
    report.expect_good();
    let (longest, read) = (report.longest, report.longest_read);
    println!(
        "{what}: {} requests, longest {longest:?}, longest read {read:?}",
        report.requests
    );
    assert!(longest < stall_max, "{what}: stalled {longest:?}");
    assert!(read < READ_MAX, "{what}: a read took {read:?}");
}

/// A client loses a brick, in either direction or both: it waits as long as
/// for a dead one, goes on without it, and brings it back by difference.
#[test]
fn a_client_is_cut_off_from_a_brick() {
    let Some(mut rig) = Rig::apart((2, 1), 64, &[], 0x71) else {
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
        losses.iter().for_each(|&(from, to)| net.lose(from, to));
        let status = rig.export().await_state("degraded");
        assert_eq!(legs(&status).iter().filter(|it| *it == "stale").count(), 1);
        load.await_answers(500);
        losses.iter().for_each(|&(from, to)| net.deliver(from, to));
        until("the leg is written again", || {
            !legs(&rig.export().status()).contains(&"stale".into())
        });
        let missed = rig.oracle.bytes_changed_since(mark);
        let moved = counter(&rig.export().await_state("healthy"), "bytes_resynced") - before;
        load.await_answers(200);
        expect_short(what, &load.finish(), STALL_MAX);
        let ratio = moved as f64 / missed as f64;
        println!("{what}: {moved} bytes moved of {missed} missed: {ratio:.2}");
        assert!(moved > 0 && ratio < 1.3, "{moved} were moved for {missed}");
        rig.verify();
    }
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// Of three copies two are lost at once, each in another direction; then all
/// three, for a while.
#[test]
fn a_client_is_cut_off_from_most_bricks() {
    let Some(mut rig) = Rig::apart((3, 1), 32, &["--copies", "3"], 0x72) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let load = rig.load(&steady());
    load.await_answers(500);
    let net = rig.cluster.net();
    net.lose(CLIENT, Host::Brick(0));
    net.lose(Host::Brick(1), CLIENT);
    until("two copies are left out", || {
        let legs = legs(&rig.export().status());
        legs.iter().filter(|leg| *leg == "stale").count() == 2
    });
    load.await_answers(500);
    net.deliver(CLIENT, Host::Brick(0));
    net.deliver(Host::Brick(1), CLIENT);
    rig.export().await_state("healthy");
    load.await_answers(500);
    // Leg by leg is noticed by itself.
    expect_short("two of three", &load.finish(), STALL_MAX * 2);

    let load = rig.load(&steady());
    load.await_answers(500);
    net.unplug(CLIENT);
    rig.export().await_state("unavailable");
    net.plug(CLIENT);
    rig.export().await_state("healthy");
    load.await_answers(500);
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(3, "tcp");
}

/// Without the manager a lost leg cannot be left out: writes wait, and say for
/// whom, reads go on; all goes on when the manager is heard again.
#[test]
fn a_client_is_cut_off_from_the_manager_and_a_brick() {
    let Some(mut rig) = Rig::apart((2, 1), 32, &[], 0x73) else {
        return;
    };
    rig.serve("tcp");
    fill(&rig);
    let load = rig.load(&Plan {
        rate: Some(800),
        ..Plan::default()
    });
    load.await_answers(500);
    let net = rig.cluster.net();
    net.cut(CLIENT, Host::Manager);
    net.cut(CLIENT, Host::Brick(0));
    let status = rig.export().await_state("awaiting-manager");
    assert!(legs(&status).iter().all(|leg| leg == "in-sync"), "{status}");
    await_stall(&load);
    let mut nbd = Nbd::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
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
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// The manager hears neither a brick nor the client: it says so of the brick,
/// and nothing else changes.
#[test]
fn the_manager_is_cut_off() {
    let Some(mut rig) = Rig::apart((2, 1), 32, &[], 0x74) else {
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
    expect_short("the manager", &load.finish(), MANAGER_STALL_MAX);
    rig.verify();
    rig.end_and_check();
}

/// Client, manager and one of two bricks, in every combination of who does not hear whom:
/// without the brick the client leaves its copy out, as soon as the manager lets it;
/// otherwise it goes on as it was.
#[test]
fn every_combination_of_client_manager_and_brick_is_cut() {
    let Some(mut rig) = Rig::apart((2, 1), 32, &[], 0x77) else {
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
        load.finish().expect_good();
        rig.verify();
        println!("{which:03b}: {state}");
    }
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// A client hears nobody, and another one attaches elsewhere. When the first
/// is back, what it had sent and what it sends reaches no leg, and it says so.
fn a_client_is_superseded(heals_after: Duration, seed: u64) {
    let Some(mut rig) = Rig::apart((2, 2), 32, &[], seed) else {
        return;
    };
    rig.serve("tcp");
    let mut late = Nbd::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    let load = rig.load(&Plan {
        depth: 16,
        mix: Mix {
            reads: 10,
            trims: 8,
            zeroes: 4,
            fua: 4,
        },
        ..Plan::default()
    });
    load.await_answers(2000);
    rig.cluster.net().unplug(CLIENT);
    let cut = Instant::now();
    load.ask_to_stop();
    // These bytes lie in its sockets when others are served already.
    let write = |late: &mut Nbd, block: u64| {
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
        // The connection ends behind the first error.
        let Ok(reply) = late.reply() else { break };
        assert_ne!(reply.errno, 0, "a fenced client wrote {}", reply.cookie);
    }
    let report = load.finish();
    let lost = report.failures.iter().find(|what| what.contains("lost"));
    assert_eq!(lost, None);
    rig.verify();
    let load = rig.load(&steady());
    load.await_answers(500);
    load.finish().expect_good();
    rig.verify();
    old.kill();
    rig.end_and_check();
    rig.verify_without_each(2, "tcp");
}

/// Its connections live still, and the kernel sends again what it had.
#[test]
fn a_client_that_was_cut_off_shortly_is_superseded() {
    a_client_is_superseded(Duration::ZERO, 0x75);
}

/// It has given its bricks up already.
#[test]
fn a_client_that_was_cut_off_long_is_superseded() {
    a_client_is_superseded(Duration::from_secs(4), 0x76);
}
