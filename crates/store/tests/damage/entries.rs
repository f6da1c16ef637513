//! Slots and entries that cannot be corrected, and the rest of their pool.

use crate::damage::pools::{
    DamageCase, LifeEnd, MediumKind, PAGE, PAGES, POOL_BYTES, SliceModel, check_image, put,
    read_all, session, slice,
};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, Recorder};
use pagemesh_store::check::FindingKind;
use pagemesh_store::geometry::{Geometry, OBJECT_BYTES};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::session::Session;
use pagemesh_store::table::{PageTable, SlotLocation};
use pagemesh_store::test_api::{COPY_AT, ROOT_AT};
use std::sync::Arc;
use uuid::Uuid;

/// A slot that lost two bits cannot be corrected. Reading its page is an error that names the page,
/// and so is writing a part of it; writing the whole page makes the slot sound again. The frame
/// that it named stays unused until a check finds it.
#[test]
fn page_with_damaged_slot_can_be_rewritten() {
    let fresh = Arc::new(Recorder::new(POOL_BYTES));
    format(&*fresh, Uuid::from_u128(7)).expect("a pool");
    let (mut pool, _) = Pool::open(fresh.clone(), fresh.clone()).expect("sound");
    pool.create(slice(0), PAGES * PAGE).expect("room");
    let handle = pool.handle(slice(0)).expect("the slice");
    let mut one = session(&mut pool);
    let put =
        |one: &mut Session<Recorder>, at: u64, data: &[u8], op| put(one, handle, at, data, op);
    put(&mut one, 0, &[1; 3 * PAGE_BYTES], 1).expect("room");
    pool.checkpoint().expect("sound");
    let geometry = *pool.mapping().geometry();
    let root_at = geometry.objects.start as usize + ROOT_AT;
    let table = PageTable::new(&*fresh, root_at, 4, geometry.first_frames());
    let Ok(SlotLocation::At(slot_at)) = table.locate(0, PageNo(1)) else {
        panic!("the leaf is linked");
    };
    fresh.store(slot_at, fresh.load(slot_at) ^ 0b11);
    let _fenced = fresh.fence(fresh.flush(slot_at, 8));

    let damaged = Err(StoreError::Damaged { offset: PAGE });
    let mut found = [0; 3 * PAGE_BYTES];
    assert_eq!(one.read(&handle, 0, &mut found, Epoch(5)), damaged);
    assert_eq!(put(&mut one, PAGE + 5, &[2; 9], 2), damaged);
    assert_eq!(put(&mut one, PAGE, &[3; PAGE_BYTES], 3), Ok(()));
    let mut model = vec![0; (PAGES * PAGE) as usize];
    model[..3 * PAGE_BYTES].fill(1);
    model[PAGE_BYTES..2 * PAGE_BYTES].fill(3);
    assert_eq!(one.read(&handle, 0, &mut found, Epoch(5)), Ok(()));
    assert!(found == model[..3 * PAGE_BYTES]);

    let model = SliceModel::from([(slice(0), model)]);
    let crashed = fresh.crash_point().image(0);
    pool.close_session(one.number()).expect("sound");
    pool.close().expect("sound");
    for image in [crashed, fresh.crash_point().all_persisted()] {
        let (report, plan) = check_image(MediumKind::Memory, &image).expect("a pool");
        let whats: Vec<_> = report.findings.iter().map(|it| &it.kind).collect();
        assert_eq!(whats, [&FindingKind::Leaked(1)]);
        assert_eq!(
            read_all(MediumKind::Memory, &image, &model, None)
                .expect("it opens")
                .1,
            0
        );
        let media = MediumKind::Memory.media(&image);
        plan.apply(&*media).expect("the damage can be repaired");
        let corrected = media.crash_point().image(0);
        assert!(
            check_image(MediumKind::Memory, &corrected)
                .expect("a pool")
                .0
                .is_sound()
        );
        assert_eq!(
            read_all(MediumKind::Memory, &corrected, &model, None)
                .expect("it opens")
                .1,
            0
        );
    }
}

/// A file's object table is corrected in the overlay as well: replaying a record may have made the
/// page private to the overlay.
#[test]
fn object_entry_is_repaired_next_to_replayed_entry() {
    let fresh = Recorder::new(POOL_BYTES);
    format(&fresh, Uuid::from_u128(7)).expect("a pool");
    let media = MediumKind::File.media(&fresh.crash_point().all_persisted());
    let (mut pool, _) = MediumKind::File.open(&media).expect("sound");
    let mut model = SliceModel::new();
    for number in 0..2 {
        pool.create(slice(number), PAGES * PAGE).expect("room");
        model.insert(slice(number), vec![0; (PAGES * PAGE) as usize]);
        if number == 0 {
            pool.checkpoint().expect("sound");
        }
    }
    let geometry = *pool.mapping().geometry();
    let image = media.crash_point().image(0);
    for at in [0, 24, COPY_AT + 24] {
        let at = geometry.objects.start as usize + at;
        let mut image = image.clone();
        image.set_word(at, image.word(at) ^ 1 << 14);
        let (_, recovered) = MediumKind::File
            .open(&MediumKind::File.media(&image))
            .expect("it opens");
        assert_eq!(recovered.corrected, 1);
        let (_, damaged) = read_all(MediumKind::File, &image, &model, None).expect("it opens");
        assert_eq!(damaged, 0);
    }
}

/// Line and copy of one object's entry are lost. The pool refuses that slice by name and no other
/// one, and grants none of its frames.
#[test]
fn lost_object_entry_refuses_only_its_slice() {
    for seed in 1..6 {
        let case = DamageCase::new(MediumKind::Memory, seed, LifeEnd::Close);
        if case.model.len() < 2 {
            continue;
        }
        let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
        let block = Pool::peek(&*MediumKind::Memory.media(&case.image)).expect("a superblock");
        let name = *case.model.keys().next().expect("a slice");
        let words = name.0.as_bytes().as_chunks::<8>().0;
        let names = |at: usize| {
            let found = [16, 24].map(|word| case.image.word(at + word).to_le_bytes());
            found == *words
        };
        let entries = 0..u64::from(block.objects_end);
        let mut entries = entries.map(|it| (geometry.objects.start + it * OBJECT_BYTES) as usize);
        let at = entries.find(|&at| names(at)).expect("the entry");
        let mut image = case.image.clone();
        for at in [at + 32, at + COPY_AT + 32] {
            image.set_word(at, image.word(at) ^ 0x3000);
        }
        let (report, _) = check_image(MediumKind::Memory, &image).expect("a pool");
        let whats: Vec<_> = report.findings.iter().map(|it| &it.kind).collect();
        assert_eq!(whats, [&FindingKind::Object]);
        assert_eq!(report.findings[0].location.slice, Some(name));

        let media = MediumKind::Memory.media(&image);
        let (mut pool, recovered) = Pool::open(media.clone(), media.clone()).expect("it opens");
        assert_eq!(recovered.objects_lost, 1);
        let refused = pool.find(name).expect_err("its entry is lost").to_string();
        assert!(refused.contains(&name.to_string()), "{refused}");
        assert!(refused.contains("pool check"), "{refused}");
        assert!(pool.create(name, PAGE).is_err(), "the name stays taken");
        let mut others = case.model.clone();
        others.remove(&name);
        // Overwrites every frame that can be granted.
        pool.create(slice(99), 4 * PAGES * PAGE).expect("an entry");
        let handle = pool.handle(slice(99)).expect("the slice");
        let mut one = session(&mut pool);
        for op in 1..=4 * PAGES {
            let data = [0xdd; PAGE_BYTES];
            let written = put(&mut one, handle, (op - 1) * PAGE, &data, op);
            pool.maintain().expect("sound");
            if written.is_err() {
                break;
            }
        }
        pool.delete(slice(99)).expect("the slice");
        pool.close_session(one.number()).expect("sound");
        while pool.maintain().expect("sound") {}
        pool.close().expect("sound");
        // With its entry restored the slice has its old contents.
        let mut after = media.crash_point().all_persisted();
        for word in (0..OBJECT_BYTES as usize)
            .step_by(8)
            .filter(|&it| it != ROOT_AT)
        {
            after.set_word(at + word, case.image.word(at + word));
        }
        assert_eq!(case.read(&after).expect("it opens").1, 0);
    }
}
