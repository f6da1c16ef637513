//! The common behaviour of all media, and the states that a crash may leave.

use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Durability, Image, MapError, MappedMedia, Media, Recorder, StatedClass};
use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

fn mapped(pages: usize) -> MappedMedia {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len((pages * PAGE_BYTES) as u64).expect("room");
    MappedMedia::new(file, pages * PAGE_BYTES).expect("a mapping")
}

fn check_media<M: Media>(media: [M; 2]) {
    let page: [u8; PAGE_BYTES] = std::array::from_fn(|i| (i * 7 + i / 256) as u8);
    let targets = [(&media[0], PAGE_BYTES), (&media[1], 0)];
    let (sums, page_stores) = M::stream_page(&targets, &page);
    let line_stores = media[0].stream_line(128, &[3; 64]);
    media[0].store(8, 5);
    let stores = page_stores.and(line_stores).and(media[0].flush(8, 8));
    let _fenced = media[0].fence(stores);

    assert_eq!(sums, PageChecksums::of(&page));
    for (medium, offset) in targets {
        let mut copy = [0; PAGE_BYTES];
        medium.read(offset, &mut copy);
        assert_eq!(copy, page);
    }
    assert_eq!(media[0].load(128), u64::from_le_bytes([3; 8]));
    assert_eq!(media[0].compare_exchange(8, 4, 6), Err(5));
    assert_eq!(media[0].compare_exchange(8, 5, 6), Ok(()));
    assert_eq!(media[0].load(8), 6);
}

#[test]
fn mapped_and_recorded_media_behave_alike() {
    check_media([mapped(2), mapped(1)]);
    let eadr = |medium: MappedMedia| {
        medium
            .with_stated_class(trusted(Durability::Eadr))
            .expect("trusted")
    };
    check_media([eadr(mapped(2)), eadr(mapped(1))]);
    check_media([Recorder::new(2 * PAGE_BYTES), Recorder::new(PAGE_BYTES)]);
}

#[test]
fn offsets_out_of_range_are_refused_before_use() {
    let medium = mapped(1);
    for offset in [PAGE_BYTES, PAGE_BYTES - 4, usize::MAX - 7] {
        let outcome = std::panic::catch_unwind(|| medium.load(offset));
        assert!(outcome.is_err(), "load at {offset}");
    }
}

#[test]
fn stores_of_two_processes_meet_in_one_file() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in memory");
    file.as_file().set_len(PAGE_BYTES as u64).expect("room");
    let open = || {
        File::options()
            .read(true)
            .write(true)
            .open(file.path())
            .expect("the file")
    };
    let (one, other) = (
        MappedMedia::new(open(), PAGE_BYTES).expect("a mapping"),
        MappedMedia::new(open(), PAGE_BYTES).expect("a mapping"),
    );
    one.store(64, 9);
    assert_eq!(other.load(64), 9);
}

#[test]
fn durability_class_is_detected_from_medium() {
    assert_eq!(mapped(1).durability(), Durability::Process);
    assert!(mapped(1).sync().is_ok());
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
    file.set_len(PAGE_BYTES as u64).expect("room");
    let medium = MappedMedia::new(file, PAGE_BYTES).expect("a mapping");
    assert_ne!(medium.durability(), Durability::Pmem);
    medium.store(0, 1);
    assert!(medium.sync().is_ok());
}

fn trusted(class: Durability) -> StatedClass {
    StatedClass {
        class,
        is_trusted: true,
    }
}

/// The result of stating a class for a medium: without and with the maker's word.
fn check_stated(medium: impl Fn() -> MappedMedia, class: Durability, alone: bool, on_trust: bool) {
    for (is_trusted, possible) in [(false, alone), (true, on_trust)] {
        let own = medium().durability();
        let what = format!("{class} on {own}, trusted: {is_trusted}");
        match medium().with_stated_class(StatedClass { class, is_trusted }) {
            Ok(stated) => {
                assert!(possible, "{what} must be refused");
                assert_eq!(stated.durability(), class, "{what}");
                stated.store(0, 1);
                assert!(stated.sync().is_ok(), "{what}");
            }
            Err(MapError::ClassNotProvided { class: of, medium }) => {
                assert!(!possible && !is_trusted, "{what} is possible");
                assert_eq!((of, medium), (class, own));
            }
            Err(MapError::CannotSync) => assert!(!possible, "{what} is possible"),
            Err(cause) => panic!("{what}: {cause}"),
        }
    }
}

#[test]
fn class_beyond_medium_requires_trust() {
    let on_disk = || {
        let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("a file");
        file.set_len(PAGE_BYTES as u64).expect("room");
        MappedMedia::new(file, PAGE_BYTES).expect("a mapping")
    };
    let device = || {
        let file = File::options().read(true).write(true).open("/dev/zero");
        MappedMedia::new(file.expect("a device"), PAGE_BYTES).expect("a mapping")
    };
    for medium in [&on_disk as &dyn Fn() -> MappedMedia, &|| mapped(1), &device] {
        check_stated(medium, Durability::Process, true, true);
        check_stated(medium, Durability::Eadr, false, true);
        let own = medium().durability();
        check_stated(medium, Durability::Pmem, own == Durability::Pmem, true);
    }
    check_stated(on_disk, Durability::FileSync, true, true);
    check_stated(|| mapped(1), Durability::FileSync, false, true);
    check_stated(device, Durability::FileSync, false, false);
}

#[test]
fn durability_class_names_parse_back() {
    for class in Durability::ALL {
        assert_eq!(class.to_string().parse(), Ok(class));
    }
    let unknown = "gold".parse::<Durability>().expect_err("no class");
    assert!(unknown.to_string().contains("'gold'"), "{unknown}");
}

#[test]
fn unmappable_length_or_file_is_refused_with_reason() {
    let file = || tempfile::tempfile().expect("a file");
    for len in [0, 1, PAGE_BYTES + 1] {
        assert!(matches!(
            MappedMedia::new(file(), len),
            Err(MapError::BadLength(_))
        ));
    }
    let error = MappedMedia::new(file(), PAGE_BYTES)
        .err()
        .expect("an error");
    assert!(error.to_string().contains("0 bytes but 4096"), "{error}");
}

/// The first words of two lines in every image of the last crash point.
fn words(recorder: &Recorder, at: [usize; 2]) -> BTreeSet<[u64; 2]> {
    let point = recorder.crash_points().pop().expect("a point");
    (0..point.count())
        .map(|index| at.map(|offset| point.image(index).word(offset)))
        .collect()
}

#[test]
fn words_of_one_line_persist_in_order() {
    let recorder = Recorder::new(PAGE_BYTES);
    recorder.store(0, 1);
    recorder.store(8, 2);
    assert_eq!(words(&recorder, [0, 8]), [[0, 0], [1, 0], [1, 2]].into());
}

#[test]
fn lines_persist_in_any_order() {
    let recorder = Recorder::new(PAGE_BYTES);
    recorder.store(0, 1);
    recorder.store(64, 2);
    let all = [[0, 0], [1, 0], [0, 2], [1, 2]];
    assert_eq!(words(&recorder, [0, 64]), all.into());
    let point = recorder.crash_points().pop().expect("a point");
    let sampled: BTreeSet<_> = (0..64).map(|seed| point.sample(seed)).collect();
    assert_eq!(sampled.len(), all.len(), "sampling reaches every image");
}

#[test]
fn only_flushed_lines_are_certain_after_a_fence() {
    let recorder = Recorder::new(PAGE_BYTES);
    recorder.store(0, 1);
    recorder.store(64, 2);
    let stores = recorder.flush(64, 8);
    recorder.store(64, 3);
    let _fenced = recorder.fence(stores);
    // Line 0 stays pending across the fence; the store after the flush too.
    let certain = [[0, 2], [1, 2], [0, 3], [1, 3]];
    assert_eq!(words(&recorder, [0, 64]), certain.into());
    assert_eq!(recorder.crash_points().len(), 2);
}

#[test]
fn fence_without_flush_persists_nothing() {
    let recorder = Recorder::new(2 * PAGE_BYTES);
    recorder.store(0, 1);
    let other = recorder.stream_line(PAGE_BYTES, &[1; 64]);
    let _fenced = recorder.fence(other);
    assert_eq!(words(&recorder, [0, 8]), [[0, 0], [1, 0]].into());
}

#[test]
fn no_image_is_given_twice() {
    let recorder = Recorder::new(PAGE_BYTES);
    // The second and the fourth of these five stores change nothing.
    for word in [1, 1, 2, 1, 3] {
        recorder.store(0, word);
    }
    recorder.store(64, 0);
    recorder.store(128, 7);
    let point = recorder.crash_point();
    assert_eq!(point.count(), 4 * 2);
    let given = |all_max, sampled| -> (Vec<Image>, bool) {
        let images = point.images(all_max, sampled, 5);
        let is_all = images.is_all();
        (images.collect(), is_all)
    };
    let (all, is_all) = given(8, 0);
    assert!(is_all && all.len() == 8);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 8);
    let (sampled, is_all) = given(7, 100);
    let different: BTreeSet<&Image> = sampled.iter().collect();
    assert!(!is_all && different.len() == sampled.len());
    assert_eq!(different, all.iter().collect(), "a long search meets all");
    assert_eq!(given(7, 3).0.len(), 3);
    assert_eq!(given(7, 2).0, [point.image(0), point.all_persisted()]);
}

/// A file with stores to sectors of the first and the second page.
fn file() -> Recorder {
    let file = Recorder::for_file(Image::filled(2 * PAGE_BYTES, 0));
    file.store(0, 1);
    file.store(504, 2);
    file.store(512, 3);
    file
}

#[test]
fn file_sector_persists_with_any_prefix_of_its_stores() {
    let file = file();
    let stores = file.flush(0, PAGE_BYTES);
    let _fenced = file.fence(stores);
    let of_a_sector = [[0, 0], [1, 0], [1, 2]];
    assert_eq!(words(&file, [0, 504]), of_a_sector.into());
    assert_eq!(words(&file, [504, 512]).len(), 4);
}

#[test]
fn sync_persists_whole_file_and_fence_nothing() {
    let file = file();
    file.sync().expect("a recorder never fails");
    assert_eq!(words(&file, [0, 504]), [[1, 2]].into());
    assert_eq!(file.crash_points().len(), 2);
    file.store(0, 9);
    assert_eq!(words(&file, [0, 512]), [[1, 3], [9, 3]].into());
}

#[test]
fn overlay_keeps_stored_pages_and_shows_file_elsewhere() {
    let file = Arc::new(file());
    let overlay = file.overlay();
    overlay.store(8, 7);
    file.store(0, 5);
    file.store(PAGE_BYTES, 6);
    let seen = [0, 8, 504, PAGE_BYTES].map(|at| overlay.load(at));
    assert_eq!(
        seen,
        [1, 7, 2, 6],
        "a page is its own from the first store on"
    );
    assert_eq!(file.load(8), 0);
}

#[test]
fn samples_include_images_one_line_short_of_all() {
    let recorder = Recorder::new(4 * PAGE_BYTES);
    for line in 0..40 {
        recorder.store(line * 64, 1);
    }
    let point = recorder.crash_point();
    let lost = |seed| {
        let image = point.sample(seed);
        (0..40).filter(|line| image.word(line * 64) == 0).count()
    };
    let lost: BTreeSet<usize> = (0..400).map(lost).collect();
    assert!(
        [1, 2, 3, 37, 38, 39]
            .iter()
            .all(|count| lost.contains(count)),
        "{lost:?}"
    );
}
