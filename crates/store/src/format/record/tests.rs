//! Tests of records.

use super::layout::KIND_BYTES;
use super::*;
use pagemesh_base::bytes::{field, get_u64, put};
use pagemesh_base::ids::FrameNo;
use pagemesh_base::ids::Incarnation;
use proptest::prelude::*;
use uuid::Uuid;

pub(super) fn place() -> RecordAddress {
    RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 2, 1 << 40)
}

pub(super) fn record(pages: usize) -> Record {
    let change = |i: u64| {
        let old = Slot::EMPTY.map(FrameNo(i));
        Change {
            old,
            new: old.map(FrameNo(i + 1000)),
            sums: PageChecksums {
                crc: i as u32,
                words: 0,
            },
        }
    };
    Record {
        seq: Seq(11),
        object: ObjectId(4),
        epoch: Epoch(9),
        level: 0,
        page: PageNo(1 << 33),
        op: u64::MAX,
        open: 16,
        group_position: GroupPosition::default(),
        kept_birth: None,
        is_adoption: false,
        has_second_sum: false,
        changes: (0..pages as u64).map(change).collect(),
        patch: Patch::default(),
    }
}

/// A patch of a part of a page.
pub(super) fn patch(within: usize, len: usize) -> Record {
    let mut record = record(1);
    let change = &mut record.changes[0];
    change.old = Slot::EMPTY.map(FrameNo(77));
    change.new = change.old.map(FrameNo(77));
    let bytes: Vec<u8> = (0..len).map(|at| at as u8 ^ 0x5a).collect();
    record.patch.set(within, &bytes);
    record
}

pub(super) fn encode(record: &Record) -> Vec<Line> {
    let mut lines = Vec::new();
    record.encode(&mut lines);
    add_checksum(&mut lines, &place());
    lines
}

#[test]
fn object_record_decodes_and_flipped_bits_are_found() {
    let entry = JournalEntry::Object(ObjectRecord {
        seq: Seq(5),
        object: ObjectId(3),
        entry: Box::new(std::array::from_fn(|i| i as u8)),
    });
    let mut lines = Vec::new();
    entry.encode(&place(), &mut lines);
    assert_eq!(lines.len(), entry.lines());
    assert_eq!(JournalEntry::decode(&lines, &place()), Ok(entry));
    for bit in 0..lines.len() * LINE_BYTES * 8 {
        let mut damaged = lines.clone();
        damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
        assert!(
            JournalEntry::decode(&damaged, &place()).is_err(),
            "bit {bit}"
        );
    }
}

#[test]
fn one_page_record_takes_one_line() {
    assert_eq!([lines(1), lines(2), lines(4), lines(5)], [1, 2, 2, 3]);
    assert_eq!(encode(&record(1)).len(), 1);
}

/// The encoding of a record by builds without groups.
#[test]
fn single_record_has_no_group_bits() {
    for pages in [1, 2, PAGES_MAX] {
        let head = encode(&record(pages))[0];
        assert_eq!(get_u64(&head, 0) >> 32, 1 | (pages as u64) << 16);
    }
}

#[test]
fn flipped_bits_of_group_record_are_corrected() {
    let standing = GroupPosition {
        lines_before: 41,
        is_continued: true,
    };
    let record = Record {
        group_position: standing,
        has_second_sum: true,
        ..record(5)
    };
    let lines = encode(&record);
    for bit in 0..lines.len() * LINE_BYTES * 8 {
        let mut damaged = lines.clone();
        damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
        assert!(
            JournalEntry::decode(&damaged, &place()).is_err(),
            "bit {bit}"
        );
        let corrected = JournalEntry::correct(&damaged, &place());
        assert_eq!(
            corrected,
            Some(JournalEntry::Map(record.clone())),
            "bit {bit}"
        );
    }
}

#[test]
fn record_is_valid_only_at_its_address() {
    let lines = encode(&record(3));
    let others = [
        RecordAddress::new(Uuid::from_u128(8), Incarnation(3), 2, 1 << 40),
        RecordAddress::new(Uuid::from_u128(7), Incarnation(4), 2, 1 << 40),
        RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 3, 1 << 40),
        RecordAddress::new(Uuid::from_u128(7), Incarnation(3), 2, (1 << 40) + 1),
    ];
    for place in others {
        assert_eq!(
            JournalEntry::decode(&lines, &place),
            Err(InvalidRecord::Checksum)
        );
    }
}

#[track_caller]
fn check_missing_lines(lines: &[Line]) {
    for kept in 0..lines.len() {
        assert!(JournalEntry::decode(&lines[..kept], &place()).is_err());
        let mut torn = lines.to_vec();
        torn[kept] = [0; LINE_BYTES];
        assert!(
            JournalEntry::decode(&torn, &place()).is_err(),
            "line {kept}"
        );
    }
}

#[test]
fn flipped_bits_and_missing_lines_are_found() {
    let lines = encode(&record(7));
    for bit in 0..lines.len() * LINE_BYTES * 8 {
        let mut damaged = lines.clone();
        damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
        assert!(
            JournalEntry::decode(&damaged, &place()).is_err(),
            "bit {bit}"
        );
    }
    check_missing_lines(&lines);
}

#[test]
fn patch_bytes_follow_their_head() {
    for (within, len) in [(0, 1), (4095, 1), (5, 63), (9, 64), (1, 4095), (0, 4095)] {
        let record = patch(within, len);
        let mut lines = encode(&record);
        assert_eq!(lines.len(), 1 + len.div_ceil(63));
        assert_eq!(claimed_lines(&lines[0]), lines.len());
        assert_eq!(
            usize::from(lines[0][39]) | usize::from(lines[0][47]) << 8,
            within
        );
        assert!(lines[1..].iter().all(|line| line[4] == KIND_BYTES));
        let bytes: Vec<u8> = [&lines[1][..4], &lines[1][5..]].concat();
        let first = len.min(63);
        assert_eq!(bytes[..first], record.patch.bytes[..first]);
        assert!(bytes[first..].iter().all(|&byte| byte == 0));
        lines.push([0xaa; LINE_BYTES]);
        assert_eq!(
            JournalEntry::decode(&lines, &place()),
            Ok(JournalEntry::Map(record))
        );
    }
}

#[test]
fn patch_bit_flips_are_corrected_and_missing_lines_found() {
    let record = patch(1000, 130);
    let lines = encode(&record);
    for bit in 0..lines.len() * LINE_BYTES * 8 {
        let mut damaged = lines.clone();
        damaged.as_flattened_mut()[bit / 8] ^= 1 << (bit % 8);
        assert!(
            JournalEntry::decode(&damaged, &place()).is_err(),
            "bit {bit}"
        );
        let corrected = JournalEntry::correct(&damaged, &place());
        assert_eq!(
            corrected,
            Some(JournalEntry::Map(record.clone())),
            "bit {bit}"
        );
    }
    check_missing_lines(&lines);
}

#[test]
fn patch_head_decodes_without_its_bytes() {
    let mut record = patch(3000, 200);
    let mut lines = encode(&record);
    // The head decodes in spite of damaged bytes.
    lines[2] = [7; LINE_BYTES];
    let mut found = Record::empty();
    found.decode_head(&lines[0], &place()).unwrap();
    record.patch.bytes.clear();
    assert_eq!(found, record);
    assert_eq!(found.lines(), lines.len());
    for bit in 0..LINE_BYTES * 8 {
        lines[0][bit / 8] ^= 1 << (bit % 8);
        assert!(found.decode_head(&lines[0], &place()).is_err(), "bit {bit}");
        lines[0][bit / 8] ^= 1 << (bit % 8);
    }
    // The head of a record of several pages has more lines.
    let several = encode(&super::tests::record(2))[0];
    assert!(found.decode_head(&several, &place()).is_err());
}

/// Not even bytes that form a record for the very address of their line.
#[test]
fn patch_bytes_never_decode_as_record() {
    let mut record = patch(0, 63 * 3);
    let second = place().at(place().position + 2);
    for entry in [
        JournalEntry::Map(super::tests::record(1)),
        JournalEntry::Map(record.clone()),
    ] {
        let mut lines = Vec::new();
        entry.encode(&second, &mut lines);
        let [first, rest @ ..] = &lines[..1] else {
            panic!("a head");
        };
        assert!(rest.is_empty());
        record.patch.bytes[63..126].copy_from_slice(&[&first[..4], &first[5..]].concat());
        let lines = encode(&record);
        assert!(JournalEntry::decode(&lines[2..], &second).is_err());
        record.patch.bytes[63..126].copy_from_slice(&first[..63]);
        let lines = encode(&record);
        assert!(JournalEntry::decode(&lines[2..], &second).is_err());
    }
}

/// Refuses a record with a right checksum that no writer makes.
#[test]
fn impossible_patch_is_refused() {
    let sound = encode(&patch(4000, 96));
    let refused = |change: &dyn Fn(&mut Vec<Line>)| {
        let mut lines = sound.clone();
        change(&mut lines);
        let claimed = claimed_lines(&lines[0]);
        add_checksum(&mut lines[..claimed], &place());
        let found = JournalEntry::decode(&lines, &place());
        assert_eq!(found, Err(InvalidRecord::Malformed));
    };
    // Beyond the page, of a node, while it is being changed, with bytes after its end.
    refused(&|lines| lines[0][39] = 0xff);
    refused(&|lines| lines[0][5] = 1);
    refused(&|lines| lines[0][44] ^= 0x20);
    refused(&|lines| lines[2][63] = 1);
    refused(&|lines| lines[1][4] = 0);
    refused(&|lines| put(&mut lines[0], 6, 0u16.to_le_bytes()));
}

/// The sums take the place of the check bits that slots have in a pool.
#[test]
fn second_sums_replace_slot_check_bits() {
    let mut record = record(2);
    record.has_second_sum = true;
    record.changes[0].sums.words = 0x1234;
    record.changes[1].sums.words = 0xabcd;
    let lines = encode(&record);
    assert_eq!(lines[0][4], 4);
    assert_eq!((lines[0][39], lines[0][47]), (0x34, 0x12));
    assert_eq!((lines[1][7], lines[1][15]), (0xcd, 0xab));
    let slot = record.changes[1].new.encode();
    assert_eq!(get_u64(&lines[1], 8) << 8, slot << 8);
}

#[test]
fn data_checksums_can_be_set_after_encoding() {
    let mut record = record(9);
    let summed = record.changes.iter_mut().zip(0xabc0..);
    summed.for_each(|(change, sum)| change.sums.words = sum);
    record.has_second_sum = true;
    let (mut blank, mut lines) = (record.clone(), Vec::new());
    blank
        .changes
        .iter_mut()
        .for_each(|change| change.sums = NO_SUMS);
    blank.encode(&mut lines);
    for (index, change) in record.changes.iter().enumerate() {
        set_sums(&mut lines, index, change.sums);
    }
    add_checksum(&mut lines, &place());
    assert_eq!(lines, encode(&record));
}

proptest! {
    #[test]
    fn record_round_trips(
        pages in 1..=PAGES_MAX,
        level in 0..=LEVELS_MAX,
        lines_before in 0..GROUP_LINES_MAX as u8,
        is_continued in any::<bool>(),
        has_second_sum in any::<bool>(),
        rest in 0usize..4,
    ) {
        let group_position = GroupPosition { lines_before, is_continued };
        let mut record = Record { level, group_position, has_second_sum, ..record(pages) };
        if has_second_sum {
            let summed = record.changes.iter_mut().zip(0x7f80u16..);
            summed.for_each(|(change, sum)| change.sums.words = sum);
        }
        let mut lane = encode(&record);
        lane.extend(vec![[0xaa; LINE_BYTES]; rest]);
        prop_assert_eq!(JournalEntry::decode(&lane, &place()), Ok(JournalEntry::Map(record)));
    }

    #[test]
    fn arbitrary_bytes_are_no_record(lane in prop::collection::vec(any::<[[u8; 32]; 2]>(), 0..8)) {
        let lane: Vec<Line> = lane.iter().map(|l| field(l.as_flattened(), 0)).collect();
        prop_assert!(JournalEntry::decode(&lane, &place()).is_err());
    }
}
