use super::*;
use crate::nfs4::state::Principal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use uuid::Uuid;

const IDENTITY: ListIdentity = ListIdentity {
    volume: Uuid::from_u128(7),
    content: 3,
};
/// Bytes that a crash keeps or loses as a whole.
const PAGE: usize = 4096;

/// The pages of a file without holes.
#[derive(Clone, Default)]
struct Pages(BTreeMap<usize, [u8; PAGE]>);

impl Pages {
    fn put(&mut self, at: usize, data: &[u8]) {
        for (at, part) in page_parts(at, data) {
            let page = self.0.entry(at / PAGE).or_insert([0; PAGE]);
            page[at % PAGE..][..part.len()].copy_from_slice(part);
        }
    }

    fn flip(&mut self, at: usize) {
        self.0.get_mut(&(at / PAGE)).expect("a page")[at % PAGE] ^= 1;
    }

    fn len(&self) -> usize {
        self.0
            .keys()
            .next_back()
            .map_or(0, |page| (page + 1) * PAGE)
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at.is_multiple_of(PAGE) && len.is_multiple_of(PAGE));
        let mut bytes = vec![0; len];
        for (page, data) in self.0.range(at / PAGE..(at + len) / PAGE) {
            bytes[page * PAGE - at..][..PAGE].copy_from_slice(data);
        }
        bytes
    }
}

/// The parts of a write in pages.
fn page_parts(at: usize, data: &[u8]) -> Vec<(usize, &[u8])> {
    let mut parts = Vec::new();
    let mut start = 0;
    while start < data.len() {
        let end = data.len().min(((at + start) / PAGE + 1) * PAGE - at);
        parts.push((at + start, &data[start..end]));
        start = end;
    }
    parts
}

/// The bytes of a file, and the parts that a crash may lose.
#[derive(Default)]
struct Disk {
    durable: Pages,
    /// Writes since the last sync.
    unsynced: Vec<(usize, Vec<u8>)>,
    /// Writes and syncs until the store fails.
    steps_left: Option<usize>,
    steps: usize,
    syncs: usize,
}

#[derive(Clone, Default)]
struct MemoryStore(Arc<Mutex<Disk>>);

impl Disk {
    fn step(&mut self) -> Result<(), FsError> {
        self.steps += 1;
        match &mut self.steps_left {
            Some(0) => Err(rustix::io::Errno::IO.into()),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn content(&self) -> Pages {
        let mut content = self.durable.clone();
        for (at, data) in &self.unsynced {
            content.put(*at, data);
        }
        content
    }

    /// The file after a crash: the page with index `n` of the unsynced writes is kept if bit `n` of `kept` is set.
    fn crashed(&self, kept: u64) -> MemoryStore {
        let mut durable = self.durable.clone();
        let parts = self.unsynced.iter();
        let parts = parts.flat_map(|(at, data)| page_parts(*at, data));
        for (index, (at, part)) in (0_u32..).zip(parts) {
            if kept.rotate_right(index) & 1 == 1 {
                durable.put(at, part);
            }
        }
        let disk = Disk {
            durable,
            ..Disk::default()
        };
        MemoryStore(Arc::new(Mutex::new(disk)))
    }
}

impl StableStore for MemoryStore {
    fn len(&self) -> Result<u64, FsError> {
        Ok(poison::lock(&self.0).content().len() as u64)
    }

    fn read(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, FsError> {
        let disk = poison::lock(&self.0);
        let offset = offset as usize;
        // After a crash nothing is unsynced.
        let content = match disk.unsynced.is_empty() {
            true => &disk.durable,
            false => &disk.content(),
        };
        let len = content.len().saturating_sub(offset).min(bytes);
        Ok(content.read(offset, len))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), FsError> {
        let mut disk = poison::lock(&self.0);
        let result = disk.step();
        // A failed write may have written.
        disk.unsynced.push((offset as usize, bytes.to_vec()));
        result
    }

    fn sync(&self) -> Result<(), FsError> {
        let mut disk = poison::lock(&self.0);
        disk.step()?;
        disk.durable = disk.content();
        disk.unsynced.clear();
        disk.syncs += 1;
        Ok(())
    }
}

fn stored(store: &MemoryStore) -> StoredList {
    StoredList::read("files", IDENTITY, Box::new(store.clone()))
}

fn begun(store: &MemoryStore, run: u32) -> ClientList {
    stored(store).begin(Instance(run))
}

fn owner(number: u32) -> Arc<[u8]> {
    Arc::from(format!("client {number}").as_bytes())
}

fn active(number: u32) -> JournalRecord {
    let principal = Principal {
        flavor: 1,
        uid: 0,
        gid: 0,
    };
    JournalRecord::Active {
        owner: owner(number),
        principal,
    }
}

fn removed(number: u32) -> JournalRecord {
    let owner = owner(number);
    JournalRecord::Removed { owner }
}

fn owners(known: &KnownClients) -> BTreeSet<Vec<u8>> {
    known.iter().map(|(owner, _)| owner.to_vec()).collect()
}

fn named(numbers: &[u32]) -> BTreeSet<Vec<u8>> {
    numbers.iter().map(|it| owner(*it).to_vec()).collect()
}

fn store_all(list: &ClientList, records: &[JournalRecord]) {
    records.iter().for_each(|it| list.append(it));
    list.wait().expect("stored");
    assert!(list.is_durable());
}

#[test]
fn list_survives_restarts() {
    let store = MemoryStore::default();
    assert_eq!(stored(&store).instance(), None);
    let list = begun(&store, 5);
    store_all(&list, &[active(1), active(2), removed(1)]);
    assert_eq!(list.records(), (4, 0));
    let read = stored(&store);
    assert_eq!(read.instance(), Some(Instance(5)));
    assert_eq!(owners(&read.known()), named(&[2]));
    for run in 6..12 {
        let list = begun(&store, run);
        assert_eq!(owners(&stored(&store).known()), named(&[2]));
        store_all(&list, &[active(3), removed(3)]);
    }
    let list = begun(&store, 12);
    store_all(&list, &[active(4), JournalRecord::GraceEnded]);
    assert_eq!(owners(&stored(&store).known()), named(&[4]));
}

#[test]
fn list_of_another_content_has_no_clients() {
    let store = MemoryStore::default();
    store_all(&begun(&store, 5), &[active(1)]);
    let clone = ListIdentity {
        volume: Uuid::from_u128(8),
        ..IDENTITY
    };
    let rolled_back = ListIdentity {
        content: 4,
        ..IDENTITY
    };
    for identity in [clone, rolled_back] {
        let read = StoredList::read("files", identity, Box::new(store.clone()));
        assert!(read.known().is_empty());
        assert_eq!(read.instance(), Some(Instance(5)), "ids stay apart");
    }
    let own = StoredList::read("files", rolled_back, Box::new(store.clone()));
    store_all(&own.begin(Instance(6)), &[active(2)]);
    let read = StoredList::read("files", rolled_back, Box::new(store.clone()));
    assert_eq!(owners(&read.known()), named(&[2]));
    assert!(stored(&store).known().is_empty());
}

#[test]
fn damaged_list_lets_no_client_reclaim() {
    let store = MemoryStore::default();
    let list = begun(&store, 5);
    (0..1000).for_each(|number| store_all(&list, &[active(number)]));
    let used = poison::lock(&list.state)
        .writer
        .as_ref()
        .map(|it| it.used_bytes[0]);
    // Records in the middle, the header, and the version.
    for at in [used.expect("idle") / 4, 20, 7] {
        let damaged = poison::lock(&store.0).crashed(u64::MAX);
        poison::lock(&damaged.0).durable.flip(at);
        assert!(stored(&damaged).known().is_empty(), "at {at}");
        store_all(&begun(&damaged, 6), &[active(1)]);
        assert_eq!(owners(&stored(&damaged).known()), named(&[1]), "at {at}");
    }
}

#[test]
fn earlier_list_does_not_come_back_after_damage() {
    let store = MemoryStore::default();
    store_all(&begun(&store, 5), &[active(1)]);
    let list = begun(&store, 6);
    store_all(&list, &[removed(1)]);
    let slot = poison::lock(&list.state)
        .writer
        .as_ref()
        .and_then(|it| it.stored_in);
    let slot = slot.expect("stored");
    let damaged = poison::lock(&store.0).crashed(u64::MAX);
    let at = slot * SLOT_BYTES + 20;
    poison::lock(&damaged.0).durable.flip(at);
    assert!(stored(&damaged).known().is_empty());
}

#[test]
fn waiting_records_are_stored_together() {
    let store = MemoryStore::default();
    let list = begun(&store, 5);
    let before = poison::lock(&store.0).syncs;
    let records: Vec<_> = (0..GROUP_MAX as u32).map(active).collect();
    store_all(&list, &records);
    assert_eq!(poison::lock(&store.0).syncs, before + 1);
}

/// The server does so for records that no reply waits for.
#[test]
fn idle_list_writes_its_records_without_a_waiting_reply() {
    let store = MemoryStore::default();
    let list = begun(&store, 1);
    list.append(&active(1));
    list.write_if_idle().expect("written");
    assert!(list.is_durable());
    assert_eq!(owners(&stored(&store).known()), named(&[1]));
}

#[test]
fn many_threads_find_their_records_durable() {
    let store = MemoryStore::default();
    let list = begun(&store, 5);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (list, store) = (&list, &store);
            scope.spawn(move || {
                for number in 0..10 {
                    let number = thread * 1000 + number;
                    store_all_of_thread(list, number);
                    let crashed = poison::lock(&store.0).crashed(0);
                    assert!(owners(&stored(&crashed).known()).contains(&*owner(number)));
                }
            });
        }
    });
    assert_eq!(list.clients(), 80);
}

fn store_all_of_thread(list: &ClientList, number: u32) {
    list.append(&active(number));
    list.wait().expect("stored");
}

#[test]
fn failed_writes_are_repeated_by_a_new_list() {
    let store = MemoryStore::default();
    let list = begun(&store, 5);
    store_all(&list, &[active(1)]);
    poison::lock(&store.0).steps_left = Some(0);
    for number in 2..5 {
        list.append(&active(number));
        list.wait().expect_err("the store fails");
        assert!(!list.is_durable());
    }
    // Memory does not grow meanwhile.
    (0..5000).for_each(|_| list.append(&active(9)));
    assert!(poison::lock(&list.state).queue.is_empty());
    poison::lock(&store.0).steps_left = None;
    list.wait().expect("stored");
    assert_eq!(owners(&stored(&store).known()), named(&[1, 2, 3, 4, 9]));
}

#[test]
fn unwritable_list_begins_with_the_first_wait_that_succeeds() {
    let store = MemoryStore::default();
    poison::lock(&store.0).steps_left = Some(0);
    let list = begun(&store, 5);
    assert!(!list.is_durable());
    poison::lock(&store.0).steps_left = None;
    store_all(&list, &[active(1)]);
    assert_eq!(stored(&store).instance(), Some(Instance(5)));
}

#[test]
fn long_run_keeps_the_list_short() {
    let store = MemoryStore::default();
    let list = begun(&store, 5);
    for round in 0..30_000 {
        list.append(&active(round % 20));
        list.append(&removed((round + 10) % 20));
        if round % 8 == 0 {
            list.wait().expect("stored");
        }
    }
    list.wait().expect("stored");
    let known = stored(&store).known();
    assert_eq!(owners(&known), owners(&poison::lock(&list.state).known));
    assert!(poison::lock(&store.0).durable.len() <= SLOT_BYTES + 2 * PREALLOCATED_BYTES);
}

/// A run of the server over a store that fails at a step. Returns the clients that were told of their state, and the ones
/// that a removal was confirmed for.
fn run_until_failure(store: &MemoryStore, run: u32) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut told, mut gone) = (BTreeSet::new(), BTreeSet::new());
    let list = begun(store, run);
    let base = 100 * run;
    list.append(&JournalRecord::GraceEnded);
    for number in 0..6 {
        let number = base + number;
        list.append(&active(number));
        if list.wait().is_err() {
            return (told, gone);
        }
        told.insert(number);
        if number % 3 == 2 {
            list.append(&removed(number - 1));
            told.remove(&(number - 1));
            if list.wait().is_err() {
                return (told, gone);
            }
            gone.insert(number - 1);
        }
    }
    (told, gone)
}

/// Each crash point of a run, with unsynced pages lost in several patterns: no client that was told of its state is
/// missing, and none of two runs ago may reclaim after the end of grace.
#[test]
fn crashes_lose_no_confirmed_client() {
    let mut crashes = 0;
    for steps in 0.. {
        let store = MemoryStore::default();
        let (first, _) = run_until_failure(&store, 1);
        let steps_before = poison::lock(&store.0).steps;
        poison::lock(&store.0).steps_left = Some(steps);
        let (told, gone) = run_until_failure(&store, 2);
        let disk = poison::lock(&store.0);
        for kept in [
            0,
            u64::MAX,
            0x5555_5555_5555_5555,
            0xaaaa_aaaa_aaaa_aaaa,
            1,
            6,
            u64::MAX - 1,
        ] {
            crashes += 1;
            let read = stored(&disk.crashed(kept));
            assert!(read.lists.error.is_none() || read.lists.current.is_some());
            let found = owners(&read.known());
            for number in &told {
                assert!(
                    found.contains(&*owner(*number)),
                    "{number} at step {steps}, {kept:x}"
                );
            }
            for number in &gone {
                assert!(
                    !found.contains(&*owner(*number)),
                    "{number} at step {steps}, {kept:x}"
                );
            }
            // Any state of the second run was granted after the end of its grace period.
            let earlier = first
                .iter()
                .filter(|it| found.contains(&*owner(**it)))
                .count();
            let wanted = if told.is_empty() && gone.is_empty() {
                earlier
            } else {
                0
            };
            assert_eq!(earlier, wanted, "at step {steps}, {kept:x}");
            if earlier > 0 {
                assert_eq!(
                    earlier,
                    first.len(),
                    "all or none at step {steps}, {kept:x}"
                );
            }
        }
        if disk.steps < steps_before + steps {
            break;
        }
    }
    assert!(crashes > 100);
}
