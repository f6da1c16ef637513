//! The stable list of clients: which clients may reclaim state after a restart.
//!
//! A client is in the list from its RECLAIM_COMPLETE until the server drops its state. Before that
//! operation it has no state, or only state that it has reclaimed by its entry of the run before. The
//! end of a grace period drops the entries of earlier runs. So a client cannot reclaim after two
//! restarts, or after its state was given to another client (RFC 8881 section 8.4.2.1, edge
//! conditions).
//!
//! | bytes | field |
//! |---|---|
//! | 8 | magic and version, `PMNFSCL1` |
//! | then, for each record: 2 | bytes of the payload |
//! | 4 | CRC32C of the payload, seeded with the checksum of the record before |
//! | 1 | kind: 1 started, 2 active, 3 removed, 4 grace ended |
//! | rest | 1: instance (4). 2: flavor, uid, gid (4 each), owner. 3: owner. 4: none |
//!
//! Numbers are big endian. Records are appended, and durable before the reply that follows them. The
//! seeds chain the records, so that bytes of an earlier list behind the end are no records. A crash
//! leaves at most one incomplete record at the end.

use super::ids::{Instance, Principal};
use super::limits::{CLIENTS_MAX, JOURNAL_BYTES_MAX, OWNER_BYTES_MAX};
use pagemesh_base::checksum::{crc32c, crc32c_append};
use std::collections::BTreeMap;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"PMNFSCL1";
const HEADER_BYTES: usize = 6;
const PRINCIPAL_BYTES: usize = 12;
/// Bytes of the longest record.
const RECORD_BYTES_MAX: usize = HEADER_BYTES + 1 + PRINCIPAL_BYTES + OWNER_BYTES_MAX;
/// Clients of a list: the ones of the run before, and the ones of this run.
const KNOWN_CLIENTS_MAX: usize = 2 * CLIENTS_MAX;
/// A list is written anew when its records are this many times those that count.
const GARBAGE_FACTOR: usize = 4;
/// Bytes of a list that is not worth writing anew.
const SMALL_BYTES: usize = 64 << 10;

const _: () = assert!(KNOWN_CLIENTS_MAX * RECORD_BYTES_MAX < JOURNAL_BYTES_MAX);

/// A record of the stable list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalRecord {
    /// The server starts a run with this number.
    Started(Instance),
    /// The client has completed its reclaims in this run, and may hold state from now on.
    Active {
        /// The client's owner.
        owner: Arc<[u8]>,
        /// The principal that made its record.
        principal: Principal,
    },
    /// The client holds no state any more.
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
    #[error("the list of NFS clients has an unknown format; a later release may have written it")]
    UnknownFormat,
    /// A record before the last one is damaged.
    #[error(
        "the list of NFS clients is damaged at byte {at}; remove it, and clients lose their locks"
    )]
    Damaged {
        /// The first byte of the record.
        at: usize,
    },
    /// More bytes or clients than the limits allow.
    #[error("the list of NFS clients is larger than any list that a server writes; remove it")]
    TooLarge,
}

/// The end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JournalEnd {
    /// A whole record.
    Complete,
    /// A record that was not complete at a crash. Its reply was not sent.
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
    /// The number of the next run.
    #[must_use]
    pub fn next_instance(&self) -> Instance {
        Instance(self.instance.wrapping_add(1).max(1))
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
    fn records(&self) -> impl Iterator<Item = JournalRecord> {
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

    /// The clients of a stored list. No bytes are an empty list.
    ///
    /// # Errors
    /// If the bytes are no list, or a damaged one.
    pub fn read(bytes: &[u8]) -> Result<(Self, JournalEnd), JournalError> {
        let mut known = Self::default();
        let start = &MAGIC[..bytes.len().min(MAGIC.len())];
        if bytes.len() > JOURNAL_BYTES_MAX {
            return Err(JournalError::TooLarge);
        }
        if !bytes.starts_with(start) {
            return Err(JournalError::UnknownFormat);
        }
        let Some(mut rest) = bytes.strip_prefix(MAGIC) else {
            let end = if bytes.is_empty() {
                JournalEnd::Complete
            } else {
                JournalEnd::Torn { at: 0 }
            };
            return Ok((known, end));
        };
        let mut seed = crc32c(MAGIC);
        while !rest.is_empty() {
            let at = bytes.len() - rest.len();
            let Some((record, after, checksum)) = read_record(rest, seed) else {
                if rest.len() > RECORD_BYTES_MAX {
                    return Err(JournalError::Damaged { at });
                }
                return Ok((known, JournalEnd::Torn { at }));
            };
            known.apply(&record);
            if known.len() > KNOWN_CLIENTS_MAX {
                return Err(JournalError::TooLarge);
            }
            (rest, seed) = (after, checksum);
        }
        Ok((known, JournalEnd::Complete))
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

/// Makes the bytes of a stable list.
#[derive(Debug)]
pub struct JournalWriter {
    known: KnownClients,
    seed: u32,
    bytes: usize,
    bytes_at_start: usize,
}

impl JournalWriter {
    /// A new list with these clients: the writer, and the bytes that replace the earlier list as a
    /// whole, durably, before any record is appended.
    #[must_use]
    pub fn new(known: KnownClients) -> (Self, Vec<u8>) {
        let mut bytes = MAGIC.to_vec();
        let mut seed = crc32c(MAGIC);
        for record in known.records() {
            write_record(&record, &mut seed, &mut bytes);
        }
        let writer = Self {
            known,
            seed,
            bytes: bytes.len(),
            bytes_at_start: bytes.len(),
        };
        (writer, bytes)
    }

    /// The bytes that append a record.
    pub fn append(&mut self, record: &JournalRecord) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.known.apply(record);
        write_record(record, &mut self.seed, &mut bytes);
        self.bytes += bytes.len();
        bytes
    }

    /// Whether most of the list is out of date: the caller writes a new one, of [`Self::known`].
    #[must_use]
    pub fn is_mostly_garbage(&self) -> bool {
        self.bytes > SMALL_BYTES.max(GARBAGE_FACTOR * self.bytes_at_start)
    }

    /// The clients of the list.
    #[must_use]
    pub fn known(&self) -> &KnownClients {
        &self.known
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
