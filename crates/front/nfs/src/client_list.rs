//! The stable list of a file system: the clients that may reclaim state there after a restart, also of
//! another machine.
//!
//! Invariants:
//! - Records get durable in the order of [`ClientList::append`]. A reply that grants state waits for all of
//!   them ([`ClientList::wait`]), so that its client is in the list, the end of the grace period is, and
//!   clients that have lost the same state are not.
//! - One thread writes at a time, without the lock, all records that wait: the others wait for it.
//! - After a failure the list is written anew, into the other slot, before any other record. Memory does not
//!   grow while the file system fails: the clients in memory have the effect of all records.

mod fs_store;
mod slots;
mod store;

pub use fs_store::ServiceFileStore;
pub use slots::ListIdentity;
pub use store::StableStore;

use crate::nfs4::state::{
    GROUP_BYTES_MAX, Instance, JournalRecord, KnownClients, RECORD_BYTES_MAX, RecordChain,
};
use pagemesh_base::poison;
use pagemesh_base::space::SpaceError;
use pagemesh_fs::FsError;
use slots::{HEADER_BYTES, SLOT_BYTES, StoredLists, slot_bytes};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Records that wait for their write. Beyond, the list is written anew.
const QUEUE_MAX: usize = 1024;
/// Records of one write.
const GROUP_MAX: usize = GROUP_BYTES_MAX / RECORD_BYTES_MAX;
/// Bytes of a slot that are written at the start, so that a full file system takes the records of some
/// thousand clients.
const PREALLOCATED_BYTES: usize = 128 << 10;
/// The time for which an unavailable volume is asked for its list, and the pause between two attempts. A
/// brick that restarts is back by then.
const READ_LIMIT: Duration = Duration::from_secs(60);
const READ_PAUSE: Duration = Duration::from_millis(500);
/// Bytes of one write of a new list.
const WRITE_BYTES: usize = 128 << 10;

/// See the module.
pub struct ClientList {
    name: String,
    identity: ListIdentity,
    store: Box<dyn StableStore>,
    state: Mutex<ListState>,
    /// A write has ended.
    changed: Condvar,
    /// Copies of the numbers in the state.
    appended: AtomicU64,
    durable: AtomicU64,
}

struct ListState {
    /// The clients after all records.
    known: KnownClients,
    /// The records behind the durable ones, unless the list is written anew.
    queue: VecDeque<JournalRecord>,
    /// The number of records so far, and of the durable ones.
    appended: u64,
    durable: u64,
    /// The queue is empty, and the next write has all clients.
    is_rewrite_due: bool,
    /// None while a thread writes.
    writer: Option<SlotWriter>,
    failures: u64,
    error: Option<FsError>,
}

/// The slot that records go to.
struct SlotWriter {
    /// None before the first list of this run.
    slot: Option<(usize, RecordChain)>,
    /// The slot of the list that counts on the storage.
    stored_in: Option<usize>,
    next_generation: u64,
    used_bytes: [usize; 2],
}

/// The work of one write.
enum Batch {
    /// All clients.
    All(KnownClients),
    Records(Vec<JournalRecord>),
}

/// The bytes of a slot up to the last one that is not zero, and as many zeros as a record may end with.
fn read_slot(store: &dyn StableStore, number: usize, len: u64) -> Result<Vec<u8>, FsError> {
    let start = (number * SLOT_BYTES) as u64;
    let wanted = len.saturating_sub(start).min(SLOT_BYTES as u64) as usize;
    let zeros = vec![0; WRITE_BYTES];
    let mut bytes = Vec::new();
    let mut at = 0;
    while at < wanted {
        let read = store.read(start + at as u64, (wanted - at).min(WRITE_BYTES))?;
        if read.is_empty() {
            break;
        }
        if zeros.get(..read.len()) != Some(&read[..]) {
            bytes.resize(at, 0);
            bytes.extend(&read);
        }
        at += read.len();
    }
    bytes.resize(at.min(bytes.len() + RECORD_BYTES_MAX), 0);
    Ok(bytes)
}

/// Reads again for a while if the volume is unavailable: a list that is not read is replaced.
fn repeated<T>(read: impl Fn() -> Result<T, FsError>) -> Result<T, FsError> {
    let end = Instant::now() + READ_LIMIT;
    loop {
        match read() {
            Err(FsError::Space(SpaceError::Unavailable(_) | SpaceError::Busy(_)))
                if Instant::now() < end =>
            {
                std::thread::sleep(READ_PAUSE);
            }
            other => return other,
        }
    }
}

/// A list that is read and not written yet.
pub struct StoredList {
    name: String,
    identity: ListIdentity,
    store: Box<dyn StableStore>,
    lists: StoredLists,
}

impl StoredList {
    /// Reads the list of a file system. A damaged or unknown list is logged, and has no clients.
    #[must_use]
    pub fn read(name: &str, identity: ListIdentity, store: Box<dyn StableStore>) -> Self {
        let read = || {
            let len = store.len()?;
            let slots = [read_slot(&*store, 0, len)?, read_slot(&*store, 1, len)?];
            Ok::<_, FsError>(StoredLists::read([&slots[0], &slots[1]]))
        };
        let lists = repeated(read).unwrap_or_else(|error| {
            tracing::error!(
                file_system = name,
                %error,
                "the list of NFS clients cannot be read: no client may reclaim its locks, and a new list begins. \
                 Restart the programs on clients that report lost locks"
            );
            StoredLists {
                used_bytes: [SLOT_BYTES; 2],
                ..StoredLists::read([&[], &[]])
            }
        });
        if let Some(error) = lists.error {
            tracing::error!(
                file_system = name,
                %error,
                "the list of NFS clients is unusable: no client may reclaim its locks, and a new list begins. \
                 Restart the programs on clients that report lost locks"
            );
        }
        if let Some((_, list)) = &lists.current
            && list.identity != identity
        {
            tracing::info!(
                file_system = name,
                "the list of NFS clients is of another volume, or of a content before a rollback: no client may reclaim"
            );
        }
        let name = name.to_owned();
        Self {
            name,
            identity,
            store,
            lists,
        }
    }

    /// The clients that may reclaim.
    #[must_use]
    pub fn known(&self) -> KnownClients {
        self.lists.known(self.identity)
    }

    /// The number of the last run, if there was one.
    #[must_use]
    pub fn instance(&self) -> Option<Instance> {
        self.lists.instance()
    }

    /// Begins the list of a run: its number is the first record. Nothing is written: a start must not wait for the volume. The first reply
    /// that grants state, or a sweep of the server, writes it.
    #[must_use]
    pub fn begin(self, instance: Instance) -> ClientList {
        let mut known = self.known();
        known.apply(&JournalRecord::Started(instance));
        let writer = SlotWriter {
            slot: None,
            stored_in: self.lists.current.as_ref().map(|(slot, _)| *slot),
            // The list of an unreadable slot is of an earlier run.
            next_generation: self.lists.next_generation.max(u64::from(instance.0) << 32),
            used_bytes: self.lists.used_bytes,
        };
        ClientList {
            name: self.name,
            identity: self.identity,
            store: self.store,
            state: Mutex::new(ListState {
                known,
                queue: VecDeque::new(),
                appended: 1,
                durable: 0,
                is_rewrite_due: true,
                writer: Some(writer),
                failures: 0,
                error: None,
            }),
            changed: Condvar::new(),
            appended: AtomicU64::new(1),
            durable: AtomicU64::new(0),
        }
    }
}

impl ListState {
    fn take_batch(&mut self) -> (Batch, u64) {
        if self.is_rewrite_due {
            // Records that are appended from here on follow.
            self.is_rewrite_due = false;
            return (Batch::All(self.known.clone()), self.appended);
        }
        let count = self.queue.len().min(GROUP_MAX);
        let records: Vec<_> = self.queue.drain(..count).collect();
        let end = self.durable + count as u64;
        (Batch::Records(records), end)
    }

    fn rewrite(&mut self) {
        self.is_rewrite_due = true;
        self.queue.clear();
    }
}

impl ClientList {
    /// Appends a record. It is durable after [`Self::wait`].
    pub fn append(&self, record: &JournalRecord) {
        let mut state = poison::lock(&self.state);
        state.known.apply(record);
        state.appended += 1;
        if !state.is_rewrite_due {
            state.queue.push_back(record.clone());
        }
        if state.queue.len() > QUEUE_MAX {
            state.rewrite();
        }
        self.appended.store(state.appended, Ordering::Release);
    }

    /// Whether all records so far are durable.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durable.load(Ordering::Acquire) >= self.appended.load(Ordering::Acquire)
    }

    /// The clients in the list.
    #[must_use]
    pub fn clients(&self) -> usize {
        poison::lock(&self.state).known.len()
    }

    /// The records so far, and those that are not durable yet.
    #[must_use]
    pub fn records(&self) -> (u64, u64) {
        let state = poison::lock(&self.state);
        (state.appended, state.appended - state.durable)
    }

    /// As [`Self::wait`], and returns at once if another thread writes.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn write_if_idle(&self) -> Result<(), FsError> {
        let is_idle = poison::lock(&self.state).writer.is_some();
        if is_idle { self.wait() } else { Ok(()) }
    }

    /// Whether the last write failed.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        poison::lock(&self.state).error.is_some()
    }

    /// Waits until all records so far are durable, and writes them unless another thread does.
    ///
    /// # Errors
    /// If the file system fails. The records stay, and the next wait tries again.
    pub fn wait(&self) -> Result<(), FsError> {
        if self.is_durable() {
            return Ok(());
        }
        let mut state = poison::lock(&self.state);
        let (wanted, failures) = (state.appended, state.failures);
        loop {
            if state.durable >= wanted {
                return Ok(());
            }
            if let (true, Some(error)) = (state.failures != failures, &state.error) {
                return Err(error.clone());
            }
            let Some(writer) = state.writer.take() else {
                state = poison::recover(self.changed.wait(state));
                continue;
            };
            let (batch, end) = state.take_batch();
            drop(state);
            let turn = WriteTurn {
                list: self,
                writer,
                result: Err(rustix::io::Errno::IO.into()),
                end,
            };
            turn.run(batch);
            state = poison::lock(&self.state);
        }
    }

    /// Writes a new list into the slot that does not count.
    fn write_all(&self, writer: &mut SlotWriter, known: &KnownClients) -> Result<(), FsError> {
        let target = writer.stored_in.map_or(0, |slot| 1 - slot);
        let generation = writer.next_generation;
        // A failed write may be there, too, so that its generation is used up.
        writer.next_generation += 1;
        writer.slot = None;
        let (mut bytes, chain) = slot_bytes(generation, self.identity, known);
        let len = bytes.len();
        bytes.resize(
            len.max(writer.used_bytes[target]).max(PREALLOCATED_BYTES),
            0,
        );
        writer.used_bytes[target] = bytes.len();
        let start = (target * SLOT_BYTES) as u64;
        for (number, part) in bytes.chunks(WRITE_BYTES).enumerate() {
            self.store
                .write(start + (number * WRITE_BYTES) as u64, part)?;
        }
        self.store.sync()?;
        writer.used_bytes[target] = len;
        writer.slot = Some((target, chain));
        let is_first = writer.stored_in.replace(target).is_none();
        self.clear_other(1 - target, is_first);
        Ok(())
    }

    /// The new list counts already. A later damage of it must not bring the one before back.
    fn clear_other(&self, slot: usize, is_first: bool) {
        let bytes = match is_first {
            true => vec![0; PREALLOCATED_BYTES],
            false => vec![0; HEADER_BYTES],
        };
        if let Err(error) = self.store.write((slot * SLOT_BYTES) as u64, &bytes) {
            tracing::debug!(file_system = self.name, %error, "the earlier list of NFS clients stays");
        }
    }

    fn write_records(
        &self,
        writer: &mut SlotWriter,
        records: &[JournalRecord],
    ) -> Result<(), FsError> {
        let Some((slot, chain)) = &mut writer.slot else {
            return Err(rustix::io::Errno::IO.into());
        };
        let at = HEADER_BYTES + chain.bytes();
        let mut bytes = Vec::new();
        for record in records {
            chain.append(record, &mut bytes);
        }
        let slot = *slot;
        let end = at + bytes.len();
        writer.used_bytes[slot] = writer.used_bytes[slot].max(end);
        if end > SLOT_BYTES {
            return Err(rustix::io::Errno::FBIG.into());
        }
        self.store.write((slot * SLOT_BYTES + at) as u64, &bytes)?;
        self.store.sync()
    }
}

impl SlotWriter {
    /// Whether the next write begins a new list.
    fn is_full(&self) -> bool {
        self.slot.as_ref().is_none_or(|(_, chain)| {
            chain.is_mostly_garbage() || HEADER_BYTES + chain.bytes() + GROUP_BYTES_MAX > SLOT_BYTES
        })
    }
}

/// The turn of one thread to write. Its drop gives the turn back, also after a panic.
struct WriteTurn<'a> {
    list: &'a ClientList,
    writer: SlotWriter,
    result: Result<(), FsError>,
    /// The number of records that are durable after it.
    end: u64,
}

impl WriteTurn<'_> {
    fn run(mut self, batch: Batch) {
        self.result = match batch {
            Batch::All(known) => self.list.write_all(&mut self.writer, &known),
            Batch::Records(records) => self.list.write_records(&mut self.writer, &records),
        };
    }
}

impl Drop for WriteTurn<'_> {
    fn drop(&mut self) {
        let list = self.list;
        let mut state = poison::lock(&list.state);
        if self.writer.is_full() {
            state.rewrite();
        }
        match std::mem::replace(&mut self.result, Ok(())) {
            Ok(()) => {
                state.durable = self.end;
                list.durable.store(self.end, Ordering::Release);
            }
            Err(error) => {
                state.failures += 1;
                state.error = Some(error);
                state.rewrite();
            }
        }
        let none = SlotWriter {
            slot: None,
            stored_in: None,
            next_generation: 0,
            used_bytes: [0; 2],
        };
        state.writer = Some(std::mem::replace(&mut self.writer, none));
        list.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
