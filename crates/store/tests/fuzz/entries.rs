//! Single structures of the medium: a decoded value encodes to the bytes that the encoder writes.

use super::target;
use pagemesh_base::checksum::{PageChecksums, crc32c, crc32c_append};
use pagemesh_base::ids::{Epoch, FrameNo, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_fuzz::{Random, measure_allocation};
use pagemesh_pmem::{Durability, StatedClass};
use pagemesh_store::device_paths::DevicePaths;
use pagemesh_store::devices::DeviceKind;
use pagemesh_store::geometry::{Geometry, JOURNALS_MAX, OBJECT_BYTES};
use pagemesh_store::object::{Object, ObjectRole, ObjectState, TierPolicy};
use pagemesh_store::record::{
    Change, GroupPosition, JournalEntry, ObjectRecord, PAGES_MAX, Patch, Record, RecordAddress,
    add_checksum, encode_pad, is_pad,
};
use pagemesh_store::slot::Slot;
use pagemesh_store::superblock::{BadSuperblock, BitmapEnds, Features, Superblock};
use pagemesh_store::version_log::VersionLogPlace;
use std::mem::discriminant;
use uuid::Uuid;

/// Bytes that reading one structure may allocate: the changes of the longest record while their
/// vector grows, or the heads of all journals.
const ALLOCATED_MAX: u64 = 3 * (PAGES_MAX * size_of::<Change>()) as u64;
const _: () = assert!(JOURNALS_MAX as u64 * 8 <= ALLOCATED_MAX);

fn superblock(pool_bytes: u64, devices: u8, stated: Option<StatedClass>) -> Vec<u8> {
    let mut geometry = Geometry::plan(pool_bytes).expect("a plan");
    for device in 0..devices {
        let id = Uuid::from_u128(device.into());
        let kind = DeviceKind::Flash;
        geometry.add_device(id, 4 << 20, kind).expect("a device");
    }
    let block = Superblock {
        pool: Uuid::from_u128(5),
        generation: 7,
        incarnation: Incarnation(2),
        epoch: Epoch(1),
        checkpoint: Seq(70),
        used_frames: 0,
        bitmap_ends: BitmapEnds::of_new(&geometry),
        objects_end: 1,
        journals_end: 2,
        stated,
        boot: stated.map(|_| Uuid::from_u128(8)),
        features: Features::NEW,
        device_paths: DevicePaths::default(),
        version_log: VersionLogPlace::default(),
        geometry,
        journal_heads: (0..u64::from(geometry.journals)).collect(),
    };
    block.encode().to_vec()
}

pub(super) fn reseal_superblock(page: &mut [u8; PAGE_BYTES]) {
    let crc = crc32c_append(crc32c_append(0, &page[..12]), &page[16..]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn fuzz_superblock() {
    let stated = StatedClass {
        class: Durability::Process,
        is_trusted: true,
    };
    target("superblock")
        .seeds([
            superblock(2 << 20, 2, None),
            superblock(1 << 30, 0, Some(stated)),
            superblock(64 << 40, 0, None),
        ])
        .cases(20_000)
        .bytes_max(PAGE_BYTES)
        .fixup(|bytes, _| {
            let mut page = [0; PAGE_BYTES];
            page[..bytes.len()].copy_from_slice(bytes);
            reseal_superblock(&mut page);
            if let (Some(crc), Some(right)) = (bytes.get_mut(12..16), page.get(12..16)) {
                crc.copy_from_slice(right);
            }
        })
        .run(|bytes| {
            let mut page = [0; PAGE_BYTES];
            page[..bytes.len()].copy_from_slice(bytes);
            let (decoded, took) = measure_allocation(|| Superblock::decode(&page));
            assert!(took <= ALLOCATED_MAX, "{took} bytes");
            let block = match decoded {
                Ok(block) => block,
                Err(cause) => return Err(discriminant(&cause)),
            };
            let geometry = block.geometry;
            assert!(geometry.in_flight.end() <= geometry.frames.start);
            assert!(geometry.frames.start < geometry.pool_bytes);
            let ranges: Vec<_> = geometry.frame_numbers().ranges().collect();
            for frame in ranges.iter().flat_map(|it| [it.start, it.end - 1]) {
                assert!(geometry.frame_entry_at(FrameNo(frame)) < geometry.end_bytes() as usize);
            }
            assert!(block.objects_end <= geometry.object_count());
            assert_eq!(block.journal_heads.len(), block.geometry.journals as usize);
            assert_eq!(Superblock::decode(&block.encode()), Ok(block.clone()));
            // Next to a copy of another pool the block is refused, whichever copy is newer.
            let mut other = block.clone();
            other.pool = Uuid::from_u128(!block.pool.as_u128());
            let chosen = Superblock::choose([&page, &other.encode()]);
            assert!(matches!(chosen, Err(BadSuperblock::Inconsistent(_))));
            Ok((block.stated.is_some(), block.boot.is_some()))
        });
}

fn place() -> RecordAddress {
    RecordAddress::new(Uuid::from_u128(3), Incarnation(4), 5, 1000)
}

fn flat(lines: &[[u8; LINE_BYTES]]) -> Vec<u8> {
    lines.as_flattened().to_vec()
}

fn map(pages: usize, level: u8) -> Vec<u8> {
    let change = |index: usize| {
        let old = Slot::EMPTY.map(FrameNo(100 + index as u64));
        Change {
            old,
            new: old.map(FrameNo(900 + index as u64)),
            sums: PageChecksums {
                crc: index as u32,
                words: 0x0101 * index as u16,
            },
        }
    };
    let record = Record {
        seq: Seq(77),
        object: ObjectId(1),
        epoch: Epoch(2),
        level,
        page: PageNo(512),
        op: 9,
        open: 1,
        group_position: GroupPosition::default(),
        kept_birth: None,
        is_adoption: level == 0 && pages == 3,
        has_second_sum: pages > 4,
        changes: (0..pages).map(change).collect(),
        patch: Patch::default(),
    };
    let mut lines = Vec::new();
    JournalEntry::Map(record).encode(&place(), &mut lines);
    flat(&lines)
}

/// A record of a part of a page.
fn patch(within: usize, len: usize) -> Vec<u8> {
    let mut record = Record::empty();
    let alone = map(1, 0);
    let (lines, _) = alone.as_chunks();
    record.decode_from(lines, &place()).expect("a record");
    record.changes[0].new = record.changes[0].old.map(FrameNo(100));
    record.patch = Patch {
        within,
        len,
        bytes: (1..=len).map(|at| at as u8).collect(),
    };
    let mut lines = Vec::new();
    JournalEntry::Map(record).encode(&place(), &mut lines);
    flat(&lines)
}

/// The second of three records of a group.
fn group() -> Vec<u8> {
    let mut record = Record::empty();
    let alone = map(4, 0);
    let (lines, _) = alone.as_chunks();
    record.decode_from(lines, &place()).expect("a record");
    record.group_position = GroupPosition {
        lines_before: 3,
        is_continued: true,
    };
    let mut lines = Vec::new();
    JournalEntry::Map(record).encode(&place(), &mut lines);
    flat(&lines)
}

fn object(state: ObjectState) -> [u8; OBJECT_BYTES as usize] {
    let object = Object {
        state,
        needs_compare: true,
        epoch: Epoch(7),
        slice: SliceId(Uuid::from_u128(9)),
        size_bytes: 1 << 30,
        tier: TierPolicy::Memory,
        role: ObjectRole::VersionsOf(ObjectId(4)),
        shared_below: Epoch(3),
        base: Epoch(2),
        cloned_below: Epoch(1),
    };
    object.encode()
}

fn reseal_record(bytes: &mut [u8], _: &mut Random) {
    let (lines, _) = bytes.as_chunks_mut::<LINE_BYTES>();
    if let Some(first) = lines.first() {
        let claimed = pagemesh_store::record::claimed_lines(first).min(lines.len());
        add_checksum(&mut lines[..claimed], &place());
    }
}

#[test]
fn fuzz_record() {
    let mut lines = Vec::new();
    JournalEntry::Object(ObjectRecord {
        seq: Seq(78),
        object: ObjectId(1),
        entry: Box::new(object(ObjectState::Live)),
    })
    .encode(&place(), &mut lines);
    target("record")
        .seeds([
            map(1, 0),
            map(3, 0),
            map(1, 4),
            map(4, 0),
            map(20, 1),
            group(),
            patch(4000, 96),
            patch(8, 200),
            flat(&lines),
            encode_pad(&place()).to_vec(),
        ])
        .cases(30_000)
        .bytes_max(1024)
        .fixup(reseal_record)
        .run(|bytes| {
            let (journal, _) = bytes.as_chunks::<LINE_BYTES>();
            let pad = journal.first().is_some_and(|line| is_pad(line, &place()));
            let (decoded, took) = measure_allocation(|| JournalEntry::decode(journal, &place()));
            assert!(took <= ALLOCATED_MAX, "{took} bytes");
            let entry = match decoded {
                Ok(entry) => entry,
                Err(cause) => return Err((pad, discriminant(&cause))),
            };
            assert!(!pad, "both a pad and a record");
            assert!(entry.lines() <= journal.len());
            assert!(
                JournalEntry::decode(journal, &place().at(1001)).is_err(),
                "elsewhere"
            );
            let mut again = Vec::new();
            entry.encode(&place(), &mut again);
            assert_eq!(again.len(), entry.lines());
            assert_eq!(JournalEntry::decode(&again, &place()), Ok(entry.clone()));
            Ok(match entry {
                JournalEntry::Map(record) if record.is_patch() => (8, record.lines().min(4)),
                JournalEntry::Map(record) => (record.level, record.changes.len().min(5)),
                JournalEntry::Object(_) => (9, 0),
            })
        });
}

#[test]
fn fuzz_object() {
    let (states, root) = (
        [ObjectState::Free, ObjectState::Live, ObjectState::Deleting],
        64,
    );
    target("object")
        .seeds(states.map(|state| object(state)[..root].to_vec()))
        .cases(20_000)
        .bytes_max(root)
        .fixup(|bytes, _| {
            let crc = bytes.get(4..).map(|covered| crc32c(covered).to_le_bytes());
            if let (Some(crc), Some(stored)) = (crc, bytes.get_mut(..4)) {
                stored.copy_from_slice(&crc);
            }
        })
        .run(|bytes| {
            let mut entry = [0; OBJECT_BYTES as usize];
            entry[..bytes.len()].copy_from_slice(bytes);
            let object = Object::decode(&entry).ok()?;
            assert_eq!(object.size_bytes % PAGE_BYTES as u64, 0);
            if entry != [0; OBJECT_BYTES as usize] {
                assert_eq!(Object::decode(&object.encode()), Ok(object));
            }
            Some((
                object.state as u8,
                object.needs_compare,
                object.size_bytes == 0,
            ))
        });
}

#[test]
fn fuzz_slot() {
    let mapped = Slot::EMPTY.map(FrameNo(77));
    target("slot")
        .seeds(
            [
                mapped,
                mapped.changing(),
                mapped.unmap(Epoch(9)),
                Slot::EMPTY,
            ]
            .map(|slot| slot.encode().to_le_bytes().to_vec()),
        )
        .cases(50_000)
        .bytes_max(8)
        .run(|bytes| {
            let bits = u64::from_le_bytes(*bytes.first_chunk()?);
            let slot = Slot::decode(bits).ok()?;
            assert_eq!(slot.encode(), bits);
            assert!(slot.hole_birth().is_none() || slot.frame().is_none());
            let flipped = |bit: u32| Slot::decode(bits ^ 1 << bit).is_ok();
            assert!(!(0..64).any(flipped), "{bits:#x}: a flipped bit");
            assert!(!slot.is_changing() || slot.frame().is_some());
            Some((
                slot.frame().is_some(),
                slot == Slot::EMPTY,
                slot.is_changing(),
            ))
        });
}
