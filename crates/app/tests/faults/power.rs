//! The power fails below pools of class `file-sync`: what the kernel holds and
//! nobody synced is gone.

use crate::load::{Mix, Plan};
use crate::media::{FileSystem, Kind};
use crate::nbd::EIO;
use crate::rig::Rig;
use crate::support::Cluster;
use crate::support::daemon::Daemon;

const ROUNDS: u64 = 3;

/// What a flush on any connection covers is there, on every copy.
fn the_power_fails(layout: &[&str], bricks: usize, seed: u64) {
    let Some(mut system) = FileSystem::new(Kind::Ext4, 144) else {
        return;
    };
    let pools = tempfile::tempdir_in(system.dir()).expect("a directory");
    let cluster = Cluster::build(pools, &vec![56; bricks], None);
    let mut rig = Rig::on(cluster, 16, layout, seed);
    rig.serve("auto");
    for round in 0..ROUNDS {
        let load = rig.load(&Plan {
            connections: 3,
            mix: Mix {
                reads: 10,
                trims: 10,
                zeroes: 5,
                fua: 5,
            },
            flush_every: Some(32),
            needs_flush: true,
            ..Plan::default()
        });
        load.await_answers(1500);
        // An fdatasync in the middle of a shutdown succeeds now and then without
        // having written all (ext4, Linux 6.18); a machine without power would not
        // tell anybody. So none is on its way.
        let frozen = || (0..bricks).map(|brick| rig.cluster.brick(brick));
        rig.export().daemon.freeze();
        frozen().for_each(Daemon::freeze);
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
        system.start_again();
        (0..bricks).for_each(|brick| rig.cluster.restart_brick(brick));
        rig.cluster.await_bricks(bricks);
        if round % 2 == 0 {
            load.await_answers(200);
            rig.export().await_state("healthy");
        } else {
            rig.serve("auto");
        }
        let report = load.finish();
        // What was not flushed may be gone, and the next flush says so.
        report.expect_at_worst(EIO, "Flush");
        rig.verify();
    }
    rig.export().await_state("healthy");
    rig.end_and_check();
    if bricks > 1 {
        rig.verify_without_each(bricks, "auto");
    }
}

#[test]
fn the_power_of_a_disk_fails_and_it_has_what_was_flushed() {
    the_power_fails(&["--layout", "concat"], 1, 0x11);
}

#[test]
fn the_power_of_all_disks_fails_and_they_have_what_was_flushed() {
    the_power_fails(&[], 2, 0x12);
}
