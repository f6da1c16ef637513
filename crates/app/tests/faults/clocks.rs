//! Machines disagree about the time, and clocks jump between two runs of a process. Within one run
//! the monotonic clock cannot jump, and `clippy.toml` forbids the other clock.

use crate::faults::load::LoadPlan;
use crate::faults::rig::VolumeRig;
use crate::support::skip::skip;
use crate::support::{Pools, program};

const YEARS_S: u64 = 10 * 365 * 86_400;

#[test]
fn clock_jumps_between_restarts_are_harmless() {
    let unshared = program::run("unshare", &["--time", "--monotonic", "1", "--fork", "true"]);
    if !unshared.status.success() {
        let cause = String::from_utf8_lossy(&unshared.stderr);
        skip(&format!("needs root for time namespaces: {cause}"));
        return;
    }
    let mut rig = VolumeRig::new(Pools::Memory, 2, 16, &[], 0x41);
    rig.serve("tcp");
    let load = rig.load(&LoadPlan::default());
    // Forward for each process, and back again.
    for ahead_s in [YEARS_S, 0] {
        rig.cluster.set_clocks_ahead(ahead_s);
        load.await_answers(500);
        rig.cluster.stop_brick(0);
        rig.cluster.restart_brick(0);
        rig.export().await_state("healthy");
        load.await_answers(500);
        rig.cluster.stop_manager();
        rig.cluster.start_manager();
        rig.cluster.await_bricks(2);
        rig.cluster.stop_brick(1);
        rig.cluster.restart_brick(1);
        rig.export().await_state("healthy");
    }
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.cluster.set_clocks_ahead(YEARS_S);
    rig.serve("map");
    rig.verify();
    rig.end_and_check();
    rig.cluster.set_clocks_ahead(0);
    rig.verify_without_each(2, "auto");
}
