//! The store opens its own files, and leaves other files unchanged.

use crate::cluster;
use cluster::{Cluster, MIB, create_request, name};
use pagemesh_manage::store::{SCHEMA, SCHEMA_MAX, Store, StoreError};
use pagemesh_manage::wire::AttachVolume;
use pagemesh_manage::{LayoutKind, Manager, ManagerConfig, ManagerSettings, ServeError, serve};
use redb::{Database, TableDefinition};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
const VOLUMES: TableDefinition<&str, &[u8]> = TableDefinition::new("volumes");

/// Opening fails, the error contains these words, and no byte changes.
#[track_caller]
fn assert_open_fails(path: &Path, words: &[&str]) -> StoreError {
    let before = std::fs::read(path).ok();
    let error = Store::open(path).expect_err("refused");
    let said = error.to_string();
    assert!(said.contains(&path.display().to_string()), "{said}");
    for word in words {
        assert!(said.contains(word), "{said:?} lacks {word:?}");
    }
    assert_eq!(std::fs::read(path).ok(), before, "{said}");
    error
}

fn edit_store(path: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
    let database = Database::open(path).expect("a database");
    let transaction = database.begin_write().expect("begun");
    change(&transaction);
    transaction.commit().expect("committed");
}

fn set_meta(path: &Path, key: &str, value: &str) {
    edit_store(path, |transaction| {
        let mut meta = transaction.open_table(META).expect("a table");
        meta.insert(key, value).expect("inserted");
    });
}

#[test]
fn new_store_is_private_to_owner() {
    let cluster = Cluster::new(0);
    drop(Store::open(&cluster.store()).expect("a store"));
    let mode = std::fs::metadata(cluster.store())
        .expect("there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let files: Vec<_> = std::fs::read_dir(cluster.dir.path())
        .expect("listed")
        .collect();
    assert_eq!(files.len(), 1, "nothing is left beside it: {files:?}");
    drop(Store::open(&cluster.store()).expect("the same store"));
    let empty = cluster.dir.path().join("empty");
    std::fs::write(&empty, "").expect("written");
    drop(Store::open(&empty).expect("a store"));
}

#[test]
fn foreign_file_is_refused_unchanged() {
    let cluster = Cluster::new(0);
    let path = cluster.store();
    let is_foreign = |error| assert!(matches!(error, StoreError::NotAStore { .. }), "{error:?}");
    for content in [
        &b"r"[..],
        b"redb",
        b"redb and so on",
        &[0; 4096],
        &[0xff; 70_000],
    ] {
        std::fs::write(&path, content).expect("written");
        is_foreign(assert_open_fails(
            &path,
            &["not a manager store", "--store"],
        ));
    }
    is_foreign(assert_open_fails(
        cluster.dir.path(),
        &["not a regular file"],
    ));
    std::fs::remove_file(&path).expect("removed");
    let other = Database::create(&path).expect("a database");
    let table: TableDefinition<u64, u64> = TableDefinition::new("meta");
    let transaction = other.begin_write().expect("begun");
    transaction.open_table(table).expect("a table");
    transaction.commit().expect("committed");
    drop(other);
    let error = Store::open(&path).expect_err("refused");
    is_foreign(error);
    std::fs::remove_file(&path).expect("removed");
    drop(Store::open(&path).expect("a store"));
    set_meta(&path, "purpose", "something else");
    is_foreign(Store::open(&path).expect_err("refused"));
    let nowhere = cluster.dir.path().join("no/such/directory");
    assert!(matches!(
        assert_open_fails(&nowhere, &[]),
        StoreError::Io { .. }
    ));
}

#[test]
fn store_of_newer_schema_is_refused() {
    let cluster = Cluster::new(0);
    let path = cluster.store();
    drop(Store::open(&path).expect("a store"));
    set_meta(&path, "schema", &(SCHEMA_MAX + 1).to_string());
    let error = Store::open(&path).expect_err("refused");
    let StoreError::NewerSchema { found, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(*found, SCHEMA_MAX + 1);
    assert!(error.to_string().contains("newer pagemesh"), "{error}");
    for nonsense in ["", "0", "one", "-1"] {
        set_meta(&path, "schema", nonsense);
        let error = Store::open(&path).expect_err("refused");
        assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
    }
    set_meta(&path, "schema", &SCHEMA.to_string());
    drop(Store::open(&path).expect("a store"));
}

#[test]
fn store_in_use_is_refused() {
    let cluster = Cluster::new(0);
    let _served = cluster.serve();
    // Repeated, because a check of the file must not release its lock.
    for _ in 0..3 {
        let error = Store::open(&cluster.store()).expect_err("refused");
        assert!(matches!(error, StoreError::InUse(_)), "{error:?}");
    }
    let second = serve(ManagerConfig {
        clock: cluster.clock.clone(),
        ..ManagerConfig::new(
            "127.0.0.1:0",
            cluster.store(),
            cluster.key.clone(),
            cluster.bricks.clone(),
        )
    });
    let error = second.err().expect("refused");
    assert!(
        matches!(error, ServeError::Store(StoreError::InUse(_))),
        "{error:?}"
    );
}

#[test]
fn port_in_use_is_refused() {
    let cluster = Cluster::new(0);
    let served = cluster.serve();
    let at = served.handle.address().to_string();
    let attempt = |listen: &str| {
        let store = cluster.dir.path().join("second");
        let (key, bricks) = (cluster.key.clone(), cluster.bricks.clone());
        serve(ManagerConfig::new(listen, store, key, bricks))
            .err()
            .expect("refused")
    };
    let error = attempt(&at);
    assert!(matches!(error, ServeError::InUse(_)), "{error:?}");
    assert!(error.to_string().contains(&at), "{error}");
    for bad in ["", "nonsense", "127.0.0.1", "127.0.0.1:99999"] {
        let error = attempt(bad);
        assert!(
            matches!(error, ServeError::BadAddress { .. }),
            "{bad}: {error:?}"
        );
    }
    let error = attempt("192.0.2.1:7070");
    assert!(matches!(error, ServeError::Bind { .. }), "{error:?}");
}

/// A truncated or overwritten store is refused or read unchanged, and never causes a panic.
#[test]
fn damaged_store_is_refused_or_read_unchanged() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    manager
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let client = "c".to_owned();
    let attach = AttachVolume {
        client,
        unreachable: false,
        process: None,
        replaces: None,
        receive: false,
    };
    let whole = manager
        .attach(&name("v"), &attach)
        .expect("attached")
        .layout;
    // The file after a crash, and after an orderly end.
    let crashed = std::fs::read(cluster.store()).expect("read");
    drop(manager);
    let ended = std::fs::read(cluster.store()).expect("read");
    let path = cluster.dir.path().join("damaged");
    let attempt = |what: &str, bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("written");
        let Ok(store) = Store::open(&path) else {
            return;
        };
        let settings = ManagerSettings::default();
        let (bricks, clock) = (cluster.bricks.clone(), cluster.clock.clone());
        let Ok(manager) = Manager::new(store, bricks, clock, settings) else {
            return;
        };
        let layout = manager.show(&name("v")).expect("shown").layout;
        assert_eq!(layout, whole, "{what}");
    };
    let epoch = br#""epoch":2"#;
    for bytes in [&crashed, &ended] {
        attempt("untouched", bytes);
        for keep in [9, 10, 64, 320, 4096, 8192, bytes.len() / 2, bytes.len() - 1] {
            attempt(&format!("cut to {keep}"), &bytes[..keep]);
        }
        let records: Vec<usize> = (0..bytes.len() - epoch.len())
            .filter(|&at| bytes[at..].starts_with(epoch))
            .map(|at| at + epoch.len() - 1)
            .collect();
        assert!(!records.is_empty());
        // Not byte 9: it selects the last of two commits, and no checksum covers it.
        for at in (10..320).step_by(7).chain(records) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            attempt(&format!("flipped at {at}"), &bytes);
        }
    }
}

/// Loading refuses records that no legal change produces, because the manager would later trust
/// them.
#[test]
fn inconsistent_records_are_refused() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    manager
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let client = "c".to_owned();
    manager
        .attach(
            &name("v"),
            &AttachVolume {
                client,
                unreachable: false,
                process: None,
                replaces: None,
                receive: false,
            },
        )
        .expect("attached");
    drop(manager);
    let path = cluster.dir.path().join("edited");
    let attempt = |key: &str, from: &str, to: &str| {
        std::fs::copy(cluster.store(), &path).expect("copied");
        edit_store(&path, |transaction| {
            let mut volumes = transaction.open_table(VOLUMES).expect("a table");
            let record = volumes
                .remove("v")
                .expect("read")
                .expect("there")
                .value()
                .to_vec();
            let text = String::from_utf8(record).expect("text");
            assert!(text.contains(from), "{text}");
            let text = text.replacen(from, to, 1);
            volumes.insert(key, text.as_bytes()).expect("inserted");
        });
        let store = Store::open(&path).expect("a store");
        let error = store.load().err().map(|error| error.to_string());
        if (key, from) == ("v", to) {
            assert_eq!(error, None);
        } else {
            let error = error.expect("refused");
            assert!(error.contains("damaged") && error.contains(key), "{error}");
        }
    };
    attempt("v", "\"name\"", "\"name\"");
    attempt("w", "\"name\"", "\"name\"");
    attempt("v", "\"columns\":[{", "\"columns\":[],\"x\":[{");
    attempt("v", "\"lost_since\":0", "\"lost_since\":1");
    attempt("v", "\"lost_since\":0", "\"lost\":0");
    attempt("v", "\"state\":\"in-sync\"", "\"state\":\"stale\"");
    attempt("v", "\"bytes\":1048576", "\"bytes\":18446744073709551615");
    attempt("v", "{", "[");
}
