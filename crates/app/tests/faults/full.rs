//! Pools without room.

use crate::load::{Mix, Plan, Report};
use crate::nbd::{Command, ENOSPC, Nbd};
use crate::oracle::BLOCK;
use crate::rig::{Rig, VOLUME, legs};
use crate::support::{MIB, Pools};

/// Writes all of a volume, past the oracle.
fn fill(rig: &Rig, volume: &str) {
    let export = rig.cluster.export(&[volume], "auto");
    let mut nbd = Nbd::connect(&export.socket(), volume, true).expect("clients are taken");
    let data = vec![0x5a; MIB as usize];
    for at in (0..nbd.size_bytes).step_by(data.len()) {
        nbd.send(at, (Command::Write, 0), at, data.len() as u32, &data)
            .expect("sent");
        assert_eq!(nbd.reply().expect("an answer").errno, 0, "{volume} at {at}");
    }
    drop(nbd);
    export.stop();
}

/// Brick 0 has most room, until another volume takes it: its leg leaves when
/// nothing is left, and comes back when that volume is gone.
fn one_leg_is_full(transport: &str, seed: u64) {
    let mut rig = Rig::with_pools(Pools::Memory, &[160, 96], 64, &[], seed);
    rig.cluster.create("other", "120M", &["--layout", "concat"]);
    fill(&rig, "other");
    rig.serve(transport);
    let load = rig.load(&Plan::default());
    let status = rig.export().await_state("degraded");
    assert_eq!(
        legs(&status).iter().filter(|leg| *leg == "stale").count(),
        1,
        "{status}"
    );
    assert!(
        status.to_string().contains("full"),
        "nobody can tell why: {status}"
    );
    load.await_answers(5000);
    assert!(!rig.export().status()["state"].eq("healthy"));
    rig.cluster.ok(&["volume", "delete", "other"]);
    rig.export().await_state("healthy");
    load.await_answers(1000);
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, transport);
}

#[test]
fn one_mapped_leg_is_full() {
    one_leg_is_full("map", 0xf1);
}

#[test]
fn one_leg_over_tcp_is_full() {
    one_leg_is_full("tcp", 0xf2);
}

/// Nothing failed but writes that found no room.
#[track_caller]
fn expect_full_at_worst(report: &Report) {
    report.expect_at_worst(ENOSPC, "Write");
    assert_eq!(report.broken, 0, "connections broke");
}

/// All legs are full: the client is told, no leg leaves, and discards make
/// room.
fn all_legs_are_full(pools: Pools, seed: u64) {
    let mut rig = Rig::with_pools(pools, &[40, 40], 64, &[], seed);
    rig.serve("auto");
    let load = rig.load(&Plan::default());
    load.await_answers(30_000);
    let report = load.finish();
    assert!(!report.failures.is_empty(), "there was room for all");
    expect_full_at_worst(&report);
    rig.verify();
    let load = rig.load(&Plan {
        mix: Mix {
            trims: 60,
            reads: 20,
            ..Mix::default()
        },
        ..Plan::default()
    });
    load.await_answers(20_000);
    expect_full_at_worst(&load.finish());
    let mut nbd = Nbd::connect(&rig.socket(), VOLUME, true).expect("clients are taken");
    let count = rig.oracle.len() / 2;
    for block in 0..count {
        let change = rig.oracle.next_change();
        let state = crate::oracle::State { change, zero: true };
        rig.oracle.block(block).begin(state);
        rig.oracle.block(block).settle(change);
    }
    let len = (count * BLOCK as u64) as u32;
    nbd.send(1, (Command::Trim, 0), 0, len, &[]).expect("sent");
    assert_eq!(
        nbd.reply().expect("an answer").errno,
        0,
        "a full pool takes discards"
    );
    drop(nbd);
    rig.verify();
    rig.export().await_state("healthy");
    let load = rig.load(&Plan {
        rate: Some(500),
        ..Plan::default()
    });
    load.await_answers(500);
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
}

#[test]
fn all_legs_in_memory_are_full() {
    all_legs_are_full(Pools::Memory, 0xf3);
}

#[test]
fn all_legs_on_disks_are_full() {
    all_legs_are_full(Pools::Disk, 0xf4);
}
