//! Programs that people have, against volumes of a real cluster.

#![allow(clippy::unwrap_used)] // Tests.

mod support;

use support::{Cluster, Pools};

#[test]
fn patterns_are_read_back() {
    let cluster = Cluster::new(Pools::Memory, 3);
    cluster.create("disk", "32M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 7 4096 65536", "read -P 7 4096 65536", "flush"]);
    export.stop();
    cluster.check_identical("disk");
}
