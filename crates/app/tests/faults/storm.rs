//! Everything is killed, over and over, in an order that a seed decides.
//!
//! PAGEMESH_STORM_SECONDS says for how long, PAGEMESH_STORM_SEED in which
//! order.

use crate::load::{Mix, Plan};
use crate::oracle::Rng;
use crate::rig::Rig;
use crate::support::{PAGEMESH, Pools, program};
use std::time::{Duration, Instant};

fn number(name: &str, otherwise: u64) -> u64 {
    let found = std::env::var(name);
    found.map_or(otherwise, |text| text.parse().expect("a number"))
}

fn busy() -> Plan {
    Plan {
        mix: Mix {
            reads: 20,
            trims: 6,
            zeroes: 4,
            fua: 4,
        },
        ..Plan::default()
    }
}

/// At the end every acknowledged block is right, the legs are identical, each
/// holds all by itself, and no pool is damaged.
fn storm(layout: &[&str], bricks: usize, seed: u64) {
    let seed = number("PAGEMESH_STORM_SEED", seed);
    let seconds = number("PAGEMESH_STORM_SECONDS", 12);
    println!("PAGEMESH_STORM_SEED={seed} PAGEMESH_STORM_SECONDS={seconds}");
    let mut rng = Rng(seed);
    let mut rig = Rig::new(Pools::Memory, bricks, 32, layout, seed);
    let transports = ["map", "tcp"];
    rig.serve(transports[0]);
    let mut load = rig.load(&busy());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut killed = [0; 4];
    while Instant::now() < end {
        load.await_answers(1 + rng.below(800));
        let kind = rng.below(8) as usize / 2;
        killed[kind] += 1;
        match kind {
            0 => {
                let brick = rng.below(bricks as u64) as usize;
                rig.cluster.kill_brick(brick);
                // Now and then long enough for its leg to be left out.
                std::thread::sleep(Duration::from_millis(rng.below(4) * 100));
                rig.cluster.restart_brick(brick);
            }
            1 => {
                (0..bricks).for_each(|brick| rig.cluster.kill_brick(brick));
                (0..bricks).for_each(|brick| rig.cluster.restart_brick(brick));
            }
            2 => {
                rig.cluster.kill_manager();
                rig.cluster.start_manager();
            }
            _ => {
                rig.take_export().kill();
                let report = load.finish();
                assert!(report.failures.is_empty(), "{:#?}", report.failures);
                rig.cluster.await_bricks(bricks);
                rig.serve(transports[rng.below(2) as usize]);
                rig.verify();
                load = rig.load(&busy());
            }
        }
    }
    let [one, all, manager, export] = killed;
    println!("killed: a brick {one}, all bricks {all}, manager {manager}, export {export} times");
    rig.export().await_state("healthy");
    load.await_answers(500);
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(bricks, "auto");
    rig.take_export().stop();
    for brick in 0..bricks {
        rig.cluster.kill_brick(brick);
        let pool = rig.cluster.pool(brick).to_str().expect("a path");
        program::ok(PAGEMESH, &["pool", "check", pool]);
        rig.cluster.restart_brick(brick);
    }
}

#[test]
fn everything_is_killed_under_a_mirror() {
    storm(&[], 2, 0x51);
}

#[test]
fn everything_is_killed_under_three_copies() {
    storm(&["--copies", "3"], 3, 0x52);
}
