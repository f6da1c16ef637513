//! `pagemesh support-bundle`: its contents, and the secrets that are not in it.

use crate::support;
use flate2::read::GzDecoder;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use support::{Cluster, PAGEMESH, Pools, own_ip, program, write_key};

/// A token of the right shape that no manager knows.
const TOKEN: &str = "pm_Zq3vT8sLkX1mWc7RbN5yHd0uGf2jKe9aPi4oUtYxSwA";
/// Bytes of a secret in a row that may be left at the edge of a known part.
const LEFT_BYTES: usize = 9;

/// The files of a bundle by name.
fn read_bundle(path: &Path) -> BTreeMap<String, String> {
    let file = std::fs::File::open(path).unwrap();
    assert_eq!(
        file.metadata().unwrap().permissions().mode() & 0o7777,
        0o600
    );
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        (name, text)
    });
    entries.collect()
}

/// Asserts that no part of a secret is in a bundle, neither in a name nor in a text.
#[track_caller]
fn lacks(bundle: &BTreeMap<String, String>, secret: &str) {
    for (name, text) in bundle {
        for part in secret.as_bytes().windows(LEFT_BYTES + 1) {
            let part = std::str::from_utf8(part).unwrap();
            assert!(
                !name.contains(part),
                "{part} of a secret in the name {name}"
            );
            assert!(!text.contains(part), "{part} of a secret in {name}");
        }
    }
}

/// Secrets in every place of a configuration where they can be, also where they must not be.
fn write_secrets(dir: &Path, key_file: &Path, key: &str) {
    let coded = program::ok("base64", &["--wrap=0", key_file.to_str().unwrap()]);
    let coded_later = format!("x{key}");
    std::fs::write(dir.join("later"), coded_later).unwrap();
    let later = dir.join("later");
    let coded_later = program::ok("base64", &["--wrap=0", later.to_str().unwrap()]);
    let percent: String = key.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let token_file = dir.join("my-token");
    std::fs::write(&token_file, TOKEN).unwrap();
    std::fs::write(
        dir.join("brick-a.toml"),
        format!(
            "key = \"{}\"\ntoken-file = \"{}\"\n# was {key}\nmanager = \"http://me:{TOKEN}@10.0.0.1:7070\"\npassword = \"hunter2-hunter2\"\n",
            key_file.display(),
            token_file.display(),
        ),
    )
    .unwrap();
    std::fs::write(
        dir.join("brick.log"),
        format!(
            "Authorization: Bearer {TOKEN}\nCookie: pagemesh_token={TOKEN}; a=b\nGET /x?token={TOKEN}\n\
             upper {}\ncoded {coded} {coded_later}\npercent {percent}\npart {}\npart {}\nkept line\n",
            key.to_uppercase(),
            &key[..20],
            &TOKEN[12..30],
        ),
    )
    .unwrap();
}

#[test]
fn bundle_has_state_of_cluster_and_no_secret() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("demo", "8M", &["--layout", "mirror", "--copies", "2"]);
    let key = std::fs::read_to_string(cluster.key()).unwrap();
    let key = key.trim();
    let dir = tempfile::tempdir().unwrap();
    // A directory is named on the command line, which the bundle has, too.
    let named = dir.path().join(TOKEN);
    std::fs::create_dir(&named).unwrap();
    write_secrets(dir.path(), &cluster.key(), key);
    write_secrets(&named, &cluster.key(), key);
    // A link could lead out of the directory.
    std::os::unix::fs::symlink("/proc/self/status", named.join("linked.log")).unwrap();
    let file = dir.path().join("bundle.tar.gz");
    let arguments = [
        "support-bundle",
        "--file",
        file.to_str().unwrap(),
        "--dir",
        dir.path().to_str().unwrap(),
        "--dir",
        named.to_str().unwrap(),
        "--output",
        "json",
    ];
    let mut command = cluster.command(&arguments);
    // The key serves for the calls: a token would precede it.
    command.env("PAGEMESH_PASSPHRASE", TOKEN);
    let output = program::succeeded("support-bundle", command.output().unwrap());
    let report: Value = serde_json::from_str(&output).unwrap();
    let bundle = read_bundle(&file);
    for secret in [key, &key.to_uppercase(), TOKEN, "hunter2-hunter2"] {
        lacks(&bundle, secret);
    }
    let coded = program::ok("base64", &["--wrap=0", cluster.key().to_str().unwrap()]);
    lacks(
        &bundle,
        coded.trim().trim_end_matches(['=', 'o', 'K', 'C', 'g']),
    );
    assert!(report["masked"].as_u64().unwrap() >= 10, "{report}");
    let text = |name: &str| &bundle[&format!("pagemesh-support/{name}")];
    assert!(text("config/0/brick.log").contains("kept line"));
    assert!(text("cluster/volumes.json").contains("demo"));
    assert!(text("cluster/events.json").contains("volume-created"));
    assert!(text("cluster/metrics.txt").contains("# HELP"));
    assert!(text("doctor.txt").contains("kernel"));
    assert!(text("host/version.txt").contains("Linux"));
    assert!(text("contents.json").contains("cluster/bricks.json"));
    assert!(text("contents.json").contains("symbolic link"));
    assert!(!bundle.keys().any(|name| name.contains("linked.log")));
    let names = report["contents"].as_array().unwrap().iter();
    let is_missing = |item: &Value| {
        item["note"]
            .as_str()
            .is_some_and(|it| it.starts_with("missing"))
    };
    let present = names.filter(|item| !is_missing(item));
    assert_eq!(present.count(), bundle.len(), "{report}");
    // An existing file is not replaced.
    cluster.refused(&arguments, &["exists", "--file"]);
}

#[test]
fn hanging_manager_is_named_in_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind((own_ip(), 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let key = dir.path().join("key");
    write_key(&key, &"a7c3e901".repeat(8));
    let file = dir.path().join("bundle.tar.gz");
    let begin = Instant::now();
    let mut command = Command::new(PAGEMESH);
    command.args(["support-bundle", "--manager", &url, "--key"]);
    command.arg(&key).arg("--file").arg(&file);
    command.arg("--dir").arg(dir.path());
    let output = program::succeeded("support-bundle", command.output().unwrap());
    assert!(begin.elapsed() < Duration::from_secs(60));
    assert!(
        output.contains("missing: no answer from the manager"),
        "{output}"
    );
    let bundle = read_bundle(&file);
    let contents = &bundle["pagemesh-support/contents.json"];
    assert!(
        contents.contains("no answer from the manager"),
        "{contents}"
    );
    assert!(bundle.contains_key("pagemesh-support/host/limits.txt"));
    lacks(&bundle, &"a7c3e901".repeat(8));
}
