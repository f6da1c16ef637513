//! Snapshots that were made while a copy of the volume was away.

use crate::support;
use std::fs;
use support::{Cluster, Export, Pools, program};

/// The bytes of a snapshot.
fn snapshot_image(cluster: &Cluster, snapshot: &str) -> Vec<u8> {
    let export = cluster.export(&[snapshot], "tcp");
    let file = cluster.dir().join("snapshot.img");
    program::ok("nbdcopy", &[&export.uri, file.to_str().unwrap()]);
    export.stop();
    let bytes = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    bytes
}

fn write(export: &Export, fill: u8, range: &str) {
    export.io(&[&format!("write -P {fill} {range}")]);
}

/// Waits until all copies of the volume have all of its snapshots.
fn await_copies(cluster: &Cluster) {
    support::until("all copies have all snapshots", || {
        let list = cluster.json(&["snapshot", "list", "v"]);
        let text = list.to_string();
        !text.contains("missing_copies")
    });
}

#[test]
fn snapshots_reach_a_copy_that_was_away() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "8M", &["--layout", "mirror", "--copies", "2"]);
    let export = cluster.export(&["v"], "tcp");
    write(&export, 1, "0 1M");
    cluster.ok(&["snapshot", "create", "v@before"]);
    cluster.stop_brick(1);
    export.await_state("degraded");
    write(&export, 2, "0 256k");
    cluster.ok(&["snapshot", "create", "v@away"]);
    write(&export, 3, "0 128k");
    write(&export, 3, "4M 64k");
    cluster.ok(&["snapshot", "create", "v@later"]);
    write(&export, 4, "0 64k");
    write(&export, 4, "4M 16k");
    let names = ["v@before", "v@away", "v@later"];
    let images = names.map(|name| snapshot_image(&cluster, name));
    let list = cluster.json(&["snapshot", "list", "v"]).to_string();
    assert!(list.contains("missing_copies"), "{list}");
    cluster.restart_brick(1);
    export.await_state("healthy");
    await_copies(&cluster);
    let checked = cluster.json(&["snapshot", "check", "v"]);
    assert_eq!(checked["differing_pages"], 0, "{checked}");
    assert_eq!(checked["compared_bytes"], 8 << 20, "{checked}");
    assert!(checked["checked_pages"].as_u64() > Some(250), "{checked}");
    cluster.ok(&["snapshot", "check", "v@away"]);
    export.stop();
    cluster.kill_brick(0);
    for (name, image) in names.iter().zip(&images) {
        let found = snapshot_image(&cluster, name);
        assert!(found == *image, "{name} differs on the copy that was away");
    }
}
