//! Several clients change the same places at once.
//!
//! Every 512 bytes name their writer. In the end each such sector must hold a change without a
//! successor: no change of the sector began after that change had ended.

use crate::faults::nbd::{Command, FUA, NbdConnection};
use crate::faults::rig::{VOLUME, VolumeRig};
use crate::support::Pools;
use pagemesh_base::rng::SplitMix64;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

const SECTOR: u64 = 512;
/// Sectors that all clients write: few, so that writes overlap.
const SECTORS: u64 = 512;
/// Sectors of the longest change.
const SPAN: u64 = 40;
const CLIENTS: u64 = 4;
const DEPTH: usize = 16;
const CHANGES: u64 = 4000;

/// A change of a run of sectors; `change` 0 is none.
#[derive(Clone, Copy, Debug)]
struct SectorChange {
    change: u64,
    zero: bool,
    start: u64,
    count: u64,
    began: u64,
    ended: u64,
}

fn fill(sector: u64, change: u64, into: &mut [u8]) {
    for (at, word) in into.chunks_exact_mut(8).enumerate() {
        let value = match at {
            0 => change,
            1 => sector,
            _ => SplitMix64::new(change << 20 ^ sector << 8 ^ at as u64).next_u64(),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// One client: many changes in flight, of which some overlap.
fn run_random_changes(
    socket: &Path,
    client: u64,
    clock: &AtomicU64,
    all: &Mutex<Vec<SectorChange>>,
) {
    let mut nbd = NbdConnection::connect(socket, VOLUME, client.is_multiple_of(2))
        .expect("clients are taken");
    let mut rng = SplitMix64::new(client + 1);
    let mut flight: HashMap<u64, SectorChange> = HashMap::new();
    let mut made = vec![];
    let mut issued = 0;
    while issued < CHANGES || !flight.is_empty() {
        while issued < CHANGES && flight.len() < DEPTH {
            issued += 1;
            let change = client * CHANGES + issued;
            let count = 1 + rng.below(SPAN);
            let start = rng.below(SECTORS - count + 1);
            let (command, flags) = match rng.below(10) {
                0 => (Command::Trim, 0),
                1 => (Command::Zero, 0),
                2 => (Command::Write, FUA),
                _ => (Command::Write, 0),
            };
            let zero = command != Command::Write;
            let mut data = vec![];
            if !zero {
                data.resize((count * SECTOR) as usize, 0);
                let sectors = data.chunks_exact_mut(SECTOR as usize);
                (start..)
                    .zip(sectors)
                    .for_each(|(sector, into)| fill(sector, change, into));
            }
            let began = clock.fetch_add(1, Ordering::SeqCst);
            let ended = u64::MAX;
            flight.insert(
                change,
                SectorChange {
                    change,
                    zero,
                    start,
                    count,
                    began,
                    ended,
                },
            );
            let (offset, len) = (start * SECTOR, (count * SECTOR) as u32);
            nbd.send(change, (command, flags), offset, len, &data)
                .expect("sent");
        }
        let reply = nbd.reply().expect("an answer");
        assert_eq!(reply.errno, 0);
        let mut change = flight.remove(&reply.cookie).expect("asked before");
        change.ended = clock.fetch_add(1, Ordering::SeqCst);
        made.push(change);
    }
    all.lock().expect("no panic").extend(made);
}

fn check_sector(sector: u64, found: &[u8], changes: &[SectorChange]) {
    let covers =
        |change: &&SectorChange| (change.start..change.start + change.count).contains(&sector);
    let here: Vec<&SectorChange> = changes.iter().filter(covers).collect();
    let last_begun = here.iter().map(|change| change.began).max().unwrap_or(0);
    // A change is superseded by any that began after it had ended.
    let is_last = |change: &&&SectorChange| change.ended > last_begun;
    let mut possible = here.iter().filter(is_last);
    let right = possible.any(|change| {
        let mut right = [0; SECTOR as usize];
        if !change.zero {
            fill(sector, change.change, &mut right);
        }
        right == *found
    });
    let head = u64::from_le_bytes(*found.first_chunk().expect("a sector"));
    assert!(
        right || here.is_empty(),
        "sector {sector} holds change {head} of {here:#?}"
    );
}

fn check_overlapping_clients(layout: &[&str], bricks: usize, transport: &str) {
    let mut rig = VolumeRig::new(Pools::Memory, bricks, 16, layout, 0xe1);
    rig.serve(transport);
    let (clock, all) = (AtomicU64::new(1), Mutex::new(vec![]));
    let socket = rig.socket();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (socket, clock, all) = (&socket, &clock, &all);
            scope.spawn(move || run_random_changes(socket, client, clock, all));
        }
    });
    let changes = all.into_inner().expect("no panic");
    assert_eq!(changes.len() as u64, CLIENTS * CHANGES);
    let mut nbd = NbdConnection::connect(&socket, VOLUME, true).expect("clients are taken");
    let len = (SECTORS * SECTOR) as u32;
    nbd.send(1, (Command::Read, 0), 0, len, &[]).expect("sent");
    let found = nbd.reply().expect("an answer").data;
    for (sector, found) in (0..).zip(found.chunks_exact(SECTOR as usize)) {
        check_sector(sector, found, &changes);
    }
    drop(nbd);
    rig.end_and_check();
}

#[test]
fn clients_overlap_on_mapped_legs() {
    check_overlapping_clients(&[], 2, "map");
}

#[test]
fn clients_overlap_on_legs_over_tcp() {
    check_overlapping_clients(&["--copies", "3"], 3, "tcp");
}
