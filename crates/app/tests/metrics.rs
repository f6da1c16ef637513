//! The metrics of running processes: documented, equal to the manager's, and off by default.

use crate::support;
use pagemesh_metrics::Metric;
use pagemesh_metrics::catalogue::{client, pool};
use std::collections::BTreeSet;
use support::mounted::{CLASSIC, TestMount, cluster, cluster_with_medium};
use support::program::qemu_io;
use support::scrape::{page, real, uncommitted_pages, value};
use support::{Cluster, Pools, until};

/// Asserts that the page of a pool without a tier has all metrics of the catalogue but these, and no others.
#[track_caller]
fn check_names(page: &str, catalogue: &[&Metric], missing: &[&Metric]) {
    let help = page.lines().filter_map(|it| it.strip_prefix("# HELP "));
    let found: BTreeSet<&str> = help.map(|it| it.split(' ').next().unwrap()).collect();
    let expected = catalogue.iter().filter(|it| !missing.contains(it));
    let expected = expected.map(|metric| metric.name);
    let expected = expected.filter(|name| !name.starts_with("pagemesh_pool_tier_"));
    assert_eq!(found, expected.collect::<BTreeSet<&str>>());
}

/// The metrics of pools on disks.
const OF_DISKS: [&Metric; 7] = [
    &pool::CACHE_CAPACITY,
    &pool::CACHE_USED,
    &pool::CACHE_DIRTY,
    &pool::CACHE_HITS,
    &pool::CACHE_MISSES,
    &pool::DISK_UNREADABLE,
    &pool::DISK_SLOW,
];

/// The metrics of mounts alone.
const OF_MOUNTS: [&Metric; 3] = [
    &client::DIRECT_CLIENTS,
    &client::UNCOMMITTED_PAGES,
    &client::UNCOMMITTED_AGE,
];

const UNCOMMITTED_AGE: &str = "pagemesh_client_uncommitted_age_seconds{volume=\"files\"}";

#[test]
fn brick_on_disk_counts_its_cache() {
    let cluster = Cluster::new(Pools::Disk, 1);
    let pool_path = cluster.dir().join("measured.pool");
    let path = pool_path.to_str().unwrap();
    cluster.ok(&["pool", "create", path, "--size", "64M"]);
    let names = ["--name", "measured", "--domain", "measured"];
    let args = [&["brick", "--pool", path][..], &names].concat();
    let options = ["--memory-budget", "16M", "--metrics", "127.0.0.1:0"];
    let brick = cluster
        .try_daemon("measured", &[&args[..], &options].concat(), 1)
        .unwrap();
    cluster.create("demo", "8M", &["--copies", "2"]);
    let export = cluster.export(&["demo"], "tcp");
    qemu_io(&export.uri, &["write 0 64k", "flush", "read 0 64k"]);
    let served = page(&brick.metrics_line());
    let missing = [&pool::SCRUB_PROGRESS, &pool::SCRUB_AGE];
    check_names(&served, pool::ALL, &missing);
    assert_eq!(
        value(&served, "pagemesh_pool_cache_capacity_bytes"),
        16 << 20
    );
    assert!(value(&served, "pagemesh_pool_cache_used_bytes") >= 64 << 10);
    assert_eq!(value(&served, "pagemesh_pool_disk_unreadable_pages"), 0);
    assert_eq!(value(&served, "pagemesh_pool_disk_slow_requests_total"), 0);
    export.stop();
    brick.stop();
    let little = [&args[..], &["--memory-budget", "1M"]].concat();
    let refused = cluster.run(&little);
    assert_eq!(refused.status.code(), Some(2));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("use at least 16M"), "{text}");
}

#[test]
fn export_and_brick_count_the_same_bytes() {
    let cluster = Cluster::new(Pools::Memory, 1);
    let pool_path = cluster.dir().join("measured.pool");
    let path = pool_path.to_str().unwrap();
    cluster.ok(&[
        "pool", "create", path, "--size", "64M", "--class", "process",
    ]);
    let names = ["--name", "measured", "--domain", "measured"];
    let args = [&["brick", "--pool", path][..], &names].concat();
    let remote = ["--metrics", "0.0.0.0:0", "--metrics-allow-remote"];
    let args = [&args[..], &remote].concat();
    let brick = cluster.try_daemon("measured", &args, 1).unwrap();
    cluster.create("demo", "8M", &["--copies", "2"]);
    let socket = cluster.dir().join("demo.sock");
    let place = ["--socket", socket.to_str().unwrap()];
    let place = [&place[..], &["--metrics", "127.0.0.1:0"]].concat();
    let export = cluster.export_at(&["demo"], "tcp", &place);
    let writes: Vec<String> = (0..20)
        .map(|at| format!("write {} 4k", at * 4096))
        .collect();
    let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
    qemu_io(&export.uri, &writes);
    let exported = page(&export.daemon.metrics_line());
    check_names(&exported, client::ALL, &OF_MOUNTS);
    let labels = "{volume=\"demo\",kind=\"write\"}";
    let operations = format!("pagemesh_client_operations_total{labels}");
    assert_eq!(value(&exported, &operations), 20);
    let bytes = format!("pagemesh_client_operation_bytes_total{labels}");
    assert_eq!(value(&exported, &bytes), 20 * 4096);
    let healthy = "pagemesh_client_volume_state{volume=\"demo\",state=\"healthy\"}";
    assert_eq!(value(&exported, healthy), 1);
    let served = page(&brick.metrics_line());
    let missing = [&pool::SCRUB_PROGRESS, &pool::SCRUB_AGE];
    check_names(&served, pool::ALL, &[&missing[..], &OF_DISKS].concat());
    let written = "pagemesh_pool_request_bytes_total{kind=\"write\"}";
    assert_eq!(value(&served, written), 20 * 4096);
    let to_media = |kind: &str| {
        let series = format!("pagemesh_pool_media_written_bytes_total{{kind=\"{kind}\"}}");
        value(&served, &series)
    };
    assert!((20 * 4096..40 * 4096).contains(&to_media("data")));
    assert!((20 * 64..400 * 64).contains(&to_media("journal")));
    assert!(to_media("tables") >= 4096, "a superblock");
    // The controller of the volume clears ranges at the attach: changes without data.
    assert!(value(&served, "pagemesh_pool_requests_total{kind=\"write\"}") >= 20);
    let warning = "readable from other machines without a token";
    assert!(brick.log().contains(warning), "{}", brick.log());
    assert!(!export.daemon.log().contains(warning));
    export.stop();
    // The client reported at its end, so the manager has the same.
    let reported = cluster.json(&["why", "demo", "--kind", "write"]);
    assert_eq!(reported["operations"], 20);
    brick.stop();
}

#[test]
fn wrong_metrics_address_is_refused_before_the_attach() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("demo", "8M", &[]);
    let socket = cluster.dir().join("demo.sock");
    let export = [
        "export",
        "nbd",
        "demo",
        "--socket",
        socket.to_str().unwrap(),
    ];
    let check = |metrics: &[&str], says: &[&str]| {
        cluster.refused(&[&export, metrics].concat(), says);
    };
    check(&["--metrics", "nowhere"], &["--metrics", "host:port"]);
    check(&["--metrics", "0.0.0.0:0"], &["--metrics-allow-remote"]);
    let manager = cluster.manager_address();
    let manager = manager.strip_prefix("http://").unwrap_or(manager);
    check(&["--metrics", manager], &["another address"]);
    let shown = cluster.json(&["volume", "show", "demo"]);
    assert!(shown["info"]["attached"].is_null(), "{shown}");
}

#[test]
fn mount_shows_operations_and_direct_clients() {
    let Some(cluster) = cluster(&[64, 64], "16M") else {
        return;
    };
    let dir = cluster.dir().join("mnt");
    std::fs::create_dir_all(&dir).unwrap();
    let args = ["mount", "files", dir.to_str().unwrap()];
    let args = [&args[..], &["--metrics", "127.0.0.1:0"]].concat();
    let mount = cluster.try_daemon("mount-mnt", &args, 1).unwrap();
    std::fs::write(dir.join("file"), [1; 4096]).unwrap();
    std::fs::File::open(dir.join("file"))
        .unwrap()
        .sync_all()
        .unwrap();
    let shown = page(&mount.metrics_line());
    check_names(&shown, client::ALL, &[]);
    let clients = "pagemesh_client_direct_clients{volume=\"files\"}";
    assert_eq!(value(&shown, clients), 0);
    assert_eq!(uncommitted_pages(&shown), 0);
    assert_eq!(real(&shown, UNCOMMITTED_AGE), 0.0);
    let writes = "pagemesh_client_operations_total{volume=\"files\",kind=\"write\"}";
    assert!(value(&shown, writes) > 0);
    cluster.ok(&["umount", dir.to_str().unwrap()]);
    mount.stop();
}

#[test]
fn mount_shows_uncommitted_changes_until_fsync() {
    let Some(cluster) = cluster_with_medium(Pools::Disk, &[128, 128], "80M") else {
        return;
    };
    let options = ["--commit-interval", "300", "--metrics", "127.0.0.1:0"];
    let how = ("auto", CLASSIC);
    let mount = TestMount::try_with_options(&cluster, "files", "mnt", how, &options).unwrap();
    let shown = || page(&mount.daemon.as_ref().unwrap().metrics_line());
    assert_eq!(uncommitted_pages(&shown()), 0);
    assert_eq!(real(&shown(), UNCOMMITTED_AGE), 0.0);
    let mut made = 0;
    // The first changes may be stored at once, while the mount reserves pages.
    until("a change waits", || {
        std::fs::File::create(mount.path(&format!("file{made}"))).unwrap();
        made += 1;
        uncommitted_pages(&shown()) > 0
    });
    let young = real(&shown(), UNCOMMITTED_AGE);
    assert!(young > 0.0, "{young}");
    until("the change is older", || {
        real(&shown(), UNCOMMITTED_AGE) > young
    });
    let root = std::fs::File::open(&mount.dir).unwrap();
    root.sync_all().unwrap();
    assert_eq!(uncommitted_pages(&shown()), 0);
    assert_eq!(real(&shown(), UNCOMMITTED_AGE), 0.0);
    drop(root);
    mount.stop(&cluster);
}
