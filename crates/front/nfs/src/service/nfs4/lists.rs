//! The stable lists of clients, one for each file system that clients may change.
//!
//! A stalled or fenced file system holds up its own list only: no reply about another file system waits for it.

use super::compound::Compound;
use super::{Done, Nfs4};
use crate::client_list::{ClientList, StoredList};
use crate::export_table::{Exports, ServedFs};
use crate::nfs4::state::limits::{GRACE, GRACE_MAX};
use crate::nfs4::state::{Instance, JournalRecord, KnownClients};
use crate::service::Target;
use pagemesh_base::poison;
use pagemesh_fs::FsError;
use std::sync::{Arc, Mutex, OnceLock};
use uuid::Uuid;

/// Lists that are read at once at the start. A server has few file systems; each list takes up to 32 MiB while it is read.
const LIST_READERS_MAX: usize = 16;

/// The stable list of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListStatus {
    /// The name of the file system.
    pub file_system: String,
    /// Clients that may reclaim after a restart.
    pub clients: usize,
    /// Records of this run.
    pub records: u64,
    /// Records that are not durable yet.
    pub unwritten: u64,
}

/// See the module. The index of a list is the number of its file system.
pub(super) struct ClientLists {
    instance: Instance,
    lists: Box<[FsList]>,
}

struct FsList {
    fs: Arc<ServedFs>,
    /// None while no client may change files, and for a file system without a place for it.
    list: OnceLock<ClientList>,
    /// Locked while a list is opened late: others wait for it.
    opening: Mutex<()>,
}

fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

impl ClientLists {
    /// Reads the lists of the file systems that clients may change, and begins new ones. Returns the clients
    /// that may reclaim, by the numbers of the file systems. `clock` is a number of this run by the clock.
    pub(super) fn open(exports: &Exports, clock: u32) -> (Self, Vec<(u32, KnownClients)>) {
        let stored = read_lists(exports);
        let earlier = stored.iter().flatten().filter_map(StoredList::instance);
        let instance = Instance::next(clock, earlier);
        let known = stored.iter().enumerate();
        let known: Vec<_> = known
            .filter_map(|(index, list)| Some((number(index), list.as_ref()?.known())))
            .collect();
        let lists = exports.file_systems().zip(stored).map(|(fs, stored)| {
            let list = OnceLock::new();
            if let Some(stored) = stored {
                list.get_or_init(|| stored.begin(instance));
            }
            let fs = Arc::clone(fs);
            let opening = Mutex::default();
            FsList { fs, list, opening }
        });
        let lists = lists.collect();
        log_grace(&known);
        (Self { instance, lists }, known)
    }

    pub(super) fn instance(&self) -> Instance {
        self.instance
    }

    fn get(&self, number: u32) -> Option<&ClientList> {
        self.lists.get(number as usize)?.list.get()
    }

    pub(super) fn append(&self, number: u32, record: &JournalRecord) {
        if let Some(list) = self.get(number) {
            list.append(record);
        }
    }

    pub(super) fn end_grace(&self) {
        tracing::info!(
            "the grace period is over: clients of earlier runs may not reclaim any more"
        );
        for list in self.lists.iter().filter_map(|it| it.list.get()) {
            list.append(&JournalRecord::GraceEnded);
        }
    }

    fn of_volume(&self, volume: Uuid) -> Option<(u32, &FsList)> {
        let mut lists = self.lists.iter().enumerate();
        let (index, list) = lists.find(|(_, it)| it.fs.volume == volume)?;
        Some((number(index), list))
    }

    /// Opens the list of a file system that clients may change since a reload of the exports. It has no clients
    /// that may reclaim: until now no client could change the files. Returns its number.
    fn open_late(&self, volume: Uuid) -> Option<u32> {
        let (number, of_fs) = self.of_volume(volume)?;
        if of_fs.list.get().is_some() {
            return None;
        }
        let _alone = poison::lock(&of_fs.opening);
        let (identity, store) = of_fs.fs.take_list_source()?;
        let stored = StoredList::read(&of_fs.fs.name, identity, store);
        of_fs.list.get_or_init(|| {
            let list = stored.begin(self.instance);
            list.append(&JournalRecord::GraceEnded);
            list
        });
        Some(number)
    }

    pub(super) fn wait(&self, volume: Uuid) -> Result<(), FsError> {
        match self.of_volume(volume).and_then(|(_, it)| it.list.get()) {
            Some(list) => list.wait(),
            None => Ok(()),
        }
    }

    /// Whether all records so far for a file system are durable.
    pub(super) fn is_durable(&self, number: u32) -> bool {
        self.get(number).is_none_or(ClientList::is_durable)
    }

    /// The server has stopped: stores the records that no reply has waited for.
    pub(super) fn close(&self) {
        for of_fs in &self.lists {
            if let Some(list) = of_fs.list.get()
                && !of_fs.fs.is_fenced()
                && let Err(error) = list.wait()
            {
                let file_system = of_fs.fs.name.as_str();
                tracing::warn!(file_system, %error, "the end of the list of NFS clients is not stored");
            }
        }
    }

    /// The name of a file system.
    pub(super) fn name(&self, number: u32) -> Option<&str> {
        self.lists
            .get(number as usize)
            .map(|it| it.fs.name.as_str())
    }

    /// Whether all records so far for these file systems are durable, but for fenced ones: their next owner writes the lists.
    pub(super) fn are_durable(&self, file_systems: &[u32]) -> bool {
        let lists = file_systems.iter();
        let mut lists = lists.filter_map(|it| self.lists.get(*it as usize));
        lists.all(|of_fs| {
            let list = of_fs.list.get();
            of_fs.fs.is_fenced() || list.is_none_or(ClientList::is_durable)
        })
    }

    pub(super) fn status(&self) -> Vec<ListStatus> {
        let lists = self.lists.iter();
        let opened = lists.filter_map(|it| Some((&it.fs.name, it.list.get()?)));
        let status = opened.map(|(name, list)| {
            let (records, unwritten) = list.records();
            ListStatus {
                file_system: name.clone(),
                clients: list.clients(),
                records,
                unwritten,
            }
        });
        status.collect()
    }
}

/// Reads the lists of the file systems that clients may change. Several are read at once: file systems that do not answer cost one
/// wait together, and not one wait each.
fn read_lists(exports: &Exports) -> Vec<Option<StoredList>> {
    let table = exports.table();
    let writable = exports.file_systems().enumerate();
    let writable: Vec<_> = writable
        .filter(|(_, fs)| table.is_writable(fs.volume))
        .collect();
    let readers = writable.len().min(LIST_READERS_MAX);
    let (unread, read) = (Mutex::new(writable.into_iter()), Mutex::new(Vec::new()));
    let read_some = || {
        loop {
            let next = poison::lock(&unread).next();
            let Some((index, fs)) = next else { break };
            if let Some((identity, store)) = fs.take_list_source() {
                let list = StoredList::read(&fs.name, identity, store);
                poison::lock(&read).push((index, list));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..readers {
            let thread = std::thread::Builder::new().name("nfs lists".into());
            // Without a thread the others read its lists.
            let _ = thread.spawn_scoped(scope, read_some);
        }
        read_some();
    });
    let mut stored: Vec<_> = exports.file_systems().map(|_| None).collect();
    for (index, list) in poison::recover(read.into_inner()) {
        stored[index] = Some(list);
    }
    stored
}

fn log_grace(known: &[(u32, KnownClients)]) {
    let owners = known.iter().flat_map(|(_, it)| it.iter());
    let mut owners: Vec<_> = owners.map(|(owner, _)| owner).collect();
    owners.sort_unstable();
    owners.dedup();
    if !owners.is_empty() {
        tracing::info!(
            clients = owners.len(),
            seconds = GRACE.as_secs(),
            seconds_max = GRACE_MAX.as_secs(),
            "grace period: these clients may reclaim their state, and no other client gets state until they have, or until the time is over"
        );
    }
}

impl Nfs4 {
    /// Whether the list of a file system has records that no reply waits for.
    pub(crate) fn has_unwritten_records(&self, file_system: usize) -> bool {
        let list = self.lists.get(number(file_system));
        list.is_some_and(|it| !it.is_durable())
    }

    /// Writes records that no reply waits for. It may wait for the volume.
    pub(crate) fn write_records(&self, file_system: usize) {
        if let Some(list) = self.lists.get(number(file_system))
            && let Err(error) = list.write_if_idle()
        {
            tracing::debug!(file_system, %error, "the list of NFS clients cannot be written now");
        }
    }

    /// Opens the list of a file system if clients may change files since a reload of the exports.
    fn open_late_list(&self, volume: Uuid) {
        if let Some(number) = self.lists.open_late(volume) {
            self.call(|locked, _| locked.state.list_again(number));
        }
    }
}

impl Compound<'_> {
    /// Waits until the records for the file system are durable, before a reply that grants state there.
    pub(super) fn store_list(&self, target: &Target<'_>) -> Done {
        match self.service.nfs4.lists.wait(target.export.volume) {
            // A damaged file system takes no change, so no client has anything to reclaim there, and its files stay readable.
            Err(FsError::ReadOnly(_)) => Ok(()),
            stored => Ok(stored.map_err(|error| self.service.report(&target.export, &error))?),
        }
    }

    /// The list of the file system exists if the client may change files.
    pub(super) fn prepare_list(&self, target: &Target<'_>) {
        if !target.options.is_read_only {
            self.service.nfs4.open_late_list(target.export.volume);
        }
    }

    /// Whether the records for file systems are durable, as far as their lists can be written. It does not wait. A client that is not in a
    /// list can reclaim nothing there after a crash, which does not stop its other file systems.
    pub(super) fn are_listed(&self, file_systems: &[u32]) -> bool {
        let nfs4 = &self.service.nfs4;
        let mut lists = file_systems
            .iter()
            .filter_map(|it| nfs4.lists.lists.get(*it as usize));
        lists.all(|of_fs| {
            let list = of_fs.list.get();
            of_fs.fs.is_fenced() || list.is_none_or(|it| it.is_durable() || it.is_failing())
        })
    }
}
