//! Schedules of snapshots on a real cluster, and their replication to another one.

use crate::support;
use serde_json::{Value, json};
use std::path::Path;
use support::{Cluster, Pools, until};

fn write(cluster: &Cluster, volume: &str, commands: &[&str]) {
    let export = cluster.export(&[volume], "map");
    export.io(commands);
    export.stop();
}

fn cluster() -> Cluster {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("db-1", "16M", &["--layout", "mirror", "--copies", "2"]);
    write(&cluster, "db-1", &["write -P 1 0 1M", "write -P 2 8M 64k"]);
    cluster
}

fn names(cluster: &Cluster, volume: &str) -> Vec<String> {
    let found = cluster.json(&["snapshot", "list", volume]);
    let found = found.as_array().unwrap().iter();
    found
        .map(|it| it["name"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn schedule_is_for_volumes_with_its_label() {
    let cluster = cluster();
    cluster.create("web", "4M", &["--layout", "mirror", "--copies", "2"]);
    let set = cluster.json(&["volume", "set-label", "web", "env=prod", "tier=gold"]);
    assert_eq!(set["labels"], json!({"env": "prod", "tier": "gold"}));
    cluster.ok(&["volume", "set-label", "web", "--remove", "tier"]);
    let shown = cluster.ok(&["volume", "show", "web"]);
    assert!(shown.contains("labels: env=prod\n"), "{shown}");
    let create = |label| {
        [
            "schedule", "create", "prod", "--label", label, "--group", "--hourly", "24",
        ]
    };
    cluster.refused(&create("env"), &["'env' is no label", "KEY=VALUE"]);
    let made = cluster.json(&create("env=prod"));
    assert_eq!(
        (&made["volumes"], &made["policy"]["group"]),
        (&json!(1), &json!(true))
    );
    until("the manager has made a snapshot", || {
        !names(&cluster, "web").is_empty()
    });
    assert!(names(&cluster, "db-1").is_empty());
}

#[test]
fn manager_carries_a_schedule_out() {
    let cluster = cluster();
    let create = [
        "schedule", "create", "auto", "--volume", "db-*", "--hourly", "24", "--daily", "7",
    ];
    let made = cluster.json(&create);
    assert_eq!(
        (&made["volumes"], &made["policy"]["warn_after_s"]),
        (&json!(1), &json!(7200))
    );
    until("the manager has made a snapshot", || {
        !names(&cluster, "db-1").is_empty()
    });
    let name = names(&cluster, "db-1").remove(0);
    assert!(name.starts_with("auto-") && name.ends_with("-hd"), "{name}");
    let dry = cluster.json(&["schedule", "dry-run", "auto"]);
    assert_eq!(
        (&dry[0]["create"], &dry[0]["prune"]),
        (&json!([]), &json!([]))
    );
    let shown = cluster.json(&["schedule", "show", "auto"]);
    assert_eq!(shown["volumes"][0]["newest"], name);
    let changed = cluster.json(&[
        "schedule",
        "update",
        "auto",
        "--daily",
        "0",
        "--enabled",
        "false",
    ]);
    assert_eq!(changed["policy"]["retention"]["hourly"], 24);
    assert_eq!(changed["policy"]["retention"]["daily"], 0);
    let run = cluster.json(&["schedule", "run", "auto"]);
    assert!(run[0]["name"].as_str().unwrap().ends_with("-h"), "{run}");
    for (args, says) in [
        (&["--hourly", "0"][..], "keeps no snapshot"),
        (&["--frequent", "9999"], "the most"),
        (&["--warn-after", "1h"], "apart"),
    ] {
        let all = [&["schedule", "update", "auto"], args].concat();
        cluster.refused(&all, &[says]);
    }
    let table = cluster.ok(&["schedule", "list"]);
    assert!(
        table.contains("disabled") && table.contains("24 hourly"),
        "{table}"
    );
    cluster.ok(&["schedule", "delete", "auto"]);
    assert_eq!(cluster.json(&["schedule", "list"]), json!([]));
    assert_eq!(names(&cluster, "db-1").len(), 2);
}

/// Two clusters, and a schedule of the first with the second as its target.
fn pair() -> (Cluster, Cluster) {
    let (from, to) = (cluster(), Cluster::new(Pools::Memory, 2));
    let target = format!("backup=http://{}/copy-", to.manager_address());
    let create = [
        "schedule",
        "create",
        "auto",
        "--volume",
        "db-*",
        "--daily",
        "2",
        "--enabled",
        "false",
    ];
    from.ok(&[&create[..], &["--target", &target]].concat());
    (from, to)
}

fn replicate(from: &Cluster, to: &Cluster) -> Value {
    let key = to.key();
    from.json(&replicate_args(&key))
}

fn replicate_args(key: &Path) -> [&str; 5] {
    let key = key.to_str().unwrap();
    ["schedule", "replicate", "auto", "--target-key", key]
}

#[test]
fn schedule_is_replicated_as_changes() {
    let (from, to) = pair();
    assert_eq!(replicate(&from, &to)[0]["outcome"], "no-snapshot");
    let first = from.json(&["schedule", "run", "auto"])[0]["name"].clone();
    assert_eq!(replicate(&from, &to)[0]["outcome"], "sent");
    assert_eq!(replicate(&from, &to)[0]["outcome"], "up-to-date");
    assert_eq!(names(&to, "copy-db-1"), [first.as_str().unwrap()]);
    write(&from, "db-1", &["write -P 3 1M 8k", "discard 8M 64k"]);
    // The names have seconds.
    until("the next second has begun", || {
        from.run(&["schedule", "run", "auto"]).status.success()
    });
    // A person deletes the snapshot that the target has. The bookmark is left.
    let path = format!("db-1@{}", first.as_str().unwrap());
    from.ok(&["snapshot", "delete", &path, "--yes"]);
    assert_eq!(replicate(&from, &to)[0]["outcome"], "sent");
    assert_eq!(names(&to, "copy-db-1").len(), 2);
    let shown = from.json(&["schedule", "show", "auto"]);
    let sent = &shown["volumes"][0]["sent"]["backup"];
    assert_eq!(sent["snapshot"], shown["volumes"][0]["newest"], "{shown}");
    let bookmarks = from.json(&["bookmark", "list", "db-1"]);
    assert_eq!(bookmarks[0]["name"], "auto.backup");
    assert_eq!(bookmarks[0]["epoch"], sent["epoch"]);
    to.ok(&["volume", "promote", "copy-db-1"]);
    let export = to.export(&["copy-db-1"], "map");
    export.io(&["read -P 1 0 1M", "read -P 3 1M 8k", "read -P 0 2M 14M"]);
    export.stop();
    // A promoted volume gets no more.
    until("the next second has begun", || {
        from.run(&["schedule", "run", "auto"]).status.success()
    });
    let key = to.key();
    from.refused(&replicate_args(&key), &["1 of 1 volumes were not sent"]);
    from.refused(
        &["schedule", "replicate", "auto", "--target", "no"],
        &["no such target"],
    );
}

/// A first stream may last longer than the retention of the schedule.
#[test]
fn snapshot_on_its_way_is_held() {
    let (from, to) = pair();
    let first = from.json(&["schedule", "run", "auto"])[0]["name"].clone();
    let path = format!("db-1@{}", first.as_str().unwrap());
    let holds = || from.json(&["snapshot", "show", &path])["info"]["holds"].clone();
    // That volume does not receive.
    let key = to.key();
    to.ok(&["volume", "create", "copy-db-1", "--size", "16M"]);
    from.refused(&replicate_args(&key), &["1 of 1 volumes were not sent"]);
    assert_eq!(holds(), json!([]), "a failed run leaves no hold");
    // A killed run leaves one, and the next run releases it.
    from.ok(&["snapshot", "hold", "sending-auto-backup", &path]);
    assert_eq!(holds(), json!(["sending-auto-backup"]));
    to.ok(&["volume", "delete", "copy-db-1"]);
    assert_eq!(replicate(&from, &to)[0]["outcome"], "sent");
    assert_eq!(holds(), json!([]));
    from.refused(
        &["snapshot", "hold", "rollback", &path],
        &["the tag rollback", "choose another"],
    );
}
