//! Journals on recorded media: every legal crash image keeps every fenced record, and at most the
//! one that was being written.

use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::{Epoch, FrameNo, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Image, Media, Recorder, UnfencedStores};
use pagemesh_store::journal::{Journal, JournalFull, JournalScan};
use pagemesh_store::record::{
    Change, GroupPosition, Patch, Record, RecordAddress, add_checksum, lines,
};
use pagemesh_store::slot::Slot;
use proptest::prelude::*;
use uuid::Uuid;

const LENGTH: u64 = 16;
const START: usize = 128;

fn place(incarnation: u32, position: u64) -> RecordAddress {
    RecordAddress::new(Uuid::from_u128(1), Incarnation(incarnation), 3, position)
}

fn record(seq: u64, pages: usize) -> Record {
    let change = |i| Change {
        old: Slot::EMPTY,
        new: Slot::EMPTY.map(FrameNo(seq * 100 + i)),
        sums: PageChecksums {
            crc: seq as u32,
            words: 0,
        },
    };
    Record {
        seq: Seq(seq),
        object: ObjectId(1),
        epoch: Epoch(1),
        level: 0,
        page: PageNo(seq),
        op: seq,
        open: 0,
        group_position: GroupPosition::default(),
        kept_birth: None,
        is_adoption: false,
        has_second_sum: false,
        patch: Patch::default(),
        changes: (0..pages as u64).map(change).collect(),
    }
}

fn recover(image: Image, head: RecordAddress) -> JournalScan {
    let media = Recorder::from_image(image);
    let mut journal = Journal::new(START, LENGTH, head);
    journal.recover(&media).expect("a torn tail is no damage")
}

fn append(
    media: &Recorder,
    journal: &mut Journal,
    record: &Record,
) -> Result<UnfencedStores, JournalFull> {
    journal.reserve(media, lines(record.changes.len()))?;
    let mut entry = Vec::new();
    record.encode(&mut entry);
    add_checksum(&mut entry, journal.next_address());
    Ok(journal.append(media, &entry))
}

fn seqs(scan: &JournalScan) -> Vec<u64> {
    scan.entries
        .iter()
        .map(|(_, entry)| entry.seq().0)
        .collect()
}

/// Appends records of these page counts, fences each, keeps the last two, and checks up to `images`
/// crash images at each fence. Returns the number of checked images.
fn check(sizes: &[usize], images: u64) -> u64 {
    let media = Recorder::new(PAGE_BYTES);
    let mut journal = Journal::new(START, LENGTH, place(1, 0));
    let mut kept: Vec<(u64, u64)> = Vec::new();
    let mut checked = 0;
    for (seq, &pages) in (0..).zip(sizes) {
        if kept.len() == 2 {
            kept.remove(0);
            journal.advance(kept[0].0);
        }
        let head = journal.head();
        let fences = media.crash_points().len();
        let stores = append(&media, &mut journal, &record(seq, pages)).expect("room");
        let committed: Vec<u64> = kept.iter().map(|&(_, seq)| seq).collect();
        let with_this: Vec<u64> = committed.iter().copied().chain([seq]).collect();
        for point in &media.crash_points()[fences - 1..] {
            let exhaustive = point.count() <= images;
            for index in 0..point.count().min(images) {
                let image = match exhaustive {
                    true => point.image(index),
                    false => point.sample(index),
                };
                let found = seqs(&recover(image, place(1, head)));
                assert!(
                    found == committed || found == with_this,
                    "sizes {sizes:?}, record {seq}, image {index}: {found:?}"
                );
                checked += 1;
            }
        }
        let _committed = media.fence(stores);
        let point = media.crash_points().pop().expect("a point");
        let scan = recover(point.image(0), place(1, head));
        assert_eq!(
            seqs(&scan),
            with_this,
            "sizes {sizes:?}: a fenced record is lost"
        );
        assert_eq!(scan.end, journal.end());
        kept.push((scan.entries.last().expect("a record").0, seq));
    }
    checked
}

#[test]
fn single_line_records_wrap_the_journal() {
    // A record has eight words. An image has none of them, or some; the last one makes the record
    // whole. A word with its old value makes no new image.
    assert!(check(&[1; 40], 1000) >= 40 * 7);
}

#[test]
fn multi_line_records_pad_and_wrap() {
    check(&[4, 7, 10, 1, 16, 1, 7, 7, 13, 4, 10], 500);
}

#[test]
fn full_journal_refuses_and_writes_nothing() {
    let media = Recorder::new(PAGE_BYTES);
    let mut journal = Journal::new(START, LENGTH, place(1, 0));
    for seq in 0..LENGTH {
        let stores = append(&media, &mut journal, &record(seq, 1)).expect("room");
        let _committed = media.fence(stores);
    }
    let error = append(&media, &mut journal, &record(99, 1)).expect_err("no room");
    assert_eq!(error.head, 0);
    let point = media.crash_points().pop().expect("a point");
    assert_eq!(recover(point.image(0), place(1, 0)).entries.len(), 16);
    journal.advance(1);
    assert!(append(&media, &mut journal, &record(100, 1)).is_ok());
}

#[test]
fn other_incarnation_reads_no_records() {
    let media = Recorder::new(PAGE_BYTES);
    let mut journal = Journal::new(START, LENGTH, place(1, 0));
    let stores = append(&media, &mut journal, &record(0, 1)).expect("room");
    let _committed = media.fence(stores);
    let point = media.crash_points().pop().expect("a point");
    assert!(recover(point.image(0), place(2, 0)).entries.is_empty());
}

#[test]
fn damage_before_valid_record_is_reported_torn_tail_is_not() {
    let media = Recorder::new(PAGE_BYTES);
    let mut journal = Journal::new(START, LENGTH, place(1, 0));
    for (seq, pages) in [(0, 1), (1, 4), (2, 1)] {
        let stores = append(&media, &mut journal, &record(seq, pages)).expect("room");
        let _committed = media.fence(stores);
    }
    let whole = media.crash_points().pop().expect("a point").image(0);
    for line in 0..4usize {
        let mut image = whole.clone();
        let at = START + line * LINE_BYTES + 16;
        image.set_word(at, image.word(at) ^ 1 << 9);
        let flipped = Recorder::from_image(image.clone());
        let found = Journal::new(START, LENGTH, place(1, 0)).recover(&flipped);
        let found = found.expect("one bit is corrected");
        assert_eq!(seqs(&found), [0, 1, 2]);
        assert_eq!(found.corrected, [[0, 1, 1, 3][line]]);
        image.set_word(at, image.word(at) ^ 1 << 30);
        let damaged = Recorder::from_image(image);
        let found = Journal::new(START, LENGTH, place(1, 0)).recover(&damaged);
        match line {
            0 => assert_eq!(found.expect_err("damage").position, 0),
            1 | 2 => assert_eq!(found.expect_err("damage").position, 1),
            _ => assert_eq!(seqs(&found.expect("torn")), [0, 1]),
        }
    }
}

/// Appends records of these page counts as one group.
fn append_group(
    media: &Recorder,
    journal: &mut Journal,
    seq: u64,
    sizes: &[usize],
) -> UnfencedStores {
    let all: usize = sizes.iter().map(|&pages| lines(pages)).sum();
    journal.reserve(media, all).expect("room");
    let mut group = Vec::new();
    for (number, &pages) in (1..).zip(sizes) {
        let start = group.len();
        let standing = GroupPosition {
            lines_before: start as u8,
            is_continued: number < sizes.len(),
        };
        let record = Record {
            group_position: standing,
            ..record(seq, pages)
        };
        record.encode(&mut group);
        let position = journal.end() + start as u64;
        add_checksum(&mut group[start..], &journal.next_address().at(position));
    }
    journal.append(media, &group)
}

#[test]
fn crash_leaves_group_all_or_nothing() {
    for (before, sizes) in [(1, &[1, 4, 1][..]), (2, &[2, 2]), (13, &[1, 1, 3])] {
        let media = Recorder::new(PAGE_BYTES);
        let mut journal = Journal::new(START, LENGTH, place(1, 0));
        for seq in 0..before {
            journal.advance(journal.end());
            let stores = append(&media, &mut journal, &record(seq, 1)).expect("room");
            let _committed = media.fence(stores);
        }
        let head = journal.head();
        let stores = append_group(&media, &mut journal, 50, sizes);
        let point = media.crash_point();
        let (old, new) = (
            vec![before - 1],
            [&[before - 1][..], &vec![50; sizes.len()]].concat(),
        );
        let mut met = [false; 2];
        assert!(point.count() < 100_000, "few lines");
        for index in 0..point.count() {
            let scan = recover(point.image(index), place(1, head));
            let found = seqs(&scan);
            assert!(found == old || found == new, "image {index}: {found:?}");
            met[usize::from(found == new)] = true;
        }
        assert_eq!(met, [true, true]);
        let _committed = media.fence(stores);
        let image = media.crash_point().image(0);
        assert_eq!(seqs(&recover(image.clone(), place(1, head))), new);
        check_flips_corrected(&image, head, &new);
    }
}

/// Every flipped bit of a fenced group is corrected.
fn check_flips_corrected(image: &Image, head: u64, expected: &[u64]) {
    let mut corrected = 0;
    for bit in 0..LENGTH as usize * LINE_BYTES * 8 {
        let mut image = image.clone();
        let at = START + bit / 64 * 8;
        image.set_word(at, image.word(at) ^ 1 << (bit % 64));
        let scan = recover(image, place(1, head));
        assert_eq!(seqs(&scan), expected, "bit {bit}");
        corrected += scan.corrected.len();
    }
    assert!(corrected >= 3 * LINE_BYTES * 8, "{corrected}");
}

#[test]
fn damaged_group_is_distinguished_from_torn_group() {
    let media = Recorder::new(PAGE_BYTES);
    let mut journal = Journal::new(START, LENGTH, place(1, 0));
    let stores = append(&media, &mut journal, &record(1, 1)).expect("room");
    let _committed = media.fence(stores);
    let stores = append_group(&media, &mut journal, 2, &[1, 2, 1]);
    let _committed = media.fence(stores);
    let last = media.crash_point().image(0);
    let stores = append(&media, &mut journal, &record(3, 1)).expect("room");
    let _committed = media.fence(stores);
    let followed = media.crash_point().image(0);
    let spoilt = |image: &Image, line: usize| {
        let mut image = image.clone();
        let at = START + line * LINE_BYTES + 16;
        image.set_word(at, image.word(at) ^ 0xff);
        Journal::new(START, LENGTH, place(1, 0)).recover(&Recorder::from_image(image))
    };
    for (line, bad, rest) in [(1, 1, 2), (2, 2, 2), (3, 2, 2), (4, 4, 2)] {
        // The group is the last one: it may be torn. The scan returns the rest of it.
        let scan = spoilt(&last, line).expect("torn");
        assert_eq!(seqs(&scan), [1], "line {line}");
        assert_eq!((scan.torn_group.len(), scan.end), (rest, 1), "line {line}");
        let damage = spoilt(&followed, line).expect_err("damage");
        assert_eq!((damage.position, damage.later), (bad, 5), "line {line}");
    }
}

/// Valid lines of a dead writer do not join a group that another writer begins before them.
#[test]
fn remains_of_another_group_do_not_continue_a_group() {
    let media = Recorder::new(PAGE_BYTES);
    let journal = Journal::new(START, LENGTH, place(1, 0));
    let stores = append_group(&media, &mut journal.clone(), 2, &[1, 1, 1]);
    let _committed = media.fence(stores);
    let mut next = journal.clone();
    let stores = append(&media, &mut next, &record(3, 1)).expect("room");
    let _committed = media.fence(stores);
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert_eq!((seqs(&found), found.end), (vec![3], 1));
    // The record has the same length but belongs to another group.
    let mut begun = Vec::new();
    Record {
        group_position: GroupPosition {
            lines_before: 0,
            is_continued: true,
        },
        ..record(4, 1)
    }
    .encode(&mut begun);
    add_checksum(&mut begun, journal.next_address());
    let _committed = media.fence(journal.clone().append(&media, &begun));
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert_eq!((seqs(&found), found.end), (vec![], 0));
    // Retiring the dead session invalidates the remains.
    let voided = journal
        .invalidate_entries(&media)
        .expect("remains to invalidate");
    let _fenced = media.fence(voided);
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert!(found.torn_group.is_empty());
    assert_eq!(journal.invalidate_entries(&media).map(drop), None);
}

#[test]
fn stale_head_is_detected_by_next_lap() {
    let media = Recorder::new(PAGE_BYTES);
    let old = Journal::new(START, LENGTH, place(1, 0));
    let mut journal = old.clone();
    for seq in 0..2 * LENGTH {
        assert_eq!(old.has_next_lap(&media), seq > LENGTH, "line {seq}");
        journal.advance(journal.end());
        let stores = append(&media, &mut journal, &record(seq, 1)).expect("room");
        let _committed = media.fence(stores);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn records_of_any_size_survive_crashes(sizes in prop::collection::vec(1usize..14, 1..20)) {
        check(&sizes, 60);
    }
}

/// Older patch records had no checksum of their own over the head: such a record is no torn tail.
#[test]
fn older_patch_format_is_distinguished_from_torn_tail() {
    const KIND_AT: usize = 4;
    const OLDER: u8 = 5;
    let slot = Slot::EMPTY.map(FrameNo(100));
    let mut older = record(1, 1);
    older.changes[0].old = slot;
    older.changes[0].new = slot.map(FrameNo(100));
    older.patch = Patch {
        within: 40,
        len: 200,
        bytes: vec![9; 200],
    };
    let mut entry = Vec::new();
    older.encode(&mut entry);
    entry[0][KIND_AT] = OLDER;
    add_checksum(&mut entry, &place(1, 0));
    let written = |entry: &[[u8; LINE_BYTES]]| {
        let media = Recorder::new(PAGE_BYTES);
        let mut journal = Journal::new(START, LENGTH, place(1, 0));
        let stores = journal.append(&media, entry);
        let _fenced = media.fence(stores);
        recover(media.visible_image(), place(1, 0))
    };
    let found = written(&entry);
    assert!(
        found.has_older_format && found.entries.is_empty(),
        "{found:?}"
    );
    entry[2][7] ^= 1;
    let torn = written(&entry);
    assert!(
        !torn.has_older_format && torn.entries.is_empty(),
        "{torn:?}"
    );
}
