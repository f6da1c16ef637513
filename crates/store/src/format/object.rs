//! The object table, which lists the objects of a pool.
//!
//! An entry has four lines. The owner of the pool alone writes the first two, by way of an object
//! record. The third begins with the root slot, which map records swap like any other slot. A copy of the first two
//! lines follows.
//!
//! ```text
//!  0  crc     4   CRC32C of bytes 4..128
//!  4  zero    4
//!  8  state   1   0 free, 1 live, 2 being deleted
//!  9  height  1   of the page table
//! 10  zero    1
//! 11  flags   1   bit 0: in-flight operations were too many to list
//! 12  epoch   4
//! 16  slice  16   UUID
//! 32  size    8   bytes, whole pages
//! 40  tier    1   0 automatic, 1 memory, 2 flash
//! 41  role    1   0 a slice, 1 the versions that snapshots of a slice keep, 2 a clone, 3 a clone without all of its leaves
//! 42  zero    2
//! 44  shared  4   pages born before are not changed in place: the epoch of the newest snapshot or `base`
//! 48  origin  4   with role 1: the object of the slice; with 2 and 3: the object of the origin
//! 52  zero    4
//! 56  base    4   frames born before belong to the origin; 0: none. Stays in a free entry
//! 60  cloned  4   clones may name frames born before; 0: there are none
//! 64  zero   64   for keys
//! 128 root    8   slot
//! 136 zero    8   for a second root
//! 144 copy  112   of bytes 0..112; the last 16 bytes of the first two lines are zero
//! ```

use crate::format::geometry::OBJECT_BYTES;
use crate::format::table::reach;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, ObjectId};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Media, UnfencedStores};
use uuid::Uuid;

/// The word of the entry that every operation checks: state, height, flags and epoch.
pub(crate) const GATE_AT: usize = 8;
pub(crate) const SLICE_AT: usize = 16;
pub(crate) const SIZE_AT: usize = 32;
pub(crate) const TIER_AT: usize = 40;
const ROLE_AT: usize = 41;
/// The word that has the epoch of the newest snapshot in its upper half.
pub(crate) const SHARED_WORD_AT: usize = 40;
const SHARED_AT: usize = 44;
const ORIGIN_AT: usize = 48;
/// The word with `base` in its lower half and `cloned` in its upper one.
pub(crate) const CLONE_WORD_AT: usize = 56;
const BASE_AT: usize = 56;
const CLONED_AT: usize = 60;
pub(crate) const ROOT_AT: usize = HEAD_BYTES;
/// The bytes that one checksum covers, itself included.
const HEAD_BYTES: usize = 2 * LINE_BYTES;
/// The copy of the head, without its trailing zeroes.
pub(crate) const COPY_AT: usize = 144;
pub(crate) const COPY_BYTES: usize = 112;
const _: () = assert!(COPY_AT + COPY_BYTES == OBJECT_BYTES as usize);
/// Every table is as high as the largest: the upper nodes stay in the processor cache, and growth
/// needs no new root.
pub const HEIGHT: u8 = 4;

/// The state of an object, which decides the operations that it admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectState {
    /// No object.
    Free,
    /// Admits reads and writes.
    Live,
    /// Refuses every operation; its frames are being freed.
    Deleting,
}

/// Where the pages of an object lie in a pool with flash behind memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TierPolicy {
    /// Cold pages are demoted, and pages in use are promoted.
    #[default]
    Automatic,
    /// Pages are promoted on their first use, and demoted only if nothing else can be.
    Memory,
    /// Pages are demoted first, and are promoted by nothing but a write.
    Flash,
}

impl TierPolicy {
    pub(crate) fn decode(byte: u8) -> Result<TierPolicy, DamagedObject> {
        match byte {
            0 => Ok(TierPolicy::Automatic),
            1 => Ok(TierPolicy::Memory),
            2 => Ok(TierPolicy::Flash),
            _ => Err(DamagedObject),
        }
    }
}

/// The content of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectRole {
    /// The pages of a slice.
    #[default]
    Slice,
    /// The versions that snapshots of the slice in this object keep. No client attaches it.
    VersionsOf(ObjectId),
    /// The pages of a slice that was cloned from a snapshot of the slice in this object.
    CloneOf(ObjectId),
    /// The same while leaves are missing. No client attaches it.
    UnfilledCloneOf(ObjectId),
}

impl ObjectRole {
    fn encode(self) -> (u8, u32) {
        match self {
            ObjectRole::Slice => (0, 0),
            ObjectRole::VersionsOf(origin) => (1, origin.0),
            ObjectRole::CloneOf(origin) => (2, origin.0),
            ObjectRole::UnfilledCloneOf(origin) => (3, origin.0),
        }
    }

    /// The object with the origin of a clone.
    pub(crate) fn origin(self) -> Option<ObjectId> {
        match self {
            ObjectRole::CloneOf(origin) | ObjectRole::UnfilledCloneOf(origin) => Some(origin),
            ObjectRole::Slice | ObjectRole::VersionsOf(_) => None,
        }
    }

    fn decode(role: u8, origin: u32) -> Result<ObjectRole, DamagedObject> {
        match (role, origin) {
            (0, 0) => Ok(ObjectRole::Slice),
            (1, origin) => Ok(ObjectRole::VersionsOf(ObjectId(origin))),
            (2, origin) => Ok(ObjectRole::CloneOf(ObjectId(origin))),
            (3, origin) => Ok(ObjectRole::UnfilledCloneOf(ObjectId(origin))),
            _ => Err(DamagedObject),
        }
    }
}

/// An entry of the object table, without its root slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Object {
    /// The state.
    pub state: ObjectState,
    /// The in-flight operations were too many to list.
    pub needs_compare: bool,
    /// The epoch, as a fencing number.
    pub epoch: Epoch,
    /// The identity.
    pub slice: SliceId,
    /// The size, whole pages.
    pub size_bytes: u64,
    /// Where its pages lie.
    pub tier: TierPolicy,
    /// Its content.
    pub role: ObjectRole,
    /// A page of an earlier birth is not changed in place: a snapshot may see it, or its frame is the origin's.
    pub shared_below: Epoch,
    /// The epoch of the snapshot that it was cloned from; 0: it is no clone. A frame of an earlier birth belongs to the
    /// origin, and is not freed.
    pub base: Epoch,
    /// Clones may name frames of an earlier birth, so these pages do not move; 0: it has no clones.
    pub cloned_below: Epoch,
}

/// The births that tell which frames of an object other objects share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CloneBounds {
    pub(crate) base: Epoch,
    pub(crate) cloned_below: Epoch,
}

impl CloneBounds {
    /// Decodes [`CLONE_WORD_AT`].
    pub(crate) fn of_word(word: u64) -> CloneBounds {
        CloneBounds {
            base: Epoch(word as u32),
            cloned_below: Epoch((word >> 32) as u32),
        }
    }

    /// The bounds of both.
    pub(crate) fn or(self, other: CloneBounds) -> CloneBounds {
        CloneBounds {
            base: self.base.max(other.base),
            cloned_below: self.cloned_below.max(other.cloned_below),
        }
    }

    /// Whether another object shares a frame with this birth, so that its page stays there. An unknown birth is 0.
    pub(crate) fn is_shared(self, birth: Epoch) -> bool {
        birth < self.base || birth < self.cloned_below
    }

    /// Whether a record that replaces a frame with this birth leaves it in use. A frame of an origin is replaced only by a
    /// record that keeps the birth, if no snapshot keeps it.
    pub(crate) fn keeps_frame(self, birth: Epoch, record_keeps_birth: bool) -> bool {
        birth < self.base || (record_keeps_birth && birth < self.cloned_below)
    }
}

/// An entry with a wrong checksum or a field out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its checksum does not match or a field is out of range")]
pub struct DamagedObject;

/// The gate word, as every operation checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gate(pub u64);

impl Gate {
    pub(crate) fn is_live(self) -> bool {
        self.0 as u8 == 1
    }

    pub(crate) fn epoch(self) -> Epoch {
        Epoch((self.0 >> 32) as u32)
    }
}

impl Object {
    /// No object.
    pub const FREE: Object = Object {
        state: ObjectState::Free,
        needs_compare: false,
        epoch: Epoch(0),
        slice: SliceId(Uuid::nil()),
        size_bytes: 0,
        tier: TierPolicy::Automatic,
        role: ObjectRole::Slice,
        shared_below: Epoch(0),
        base: Epoch(0),
        cloned_below: Epoch(0),
    };

    /// The epoch of its own newest snapshot; 0: it has none. All of them are later than `base`.
    pub(crate) fn newest_snapshot(&self) -> Epoch {
        match self.shared_below > self.base {
            true => self.shared_below,
            false => Epoch(0),
        }
    }

    /// The births that decide about the frames of its pages.
    pub(crate) fn clone_bounds(&self) -> CloneBounds {
        CloneBounds {
            base: self.base,
            cloned_below: self.cloned_below,
        }
    }

    /// The entry as it lies on media, with an empty root slot.
    #[must_use]
    pub fn encode(&self) -> [u8; OBJECT_BYTES as usize] {
        let mut entry = [0; OBJECT_BYTES as usize];
        let state = match self.state {
            ObjectState::Free => 0,
            ObjectState::Live => 1,
            ObjectState::Deleting => 2,
        };
        put(
            &mut entry,
            GATE_AT,
            [state, HEIGHT, 0, u8::from(self.needs_compare)],
        );
        put(&mut entry, 12, self.epoch.0.to_le_bytes());
        put(&mut entry, SLICE_AT, *self.slice.0.as_bytes());
        put(&mut entry, SIZE_AT, self.size_bytes.to_le_bytes());
        let (role, origin) = self.role.encode();
        put(&mut entry, TIER_AT, [self.tier as u8]);
        put(&mut entry, ROLE_AT, [role]);
        put(&mut entry, SHARED_AT, self.shared_below.0.to_le_bytes());
        put(&mut entry, ORIGIN_AT, origin.to_le_bytes());
        put(&mut entry, BASE_AT, self.base.0.to_le_bytes());
        put(&mut entry, CLONED_AT, self.cloned_below.0.to_le_bytes());
        let crc = crc32c(&entry[4..HEAD_BYTES]);
        put(&mut entry, 0, crc.to_le_bytes());
        entry.copy_within(..COPY_BYTES, COPY_AT);
        entry
    }

    /// Decodes an entry. The flag says whether line and copy are both sound and agree. The line
    /// counts if its checksum is right, then the copy, then the line or copy with one flipped bit
    /// corrected. An entry that was ever used is not all zeroes.
    ///
    /// # Errors
    /// When neither can be decoded or corrected.
    pub(crate) fn decode_redundant(
        entry: &[u8; OBJECT_BYTES as usize],
    ) -> Result<(Object, bool), DamagedObject> {
        let mut other = [0; OBJECT_BYTES as usize];
        other[..COPY_BYTES].copy_from_slice(&entry[COPY_AT..COPY_AT + COPY_BYTES]);
        let is_blank = |line: &[u8; OBJECT_BYTES as usize]| line[..HEAD_BYTES] == [0; HEAD_BYTES];
        if is_blank(entry) && is_blank(&other) {
            return Ok((Object::FREE, true));
        }
        let used = |line: &[u8; OBJECT_BYTES as usize]| match is_blank(line) {
            true => Err(DamagedObject),
            false => Object::decode(line),
        };
        match (used(entry), used(&other)) {
            (Ok(line), copy) => Ok((line, copy == Ok(line))),
            (Err(_), Ok(copy)) => Ok((copy, false)),
            (Err(damaged), Err(_)) => Object::correct(entry)
                .or_else(|| Object::correct(&other))
                .map(|object| (object, false))
                .ok_or(damaged),
        }
    }

    /// The slice that a damaged entry names; the name may be damaged too.
    pub(crate) fn claimed_slice(entry: &[u8; OBJECT_BYTES as usize]) -> SliceId {
        SliceId(Uuid::from_bytes(field(entry, SLICE_AT)))
    }

    /// The entry before the damage, if one bit of its head was flipped.
    fn correct(entry: &[u8; OBJECT_BYTES as usize]) -> Option<Object> {
        (0..HEAD_BYTES * 8).find_map(|bit| {
            let mut entry = *entry;
            entry[bit / 8] ^= 1 << (bit % 8);
            match entry[..HEAD_BYTES] == [0; HEAD_BYTES] {
                true => None,
                false => Object::decode(&entry).ok(),
            }
        })
    }

    /// Decodes an entry from media. An entry of zeroes was never used.
    ///
    /// # Errors
    /// When it is damaged.
    pub fn decode(entry: &[u8; OBJECT_BYTES as usize]) -> Result<Object, DamagedObject> {
        if entry[..HEAD_BYTES].iter().all(|&byte| byte == 0) {
            return Ok(Object::FREE);
        }
        let [state, height, reserved, flags] = field(entry, GATE_AT);
        let size_bytes = get_u64(entry, SIZE_AT);
        let state = match state {
            0 => ObjectState::Free,
            1 => ObjectState::Live,
            2 => ObjectState::Deleting,
            _ => return Err(DamagedObject),
        };
        let sound = crc32c(&entry[4..HEAD_BYTES]) == get_u32(entry, 0)
            && height == HEIGHT
            && reserved == 0
            && flags <= 1
            && size_bytes.is_multiple_of(PAGE_BYTES as u64)
            && size_bytes / PAGE_BYTES as u64 <= reach(HEIGHT);
        if !sound {
            return Err(DamagedObject);
        }
        Ok(Object {
            state,
            needs_compare: flags == 1,
            epoch: Epoch(get_u32(entry, 12)),
            slice: SliceId(Uuid::from_bytes(field(entry, SLICE_AT))),
            size_bytes,
            tier: TierPolicy::decode(entry[TIER_AT])?,
            role: ObjectRole::decode(entry[ROLE_AT], get_u32(entry, ORIGIN_AT))?,
            shared_below: Epoch(get_u32(entry, SHARED_AT)),
            base: Epoch(get_u32(entry, BASE_AT)),
            cloned_below: Epoch(get_u32(entry, CLONED_AT)),
        })
    }
}

/// Stores the head of an entry and its copy, the gate last, and flushes both. The root slot
/// stays.
pub(crate) fn store_entry<M: Media>(
    media: &M,
    at: usize,
    entry: &[u8; OBJECT_BYTES as usize],
) -> UnfencedStores {
    let words = &entry.as_chunks::<8>().0[..ROOT_AT / 8];
    for (i, word) in words.iter().enumerate().take(COPY_BYTES / 8) {
        media.store(at + COPY_AT + i * 8, u64::from_le_bytes(*word));
    }
    for (i, word) in words.iter().enumerate().skip(2) {
        media.store(at + i * 8, u64::from_le_bytes(*word));
    }
    media.store(at, u64::from_le_bytes(words[0]));
    media.store(at + 8, u64::from_le_bytes(words[1]));
    media.flush(at, OBJECT_BYTES as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_round_trips_and_every_flipped_bit_is_found() {
        let object = Object {
            state: ObjectState::Live,
            needs_compare: true,
            epoch: Epoch(7),
            slice: SliceId(Uuid::from_u128(9)),
            size_bytes: 1 << 30,
            tier: TierPolicy::Flash,
            role: ObjectRole::CloneOf(ObjectId(3)),
            shared_below: Epoch(5),
            base: Epoch(4),
            cloned_below: Epoch(6),
        };
        let entry = object.encode();
        assert_eq!(Object::decode(&entry), Ok(object));
        let gate = Gate(get_u64(&entry, GATE_AT));
        assert_eq!((gate.is_live(), gate.epoch()), (true, Epoch(7)));
        for bit in 0..HEAD_BYTES * 8 {
            let mut damaged = entry;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Object::decode(&damaged).is_err(), "bit {bit}");
        }
        assert_eq!(
            Object::decode(&[0; OBJECT_BYTES as usize]),
            Ok(Object::FREE)
        );
    }

    #[test]
    fn object_entry_survives_loss_of_line_or_copy() {
        let object = Object {
            state: ObjectState::Live,
            slice: SliceId(Uuid::from_u128(9)),
            size_bytes: 1 << 30,
            ..Object::FREE
        };
        let sound = object.encode();
        assert_eq!(Object::decode_redundant(&sound), Ok((object, true)));
        for junk in [0, 0xff, 0x5a] {
            let mut damaged = sound;
            damaged[..HEAD_BYTES].fill(junk);
            assert_eq!(Object::decode_redundant(&damaged), Ok((object, false)));
            damaged[HEAD_BYTES..].fill(junk);
            let lost = Object::decode_redundant(&damaged);
            assert_eq!(lost.is_ok(), junk == 0, "{lost:?}");
            let mut damaged = sound;
            damaged[HEAD_BYTES..].fill(junk);
            assert_eq!(Object::decode_redundant(&damaged), Ok((object, false)));
            damaged[20] ^= 4;
            assert_eq!(Object::decode_redundant(&damaged), Ok((object, false)));
            damaged[20] ^= 3;
            assert_eq!(Object::decode_redundant(&damaged), Err(DamagedObject));
        }
        assert_eq!(
            Object::decode_redundant(&[0; OBJECT_BYTES as usize]),
            Ok((Object::FREE, true))
        );
    }
}
