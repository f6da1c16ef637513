//! Damage of versions for snapshots: of lines of the log, and of the pages that list versions. A snapshot has the bytes of
//! its time, or an error, and never other bytes; also after a restart. Slices are served, and the snapshots can be deleted.

use crate::damage::pools::{MediumKind, PAGE, PAGES, POOL_BYTES, session, slice};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{LegFailure, LegSession, clear, write};
use pagemesh_store::test_api::PoolInternals;
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

/// Distance of the damaged bytes in a page.
const STEP: usize = 61;
/// Maintenance rounds until all work is done.
const ROUNDS_MAX: usize = 1000;
/// Written pages.
const WRITTEN: u64 = 4;

type Contents = BTreeMap<u64, u8>;

/// A closed pool with versions, and the first byte of each page in its snapshots and now.
struct VersionedPool {
    kind: MediumKind,
    image: Image,
    snapshots: BTreeMap<Epoch, Contents>,
    live: Contents,
    lines: Vec<usize>,
    pages: Vec<usize>,
}

fn put(pool: &mut Pool<Recorder>, number: u64, page: u64, value: u8, epoch: u32) {
    change(pool, number, epoch, |legs, stamp| {
        write(legs, page * PAGE, &[value; PAGE_BYTES], stamp)
    });
}

fn change(
    pool: &mut Pool<Recorder>,
    number: u64,
    epoch: u32,
    run: impl FnOnce(&mut [LegSession<'_, Recorder>], Stamp) -> Result<(), LegFailure>,
) {
    let mut one = session(pool);
    let handle = pool.handle(slice(number)).expect("the slice");
    let stamp = Stamp {
        epoch: Epoch(epoch),
        op: 0,
        open_ops: 0,
    };
    let legs = &mut [LegSession {
        session: &mut one,
        handle,
    }];
    run(legs, stamp)
        .map_err(|failed| failed.cause)
        .expect("room");
    let number = one.number();
    drop(one);
    pool.close_session(number).expect("sound");
}

fn maintain(pool: &mut Pool<Recorder>) {
    pool.checkpoint().expect("sound");
    let mut rounds = 0..ROUNDS_MAX;
    while pool.maintain().expect("sound") {
        rounds.next().expect("the work ends");
    }
}

/// The place of the versions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Versions {
    /// In the log.
    Logged,
    /// Linked, and the log is empty.
    Merged,
    /// The records that replace pages of the last snapshot are not applied, and the log has room for so many lines.
    Unapplied(u64),
}

impl VersionedPool {
    fn new(kind: MediumKind, place: Versions) -> VersionedPool {
        let fresh = Recorder::new(POOL_BYTES);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let media = kind.media(&fresh.crash_point().all_persisted());
        let (mut pool, _) = kind.open(&media).expect("sound");
        let (mut live, mut snapshots) = (Contents::new(), BTreeMap::new());
        for number in 0..2 {
            pool.create(slice(number), PAGES * PAGE).expect("room");
            put(&mut pool, number, 0, 9, 1);
        }
        live.insert(0, 9);
        for (round, epoch) in [(1, 6), (2, 8)] {
            pool.prepare_snapshot(slice(0), Epoch(epoch)).expect("room");
            snapshots.insert(Epoch(epoch), live.clone());
            if let (Versions::Unapplied(room), 2) = (place, round) {
                pool.checkpoint().expect("sound");
                pool.fill_version_log(room).expect("a log");
            }
            for page in 0..WRITTEN {
                put(&mut pool, 0, page, 10 * round + page as u8, epoch);
                live.insert(page, 10 * round + page as u8);
            }
        }
        // A hole now, and a page in the last snapshot.
        let hole = WRITTEN - 1;
        change(&mut pool, 0, 8, |legs, stamp| {
            clear(legs, hole * PAGE, PAGE, stamp)
        });
        live.remove(&hole);
        if !matches!(place, Versions::Unapplied(_)) {
            pool.checkpoint().expect("sound");
        }
        if place == Versions::Merged {
            pool.merge_versions_soon();
            maintain(&mut pool);
        }
        let lines = pool.version_lines();
        let pages = pool.version_pages(slice(0)).expect("the slice");
        assert_eq!(lines.is_empty(), place == Versions::Merged);
        drop(pool);
        VersionedPool {
            kind,
            image: media.crash_point().all_persisted(),
            snapshots,
            live,
            lines,
            pages,
        }
    }

    /// The pool with other bits in some bytes.
    fn damaged(&self, places: &[usize], bits: u8) -> Arc<Recorder> {
        let media = self.kind.media(&self.image);
        for &at in places {
            let mut byte = [0];
            media.read(at, &mut byte);
            media.write(at, &[byte[0] ^ bits]);
            let _fenced = media.fence(media.flush(at, 1));
        }
        media
    }

    fn open(&self, media: &Arc<Recorder>) -> Pool<Recorder> {
        self.kind.open(media).expect("it opens").0
    }

    /// Checks the slices, and the snapshots. Returns the number of pages that are errors.
    fn check(&self, pool: &mut Pool<Recorder>) -> Result<usize, String> {
        for (number, live) in [(0, &self.live), (1, &Contents::from([(0, 9)]))] {
            let mut one = session(pool);
            let handle = pool.handle(slice(number)).expect("the slice");
            let mut found = vec![0; (PAGES * PAGE) as usize];
            let read = one.read(&handle, 0, &mut found, Epoch(8));
            read.map_err(|cause| format!("slice {number}: {cause}"))?;
            for page in 0..PAGES {
                let first = found[(page * PAGE) as usize];
                if first != live.get(&page).copied().unwrap_or(0) {
                    return Err(format!("page {page} of slice {number} has {first}"));
                }
            }
            let number = one.number();
            drop(one);
            pool.close_session(number).expect("sound");
        }
        let mut errors = 0;
        for (&snapshot, contents) in &self.snapshots {
            for page in 0..PAGES {
                let expected = contents.get(&page).copied().unwrap_or(0);
                match read_page(pool, snapshot, page) {
                    Some(found) if found == [expected; PAGE_BYTES] => {}
                    Some(found) => {
                        let found = found[0];
                        return Err(format!("page {page} of snapshot {snapshot} has {found}"));
                    }
                    None => errors += 1,
                }
            }
        }
        Ok(errors)
    }

    /// Damages some bytes. Returns the number of pages that cannot be read.
    fn check_damage(&self, places: &[usize], bits: u8) -> Result<usize, String> {
        let media = self.damaged(places, bits);
        let mut pool = self.open(&media);
        let first = self.check(&mut pool)?;
        pool.merge_versions_soon();
        maintain(&mut pool);
        self.check(&mut pool)?;
        drop(pool);
        let mut pool = self.open(&media);
        let later = self.check(&mut pool)?;
        if later < first {
            return Err(format!(
                "{first} damaged pages, and {later} after a restart"
            ));
        }
        self.check_deletion(&mut pool)?;
        Ok(later)
    }

    /// Deletes the snapshots, and takes another one.
    fn check_deletion(&self, pool: &mut Pool<Recorder>) -> Result<(), String> {
        for &snapshot in self.snapshots.keys() {
            let dropped = pool.drop_snapshots(slice(0), &[snapshot]);
            dropped.map_err(|cause| format!("dropping {snapshot}: {cause}"))?;
        }
        maintain(pool);
        let taken = pool.prepare_snapshot(slice(0), Epoch(20));
        taken.map_err(|cause| format!("a new snapshot: {cause}"))?;
        for page in 0..WRITTEN {
            put(pool, 0, page, 77, 20);
        }
        pool.merge_versions_soon();
        maintain(pool);
        for page in 0..PAGES {
            let expected = self.live.get(&page).copied().unwrap_or(0);
            if read_page(pool, Epoch(20), page) != Some([expected; PAGE_BYTES]) {
                return Err(format!("page {page} of the new snapshot is not {expected}"));
            }
        }
        Ok(())
    }
}

/// A page as a snapshot of the first slice sees it; none: an error.
fn read_page(pool: &mut Pool<Recorder>, snapshot: Epoch, page: u64) -> Option<[u8; PAGE_BYTES]> {
    let leaf = pool.version_leaf(slice(0), snapshot, 0).ok()?;
    if leaf.is_lost(page as usize) {
        return None;
    }
    let mut bytes = [0; PAGE_BYTES];
    if let Some(frame) = leaf.frame(page as usize) {
        let read = pool.mapping().read_version(frame, PageNo(page), &mut bytes);
        read.ok()?;
    }
    Some(bytes)
}

const KINDS: [MediumKind; 2] = [MediumKind::Memory, MediumKind::File];

#[track_caller]
fn check_lines(bits: impl Fn(usize) -> u8, has_errors: bool) {
    for kind in KINDS {
        let pool = VersionedPool::new(kind, Versions::Logged);
        assert_eq!(pool.lines.len() as u64, 1 + WRITTEN);
        for &line in &pool.lines {
            for at in line..line + 32 {
                let errors = pool.check_damage(&[at], bits(at));
                let errors = errors.unwrap_or_else(|why| panic!("{kind:?}, byte {at}: {why}"));
                assert_eq!(errors > 0, has_errors, "{kind:?}, byte {at}");
            }
        }
    }
}

#[test]
fn flipped_bit_of_version_log_is_corrected() {
    check_lines(|at| 1 << (at % 8), false);
}

#[test]
fn damaged_line_of_version_log_is_an_error_and_no_hole() {
    check_lines(|_| 0xff, true);
}

#[test]
fn damaged_page_of_versions_gives_no_wrong_bytes() {
    for kind in KINDS {
        let pool = VersionedPool::new(kind, Versions::Merged);
        assert_eq!(pool.pages.len(), 4, "head, list, directory and entries");
        let mut errors = 0;
        for &page in &pool.pages {
            for at in (page..page + PAGE_BYTES).step_by(STEP) {
                let found = pool.check_damage(&[at], 0xff);
                errors += found.unwrap_or_else(|why| panic!("{kind:?}, byte {at}: {why}"));
            }
        }
        assert!(errors > 0, "no page was damaged");
    }
}

/// No line is left that makes a merge store the head for another reason.
#[test]
fn lost_version_log_is_an_error_after_restarts() {
    for kind in KINDS {
        let pool = VersionedPool::new(kind, Versions::Logged);
        let errors = pool.check_damage(&pool.lines, 0xff);
        let errors = errors.unwrap_or_else(|why| panic!("{kind:?}: {why}"));
        assert!(errors as u64 >= WRITTEN, "{kind:?}: {errors}");
    }
}

#[test]
fn recovery_with_a_full_version_log_serves_the_slice() {
    for kind in KINDS {
        for room in [0, 1, 2, 20] {
            let pool = VersionedPool::new(kind, Versions::Unapplied(room));
            let (_, found) = kind.open(&kind.media(&pool.image)).expect("it opens");
            assert_eq!(found.versions_lost > 0, room < 20, "{found:?}");
            let errors = pool.check_damage(&[], 0);
            let errors = errors.unwrap_or_else(|why| panic!("{kind:?}, room {room}: {why}"));
            assert_eq!(errors > 0, room < 20, "{kind:?}, room {room}: {errors}");
        }
    }
}

/// The checks fail if the damage is forgotten.
#[test]
fn forgotten_damage_of_versions_is_found() {
    for present in [Defect::LostLineForgotten, Defect::DamageNotStored] {
        let pool = VersionedPool::new(MediumKind::Memory, Versions::Logged);
        defect::set(Some(present));
        let found = pool.check_damage(&pool.lines, 0xff);
        defect::set(None);
        assert!(found.is_err(), "{present:?}: {found:?}");
    }
}
