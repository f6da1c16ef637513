//! The bytes of a stable list: two slots, of which one counts. Pure.
//!
//! | bytes of a slot | field |
//! |---|---|
//! | 8 | magic and version, `PMNFSCL1` |
//! | 8 | generation |
//! | 16 | id of the volume |
//! | 8 | the number of times that the volume got an earlier content |
//! | 4 | bytes of the first records |
//! | 4 | checksum after the first records |
//! | 4 | CRC32C of the bytes before |
//! | 12 | zero |
//! | rest | records, see `nfs4::state::journal`. The first seed is the CRC32C of the first 40 bytes |
//!
//! Numbers are big endian. A slot counts if its header and its first records are whole, and its
//! generation is the higher one. A new list goes into the other slot as a whole. It is durable before it is
//! used, and before the header of the slot before is overwritten by zeros. So a crash leaves at least one
//! whole list, and later damage of the list never brings the one before back.

use crate::nfs4::state::limits::JOURNAL_BYTES_MAX;
use crate::nfs4::state::{Instance, JournalError, KnownClients, RecordChain};
use pagemesh_base::checksum::crc32c;
use uuid::Uuid;

/// Bytes of a slot. The second slot begins here.
pub(crate) const SLOT_BYTES: usize = 16 << 20;
/// Bytes before the records.
pub(crate) const HEADER_BYTES: usize = 64;
const MAGIC: &[u8; 8] = b"PMNFSCL1";
/// The part of the magic before the version.
const MAGIC_NAME_BYTES: usize = 7;
/// Bytes of the fields that the first seed depends on.
const SEEDED_BYTES: usize = 40;
const CHECKED_BYTES: usize = 48;

const _: () = assert!(JOURNAL_BYTES_MAX == SLOT_BYTES);

/// The content that a list belongs to. A list of another content is no list: clients could reclaim state
/// of that time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListIdentity {
    /// The id of the volume. A clone has another one than its origin.
    pub volume: Uuid,
    /// The number of times that the volume got an earlier content: rollbacks and promotions.
    pub content: u64,
}

/// A whole list.
#[derive(Clone, Debug)]
pub(crate) struct SlotList {
    pub(crate) generation: u64,
    pub(crate) identity: ListIdentity,
    pub(crate) known: KnownClients,
}

/// The content of a slot.
#[derive(Clone, Debug)]
enum Slot {
    Empty,
    /// An incomplete list, or no list.
    Partial {
        generation: u64,
    },
    /// Another version.
    Unknown,
    /// A list with damaged records.
    Damaged {
        generation: u64,
        error: JournalError,
    },
    Whole(SlotList),
}

/// The stored list of a file system.
#[derive(Clone, Debug)]
pub(crate) struct StoredLists {
    /// The slot that counts, and its list.
    pub(crate) current: Option<(usize, SlotList)>,
    /// The reason that there is none, if the file is not empty.
    pub(crate) error: Option<JournalError>,
    /// A higher generation than both slots have.
    pub(crate) next_generation: u64,
    /// Bytes of each slot up to the last one that is not zero.
    pub(crate) used_bytes: [usize; 2],
}

fn fields(generation: u64, identity: ListIdentity) -> [u8; SEEDED_BYTES] {
    let mut bytes = [0; SEEDED_BYTES];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&generation.to_be_bytes());
    bytes[16..32].copy_from_slice(identity.volume.as_bytes());
    bytes[32..].copy_from_slice(&identity.content.to_be_bytes());
    bytes
}

/// A new list: the bytes of its slot, and the chain behind them.
pub(crate) fn slot_bytes(
    generation: u64,
    identity: ListIdentity,
    known: &KnownClients,
) -> (Vec<u8>, RecordChain) {
    let mut bytes = fields(generation, identity).to_vec();
    let (chain, records) = RecordChain::new(known, crc32c(&bytes));
    // The limit of clients keeps records far below 4 GiB.
    let len = u32::try_from(records.len()).unwrap_or(u32::MAX);
    bytes.extend(len.to_be_bytes());
    bytes.extend(chain.checksum().to_be_bytes());
    bytes.extend(crc32c(&bytes).to_be_bytes());
    bytes.resize(HEADER_BYTES, 0);
    bytes.extend(records);
    (bytes, chain)
}

fn field<const LEN: usize>(bytes: &[u8], at: usize) -> [u8; LEN] {
    let field = bytes.get(at..).and_then(|rest| rest.first_chunk());
    field.copied().unwrap_or([0; LEN])
}

fn read_slot(bytes: &[u8]) -> Slot {
    if bytes.iter().all(|byte| *byte == 0) {
        return Slot::Empty;
    }
    let magic: [u8; 8] = field(bytes, 0);
    if magic != *MAGIC {
        return match magic.starts_with(&MAGIC[..MAGIC_NAME_BYTES]) {
            true => Slot::Unknown,
            false => Slot::Partial { generation: 0 },
        };
    }
    let Some((header, records)) = bytes.split_at_checked(HEADER_BYTES) else {
        return Slot::Partial { generation: 0 };
    };
    if u32::from_be_bytes(field(header, CHECKED_BYTES)) != crc32c(&header[..CHECKED_BYTES]) {
        return Slot::Partial { generation: 0 };
    }
    let generation = u64::from_be_bytes(field(header, 8));
    let seed = crc32c(&header[..SEEDED_BYTES]);
    let first_bytes = u32::from_be_bytes(field(header, SEEDED_BYTES)) as usize;
    let Some(first) = records.get(..first_bytes) else {
        return Slot::Partial { generation };
    };
    let wanted = u32::from_be_bytes(field(header, SEEDED_BYTES + 4));
    if !is_whole(first, seed, wanted) {
        return Slot::Partial { generation };
    }
    match KnownClients::read(records, seed) {
        Ok((known, _)) => Slot::Whole(SlotList {
            generation,
            identity: ListIdentity {
                volume: Uuid::from_bytes(field(header, 16)),
                content: u64::from_be_bytes(field(header, 32)),
            },
            known,
        }),
        Err(error) => Slot::Damaged { generation, error },
    }
}

/// Whether the first records belong to the header. The records of a list with the same clients are
/// the same bytes.
fn is_whole(first: &[u8], seed: u32, checksum: u32) -> bool {
    let Ok((known, crate::nfs4::state::JournalEnd::Complete)) = KnownClients::read(first, seed)
    else {
        return false;
    };
    let (chain, records) = RecordChain::new(&known, seed);
    chain.checksum() == checksum && records == first
}

impl StoredLists {
    /// The list in the bytes of both slots.
    pub(crate) fn read(slots: [&[u8]; 2]) -> Self {
        let used_bytes = slots.map(|bytes| {
            let last = bytes.iter().rposition(|byte| *byte != 0);
            last.map_or(0, |last| last + 1)
        });
        let mut lists = Self {
            current: None,
            error: None,
            next_generation: 1,
            used_bytes,
        };
        let mut highest = 0;
        for (number, bytes) in slots.into_iter().enumerate() {
            let (generation, outcome) = match read_slot(bytes) {
                Slot::Empty => continue,
                Slot::Partial { generation } => {
                    lists.next_generation = lists.next_generation.max(generation.saturating_add(1));
                    let is_alone = lists.current.is_none() && lists.error.is_none();
                    lists.error = is_alone
                        .then_some(JournalError::Damaged { at: 0 })
                        .or(lists.error);
                    continue;
                }
                Slot::Unknown => (u64::MAX, Err(JournalError::UnknownFormat)),
                Slot::Damaged { generation, error } => (generation, Err(error)),
                Slot::Whole(list) => (list.generation, Ok((number, list))),
            };
            if generation <= highest {
                continue;
            }
            highest = generation;
            (lists.current, lists.error) = match outcome {
                Ok(current) => (Some(current), None),
                Err(error) => (None, Some(error)),
            };
        }
        if highest != u64::MAX {
            lists.next_generation = lists.next_generation.max(highest + 1);
        }
        lists
    }

    /// The clients that may reclaim in this content.
    pub(crate) fn known(&self, identity: ListIdentity) -> KnownClients {
        match &self.current {
            Some((_, list)) if list.identity == identity => list.known.clone(),
            _ => KnownClients::default(),
        }
    }

    /// The number of the last run, also of another content.
    pub(crate) fn instance(&self) -> Option<Instance> {
        let (_, list) = self.current.as_ref()?;
        Some(list.known.instance())
    }
}
