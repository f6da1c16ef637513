//! `pagemesh snapshot diff` on volumes and file systems.

use crate::support;
use serde_json::{Value, json};
use support::mounted::{self, TestMount};
use support::{Cluster, MIB, Pools};

/// The changes of files as lines: kind, path and later path.
fn lines(diff: &Value) -> Vec<String> {
    let files = diff["files"].as_array().unwrap().iter();
    let line = |it: &Value| {
        let word = |key: &str| it[key].as_str().unwrap_or_default().to_owned();
        let line = format!("{} {} {}", word("change"), word("path"), word("to"));
        line.trim_end().to_owned()
    };
    files.map(line).collect()
}

#[test]
fn changed_ranges_of_a_volume_are_listed() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("v", "16M", &["--layout", "mirror", "--copies", "2"]);
    let export = cluster.export(&["v"], "map");
    export.io(&["write -P 1 0 1M"]);
    cluster.ok(&["snapshot", "create", "v@one"]);
    export.io(&["write -P 2 64k 8k", "write -P 2 2M 4k", "discard 512k 4k"]);
    cluster.ok(&["snapshot", "create", "v@two"]);
    export.io(&["write -P 3 8M 64k"]);
    let diff = cluster.json(&["snapshot", "diff", "v@one", "v@two"]);
    let ranges = json!([
        {"offset": 65536, "bytes": 8192},
        {"offset": 512 * 1024, "bytes": 4096},
        {"offset": 2 * MIB, "bytes": 4096},
    ]);
    assert_eq!(diff["ranges"], ranges, "{diff}");
    assert_eq!(diff["changed_bytes"], 16384, "{diff}");
    assert_eq!(diff["files"], Value::Null);
    // The present, while a client has the volume.
    let diff = cluster.json(&["snapshot", "diff", "v@two"]);
    assert_eq!(diff["ranges"], json!([{"offset": 8 * MIB, "bytes": 65536}]));
    let text = cluster.ok(&["snapshot", "diff", "v@two"]);
    assert!(
        text.contains("64.0 KiB of pages changed from v@two to the present"),
        "{text}"
    );
    let left = cluster.json(&["snapshot", "list", "v"]);
    assert_eq!(left.as_array().unwrap().len(), 2, "{left}");
    export.stop();
    cluster.refused(
        &["snapshot", "diff", "v@two", "v@one"],
        &["v@two is not earlier than v@one"],
    );
    cluster.create("w", "1M", &[]);
    cluster.ok(&["snapshot", "create", "w@one"]);
    cluster.refused(
        &["snapshot", "diff", "v@one", "w@one"],
        &["v@one is not of w"],
    );
}

#[test]
fn changed_files_are_listed_by_name() {
    let Some(cluster) = mounted::cluster(&[128, 128], "64M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    mount.sh("mkdir dir; echo old > kept; echo old > written; echo x > gone; echo y > dir/moved; echo z > linked; \
              echo o > owned; head -c 3M /dev/urandom > large; sync .");
    cluster.ok(&["snapshot", "create", "files@one"]);
    mount.sh("rm gone; mv dir other; ln linked name; chown 7 owned; mkdir new; echo n > new/file; \
              echo more >> written; printf 1 | dd of=large bs=1 seek=2000000 conv=notrunc status=none; sync .");
    let diff = cluster.json(&["snapshot", "diff", "files@one"]);
    let expected = [
        "modified /",
        "renamed /dir /other",
        "deleted /gone",
        "modified /large",
        "created /name",
        "created /new",
        "created /new/file",
        "modified /owned",
        "modified /written",
    ];
    assert_eq!(lines(&diff), expected, "{diff}");
    assert_eq!(diff["ranges"], Value::Null);
    assert!(diff["changed_bytes"].as_u64().unwrap() > 0);
    let text = cluster.ok(&["snapshot", "diff", "files@one"]);
    assert!(
        text.contains("R  /dir -> /other\n-  /gone\nM  /large\n+  /name\n"),
        "{text}"
    );
    // Times of writes are stored later than bytes: contents are compared.
    cluster.ok(&["snapshot", "create", "files@two"]);
    mount.sh("touch -r large ../times; printf 2 | dd of=large bs=1 seek=2500000 conv=notrunc status=none; \
              touch -r ../times large; sync .");
    let diff = cluster.json(&["snapshot", "diff", "files@two"]);
    assert_eq!(lines(&diff), ["modified /large"]);
    mount.stop(&cluster);
}
