//! `pagemesh snapshot create A B C@NAME`: several volumes at one moment, while a program writes to them in turn.

use crate::faults::nbd as wire;
use crate::support;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use support::{Cluster, Pools, program};
use wire::{Command, NbdConnection};

const PAGE: usize = 4096;
const MIRROR: [&str; 4] = ["--layout", "mirror", "--copies", "2"];

/// Writes 1, 2, 3, … to the first page of `a`, each then to that of `b`, and begins no write before the last one is
/// acknowledged.
#[derive(Default)]
struct Chain {
    is_over: AtomicBool,
    acknowledged: AtomicU64,
}

impl Chain {
    fn run(&self, sockets: [&Path; 2]) {
        let connect = |(socket, name)| NbdConnection::connect(socket, name, true).unwrap();
        let mut connections = [(sockets[0], "a"), (sockets[1], "b")].map(connect);
        let mut value = 0u64;
        while !self.is_over.load(Ordering::Relaxed) {
            value += 1;
            let data = value.to_le_bytes().repeat(PAGE / 8);
            for nbd in &mut connections {
                nbd.send(value, (Command::Write, 0), 0, PAGE as u32, &data)
                    .unwrap();
                assert_eq!(nbd.reply().unwrap().errno, 0, "value {value}");
            }
            self.acknowledged.store(value, Ordering::SeqCst);
        }
    }

    fn await_more(&self, count: u64) {
        let wanted = self.acknowledged.load(Ordering::SeqCst) + count;
        support::until("the writes go on", || {
            self.acknowledged.load(Ordering::SeqCst) >= wanted
        });
    }
}

/// Ends the writes, also when an assertion fails.
struct EndGuard<'a>(&'a AtomicBool);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The value in the first page of a snapshot.
fn value_of(cluster: &Cluster, snapshot: &str) -> u64 {
    let export = cluster.export(&[snapshot], "auto");
    let file = cluster.dir().join("snapshot.img");
    program::ok("nbdcopy", &[&export.uri, file.to_str().unwrap()]);
    let image = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    export.stop();
    let value = u64::from_le_bytes(image[..8].try_into().unwrap());
    assert_eq!(image[..PAGE], value.to_le_bytes().repeat(PAGE / 8), "torn");
    value
}

fn check_group_under_load(transport: &str) {
    let cluster = Cluster::new(Pools::Memory, 2);
    for volume in ["a", "b", "c"] {
        cluster.create(volume, "4M", &MIRROR);
    }
    // No client attaches `c`.
    let exports = ["a", "b"].map(|volume| cluster.export(&[volume], transport));
    let sockets = [exports[0].socket(), exports[1].socket()];
    let chain = Chain::default();
    std::thread::scope(|scope| {
        let _guard = EndGuard(&chain.is_over);
        let (chain, sockets) = (&chain, [sockets[0].as_path(), sockets[1].as_path()]);
        scope.spawn(move || chain.run(sockets));
        for number in 0..10 {
            chain.await_more(20);
            let before = chain.acknowledged.load(Ordering::SeqCst);
            let name = format!("c@s{number}");
            let made = cluster.json(&["snapshot", "create", "a", "b", &name]);
            assert_eq!(made["consistent"], true, "{made}");
            assert_eq!(made["snapshots"].as_array().unwrap().len(), 3);
            assert!(made["held_us"].as_u64().unwrap() > 0, "{made}");
            let [a, b] = ["a", "b"].map(|it| value_of(&cluster, &format!("{it}@s{number}")));
            assert!(before <= b, "b@s{number} lacks {before}: {b}");
            assert!(b <= a && a <= b + 1, "s{number}: {a} in a, {b} in b");
        }
        chain.await_more(20);
    });
    for export in exports {
        export.stop();
    }
}

#[test]
fn group_of_busy_volumes_shows_one_moment_on_map() {
    check_group_under_load("map");
}

#[test]
fn group_of_busy_volumes_shows_one_moment_on_tcp() {
    check_group_under_load("tcp");
}

#[test]
fn group_is_named_by_a_pattern() {
    let cluster = Cluster::new(Pools::Memory, 2);
    for volume in ["db-data", "db-log", "web"] {
        cluster.create(volume, "4M", &MIRROR);
    }
    let made = cluster.ok(&["snapshot", "create", "db-*@n"]);
    assert!(made.contains("made db-data@n\nmade db-log@n\n"), "{made}");
    assert!(made.contains("one moment"), "{made}");
    let none = &["no volume has a name like x*", "volume list"];
    cluster.refused(&["snapshot", "create", "x*@n"], none);
    let listed = cluster.json(&["snapshot", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 2, "{listed}");
}
