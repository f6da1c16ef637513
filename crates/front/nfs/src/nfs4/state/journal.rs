//! The records of a stable list: which clients may reclaim state in a file system after a restart.
//!
//! Each file system has a list. A client is in it from its first state there that is no reclaim, or from
//! its RECLAIM_COMPLETE after reclaims there, until the server drops its state. A client that
//! reclaims is in the list by its entry of an earlier run. The end of a grace period drops the entries of
//! earlier runs. So a client cannot reclaim after two restarts, or after its state was given to another
//! client (RFC 8881 section 8.4.2.1, edge conditions).
//!
//! | bytes | field |
//! |---|---|
//! | 2 | bytes of the payload |
//! | 4 | CRC32C of the payload, seeded with the checksum of the record before |
//! | 1 | kind: 1 started, 2 active, 3 removed, 4 grace ended |
//! | rest | 1: instance (4). 2: flavor, uid, gid (4 each), owner. 3: owner. 4: none |
//!
//! Numbers are big endian. The seeds chain the records, and the first seed names the list, so that bytes
//! of an earlier list behind the end are no records. Zeros follow the last record. A crash leaves at most
//! [`GROUP_BYTES_MAX`] bytes of incomplete records at the end.

use super::ids::{Instance, Principal};
use super::limits::{CLIENTS_MAX, JOURNAL_BYTES_MAX, OWNER_BYTES_MAX};
use pagemesh_base::checksum::crc32c_append;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes of records that are written at once, before they are durable.
pub const GROUP_BYTES_MAX: usize = 16 << 10;
const HEADER_BYTES: usize = 6;
const PRINCIPAL_BYTES: usize = 12;
/// Bytes of the longest record.
pub(crate) const RECORD_BYTES_MAX: usize = HEADER_BYTES + 1 + PRINCIPAL_BYTES + OWNER_BYTES_MAX;
/// Clients of a list: the ones of the run before, and the ones of this run.
const KNOWN_CLIENTS_MAX: usize = 2 * CLIENTS_MAX;
/// A list is written anew when its records are this many times those that count.
const GARBAGE_FACTOR: usize = 4;
/// Bytes of a list that is not worth writing anew.
const SMALL_BYTES: usize = 64 << 10;

const _: () =
    assert!(KNOWN_CLIENTS_MAX * RECORD_BYTES_MAX < JOURNAL_BYTES_MAX - 2 * GROUP_BYTES_MAX);
const _: () = assert!(RECORD_BYTES_MAX <= GROUP_BYTES_MAX);

/// A record of the stable list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalRecord {
    /// The server starts a run with this number.
    Started(Instance),
    /// The client has completed its reclaims in this run, and may hold state in the file system.
    Active {
        /// The client's owner.
        owner: Arc<[u8]>,
        /// The principal that made its record.
        principal: Principal,
    },
    /// The client holds no state any more, or another client may get it.
    Removed {
        /// The client's owner.
        owner: Arc<[u8]>,
    },
    /// The grace period of the run is over: clients of earlier runs may not reclaim.
    GraceEnded,
}

impl JournalRecord {
    fn payload(&self) -> Vec<u8> {
        match self {
            Self::Started(instance) => [&[1], &instance.0.to_be_bytes()[..]].concat(),
            Self::Active { owner, principal } => {
                let Principal { flavor, uid, gid } = *principal;
                let [flavor, uid, gid] = [flavor, uid, gid].map(u32::to_be_bytes);
                [&[2][..], &flavor, &uid, &gid, owner].concat()
            }
            Self::Removed { owner } => [&[3], &owner[..]].concat(),
            Self::GraceEnded => vec![4],
        }
    }

    fn from_payload(payload: &[u8]) -> Option<Self> {
        let (kind, rest) = payload.split_first()?;
        match (kind, rest) {
            (1, rest) => {
                let instance = u32::from_be_bytes(rest.try_into().ok()?);
                Some(Self::Started(Instance(instance)))
            }
            (2, rest) => {
                let (flavor, rest) = rest.split_first_chunk()?;
                let (uid, rest) = rest.split_first_chunk()?;
                let (gid, owner) = rest.split_first_chunk()?;
                let [flavor, uid, gid] = [flavor, uid, gid].map(|it| u32::from_be_bytes(*it));
                (owner.len() <= OWNER_BYTES_MAX).then(|| Self::Active {
                    owner: owner.into(),
                    principal: Principal { flavor, uid, gid },
                })
            }
            (3, owner) => (owner.len() <= OWNER_BYTES_MAX).then(|| Self::Removed {
                owner: owner.into(),
            }),
            (4, []) => Some(Self::GraceEnded),
            _ => None,
        }
    }
}

/// The bytes cannot be used as a stable list. A server without it must not let any client reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// Another format or version.
    #[error("it has an unknown format; a later release may have written it")]
    UnknownFormat,
    /// A record before the last ones is damaged.
    #[error("it is damaged at byte {at}")]
    Damaged {
        /// The first byte of the record.
        at: usize,
    },
    /// More bytes or clients than the limits allow.
    #[error("it is larger than any list that a server writes")]
    TooLarge,
}

/// The end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalEnd {
    /// A whole record.
    Complete,
    /// Records that were not complete at a crash. No reply that depends on them was sent.
    Torn {
        /// Bytes of the whole records.
        at: usize,
    },
}

/// The clients of the stable list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownClients {
    instance: u32,
    /// The principal, and the run in which the client was active last.
    clients: BTreeMap<Arc<[u8]>, (Principal, u32)>,
}

impl KnownClients {
    /// The number of the last run; 0 without any.
    #[must_use]
    pub fn instance(&self) -> Instance {
        Instance(self.instance)
    }

    /// The clients that may reclaim after a restart.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<[u8]>, Principal)> {
        self.clients.iter().map(|(owner, (it, _))| (owner, *it))
    }

    /// The number of clients.
    #[must_use]
    pub fn len(&self) -> usize {
        self.clients.len()
    }

    /// Whether no client may reclaim.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// The effect of a record.
    pub fn apply(&mut self, record: &JournalRecord) {
        match record {
            JournalRecord::Started(instance) => self.instance = instance.0,
            JournalRecord::Active { owner, principal } => {
                self.clients
                    .insert(owner.clone(), (*principal, self.instance));
            }
            JournalRecord::Removed { owner } => {
                self.clients.remove(owner);
            }
            JournalRecord::GraceEnded => {
                let instance = self.instance;
                self.clients.retain(|_, (_, active)| *active == instance);
            }
        }
    }

    /// The records of a short list with the same clients.
    pub(crate) fn records(&self) -> impl Iterator<Item = JournalRecord> {
        let mut runs: Vec<u32> = self.clients.values().map(|(_, run)| *run).collect();
        runs.push(self.instance);
        // Runs in the order of the list: the numbers may wrap, and the last one is this run's.
        runs.sort_unstable_by_key(|run| run.wrapping_sub(self.instance.wrapping_add(1)));
        runs.dedup();
        runs.into_iter().flat_map(move |run| {
            let of_run = self.clients.iter().filter(move |(_, (_, it))| *it == run);
            let active = of_run.map(|(owner, (principal, _))| JournalRecord::Active {
                owner: owner.clone(),
                principal: *principal,
            });
            [JournalRecord::Started(Instance(run))]
                .into_iter()
                .chain(active)
        })
    }

    /// The clients of the stored records behind this seed.
    ///
    /// # Errors
    /// If records are damaged, or there are too many.
    pub fn read(bytes: &[u8], mut seed: u32) -> Result<(Self, JournalEnd), JournalError> {
        let mut known = Self::default();
        if bytes.len() > JOURNAL_BYTES_MAX {
            return Err(JournalError::TooLarge);
        }
        let mut rest = bytes;
        while let Some((record, after, checksum)) = read_record(rest, seed) {
            known.apply(&record);
            if known.len() > KNOWN_CLIENTS_MAX {
                return Err(JournalError::TooLarge);
            }
            (rest, seed) = (after, checksum);
        }
        let at = bytes.len() - rest.len();
        let behind = rest.iter().rposition(|byte| *byte != 0);
        match behind.map_or(0, |last| last + 1) {
            0 => Ok((known, JournalEnd::Complete)),
            1..=GROUP_BYTES_MAX => Ok((known, JournalEnd::Torn { at })),
            _ => Err(JournalError::Damaged { at }),
        }
    }
}

/// The first record, the bytes after it, and its checksum.
fn read_record(bytes: &[u8], seed: u32) -> Option<(JournalRecord, &[u8], u32)> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (checksum, rest) = rest.split_first_chunk()?;
    let (payload, after) = rest.split_at_checked(usize::from(u16::from_be_bytes(*len)))?;
    let expected = crc32c_append(seed, payload);
    if u32::from_be_bytes(*checksum) != expected {
        return None;
    }
    Some((JournalRecord::from_payload(payload)?, after, expected))
}

/// Makes the bytes of records, each with the checksum of the one before.
#[derive(Clone, Debug)]
pub struct RecordChain {
    seed: u32,
    bytes: usize,
    bytes_at_start: usize,
}

impl RecordChain {
    /// The records of a new list with these clients: the chain behind them, and their bytes.
    #[must_use]
    pub fn new(known: &KnownClients, mut seed: u32) -> (Self, Vec<u8>) {
        let mut bytes = Vec::new();
        for record in known.records() {
            write_record(&record, &mut seed, &mut bytes);
        }
        let chain = Self {
            seed,
            bytes: bytes.len(),
            bytes_at_start: bytes.len(),
        };
        (chain, bytes)
    }

    /// Appends the bytes of a record.
    pub fn append(&mut self, record: &JournalRecord, out: &mut Vec<u8>) {
        let before = out.len();
        write_record(record, &mut self.seed, out);
        self.bytes += out.len() - before;
    }

    /// The checksum of the last record.
    #[must_use]
    pub fn checksum(&self) -> u32 {
        self.seed
    }

    /// Bytes of all records.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether most records are out of date, so that a new list is due.
    #[must_use]
    pub fn is_mostly_garbage(&self) -> bool {
        self.bytes > SMALL_BYTES.max(GARBAGE_FACTOR * self.bytes_at_start)
    }
}

fn write_record(record: &JournalRecord, seed: &mut u32, bytes: &mut Vec<u8>) {
    let payload = record.payload();
    // The state refuses longer owners, so that each payload fits.
    let len = u16::try_from(payload.len()).unwrap_or(u16::MAX);
    *seed = crc32c_append(*seed, &payload);
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes.extend_from_slice(&seed.to_be_bytes());
    bytes.extend_from_slice(&payload);
}

#[cfg(test)]
mod tests;
