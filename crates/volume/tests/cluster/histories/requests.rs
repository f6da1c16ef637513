//! Random histories of a volume: overlapping requests from several channels while bricks die
//! and return, connections break, the manager is away and clients crash. Reads return only
//! allowed values. In the end the legs are equal in contents and births, and hold all acknowledged writes.
//!
//! A failure names its seed: `PAGEMESH_SEED=n cargo test -p pagemesh-volume replay_history_seed
//! -- --ignored` repeats it.

use crate::world::bricks::Fabric;
use crate::world::cluster::create_slices;
use crate::world::history::World;
use crate::world::manager::{Manager, ManagerMode, brick, segment};
use crate::world::oracle::{AtomicSectors, PAGE_SECTORS, ReadOracle, SECTOR, fill, value_of};
use crate::world::{SeedReporter, seeds_from_env};
use bytes::Bytes;
use pagemesh_base::layout::{BrickId, LegState, STRIPE_BYTES};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Channel, Reply, Request, SpaceError, Token};
use pagemesh_volume::VolumeState;
use pagemesh_volume::limits::DOWN_LIMIT;
use pagemesh_volume::test_api::VolumeChannel;
use std::collections::BTreeMap;

const STEPS: usize = 3000;
/// The maximum of steps after the last fault until everything is idle.
const SETTLE_STEPS_MAX: usize = 200_000;
/// The maximum of steps of a read after a crash: some legs may be away.
const READ_STEPS_MAX: usize = 2000;
const IN_FLIGHT_MAX: usize = 8;
const STRIPE_PAGES: u64 = STRIPE_BYTES / 4096;

enum PendingRequest {
    Change(u64),
    Transaction(Vec<u64>),
    Read(u64),
    Flush,
}

struct ChannelThread {
    channel: VolumeChannel,
    pending: BTreeMap<u64, PendingRequest>,
}

struct Scenario {
    world: World,
    threads: Vec<ChannelThread>,
    oracle: ReadOracle,
    sectors: u64,
    copies: usize,
    /// Whether the volume has one column.
    has_one_column: bool,
    buffers: bool,
    /// Transactions with an unknown outcome after a crash.
    atomic_sectors: Vec<AtomicSectors>,
    transactions_seen: u64,
    /// The next token, value, and so on.
    next: u64,
    /// Requests that ended, and those that failed because no leg was in reach.
    completed: u64,
    unavailable: u64,
}

impl Scenario {
    fn new(seed: u64) -> Scenario {
        let mut rng = SplitMix64::new(seed);
        let copies = [1, 2, 2, 2, 3][rng.below(5) as usize];
        let columns = 1 + rng.below(2) as usize;
        let buffers = rng.one_in(3);
        let count = 1 + rng.below(2) as usize;
        let segments: Vec<_> = (0..count)
            .map(|n| segment(n, columns, copies, STRIPE_BYTES * columns as u64))
            .collect();
        let fabric = Fabric::default();
        poison::lock(&fabric.0).table_max = rng.one_in(3).then_some(6);
        for copy in 0..copies {
            poison::lock(&fabric.0).add(brick(copy as u128), buffers);
        }
        create_slices(&fabric, &segments);
        let bytes: u64 = segments.iter().map(|s| s.bytes).sum();
        let manager = Manager::new(segments, if buffers { "file-sync" } else { "process" });
        Scenario {
            world: World::new(rng, fabric, manager),
            threads: vec![],
            oracle: ReadOracle::new(bytes / SECTOR),
            sectors: bytes / SECTOR,
            copies,
            has_one_column: columns == 1 && count == 1,
            buffers,
            atomic_sectors: vec![],
            transactions_seen: 0,
            next: 0,
            completed: 0,
            unavailable: 0,
        }
    }

    /// Attaches, with as many tries as it takes.
    fn attach(&mut self) {
        for _ in 0..SETTLE_STEPS_MAX {
            self.world.background();
            self.world.client.poll();
            match self.world.client.take_attach_result() {
                Some(Ok(())) => {
                    let channels = 1 + self.world.rng.below(3);
                    (0..channels).for_each(|_| self.open());
                    return;
                }
                Some(Err(_)) => {
                    self.restore_all();
                    self.world.replace_client();
                }
                None => {}
            }
            if self.world.rng.one_in(400) {
                self.inject_fault();
            }
        }
        panic!("an attach does not end");
    }

    fn open(&mut self) {
        let channel = self.world.client.open();
        self.threads.push(ChannelThread {
            channel,
            pending: BTreeMap::new(),
        });
    }

    fn submit(&mut self) {
        let at = self.world.rng.below(self.threads.len() as u64) as usize;
        if self.threads[at].pending.len() >= IN_FLIGHT_MAX {
            return;
        }
        self.next += 1;
        let token = self.next;
        let len = if self.world.rng.one_in(6) {
            8 + self.world.rng.below(200)
        } else {
            1 + self.world.rng.below(20)
        };
        let start = self.world.rng.below(self.sectors);
        let end = (start + len).min(self.sectors);
        let (offset, bytes) = (start * SECTOR, (end - start) * SECTOR);
        let durable = self.world.rng.one_in(4);
        let (request, pending) = match self.world.rng.below(11) {
            0..=3 => {
                let order = self.oracle.begin(at, start..end, token);
                let data = Bytes::from(fill(token, end - start));
                let request = Request::Write {
                    offset,
                    data,
                    durable,
                };
                (request, PendingRequest::Change(order))
            }
            4 => {
                let order = self.oracle.begin(at, start..end, 0);
                let request = Request::WriteZeroes {
                    offset,
                    len: bytes,
                    durable,
                };
                (request, PendingRequest::Change(order))
            }
            5 => (Request::Flush, PendingRequest::Flush),
            6 => self.transaction(at, token),
            _ => {
                let number = self.oracle.begin_read(start..end);
                let request = Request::Read {
                    offset,
                    len: bytes as u32,
                };
                (request, PendingRequest::Read(number))
            }
        };
        let thread = &mut self.threads[at];
        thread.pending.insert(token, pending);
        thread.channel.submit(Token(token), request);
    }

    /// One to four parts of one or a few pages. One of them may be a clear.
    fn transaction(&mut self, at: usize, token: u64) -> (Request, PendingRequest) {
        let pages = self.sectors / PAGE_SECTORS;
        let rng = &mut self.world.rng;
        // Mostly within one column.
        let base = rng.below(pages / STRIPE_PAGES) * STRIPE_PAGES;
        let (base, room) = match rng.one_in(8) {
            true => (0, pages),
            false => (base, STRIPE_PAGES),
        };
        let mut taken = std::collections::BTreeSet::new();
        let (mut parts, mut changes) = (vec![], vec![]);
        for _ in 0..1 + rng.below(4) {
            let len = 1 + rng.below(3);
            let from = rng.below(room - len + 1) + base;
            if (from..from + len).any(|page| !taken.insert(page)) {
                continue;
            }
            let (offset, bytes) = (from * 4096, len * 4096);
            let sectors = from * PAGE_SECTORS..(from + len) * PAGE_SECTORS;
            if rng.one_in(4) {
                parts.push(TransactionPart::Clear { offset, len: bytes });
                changes.push((sectors, 0));
            } else {
                let data = Bytes::from(fill(token, len * PAGE_SECTORS));
                parts.push(TransactionPart::Write { offset, data });
                changes.push((sectors, token));
            }
        }
        let durable = rng.one_in(4);
        let orders = self.oracle.begin_transaction(at, &changes, token);
        let request = Request::Transact { parts, durable };
        (request, PendingRequest::Transaction(orders))
    }

    fn reap(&mut self, at: usize) {
        let mut completions = vec![];
        self.threads[at].channel.reap(&mut completions);
        for completion in completions {
            let token = completion.token.0;
            let pending = self.threads[at]
                .pending
                .remove(&token)
                .expect("answered once");
            self.completed += 1;
            self.unavailable += u64::from(matches!(
                &completion.result,
                Err(SpaceError::Unavailable(_))
            ));
            match (pending, completion.result) {
                (PendingRequest::Change(order), Ok(Reply::Done)) => self.oracle.complete(order),
                (
                    PendingRequest::Change(order),
                    Err(SpaceError::Unavailable(_) | SpaceError::NoSpace(_)),
                ) => self.oracle.mark_indeterminate(order),
                (PendingRequest::Transaction(orders), result) => {
                    for order in orders {
                        match &result {
                            Ok(_) => self.oracle.complete(order),
                            Err(SpaceError::Unsupported(_)) if !self.has_one_column => {
                                self.oracle.cancel(order);
                            }
                            Err(SpaceError::Unavailable(_) | SpaceError::NoSpace(_)) => {
                                self.oracle.mark_indeterminate(order);
                            }
                            Err(cause) => panic!("token {token} ended with {cause}"),
                        }
                    }
                }
                (PendingRequest::Read(number), Ok(Reply::Data(data))) => {
                    self.oracle
                        .end_read(number, Some(&data))
                        .expect("an allowed value");
                }
                (PendingRequest::Read(number), Err(SpaceError::Unavailable(_))) => {
                    self.oracle.end_read(number, None).expect("nothing");
                }
                (PendingRequest::Flush, Ok(_) | Err(SpaceError::Unavailable(_))) => {}
                (_, result) => panic!("token {token} ended with {result:?}"),
            }
        }
    }

    fn inject_fault(&mut self) {
        let number = brick(u128::from(self.world.rng.below(self.copies as u64)));
        match self.world.rng.below(12) {
            0 | 1 if self.may_kill_brick() => self.world.kill(number),
            2..=4 => self.world.restart(number),
            5 => self.world.break_any_connection(),
            6 => {
                self.world.set_any_manager_mode(&[
                    ManagerMode::Down,
                    ManagerMode::LoseNextReply,
                    ManagerMode::Up,
                ]);
            }
            7 => {
                let room = self.world.rng.one_in(2).then(|| self.world.rng.below(40));
                self.world.set_room(number, room.unwrap_or(u64::MAX));
            }
            8 => {
                for copy in 0..self.copies {
                    let room = self.world.rng.below(40);
                    self.world.set_room(brick(copy as u128), room);
                }
            }
            9 => {
                for copy in 0..self.copies {
                    self.world.set_room(brick(copy as u128), u64::MAX);
                }
            }
            10 if !self.threads.is_empty() && self.may_kill_brick() => {
                self.kill_brick_and_client(number)
            }
            // So long that waiting requests fail.
            11 if self.world.rng.one_in(4) => self.world.client.now += DOWN_LIMIT,
            _ => self.world.manager.set_mode(ManagerMode::Up),
        }
    }

    /// Kills a brick, and then the client before it sends its writes again. Changes that only
    /// that brick has are known to no other process.
    fn kill_brick_and_client(&mut self, number: BrickId) {
        for _ in 0..self.world.rng.below(6) {
            self.submit();
        }
        let mut bricks = poison::lock(&self.world.fabric.0);
        for connection in bricks.connections_of(number) {
            for _ in 0..self.world.rng.below(6) {
                bricks.step(connection, &mut self.world.rng);
            }
        }
        bricks.kill(number);
        drop(bricks);
        self.crash();
    }

    /// Whether a brick may die. A buffering brick that dies loses unflushed changes, so the
    /// others must have them all.
    fn may_kill_brick(&mut self) -> bool {
        if !self.buffers {
            return true;
        }
        // The losses that channels noticed must be in the status.
        self.world.client.poll();
        let layout = self.world.manager.layout();
        let mut legs = layout
            .segments
            .iter()
            .flat_map(|s| &s.columns)
            .flat_map(|c| &c.legs);
        let in_sync = legs.all(|leg| leg.state == LegState::InSync);
        let bricks = poison::lock(&self.world.fabric.0);
        let whole = bricks.bricks.values().all(|brick| brick.up) && !bricks.has_lost();
        self.copies > 1
            && in_sync
            && whole
            && !self.threads.is_empty()
            && self.world.client.status().state == VolumeState::Healthy
    }

    fn crash(&mut self) {
        self.world.replace_client();
        self.threads.clear();
        // Only sectors that stayed unwritten are decided; a later crash does not change that.
        self.atomic_sectors.extend(self.oracle.crash());
        self.attach();
        self.check_transactions();
    }

    /// Checks that transactions in flight at the client's death are there as a whole or not at
    /// all, on whichever leg answers.
    fn check_transactions(&mut self) {
        for whole in std::mem::take(&mut self.atomic_sectors) {
            let found = whole.sectors.iter().map(|sector| self.read_sector(*sector));
            let Some(found) = found.collect::<Option<Vec<u64>>>() else {
                return;
            };
            let present = found.iter().filter(|value| **value == whole.value).count();
            assert!(
                present == 0 || present == found.len(),
                "{present} of {} sectors of transaction {} are there: {found:?}",
                found.len(),
                whole.value
            );
            self.transactions_seen += 1;
        }
    }

    /// The value of a sector; none if it cannot be read now.
    fn read_sector(&mut self, sector: u64) -> Option<u64> {
        self.next += 1;
        let token = self.next;
        let request = Request::Read {
            offset: sector * SECTOR,
            len: SECTOR as u32,
        };
        self.threads[0].channel.submit(Token(token), request);
        for _ in 0..READ_STEPS_MAX {
            self.world.background();
            let mut completions = vec![];
            self.threads[0].channel.reap(&mut completions);
            if let Some(completion) = completions.pop() {
                assert_eq!(completion.token.0, token, "nothing else is in flight");
                return match completion.result {
                    Ok(Reply::Data(data)) => Some(value_of(&data).expect("not torn")),
                    Ok(other) => panic!("a read gave {other:?}"),
                    Err(_) => None,
                };
            }
        }
        self.threads[0].pending.insert(token, PendingRequest::Flush);
        None
    }

    fn replace_channel(&mut self) {
        let at = self.world.rng.below(self.threads.len() as u64) as usize;
        let gone = self.threads.swap_remove(at);
        for pending in gone.pending.into_values() {
            match pending {
                PendingRequest::Change(order) => self.oracle.mark_indeterminate(order),
                PendingRequest::Transaction(orders) => {
                    orders
                        .into_iter()
                        .for_each(|order| self.oracle.mark_indeterminate(order));
                }
                PendingRequest::Read(number) => {
                    self.oracle.end_read(number, None).expect("nothing")
                }
                PendingRequest::Flush => {}
            }
        }
        drop(gone.channel);
        self.open();
    }

    fn run_steps(&mut self) {
        self.attach();
        for _ in 0..STEPS {
            match self.world.rng.below(100) {
                0..=19 => self.submit(),
                20..=39 => {
                    let at = self.world.rng.below(self.threads.len() as u64) as usize;
                    self.reap(at);
                }
                40..=97 => self.world.background(),
                98 => self.inject_fault(),
                _ => match self.world.rng.below(10) {
                    0 => self.crash(),
                    1 => self.replace_channel(),
                    _ => {}
                },
            }
        }
        self.run_until_healthy();
        self.compare_legs();
        if self.world.rng.one_in(3) {
            self.crash();
            self.run_until_healthy();
            self.compare_legs();
        }
    }

    fn restore_all(&mut self) {
        self.world.restart_all();
        let mut bricks = poison::lock(&self.world.fabric.0);
        bricks
            .bricks
            .values_mut()
            .for_each(|brick| brick.room = u64::MAX);
    }

    fn run_until_healthy(&mut self) {
        self.restore_all();
        for _ in 0..SETTLE_STEPS_MAX {
            self.world.background();
            (0..self.threads.len()).for_each(|at| self.reap(at));
            let calm = self.threads.iter().all(|t| t.pending.is_empty());
            // Dropped channels must complete their changes, too.
            let ended =
                poison::lock(&self.world.client.shared.members).len() == self.threads.len() + 1;
            if calm && ended && self.world.client.status().state == VolumeState::Healthy {
                return;
            }
        }
        let pending: Vec<_> = self.threads.iter().map(|t| t.pending.len()).collect();
        panic!(
            "no rest; pending {pending:?}, {:#?}",
            self.world.client.status()
        );
    }

    fn compare_legs(&mut self) {
        let layout = self.world.manager.layout();
        let bricks = poison::lock(&self.world.fabric.0);
        let view = self.world.client.shared.snapshot().1;
        let columns = layout.segments.iter().flat_map(|s| &s.columns);
        for (number, column) in columns.enumerate() {
            assert_eq!(column.lost_since.0, 0);
            let first = bricks.slice(column.legs[0].brick, column.legs[0].slice);
            for leg in &column.legs[1..] {
                let other = bricks.slice(leg.brick, leg.slice);
                // A leg without room is born anew no more, nor is one without a list of operations. With three
                // legs, two may have been away at once.
                if self.copies == 2 && !bricks.was_full && bricks.table_max.is_none() {
                    assert_eq!(first.differing_births(other), None, "column {number}");
                }
                let (first, other) = (first.pages(), other.pages());
                for (page, (a, b)) in first.iter().zip(other).enumerate() {
                    let zero = [0; 4096];
                    let bytes = |page: &crate::world::bricks::Page| {
                        **page.as_ref().unwrap_or(&Box::new(zero))
                    };
                    assert!(
                        bytes(a) == bytes(b),
                        "column {number} page {page} differs: {:?} {:?}",
                        value_of(&bytes(a)[..512]),
                        value_of(&bytes(b)[..512])
                    );
                }
            }
            for (page, bytes) in first.pages().iter().enumerate() {
                for sector in 0..8 {
                    let offset = page as u64 * 4096 + sector * SECTOR;
                    let at = view.volume_offset(number, offset) / SECTOR;
                    let from = (sector * SECTOR) as usize;
                    let value = bytes
                        .as_ref()
                        .map_or(Ok(0), |b| value_of(&b[from..from + 512]));
                    let value = value.expect("no torn sector");
                    let allowed = self.oracle.allowed_values(at);
                    assert!(
                        allowed.contains(&value),
                        "sector {at} holds {value}, not {allowed:?}"
                    );
                }
            }
        }
    }
}

fn run_seed(seed: u64) {
    let _told = SeedReporter(seed, "replay_history_seed");
    let mut life = Scenario::new(seed);
    life.run_steps();
    if std::env::var("PAGEMESH_TELL").is_ok() {
        let (unavailable, ends) = (life.unavailable, life.completed);
        eprintln!(
            "seed {seed}: {ends} ends, {unavailable} unavailable, {} transactions seen, {:?}",
            life.transactions_seen,
            life.world.client.status()
        );
    }
}

fn seeds(from: u64) {
    (from..from + seeds_from_env().unwrap_or(400)).for_each(run_seed);
}

#[test]
fn random_histories_converge_1() {
    seeds(0);
}

#[test]
fn random_histories_converge_2() {
    seeds(1_000_000);
}

#[test]
#[ignore = "repeats the seed in PAGEMESH_SEED"]
fn replay_history_seed() {
    let seed = std::env::var("PAGEMESH_SEED").expect("PAGEMESH_SEED");
    run_seed(seed.parse().expect("a number"));
}
