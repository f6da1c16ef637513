//! fio writes and verifies its data while bricks and the manager are killed.

use crate::faults::rig::{STALL_MAX, VolumeRig};
use crate::support::{Pools, program};
use pagemesh_base::rng::SplitMix64;
use serde_json::Value;
use std::process::Stdio;
use std::time::Duration;

/// Every block of this region is written once, in any order, then read.
const REGION_MIB: u64 = 48;
const BLOCKS: u64 = (REGION_MIB << 20) / 4096;
/// Requests per second: fio then writes for some seconds.
const RATE: u64 = 2500;
/// Least number of kills while fio writes.
const KILLS_MIN: u64 = 3;

fn check_fio_during_kills(transport: &str, seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 3, 64, &["--copies", "3"], seed);
    rig.serve(transport);
    let mut rng = SplitMix64::new(seed);
    let uri = &rig.export().uri;
    let fio = program::limited("fio")
        .args(["--name=verify", "--thread", "--ioengine=nbd"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={REGION_MIB}M"))
        .arg(format!("--rate_iops={RATE}"))
        .arg(format!("--randseed={seed}"))
        .args(["--rw=randwrite", "--bs=4k", "--iodepth=8"])
        .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1"])
        .args(["--verify_state_save=0", "--output-format=json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut fio = Some(fio);
    let mut kills = 0;
    while fio.as_mut().unwrap().try_wait().unwrap().is_none() {
        match rng.below(4) {
            0 => {
                rig.cluster.kill_manager();
                rig.cluster.start_manager();
            }
            _ => {
                let brick = rng.below(3) as usize;
                rig.cluster.kill_brick(brick);
                // At times long enough that the leg is detached.
                std::thread::sleep(Duration::from_millis(rng.below(3) * 150));
                rig.cluster.restart_brick(brick);
            }
        }
        kills += 1;
        rig.export().await_state("healthy");
    }
    let text = program::succeeded("fio", fio.take().unwrap().wait_with_output().unwrap());
    let json = text.find('{').map_or("", |at| &text[at..]);
    let said: Value = serde_json::from_str(json).unwrap_or_else(|cause| panic!("{cause}: {text}"));
    let job = &said["jobs"][0];
    let number = |value: &Value| {
        value
            .as_u64()
            .unwrap_or_else(|| panic!("{value} in {text}"))
    };
    assert_eq!(number(&job["error"]), 0, "{text}");
    assert_eq!(number(&job["write"]["total_ios"]), BLOCKS);
    assert_eq!(number(&job["read"]["total_ios"]), BLOCKS);
    let longest = ["write", "read"].map(|way| number(&job[way]["clat_ns"]["max"]));
    let longest = Duration::from_nanos(longest.into_iter().max().unwrap());
    println!("{transport}: {kills} kills, longest {longest:?}");
    assert!(kills >= KILLS_MIN, "{kills} kills");
    assert!(longest < STALL_MAX, "stalled {longest:?}");
    rig.end_and_check();
}

#[test]
fn fio_verifies_writes_to_mapped_bricks_during_kills() {
    check_fio_during_kills("map", 0xf1);
}

#[test]
fn fio_verifies_writes_over_tcp_during_kills() {
    check_fio_during_kills("tcp", 0xf2);
}
