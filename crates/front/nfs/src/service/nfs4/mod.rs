//! COMPOUND of NFSv4.1 over the exports, pins and handles that NFSv3 uses, and the state machine of
//! clients.
//!
//! The operations of a request run one after the other. Each change is one transaction of the file
//! system; a request is none. The lock of the state is never held over a call of the file system.
//!
//! | module | operations |
//! |---|---|
//! | `compound` | the loop, the order of operations, the size of replies |
//! | `sessions` | EXCHANGE_ID to DESTROY_CLIENTID, SEQUENCE, RECLAIM_COMPLETE |
//! | `other_access` | the effects of opens on calls without state, and of removals on opens |
//! | `handles` | PUTFH to RESTOREFH, LOOKUP, LOOKUPP, SECINFO |
//! | `attributes`, `names`, `listing`, `data` | the file system |
//! | `lists` | the stable lists of clients |
//! | `operators` | the clients as operators see and expire them |
//! | `opens`, `locks` | OPEN, CLOSE, OPEN_DOWNGRADE; LOCK, LOCKT, LOCKU; stateids |

mod attributes;
mod compound;
mod data;
mod handles;
mod listing;
mod lists;
mod locks;
mod names;
mod opens;
mod operators;
mod other_access;
mod sessions;

use super::Failure;
use crate::export_table::{Exports, ServedExport};
use crate::nfs4::identity::{Identities, NumericIdentities};
use crate::nfs4::state::limits::LEASE;
use crate::nfs4::state::{FileKey, NfsState, RemovalReason, StateError, StateEvent, StateId};
use crate::nfs4::status::Status;
use crate::xdr::XdrError;
use compound::Compound;
use lists::ClientLists;
pub use lists::ListStatus;
pub use operators::{ExpiryProgress, Nfs4ClientStatus, Nfs4Status};
use pagemesh_base::poison;
use pagemesh_fs::{FileId, Pin};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use uuid::Uuid;

/// Runs of a server have numbers by the time of their start, in this unit: no two are equal.
const INSTANCES_PER_SECOND: i64 = 10;
const NANOSECONDS: i64 = 1_000_000_000;

/// The present time, for leases.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// Why an operation has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Status(Status),
    /// See [`NoReply::Fenced`](super::NoReply::Fenced).
    Fenced,
}

impl From<Status> for Fault {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Status(status) => Self::Status(status.into()),
            Failure::Fenced => Self::Fenced,
        }
    }
}

impl From<StateError> for Fault {
    fn from(error: StateError) -> Self {
        Self::Status(Status::from_number(error.code()).unwrap_or(Status::ServerFault))
    }
}

impl From<XdrError> for Fault {
    fn from(_: XdrError) -> Self {
        Self::Status(Status::BadXdr)
    }
}

/// The result of an operation, which has appended its fields.
type Done = Result<(), Fault>;

/// The options of NFSv4.1.
#[derive(Clone)]
pub struct Nfs4Options {
    /// The names of owners and groups.
    pub identities: Arc<dyn Identities>,
    /// The clock of leases. It never goes back.
    pub clock: Clock,
}

impl Default for Nfs4Options {
    fn default() -> Self {
        Self {
            identities: Arc::new(NumericIdentities),
            clock: Arc::new(Instant::now),
        }
    }
}

/// The state of all clients.
pub(crate) struct Nfs4 {
    inner: Mutex<LockedState>,
    lists: Arc<ClientLists>,
    identities: Arc<dyn Identities>,
    clock: Clock,
    /// The name of this server. Clients that find one name at two addresses use both for one session,
    /// so no two servers may have the same.
    server_name: String,
    summary: other_access::StateSummary,
}

/// The pin of an open file.
struct HeldPin {
    pin: Arc<Pin>,
    export: Arc<ServedExport>,
}

struct LockedState {
    state: NfsState,
    /// The files that clients have open. They keep their pages, also without a name.
    pins: HashMap<FileKey, HeldPin>,
    /// Pins that leave after the lock.
    unused: Vec<HeldPin>,
    /// The volumes by the numbers of [`FileKey`].
    volumes: Vec<Uuid>,
    lists: Arc<ClientLists>,
    /// The clients removed so far, by the reason.
    removals: [u64; RemovalReason::COUNT],
}

impl LockedState {
    /// The identity of a file for the state.
    fn key(&mut self, volume: Uuid, file: FileId) -> FileKey {
        let known = self.volumes.iter().position(|it| *it == volume);
        let number = known.unwrap_or_else(|| {
            self.volumes.push(volume);
            self.volumes.len() - 1
        });
        let export = u32::try_from(number).unwrap_or(u32::MAX);
        FileKey { export, file }
    }

    /// Handles the events of the calls so far.
    fn handle_events(&mut self) {
        for event in self.state.take_events() {
            match event {
                StateEvent::FileUnused(file) => self.unused.extend(self.pins.remove(&file)),
                StateEvent::ClientRemoved { client, reason } => {
                    self.removals[reason as usize] += 1;
                    tracing::debug!(?client, ?reason, "an NFS client is removed");
                }
                StateEvent::Journal { export, record } => self.lists.append(export, &record),
                StateEvent::GraceEnded => self.lists.end_grace(),
            }
        }
    }
}

impl Nfs4 {
    /// Reads the lists of the file systems, and begins the ones of this run. The number of the run follows from the
    /// clock of the machine and from the lists, so that ids of earlier runs are recognized.
    pub(crate) fn new(exports: &Exports, options: &Nfs4Options) -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let part = now.tv_nsec / (NANOSECONDS / INSTANCES_PER_SECOND);
        let ticks = now.tv_sec.wrapping_mul(INSTANCES_PER_SECOND) + part;
        let (lists, known) = ClientLists::open(exports, ticks as u32);
        let lists = Arc::new(lists);
        let volumes: Vec<_> = exports.file_systems().map(|fs| fs.volume).collect();
        let first = volumes.first().copied();
        let server = first.unwrap_or_else(|| Uuid::from_u128(ticks as u128));
        Self {
            inner: Mutex::new(LockedState {
                state: NfsState::new(lists.instance(), &known, (options.clock)()),
                pins: HashMap::new(),
                unused: Vec::new(),
                volumes,
                lists: Arc::clone(&lists),
                removals: [0; RemovalReason::COUNT],
            }),
            lists,
            summary: other_access::StateSummary::default(),
            identities: Arc::clone(&options.identities),
            clock: Arc::clone(&options.clock),
            server_name: format!("pagemesh {server}"),
        }
    }

    fn lease_seconds(&self) -> u32 {
        u32::try_from(LEASE.as_secs()).unwrap_or(u32::MAX)
    }

    /// Calls the state. Pins that are no longer needed go to their file systems. Workers there drop them: a drop may wait for the volume.
    fn call<T>(&self, call: impl FnOnce(&mut LockedState, Instant) -> T) -> T {
        let now = (self.clock)();
        let mut locked = poison::lock(&self.inner);
        let result = call(&mut locked, now);
        locked.handle_events();
        self.summary.update(&locked.state);
        let unused = std::mem::take(&mut locked.unused);
        drop(locked);
        for held in unused {
            held.export.add_unused_pin(held.pin);
        }
        result
    }

    /// Ends leases at their time.
    pub(crate) fn tick(&self) {
        self.call(|locked, now| locked.state.tick(now));
    }

    /// The server has stopped: stores the lists, and drops the pins of open files.
    pub(crate) fn close(&self) {
        self.lists.close();
        let pins = std::mem::take(&mut poison::lock(&self.inner).pins);
        drop(pins);
    }
}

#[cfg(test)]
mod tests;

/// The id of a state, as the state machine has it.
fn state_id(id: crate::nfs4::arguments::WireStateid) -> StateId {
    StateId {
        seqid: id.sequence,
        other: id.other,
    }
}

fn encode_state_id(id: StateId, out: &mut crate::xdr::Writer) {
    out.u32(id.seqid);
    out.fixed(&id.other);
}
