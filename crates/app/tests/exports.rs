//! NBD exports of a real cluster at their limits, and the end of a fenced export.

use crate::faults::nbd as wire;
use crate::support;
use std::path::Path;
use support::{Cluster, Pools, until};
use wire::{Command, NbdConnection};

/// The errno of one read.
fn read(nbd: &mut NbdConnection) -> u32 {
    nbd.send(1, (Command::Read, 0), 0, 4096, &[]).unwrap();
    nbd.reply().unwrap().errno
}

/// Opens connections until the export refuses one. Returns the connections and the error message.
fn connect_all(socket: &Path) -> (Vec<NbdConnection>, String) {
    let mut taken = Vec::new();
    loop {
        match NbdConnection::connect(socket, "disk", true) {
            Ok(nbd) => taken.push(nbd),
            Err(refused) => return (taken, refused.to_string()),
        }
    }
}

#[test]
fn export_refuses_connections_beyond_sessions_of_pool() {
    // A pool of this size has sessions for fewer connections than a volume has channels.
    let cluster = Cluster::with_pools(Pools::Memory, &[32, 32]);
    cluster.create("disk", "8M", &["--layout", "mirror", "--copies", "2"]);
    let export = cluster.export(&["disk"], "map");
    let (mut taken, refused) = connect_all(&export.socket());
    assert!(refused.contains("session"), "{refused}");
    for nbd in &mut taken {
        assert_eq!(read(nbd), 0);
    }
    // The error ends with its cause.
    let before = taken.len();
    taken.truncate(before / 2);
    until("closed connections make room", || {
        let Ok(mut nbd) = NbdConnection::connect(&export.socket(), "disk", true) else {
            return false;
        };
        assert_eq!(read(&mut nbd), 0);
        taken.push(nbd);
        taken.len() == before
    });
    drop(taken);
    export.stop();
}

#[test]
fn fenced_export_ends_and_frees_its_socket() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    let mut older = cluster.export(&["disk"], "map");
    let mut idle = NbdConnection::connect(&older.socket(), "disk", true).unwrap();
    assert_eq!(read(&mut idle), 0);
    let newer = cluster.export(&["disk"], "map");
    older.await_fenced();
    assert!(!older.socket().exists(), "its socket is there still");
    assert!(idle.reply().is_err(), "its connection is closed");
    newer.io(&["write -P 3 0 1M", "read -P 3 0 1M"]);
    newer.stop();
}

#[test]
fn export_of_two_volumes_survives_fence_of_one() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    cluster.create("other", "8M", &[]);
    let mut export = cluster.export(&["disk", "other"], "map");
    let newer = cluster.export(&["disk"], "map");
    until("the fence is reported", || {
        export.daemon.log().contains("another client took over")
    });
    let refused = NbdConnection::connect(&export.socket(), "disk", true);
    let refused = refused.map(drop).unwrap_err().to_string();
    assert!(refused.contains("another client"), "{refused}");
    let mut other = NbdConnection::connect(&export.socket(), "other", true).unwrap();
    assert_eq!(read(&mut other), 0);
    drop(other);
    let second = cluster.export(&["other"], "map");
    export.await_fenced();
    second.stop();
    newer.stop();
}
