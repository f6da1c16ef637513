//! Lanes on recorded media: every legal crash image keeps every fenced record
//! and at most the one that was being written.

use pagemesh_base::checksum::Sums;
use pagemesh_base::ids::{Epoch, FrameNo, Incarnation, ObjectId, PageNo, Seq};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{Image, Media, Recorder, Unfenced};
use pagemesh_store::lane::{Lane, LaneFull, Scan};
use pagemesh_store::record::{Change, Patch, Place, Record, Standing, lines, seal};
use pagemesh_store::slot::Slot;
use proptest::prelude::*;
use uuid::Uuid;

const LENGTH: u64 = 16;
const START: usize = 128;

fn place(incarnation: u32, position: u64) -> Place {
    Place::new(Uuid::from_u128(1), Incarnation(incarnation), 3, position)
}

fn record(seq: u64, pages: usize) -> Record {
    let change = |i| Change {
        old: Slot::EMPTY,
        new: Slot::EMPTY.map(FrameNo(seq * 100 + i), 0),
        sums: Sums {
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
        standing: Standing::default(),
        is_summed: false,
        patch: Patch::default(),
        changes: (0..pages as u64).map(change).collect(),
    }
}

fn recover(image: Image, head: Place) -> Scan {
    let media = Recorder::from_image(image);
    let mut lane = Lane::new(START, LENGTH, head);
    lane.recover(&media).expect("a torn tail is no damage")
}

fn append(media: &Recorder, lane: &mut Lane, record: &Record) -> Result<Unfenced, LaneFull> {
    lane.reserve(media, lines(record.changes.len()))?;
    let mut entry = Vec::new();
    record.encode(&mut entry);
    seal(&mut entry, lane.place());
    Ok(lane.append(media, &entry))
}

fn seqs(scan: &Scan) -> Vec<u64> {
    scan.entries
        .iter()
        .map(|(_, entry)| entry.seq().0)
        .collect()
}

/// Appends records of these page counts, each fenced, keeping two, and checks
/// up to `images` crash images at each fence. Returns how many were checked.
fn check(sizes: &[usize], images: u64) -> u64 {
    let media = Recorder::new(PAGE_BYTES);
    let mut lane = Lane::new(START, LENGTH, place(1, 0));
    let mut kept: Vec<(u64, u64)> = Vec::new();
    let mut checked = 0;
    for (seq, &pages) in (0..).zip(sizes) {
        if kept.len() == 2 {
            kept.remove(0);
            lane.advance(kept[0].0);
        }
        let head = lane.head();
        let fences = media.crash_points().len();
        let stores = append(&media, &mut lane, &record(seq, pages)).expect("room");
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
        assert_eq!(seqs(&scan), with_this, "sizes {sizes:?}: fenced is there");
        assert_eq!(scan.end, lane.end());
        kept.push((scan.entries.last().expect("a record").0, seq));
    }
    checked
}

#[test]
fn single_lines_over_several_laps() {
    // Nothing, each of eight words, the last of which makes it whole; a word that
    // is what it was makes no image of its own.
    assert!(check(&[1; 40], 1000) >= 40 * 7);
}

#[test]
fn records_of_several_lines_pad_and_wrap() {
    check(&[4, 7, 10, 1, 16, 1, 7, 7, 13, 4, 10], 500);
}

#[test]
fn a_full_lane_refuses_and_writes_nothing() {
    let media = Recorder::new(PAGE_BYTES);
    let mut lane = Lane::new(START, LENGTH, place(1, 0));
    for seq in 0..LENGTH {
        let stores = append(&media, &mut lane, &record(seq, 1)).expect("room");
        let _committed = media.fence(stores);
    }
    let error = append(&media, &mut lane, &record(99, 1)).expect_err("no room");
    assert_eq!(error.head, 0);
    let point = media.crash_points().pop().expect("a point");
    assert_eq!(recover(point.image(0), place(1, 0)).entries.len(), 16);
    lane.advance(1);
    assert!(append(&media, &mut lane, &record(100, 1)).is_ok());
}

#[test]
fn another_incarnation_sees_nothing() {
    let media = Recorder::new(PAGE_BYTES);
    let mut lane = Lane::new(START, LENGTH, place(1, 0));
    let stores = append(&media, &mut lane, &record(0, 1)).expect("room");
    let _committed = media.fence(stores);
    let point = media.crash_points().pop().expect("a point");
    assert!(recover(point.image(0), place(2, 0)).entries.is_empty());
}

#[test]
fn damage_below_a_later_record_is_reported_and_a_torn_tail_is_not() {
    let media = Recorder::new(PAGE_BYTES);
    let mut lane = Lane::new(START, LENGTH, place(1, 0));
    for (seq, pages) in [(0, 1), (1, 4), (2, 1)] {
        let stores = append(&media, &mut lane, &record(seq, pages)).expect("room");
        let _committed = media.fence(stores);
    }
    let whole = media.crash_points().pop().expect("a point").image(0);
    for line in 0..4usize {
        let mut image = whole.clone();
        let at = START + line * LINE_BYTES + 16;
        image.set_word(at, image.word(at) ^ 1 << 9);
        let flipped = Recorder::from_image(image.clone());
        let found = Lane::new(START, LENGTH, place(1, 0)).recover(&flipped);
        let found = found.expect("one bit is mended");
        assert_eq!(seqs(&found), [0, 1, 2]);
        assert_eq!(found.mended, [[0, 1, 1, 3][line]]);
        image.set_word(at, image.word(at) ^ 1 << 30);
        let damaged = Recorder::from_image(image);
        let found = Lane::new(START, LENGTH, place(1, 0)).recover(&damaged);
        match line {
            0 => assert_eq!(found.expect_err("damage").position, 0),
            1 | 2 => assert_eq!(found.expect_err("damage").position, 1),
            _ => assert_eq!(seqs(&found.expect("torn")), [0, 1]),
        }
    }
}

/// Records of these page counts as one group.
fn append_group(media: &Recorder, lane: &mut Lane, seq: u64, sizes: &[usize]) -> Unfenced {
    let all: usize = sizes.iter().map(|&pages| lines(pages)).sum();
    lane.reserve(media, all).expect("room");
    let mut group = Vec::new();
    for (number, &pages) in (1..).zip(sizes) {
        let start = group.len();
        let standing = Standing {
            lines_before: start as u8,
            goes_on: number < sizes.len(),
        };
        let record = Record {
            standing,
            ..record(seq, pages)
        };
        record.encode(&mut group);
        let position = lane.end() + start as u64;
        seal(&mut group[start..], &lane.place().at(position));
    }
    lane.append(media, &group)
}

#[test]
fn every_crash_leaves_all_of_a_group_or_nothing() {
    for (before, sizes) in [(1, &[1, 4, 1][..]), (2, &[2, 2]), (13, &[1, 1, 3])] {
        let media = Recorder::new(PAGE_BYTES);
        let mut lane = Lane::new(START, LENGTH, place(1, 0));
        for seq in 0..before {
            lane.advance(lane.end());
            let stores = append(&media, &mut lane, &record(seq, 1)).expect("room");
            let _committed = media.fence(stores);
        }
        let head = lane.head();
        let stores = append_group(&media, &mut lane, 50, sizes);
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
        check_flips(&image, head, &new);
    }
}

/// Every flipped bit of a fenced group is mended.
fn check_flips(image: &Image, head: u64, expected: &[u64]) {
    let mut mended = 0;
    for bit in 0..LENGTH as usize * LINE_BYTES * 8 {
        let mut image = image.clone();
        let at = START + bit / 64 * 8;
        image.set_word(at, image.word(at) ^ 1 << (bit % 64));
        let scan = recover(image, place(1, head));
        assert_eq!(seqs(&scan), expected, "bit {bit}");
        mended += scan.mended.len();
    }
    assert!(mended >= 3 * LINE_BYTES * 8, "{mended}");
}

#[test]
fn damage_in_a_group_is_told_from_a_torn_one() {
    let media = Recorder::new(PAGE_BYTES);
    let mut lane = Lane::new(START, LENGTH, place(1, 0));
    let stores = append(&media, &mut lane, &record(1, 1)).expect("room");
    let _committed = media.fence(stores);
    let stores = append_group(&media, &mut lane, 2, &[1, 2, 1]);
    let _committed = media.fence(stores);
    let last = media.crash_point().image(0);
    let stores = append(&media, &mut lane, &record(3, 1)).expect("room");
    let _committed = media.fence(stores);
    let followed = media.crash_point().image(0);
    let spoilt = |image: &Image, line: usize| {
        let mut image = image.clone();
        let at = START + line * LINE_BYTES + 16;
        image.set_word(at, image.word(at) ^ 0xff);
        Lane::new(START, LENGTH, place(1, 0)).recover(&Recorder::from_image(image))
    };
    for (line, bad, rest) in [(1, 1, 2), (2, 2, 2), (3, 2, 2), (4, 4, 2)] {
        // Nothing behind it: it may be torn. Its reader gets the rest of it.
        let scan = spoilt(&last, line).expect("torn");
        assert_eq!(seqs(&scan), [1], "line {line}");
        assert_eq!((scan.torn.len(), scan.end), (rest, 1), "line {line}");
        let damage = spoilt(&followed, line).expect_err("damage");
        assert_eq!((damage.position, damage.later), (bad, 5), "line {line}");
    }
}

/// Lines that a dead writer left, valid by themselves, are of no group that
/// another one begins before them.
#[test]
fn parts_of_another_group_do_not_go_on() {
    let media = Recorder::new(PAGE_BYTES);
    let lane = Lane::new(START, LENGTH, place(1, 0));
    let stores = append_group(&media, &mut lane.clone(), 2, &[1, 1, 1]);
    let _committed = media.fence(stores);
    let mut next = lane.clone();
    let stores = append(&media, &mut next, &record(3, 1)).expect("room");
    let _committed = media.fence(stores);
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert_eq!((seqs(&found), found.end), (vec![3], 1));
    // The same length, and yet not its own.
    let mut begun = Vec::new();
    Record {
        standing: Standing {
            lines_before: 0,
            goes_on: true,
        },
        ..record(4, 1)
    }
    .encode(&mut begun);
    seal(&mut begun, lane.place());
    let _committed = media.fence(lane.clone().append(&media, &begun));
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert_eq!((seqs(&found), found.end), (vec![], 0));
    // Whoever ends the dead one's session sees to it that nothing is found.
    let voided = lane.void(&media).expect("there was something");
    let _fenced = media.fence(voided);
    let found = recover(media.crash_point().image(0), place(1, 0));
    assert!(found.torn.is_empty());
    assert_eq!(lane.void(&media).map(drop), None);
}

#[test]
fn an_old_head_is_told_by_the_lap_behind_it() {
    let media = Recorder::new(PAGE_BYTES);
    let old = Lane::new(START, LENGTH, place(1, 0));
    let mut lane = old.clone();
    for seq in 0..2 * LENGTH {
        assert_eq!(old.is_lapped(&media), seq > LENGTH, "line {seq}");
        lane.advance(lane.end());
        let stores = append(&media, &mut lane, &record(seq, 1)).expect("room");
        let _committed = media.fence(stores);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_sizes(sizes in prop::collection::vec(1usize..14, 1..20)) {
        check(&sizes, 60);
    }
}

/// Heads of patches had no sum of their own once: such a record is no torn tail.
#[test]
fn a_patch_of_an_older_build_is_told_from_a_torn_tail() {
    const KIND_AT: usize = 4;
    const OLDER: u8 = 5;
    let slot = Slot::EMPTY.map(FrameNo(100), 0);
    let mut older = record(1, 1);
    older.changes[0].old = slot;
    older.changes[0].new = slot.map(FrameNo(100), 0);
    older.patch = Patch {
        within: 40,
        len: 200,
        bytes: vec![9; 200],
    };
    let mut entry = Vec::new();
    older.encode(&mut entry);
    entry[0][KIND_AT] = OLDER;
    seal(&mut entry, &place(1, 0));
    let written = |entry: &[[u8; LINE_BYTES]]| {
        let media = Recorder::new(PAGE_BYTES);
        let mut lane = Lane::new(START, LENGTH, place(1, 0));
        let stores = lane.append(&media, entry);
        let _fenced = media.fence(stores);
        recover(media.now(), place(1, 0))
    };
    let found = written(&entry);
    assert!(found.is_older && found.entries.is_empty(), "{found:?}");
    entry[2][7] ^= 1;
    let torn = written(&entry);
    assert!(!torn.is_older && torn.entries.is_empty(), "{torn:?}");
}
