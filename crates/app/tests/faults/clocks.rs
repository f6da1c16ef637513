//! Machines disagree about the time, and clocks jump between two lives of a
//! process. Within one life the monotonic clock cannot, and `clippy.toml`
//! refuses the other one.

use crate::load::Plan;
use crate::rig::Rig;
use crate::support::skip::skip;
use crate::support::{Pools, program};

const YEARS_S: u64 = 10 * 365 * 86_400;

#[test]
fn clocks_jump_between_lives() {
    let unshared = program::run("unshare", &["--time", "--monotonic", "1", "--fork", "true"]);
    if !unshared.status.success() {
        let cause = String::from_utf8_lossy(&unshared.stderr);
        skip(&format!("needs root for time namespaces: {cause}"));
        return;
    }
    let mut rig = Rig::new(Pools::Memory, 2, 16, &[], 0x41);
    rig.serve("tcp");
    let load = rig.load(&Plan::default());
    // Forward for each, and back again.
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
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.cluster.set_clocks_ahead(YEARS_S);
    rig.serve("map");
    rig.verify();
    rig.end_and_check();
    rig.cluster.set_clocks_ahead(0);
    rig.verify_without_each(2, "auto");
}
