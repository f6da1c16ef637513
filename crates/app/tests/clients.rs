//! Common client programs against volumes of a real cluster.

use crate::support;
use serde_json::Value;
use std::path::{Path, PathBuf};
use support::program::{self, qemu_io};
use support::{Cluster, MIB, Pools, own_ip};

/// Bytes that do not compress and are the same in every run.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        // Xorshift of G. Marsaglia.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A file system image with files of many sizes in directories.
fn ext4_image(dir: &Path, size_mib: u64) -> PathBuf {
    let root = dir.join("root");
    for n in 0..60usize {
        let inner = root.join(format!("directory-{}/{}", n % 7, n % 3));
        std::fs::create_dir_all(&inner).unwrap();
        let len = [0, 1, 511, 4096, 70_001, 1_234_567][n % 6];
        std::fs::write(inner.join(format!("file-{n}")), noise(len, n as u64 + 1)).unwrap();
    }
    let image = dir.join("image");
    let size = format!("{size_mib}M");
    let (root, path) = (root.to_str().unwrap(), image.to_str().unwrap());
    program::ok("mke2fs", &["-q", "-t", "ext4", "-d", root, path, &size]);
    image
}

fn info(uri: &str) -> Value {
    let text = program::ok("nbdinfo", &["--json", uri]);
    let told: Value = serde_json::from_str(&text).unwrap();
    told["exports"][0].clone()
}

/// The extents that `nbdinfo --map` reports: offset, length, and whether the extent holds data.
fn map(uri: &str) -> Vec<(u64, u64, bool)> {
    let text = program::ok("nbdinfo", &["--map", "--json", uri]);
    let told: Vec<Value> = serde_json::from_str(&text).unwrap();
    let number = |extent: &Value, name: &str| extent[name].as_u64().unwrap();
    told.iter()
        .map(|it| {
            (
                number(it, "offset"),
                number(it, "length"),
                number(it, "type") == 0,
            )
        })
        .collect()
}

/// Copies a file system into a mirrored volume, compares it, copies it out, and checks it.
fn check_file_system_copy(pools: Pools, transport: &str) {
    let cluster = Cluster::with_pools(pools, &[128, 128, 128]);
    let image = ext4_image(cluster.dir(), 96);
    let image = image.to_str().unwrap();
    cluster.create("disk", "96M", &["--layout", "mirror", "--copies", "2"]);
    let copy = cluster.dir().join("copy");
    let copy = copy.to_str().unwrap();

    let export = cluster.export(&["disk"], transport);
    let uri = &export.uri;
    program::ok(
        "qemu-img",
        &["convert", "-n", "-f", "raw", "-O", "raw", image, uri],
    );
    program::ok(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", image, uri],
    );
    program::ok("nbdcopy", &[uri, copy]);
    program::ok("cmp", &[image, copy]);
    program::ok("e2fsck", &["-fn", copy]);
    let used = cluster.json(&["status"])["status"]["used_bytes"]
        .as_u64()
        .unwrap();
    assert!(
        used < 2 * 60 * MIB,
        "holes take no space, but {used} bytes are used"
    );
    export.stop();

    cluster.check_identical("disk");
    let export = cluster.export(&["disk"], "tcp");
    program::ok(
        "qemu-img",
        &["compare", "-f", "raw", "-F", "raw", image, &export.uri],
    );
}

#[test]
fn file_system_survives_copy_over_map() {
    check_file_system_copy(Pools::Memory, "map");
}

#[test]
fn file_system_survives_copy_over_tcp() {
    check_file_system_copy(Pools::Memory, "tcp");
}

#[test]
fn file_system_survives_copy_to_disk_pools() {
    check_file_system_copy(Pools::Disk, "auto");
}

/// qemu-io operations, also at unaligned offsets.
fn check_patterns(pools: Pools, transport: &str) {
    let cluster = Cluster::new(pools, 3);
    cluster.create("disk", "32M", &[]);
    let export = cluster.export(&["disk"], transport);
    export.io(&[
        "write -P 0x11 0 1M",
        "write -P 0x22 1000 513",
        "read -P 0x11 0 1000",
        "read -P 0x22 1000 513",
        "read -P 0x11 1513 4096",
        // Across pages, one byte off at both ends.
        "write -f -P 0x33 8191 8194",
        "read -P 0x11 8190 1",
        "read -P 0x33 8191 8194",
        "read -P 0x11 16385 1",
        "write -z 64k 64k",
        "read -P 0 64k 64k",
        "write -z 200001 3",
        "read -P 0x11 200000 1",
        "read -P 0 200001 3",
        "read -P 0x11 200004 1",
        "write -z -u 256k 128k",
        "read -P 0 256k 128k",
        "discard 512k 256k",
        "read -P 0 512k 256k",
        "read -P 0x11 768k 256k",
        // Never written, and the last bytes of the volume.
        "read -P 0 16M 1M",
        "write -P 0x44 33554431 1",
        "read -P 0x44 33554431 1",
        "read -P 0 33550336 4095",
        "flush",
    ]);
    let again = [
        "read -P 0x22 1000 513",
        "read -P 0x33 8191 8194",
        "read -P 0 64k 64k",
        "read -P 0 512k 256k",
        "read -P 0x44 33554431 1",
    ];
    export.io(&again);
    export.stop();
    cluster.check_identical("disk");
    cluster.export(&["disk"], transport).io(&again);
}

#[test]
fn patterns_are_read_back_over_map() {
    check_patterns(Pools::Memory, "map");
}

#[test]
fn patterns_are_read_back_over_tcp() {
    check_patterns(Pools::Memory, "tcp");
}

#[test]
fn patterns_are_read_back_from_disk_pools() {
    check_patterns(Pools::Disk, "auto");
}

#[test]
fn every_layout_keeps_writes_of_many_connections() {
    let cluster = Cluster::new(Pools::Memory, 4);
    let source = cluster.dir().join("source");
    std::fs::write(&source, noise(16 * MIB as usize, 5)).unwrap();
    let (source, dir) = (source.to_str().unwrap(), cluster.dir());
    let layouts: [(&str, &[&str]); 5] = [
        ("concat", &["--layout", "concat"]),
        ("stripe", &["--layout", "stripe", "--columns", "3"]),
        ("mirror", &["--layout", "mirror"]),
        ("mirror3", &["--layout", "mirror", "--copies", "3"]),
        (
            "both",
            &[
                "--layout",
                "stripe+mirror",
                "--columns",
                "2",
                "--copies",
                "2",
            ],
        ),
    ];
    for (name, args) in layouts {
        cluster.create(name, "16M", args);
        let export = cluster.export(&[name], "auto");
        let uri = export.uri.as_str();
        program::ok("nbdcopy", &["--connections=4", "--flush", source, uri]);
        let copy = dir.join(name);
        program::ok("nbdcopy", &["--connections=4", uri, copy.to_str().unwrap()]);
        // Stripes are rounded up to whole rows.
        program::ok("cmp", &["-n", "16777216", source, copy.to_str().unwrap()]);
        export.stop();
        cluster.check_identical(name);
        // The next volumes need the room in the same pools.
        cluster.ok(&["volume", "delete", name]);
    }
    let status = cluster.json(&["status"]);
    assert_eq!(status["status"]["provisioned_bytes"], 0, "{status}");
}

#[test]
fn nbdinfo_shows_size_abilities_and_allocation() {
    let cluster = Cluster::new(Pools::Memory, 3);
    cluster.create("disk", "32M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&[
        "write -P 1 1M 64k",
        "write -P 2 4M 1M",
        "discard 4352k 256k",
    ]);
    let told = info(&export.uri);
    assert_eq!(told["export-size"], 32 * MIB, "{told}");
    assert_eq!(told["description"], "pagemesh volume disk", "{told}");
    assert_eq!(told["is_read_only"], false, "{told}");
    let abilities = [
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
        "can_fast_zero",
        "can_df",
        "can_cache",
    ];
    let has: Vec<&str> = abilities
        .into_iter()
        .filter(|name| told[*name] == true)
        .collect();
    assert_eq!(has, abilities[..7], "{told}");
    assert_eq!(
        told["contexts"],
        serde_json::json!(["base:allocation"]),
        "{told}"
    );
    let k = 1 << 10;
    let expected = [
        (0, 1024 * k, false),
        (1024 * k, 64 * k, true),
        (1088 * k, 3008 * k, false),
        (4096 * k, 256 * k, true),
        (4352 * k, 256 * k, false),
        (4608 * k, 512 * k, true),
        (5120 * k, 27648 * k, false),
    ];
    assert_eq!(map(&export.uri), expected);
}

#[test]
fn one_process_serves_many_volumes_over_tcp() {
    let cluster = Cluster::new(Pools::Memory, 2);
    let names = ["one", "two", "three"];
    for name in names {
        cluster.create(name, "8M", &[]);
    }
    let export = cluster.export_at(&names, "auto", &["--listen", &format!("{}:0", own_ip())]);
    for (at, uri) in export.uris.iter().enumerate() {
        assert!(
            uri.starts_with("nbd://127.") && uri.ends_with(names[at]),
            "{uri}"
        );
        qemu_io(uri, &[&format!("write -P {} 0 1M", at + 1)]);
    }
    for (at, uri) in export.uris.iter().enumerate() {
        qemu_io(
            uri,
            &[&format!("read -P {} 0 1M", at + 1), "read -P 0 1M 1M"],
        );
    }
    let server = export.uri.trim_end_matches("one");
    let listed = program::ok("nbdinfo", &["--list", "--json", server]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let mut found: Vec<&str> = listed["exports"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["export-name"].as_str().unwrap())
        .collect();
    found.sort_unstable();
    assert_eq!(found, ["one", "three", "two"]);
    let unknown = program::run("nbdinfo", &[&format!("{server}four")]);
    assert!(!unknown.status.success());
    export.stop();
    names.iter().for_each(|name| cluster.check_identical(name));
}

#[test]
fn grown_volume_is_larger_for_next_client() {
    let cluster = Cluster::new(Pools::Memory, 3);
    cluster.create("disk", "8M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 1 0 8M"]);
    cluster.ok(&["volume", "grow", "disk", "--size", "24M"]);
    assert_eq!(info(&export.uri)["export-size"], 24 * MIB);
    export.io(&[
        "read -P 1 0 8M",
        "read -P 0 8M 16M",
        // Across the old end and up to the new end.
        "write -P 2 7M 2M",
        "write -P 3 23M 1M",
        "read -P 1 0 7M",
        "read -P 2 7M 2M",
        "read -P 0 9M 14M",
        "read -P 3 23M 1M",
    ]);
    let shown = cluster.json(&["volume", "show", "disk"]);
    assert_eq!(shown["info"]["size_bytes"], 24 * MIB, "{shown}");
    export.stop();
    cluster.check_identical("disk");
    let smaller = ["volume", "grow", "disk", "--size", "16M"];
    cluster.refused(&smaller, &["25165824", "volumes do not shrink"]);
}

#[test]
fn read_only_export_serves_reads_and_refuses_writes() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 9 0 1M"]);
    export.stop();
    let socket = cluster.dir().join("frozen.sock");
    let place = ["--read-only", "--socket", socket.to_str().unwrap()];
    let export = cluster.export_at(&["disk"], "auto", &place);
    assert_eq!(info(&export.uri)["is_read_only"], true);
    program::ok(
        "qemu-io",
        &["-r", "-f", "raw", "-c", "read -P 9 0 1M", &export.uri],
    );
    let refused = program::run("qemu-io", &["-f", "raw", "-c", "write 0 4k", &export.uri]);
    assert!(!refused.status.success(), "{refused:?}");
}
