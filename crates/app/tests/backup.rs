//! Backups of snapshots in a directory: made, made of changes, verified, pruned and restored.

use crate::support;
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use support::{Cluster, PAGEMESH, Pools, until};

fn write(cluster: &Cluster, volume: &str, commands: &[&str]) {
    let export = cluster.export(&[volume], "map");
    export.io(commands);
    export.stop();
}

/// A cluster with a volume `v` of 16 MiB and its snapshot `one`.
fn cluster() -> Cluster {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "16M", &["--layout", "mirror", "--copies", "2"]);
    write(
        &cluster,
        "v",
        &["write -P 1 0 1M", "write -P 2 4M 64k", "write -P 3 8M 1M"],
    );
    cluster.ok(&["snapshot", "create", "v@one"]);
    cluster
}

fn backup(cluster: &Cluster, args: &[&str]) -> Value {
    cluster.json(&[&["backup"], args].concat())
}

/// The files of chunks.
fn chunks(dir: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir.join("chunks")).unwrap();
    let files = folders.flat_map(|it| fs::read_dir(it.unwrap().path()).unwrap());
    files.map(|it| it.unwrap().path()).collect()
}

#[test]
fn backup_has_changes_alone_and_is_restored() {
    let cluster = cluster();
    let (dir, other) = (cluster.dir().join("b"), Cluster::new(Pools::Memory, 2));
    let at = dir.to_str().unwrap();
    let first = backup(&cluster, &["create", "v@one", at]);
    // The chunks of equal bytes are one file.
    assert_eq!(
        (&first["chunks"], &first["stored_chunks"]),
        (&json!(9), &json!(3)),
        "{first}"
    );
    cluster.refused(
        &["backup", "create", "v@one", at],
        &["a backup v@one already"],
    );
    write(
        &cluster,
        "v",
        &[
            "write -P 7 300k 4k",
            "discard 8M 512k",
            "write -P 2 15M 64k",
        ],
    );
    cluster.ok(&["snapshot", "create", "v@two"]);
    // The bookmark of the first backup is left.
    cluster.ok(&["snapshot", "delete", "v@one", "--yes"]);
    write(&cluster, "v", &["write -P 9 0 2M"]);
    let second = backup(&cluster, &["create", "v@two", at]);
    assert_eq!(second["since"], "v@one");
    // Four chunks have changed. Four had holes that were written since, and the births of these are not known.
    assert_eq!(
        (&second["read_bytes"], &second["stored_chunks"]),
        (&json!(8 * 262_144), &json!(1)),
        "{second}"
    );
    let listed = backup(&cluster, &["list", at]);
    assert_eq!(
        (&listed[0]["backup"], &listed[1]["chunks"]),
        (&json!("v@one"), &json!(8))
    );
    let verified = backup(&cluster, &["verify", at]);
    assert_eq!(
        (
            &verified["backups"],
            &verified["chunks"],
            &verified["problems"]
        ),
        (&json!(2), &json!(4), &json!([]))
    );

    for (name, reads) in [
        (
            "v@one",
            &[
                "read -P 1 0 1M",
                "read -P 0 1M 3M",
                "read -P 2 4M 64k",
                "read -P 3 8M 1M",
                "read -P 0 9M 7M",
            ][..],
        ),
        (
            "v@two",
            &[
                "read -P 1 0 300k",
                "read -P 7 300k 4k",
                "read -P 0 8M 512k",
                "read -P 3 8704k 512k",
                "read -P 2 15M 64k",
            ],
        ),
    ] {
        other.ok(&["backup", "restore", at, name, "w"]);
        let export = other.export(&["w"], "map");
        export.io(reads);
        export.stop();
        other.check_identical("w");
        assert_eq!(other.json(&["snapshot", "list", "w"]), json!([]));
        other.refused(
            &["backup", "restore", at, name, "w"],
            &["already is a volume w"],
        );
        other.ok(&["volume", "delete", "w"]);
    }
    other.refused(&["backup", "restore", at, "v@no", "w"], &["no backup v@no"]);
}

#[test]
fn volume_of_a_killed_restore_is_attached_by_no_client() {
    let cluster = cluster();
    let dir = cluster.dir().join("b");
    let at = dir.to_str().unwrap();
    backup(&cluster, &["create", "v@one", at]);
    // The restore waits for a writer of the chunk.
    for chunk in chunks(&dir) {
        fs::remove_file(&chunk).unwrap();
        mkfifoat(CWD, &chunk, Mode::RUSR | Mode::WUSR).unwrap();
    }
    let limited = cluster.command(&[]);
    let envs = limited.get_envs();
    let mut restore = Command::new(PAGEMESH);
    restore.args(["backup", "restore", at, "v@one", "w"]);
    restore.envs(envs.filter_map(|(key, value)| Some((key, value?))));
    let mut restore = restore.stdout(Stdio::null()).spawn().unwrap();
    until("the volume is attached", || {
        let shown = cluster.run(&["volume", "show", "w", "--output", "json"]);
        let shown = serde_json::from_slice::<Value>(&shown.stdout);
        shown.is_ok_and(|it| !it["info"]["attached"].is_null())
    });
    restore.kill().unwrap();
    restore.wait().unwrap();
    let socket = cluster.dir().join("nbd");
    let export = ["export", "nbd", "w", "--socket", socket.to_str().unwrap()];
    cluster.refused(&export, &["w", "receives"]);
    cluster.refused(&["volume", "promote", "w"], &["w"]);
    cluster.ok(&["volume", "detach", "w"]);
    cluster.ok(&["volume", "delete", "w"]);
}

#[test]
fn pruning_deletes_chunks_that_no_backup_has() {
    let cluster = cluster();
    let dir = cluster.dir().join("b");
    let at = dir.to_str().unwrap();
    backup(&cluster, &["create", "v@one", at]);
    write(&cluster, "v", &["write -P 7 8M 1M"]);
    cluster.ok(&["snapshot", "create", "v@two"]);
    backup(&cluster, &["create", "v@two", at]);
    // A process that was killed left these.
    fs::write(dir.join(".tmpx"), "x").unwrap();
    fs::write(dir.join("backups/.tmpx"), "x").unwrap();
    let dry = backup(&cluster, &["prune", at, "--keep", "1", "--dry-run"]);
    assert_eq!(
        (&dry["backups"], &dry["chunks"]),
        (&json!(["v@one"]), &json!(1)),
        "{dry}"
    );
    assert_eq!(chunks(&dir).len(), 4);
    let pruned = backup(&cluster, &["prune", at, "--keep", "1"]);
    assert_eq!(pruned, dry);
    assert_eq!(chunks(&dir).len(), 3);
    assert!(!dir.join(".tmpx").exists() && !dir.join("backups/.tmpx").exists());
    assert_eq!(backup(&cluster, &["verify", at])["problems"], json!([]));
    cluster.ok(&["backup", "restore", at, "v@two", "w"]);
    cluster.refused(
        &["backup", "prune", at, "--delete", "v@one"],
        &["no backup v@one"],
    );
    backup(&cluster, &["prune", at, "--delete", "v@two"]);
    assert!(chunks(&dir).is_empty());
}

#[test]
fn damage_is_found_and_repaired_by_a_full_backup() {
    let cluster = cluster();
    let dir = cluster.dir().join("b");
    let at = dir.to_str().unwrap();
    backup(&cluster, &["create", "v@one", at]);
    let victim = chunks(&dir).remove(0);
    let mut bytes = fs::read(&victim).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&victim, bytes).unwrap();
    let verified = cluster.run(&["backup", "verify", at]);
    let shown = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert_eq!(verified.status.code(), Some(3), "{shown}");
    assert!(
        shown.contains("is damaged") && shown.contains("v@one lacks"),
        "{shown}"
    );
    cluster.refused(
        &["backup", "restore", at, "v@one", "w"],
        &["is damaged", "volume w is deleted"],
    );
    assert_eq!(
        cluster.json(&["volume", "list"]).as_array().unwrap().len(),
        1
    );
    cluster.ok(&["snapshot", "create", "v@two"]);
    backup(&cluster, &["create", "v@two", at, "--full"]);
    assert_eq!(backup(&cluster, &["verify", at])["problems"], json!([]));
    // A crash between the chunks and the manifest: the next backup reads the chunks that are there.
    backup(
        &cluster,
        &["prune", at, "--delete", "v@one", "--delete", "v@two"],
    );
    fs::write(dir.join("unfinished"), "").unwrap();
    fs::create_dir_all(victim.parent().unwrap()).unwrap();
    fs::write(&victim, "").unwrap();
    backup(&cluster, &["create", "v@one", at]);
    assert_eq!(backup(&cluster, &["verify", at])["problems"], json!([]));
    // Chunks that this backup does not name may be incomplete, so the mark stays until they are pruned.
    assert!(dir.join("unfinished").exists());
    backup(&cluster, &["prune", at]);
    assert!(!dir.join("unfinished").exists());
    // No chunk goes while a manifest is damaged.
    let manifest = dir.join("backups/v@one");
    let mut bytes = fs::read(&manifest).unwrap();
    bytes[400] ^= 1;
    fs::write(&manifest, bytes).unwrap();
    cluster.refused(&["backup", "prune", at], &["while a backup is damaged"]);
    backup(&cluster, &["prune", at, "--delete", "v@one"]);
    assert!(chunks(&dir).is_empty());
}

#[test]
fn damaged_backup_is_named_and_blocks_no_other() {
    let cluster = cluster();
    let dir = cluster.dir().join("b");
    let at = dir.to_str().unwrap();
    for name in ["one", "two", "three"] {
        let snapshot = format!("v@{name}");
        if name != "one" {
            write(&cluster, "v", &["write -P 7 8M 1M"]);
            cluster.ok(&["snapshot", "create", &snapshot]);
        }
        let made = backup(&cluster, &["create", &snapshot, at]);
        if name == "three" {
            assert_eq!(made["since"], "v@one", "the damaged one is not used");
        }
        if name == "two" {
            let manifest = dir.join("backups/v@two");
            let mut bytes = fs::read(&manifest).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&manifest, bytes).unwrap();
        }
    }
    let listed = cluster.run(&["backup", "list", at, "--output", "json"]);
    assert_eq!(listed.status.code(), Some(3));
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let names: Vec<&Value> = (0..3).map(|it| &listed[it]["backup"]).collect();
    assert_eq!(names, [&json!("v@one"), &json!("v@three"), &json!("v@two")]);
    assert!(listed[2]["problem"].is_string(), "{listed}");
    let table = cluster.run(&["backup", "list", at]);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("v@three"), "{table}");
    assert!(table.contains("the backup v@two is damaged"), "{table}");
}

#[test]
fn directory_in_use_or_of_others_is_refused() {
    let cluster = cluster();
    let (dir, other) = (cluster.dir().join("b"), cluster.dir().join("other"));
    let at = dir.to_str().unwrap();
    backup(&cluster, &["create", "v@one", at]);
    let lock = fs::File::open(dir.join("lock")).unwrap();
    lock.lock_shared().unwrap();
    cluster.refused(&["backup", "prune", at], &["in use"]);
    backup(&cluster, &["verify", at]);
    drop(lock);
    backup(&cluster, &["prune", at]);
    fs::create_dir(&other).unwrap();
    fs::write(other.join("file"), "x").unwrap();
    let other = other.to_str().unwrap();
    cluster.refused(&["backup", "create", "v@one", other], &["other files"]);
    cluster.refused(&["backup", "list", other], &["no directory of backups"]);
}
