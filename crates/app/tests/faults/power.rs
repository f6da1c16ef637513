//! The power fails below pools of class `file-sync`: unsynced data in the kernel is lost.

use crate::faults::load::{LoadPlan, RequestMix};
use crate::faults::media::{FileSystemKind, TestFileSystem};
use crate::faults::nbd::EIO;
use crate::faults::rig::VolumeRig;
use crate::support::Cluster;
use crate::support::daemon::Daemon;

const ROUNDS: u64 = 3;

/// Writes that a flush on any connection covers are on every copy afterwards.
fn check_power_failure(layout: &[&str], bricks: usize, seed: u64) {
    let Some(mut system) = TestFileSystem::new(FileSystemKind::Ext4, 144) else {
        return;
    };
    let pools = tempfile::tempdir_in(system.dir()).expect("a directory");
    let cluster = Cluster::build(pools, &vec![56; bricks], None);
    let mut rig = VolumeRig::on(cluster, 16, layout, seed);
    rig.serve("auto");
    for round in 0..ROUNDS {
        let load = rig.load(&LoadPlan {
            connections: 3,
            mix: RequestMix {
                reads: 10,
                trims: 10,
                zeroes: 5,
                fua: 5,
            },
            flush_every: Some(32),
            needs_flush: true,
            ..LoadPlan::default()
        });
        load.await_answers(1500);
        // An fdatasync during a shutdown sometimes succeeds without having written all data (ext4,
        // Linux 6.18). A machine without power would not acknowledge it. So no fdatasync is in
        // flight.
        let frozen = || (0..bricks).map(|brick| rig.cluster.brick(brick));
        rig.export().daemon.stop_all_threads();
        frozen().for_each(Daemon::stop_all_threads);
        system.fail_power();
        frozen().for_each(|brick| brick.signal("CONT"));
        rig.export().daemon.signal("CONT");
        (0..bricks).for_each(|brick| rig.cluster.kill_brick(brick));
        if round % 2 == 1 {
            // The machines of the client and the manager fail, too.
            rig.take_export().kill();
            rig.cluster.kill_manager();
            rig.cluster.start_manager();
        }
        system.remount();
        (0..bricks).for_each(|brick| rig.cluster.restart_brick(brick));
        rig.cluster.await_bricks(bricks);
        if round % 2 == 0 {
            load.await_answers(200);
            rig.export().await_state("healthy");
        } else {
            rig.serve("auto");
        }
        let report = load.finish();
        // Unflushed writes may be lost, and the next flush reports that.
        report.assert_only_errors(EIO, "Flush");
        rig.verify();
    }
    rig.export().await_state("healthy");
    rig.end_and_check();
    if bricks > 1 {
        rig.verify_without_each(bricks, "auto");
    }
}

#[test]
fn disk_keeps_flushed_writes_on_power_failure() {
    check_power_failure(&["--layout", "concat"], 1, 0x11);
}

#[test]
fn all_disks_keep_flushed_writes_on_power_failure() {
    check_power_failure(&[], 2, 0x12);
}
