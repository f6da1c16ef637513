//! The findings of the check, by the place of the damage: every kind of finding.

use crate::damage::pools::{DamageCase, LifeEnd, MediumKind, PAGE, PAGES, check_image, live_lines};
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::check::{Finding, FindingKind, Remedy};
use pagemesh_store::frame_word::FrameWord;
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::pool::Pool;
use pagemesh_store::slot::{FRAMES_MAX, Slot};
use pagemesh_store::table::{PageTable, SlotLocation};
use pagemesh_store::test_api::{COPY_AT, ROOT_AT};
use std::collections::BTreeSet;

/// The positions of structures in a closed pool.
struct PoolLayout {
    kind: MediumKind,
    image: Image,
    geometry: Geometry,
    /// Entries of live objects, and of free ones below the last live one.
    objects: Vec<usize>,
    free: Vec<usize>,
}

impl PoolLayout {
    fn new(case: &DamageCase) -> PoolLayout {
        let media = Recorder::unrecorded(case.image.clone());
        let block = Pool::peek(&media).expect("a superblock");
        let geometry = block.geometry;
        let entries = (0..u64::from(block.objects_end))
            .map(|it| (geometry.objects.start + it * OBJECT_BYTES) as usize);
        let in_state = |state: u64| {
            let states = entries.clone();
            let states = states.filter(move |at| case.image.word(at + 8) & 0xff == state);
            states.collect()
        };
        let (free, objects) = (in_state(0), in_state(1));
        PoolLayout {
            kind: case.kind,
            image: case.image.clone(),
            geometry,
            objects,
            free,
        }
    }

    /// The byte of the slot of `level` above a page of an object.
    fn slot_at(&self, entry: usize, level: u8, page: u64) -> Option<usize> {
        let media = Recorder::unrecorded(self.image.clone());
        let numbers = self.geometry.first_frames();
        let table = PageTable::new(&media, entry + ROOT_AT, 4, numbers);
        match table.locate(level, PageNo(page)).expect("a sound table") {
            SlotLocation::At(at) => Some(at),
            SlotLocation::Unlinked(_) => None,
        }
    }

    /// Bytes of slots that map pages.
    fn mapped(&self) -> Vec<usize> {
        let all = self.objects.iter();
        let all = all.flat_map(|&entry| (0..PAGES).map(move |page| (entry, page)));
        let all = all.filter_map(|(entry, page)| self.slot_at(entry, 0, page));
        all.filter(|&at| self.slot(at).frame().is_some()).collect()
    }

    fn slot(&self, at: usize) -> Slot {
        Slot::decode(self.image.word(at)).expect("sound")
    }

    /// An unused frame: its bit is clear.
    fn free_frame(&self) -> FrameNo {
        let is_used = |frame: &u64| {
            let word = self.geometry.bitmap.start + frame / 448 * 64 + frame % 448 / 64 * 8;
            self.image.word(word as usize) >> (frame % 64) & 1 != 0
        };
        let mut frames = self.geometry.first_frames().filter(|it| !is_used(it));
        FrameNo(frames.next().expect("room"))
    }

    /// The findings of the check after words were changed.
    fn check_with_words(&self, words: &[(usize, u64)]) -> Vec<Finding> {
        let mut image = self.image.clone();
        for &(at, word) in words {
            image.set_word(at, word);
        }
        check_image(self.kind, &image).expect("a pool").0.findings
    }

    fn check_with_flip(&self, byte: usize, bit: u32) -> Vec<Finding> {
        let at = byte / 8 * 8;
        self.check_with_words(&[(at, self.image.word(at) ^ 1 << bit)])
    }
}

/// The kind of a finding, without its details.
fn kind_of(what: &FindingKind) -> &'static str {
    match what {
        FindingKind::Superblock(_) => "Superblock",
        FindingKind::JournalRecord { .. } => "Record",
        FindingKind::Recovery(_) => "Recovery",
        FindingKind::Object => "Object",
        FindingKind::Root => "Root",
        FindingKind::VersionLog => "VersionLog",
        FindingKind::InFlight => "InFlight",
        FindingKind::Slot { .. } => "Slot",
        FindingKind::NoSuchFrame { .. } => "NoSuchFrame",
        FindingKind::Shared { .. } => "Shared",
        FindingKind::BeyondEnd => "Beyond",
        FindingKind::Data { .. } => "Data",
        FindingKind::FrameWord { .. } => "FrameWord",
        FindingKind::Flipped => "Flipped",
        FindingKind::UsedButFree(_) => "NotUsed",
        FindingKind::Leaked(_) => "Leaked",
        FindingKind::Bitmap { .. } => "Bitmap",
        FindingKind::Count { .. } => "Count",
    }
}

/// Checks that the findings are exactly these kinds with these remedies. The first finding names
/// the byte, if one is given.
#[derive(Default)]
struct FindingCoverage {
    seen_kinds: BTreeSet<&'static str>,
}

impl FindingCoverage {
    fn check(
        &mut self,
        found: &[Finding],
        wanted: &[(&'static str, Remedy)],
        byte: impl Into<Option<usize>>,
    ) {
        let kinds: Vec<_> = found
            .iter()
            .map(|it| (kind_of(&it.kind), it.remedy))
            .collect();
        assert_eq!(kinds, wanted, "{found:?}");
        if let Some(byte) = byte.into() {
            assert_eq!(found[0].location.byte, Some(byte as u64), "{found:?}");
        }
        self.seen_kinds.extend(wanted.iter().map(|(kind, _)| *kind));
    }
}

/// Flips one bit in each structure.
fn check_flips(case: &DamageCase, expected: &mut FindingCoverage) {
    let map = PoolLayout::new(case);
    let Geometry {
        bitmap, in_flight, ..
    } = map.geometry;
    for page in [0, PAGE as usize] {
        for byte in [page, page + 1024] {
            let found = map.check_with_flip(byte, 5);
            expected.check(&found, &[("Superblock", Remedy::Pool)], page);
        }
    }
    let lines = live_lines(map.kind, &map.image);
    if let Some(&line) = lines.first() {
        // Flips bits in the first line of a record.
        for word in [0, 24, 56] {
            let found = map.check_with_flip(line as usize + word, 7);
            expected.check(&found, &[("Record", Remedy::Pool)], line as usize);
        }
    }
    let media = Recorder::from_image(map.image.clone());
    let block = Pool::peek(&media).expect("a superblock");
    let summed = lines.iter().map(|&line| line as usize).find(|&line| {
        // A replayed record of one written page (kind 4). In memory only the last record of a
        // journal is in doubt.
        let is_written = map.image.word(line + 40) & (FRAMES_MAX - 1) != 0;
        map.kind == MediumKind::File
            && is_written
            && map.image.word(line) >> 32 == 0x0001_0004
            && map.image.word(line + 8) >= block.checkpoint.0
    });
    if let Some(line) = summed {
        let frame = map.image.word(line + 40) & (FRAMES_MAX - 1);
        let byte = (frame * PAGE) as usize;
        let found = map.check_with_flip(byte + 2048, 9);
        expected.check(&found, &[("Flipped", Remedy::Pool)], byte);
    }
    let entries = (in_flight.start as usize..in_flight.end() as usize).step_by(32);
    let is_used = |at: &usize| map.image.word(*at) != 0 && map.image.word(at + 24) != 0;
    if let Some(at) = entries.into_iter().find(is_used) {
        for word in [0, 8, 24] {
            let found = map.check_with_flip(at + word, 3);
            expected.check(&found, &[("InFlight", Remedy::Pool)], at);
        }
    }
    if case.end != LifeEnd::Close {
        // Replayed records may rewrite the structures that they name.
        return;
    }
    for &entry in &map.objects {
        for at in [entry + 32, entry + COPY_AT + 32] {
            let found = map.check_with_flip(at, 13);
            expected.check(&found, &[("Object", Remedy::Pool)], entry);
        }
        for level in 1..=4 {
            if let Some(at) = map.slot_at(entry, level, 0) {
                let found = map.check_with_flip(at, 1);
                expected.check(&found, &[("Slot", Remedy::Pool)], at);
            }
        }
    }
    let line = bitmap.start as usize;
    for at in [line, line + 56] {
        let found = map.check_with_flip(at, 2);
        expected.check(&found, &[("Bitmap", Remedy::Pool)], line);
    }
    for at in map.mapped() {
        let found = map.check_with_flip(at, 44);
        expected.check(&found, &[("Slot", Remedy::Pool)], at);
        let frame = map.slot(at).frame().expect("mapped");
        let byte = (frame.0 * PAGE) as usize;
        let found = map.check_with_flip(byte + 2048, 9);
        expected.check(&found, &[("Data", Remedy::Leg)], byte);
        let sum = (map.geometry.frame_table.start + frame.0 * 8) as usize;
        for bit in [9, 40, 62] {
            let found = map.check_with_flip(sum, bit);
            expected.check(&found, &[("FrameWord", Remedy::Pool)], sum);
        }
    }
    for &entry in &map.free {
        let found = map.check_with_flip(entry + ROOT_AT, 3);
        let wanted = [("Root", Remedy::Pool)];
        expected.check(&found, &wanted, entry + ROOT_AT);
    }
}

/// More than one changed bit: slots with valid checks and impossible contents.
fn check_forgeries(case: &DamageCase, expected: &mut FindingCoverage) {
    let map = PoolLayout::new(case);
    let mapped = map.mapped();
    let (Some(&entry), [one, two, ..]) = (map.objects.first(), &mapped[..]) else {
        return;
    };
    let leak = ("Leaked", Remedy::Pool);
    let found = map.check_with_words(&[(*one, 0)]);
    expected.check(&found, &[leak], None);
    // Leaked frames are reported only if every table can be read.
    let shared = map.check_with_words(&[(*two, map.image.word(*one))]);
    expected.check(&shared, &[("Shared", Remedy::Replace)], *two);
    let nowhere = Slot::EMPTY.map(FrameNo(1 << 30)).encode();
    let found = map.check_with_words(&[(*one, nowhere)]);
    expected.check(&found, &[("NoSuchFrame", Remedy::Replace)], *one);
    if let Some(at) = map
        .slot_at(entry, 1, 0)
        .filter(|&at| map.image.word(at) != 0)
    {
        let found = map.check_with_words(&[(at, nowhere)]);
        expected.check(&found, &[("NoSuchFrame", Remedy::Replace)], at);
    }
    let frame = map.free_frame();
    let sum_at = (map.geometry.frame_table.start + frame.0 * 8) as usize;
    let page = (frame.0 * PAGE) as usize..((frame.0 + 1) * PAGE) as usize;
    let bytes: Vec<u8> = page
        .step_by(8)
        .flat_map(|at| map.image.word(at).to_le_bytes())
        .collect();
    let sum = pagemesh_base::checksum::crc32c(&bytes);
    let sum = FrameWord::new(sum, Epoch(1)).bits();
    let slot = Slot::EMPTY.map(frame).encode();
    let unused = ("NotUsed", Remedy::Pool);
    let found = map.check_with_words(&[(*one, slot), (sum_at, sum)]);
    expected.check(&found, &[unused, leak], None);
    if let Some(leaf) = map.slot_at(entry, 0, PAGES + 3) {
        let found = map.check_with_words(&[(leaf, slot), (sum_at, sum)]);
        expected.check(&found, &[("Beyond", Remedy::Replace), unused], leaf);
    }
    // Line and copy are lost: the slice is lost.
    let lost = [entry + 32, entry + COPY_AT + 32].map(|at| (at, map.image.word(at) ^ 0x3000));
    expected.check(
        &map.check_with_words(&lost),
        &[("Object", Remedy::Replace)],
        entry,
    );
}

/// A record that lost two bits, with others behind it, cannot be read.
fn check_lost_records(case: &DamageCase, expected: &mut FindingCoverage) {
    let map = PoolLayout::new(case);
    let Some(&line) = live_lines(MediumKind::Memory, &map.image).first() else {
        return;
    };
    let at = line as usize;
    let words = [(at, 3u64), (at + 24, 1)].map(|(at, mask)| (at, map.image.word(at) ^ mask));
    let found = map.check_with_words(&words);
    if let [
        Finding {
            kind: FindingKind::Recovery(cause),
            ..
        },
        ..,
    ] = &found[..]
    {
        assert!(cause.contains("is damaged at line"), "{cause}");
        assert_eq!(found[0].remedy, Remedy::Replace);
        expected.seen_kinds.insert("Recovery");
    }
}

#[test]
fn every_finding_is_named_by_its_damage() {
    let mut expected = FindingCoverage::default();
    for seed in 1..7 {
        for kind in [MediumKind::Memory, MediumKind::File] {
            check_flips(&DamageCase::new(kind, seed, LifeEnd::Close), &mut expected);
            check_flips(&DamageCase::new(kind, seed, LifeEnd::Crash), &mut expected);
            check_forgeries(&DamageCase::new(kind, seed, LifeEnd::Close), &mut expected);
        }
        let crashed = DamageCase::new(MediumKind::Memory, seed, LifeEnd::Crash);
        check_lost_records(&crashed, &mut expected);
    }
    // The finding of a stale bitmap line has its own test:
    // `stale_bitmap_line_is_found_by_frame_count`.
    let all = [
        "Beyond",
        "Bitmap",
        "Data",
        "Flipped",
        "FrameWord",
        "InFlight",
        "Leaked",
        "NoSuchFrame",
        "NotUsed",
        "Object",
        "Record",
        "Recovery",
        "Root",
        "Shared",
        "Slot",
        "Superblock",
    ];
    assert_eq!(expected.seen_kinds, BTreeSet::from(all));
}
