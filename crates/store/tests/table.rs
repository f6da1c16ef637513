//! Page tables against a map, and damaged page tables.

use pagemesh_base::ids::{FrameNo, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::slot::{FRAMES_MAX, Slot};
use pagemesh_store::table::{BadTable, PageTable, SlotLocation, reach};
use proptest::prelude::*;
use std::collections::BTreeMap;

const FRAMES: u64 = 256;
const ROOT_AT: usize = 128;

fn table(media: &Recorder, height: u8) -> PageTable<'_, Recorder> {
    PageTable::new(media, ROOT_AT, height, 1..FRAMES)
}

/// Links nodes from `next` on until the page's slot exists, and returns its position.
fn locate(media: &Recorder, height: u8, page: PageNo, next: &mut u64) -> usize {
    loop {
        let table = table(media, height);
        match table.locate(0, page).expect("a sound table") {
            SlotLocation::At(at) => return at,
            SlotLocation::Unlinked(level) => {
                let SlotLocation::At(at) = table.locate(level, page).expect("a sound table") else {
                    panic!("the slot of the first unlinked level must exist");
                };
                let node = Slot::EMPTY.map(FrameNo(*next));
                media
                    .compare_exchange(at, 0, node.encode())
                    .expect("an empty slot");
                *next += 1;
            }
        }
    }
}

proptest! {
    #[test]
    fn lookup_finds_only_mapped_pages(
        height in 0u8..=4,
        writes in prop::collection::vec((any::<u64>(), 1..FRAMES), 0..40),
        others in prop::collection::vec(any::<u64>(), 0..40),
    ) {
        let media = Recorder::new(FRAMES as usize * PAGE_BYTES);
        let mut model = BTreeMap::new();
        let mut next = 1;
        for (page, frame) in writes {
            // Clusters half of the pages, so that nodes are shared.
            let page = if page % 2 == 0 { page % reach(height) } else { page % 700 % reach(height) };
            let at = locate(&media, height, PageNo(page), &mut next);
            let old = model.get(&page).copied().unwrap_or(Slot::EMPTY);
            let new = old.map(FrameNo(frame));
            prop_assert_eq!(media.compare_exchange(at, old.encode(), new.encode()), Ok(()));
            model.insert(page, new);
        }
        let table = table(&media, height);
        let pages = model.keys().copied().chain(others.iter().map(|page| page % reach(height)));
        for page in pages {
            let expected = model.get(&page).copied().unwrap_or(Slot::EMPTY);
            prop_assert_eq!(table.lookup(PageNo(page)), Ok(expected));
        }
        let (page, pages) = (PageNo(reach(height)), reach(height));
        prop_assert_eq!(table.lookup(page), Err(BadTable::OutOfReach { page, pages }));
    }
}

#[test]
fn flipped_bit_in_walk_is_error_and_never_another_page() {
    let media = Recorder::new(FRAMES as usize * PAGE_BYTES);
    let page = PageNo(1 << 20 | 3);
    let at = locate(&media, 3, page, &mut 1);
    let slot = Slot::EMPTY.map(FrameNo(9));
    media.store(at, slot.encode());
    assert_eq!(table(&media, 3).lookup(page), Ok(slot));
    for level in 0..=3 {
        let Ok(SlotLocation::At(at)) = table(&media, 3).locate(level, page) else {
            panic!("level {level} is linked");
        };
        let sound = media.load(at);
        for bit in 0..64 {
            media.store(at, sound ^ 1 << bit);
            let error = table(&media, 3).lookup(page).expect_err("damage");
            assert!(matches!(error, BadTable::Damaged { level: found, .. } if found == level));
        }
        media.store(at, sound);
    }
}

#[test]
fn frames_outside_the_pool_are_not_followed() {
    let media = Recorder::new(FRAMES as usize * PAGE_BYTES);
    for frame in [0, FRAMES, FRAMES_MAX - 1] {
        media.store(ROOT_AT, Slot::EMPTY.map(FrameNo(frame)).encode());
        let error = table(&media, 2)
            .lookup(PageNo(0))
            .expect_err("no such frame");
        assert!(
            matches!(error, BadTable::NoSuchFrame { level: 2, .. }),
            "{error}"
        );
    }
}
