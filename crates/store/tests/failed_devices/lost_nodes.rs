//! Page-table nodes on a failed device: new nodes take their places, and the pages below are damaged until each is
//! written or cleared.

use super::bed::{
    Client, DEVICE, FIRST_LEAF_PAGES, INNER_FIRST, Kind, Model, PAGE, PAGES, add_device, checked,
    damaged_or_newer_pages, damaged_pages, maintain, page_bytes, state_of, written_pool,
};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use pagemesh_store::check::FindingKind;
use pagemesh_store::control::FrameRun;
use pagemesh_store::drain::NodeCursor;
use pagemesh_store::pool::{ObjectError, Pool};
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::test_api::PoolInternals;
use std::ops::Range;
use std::sync::Arc;
use uuid::Uuid;

const THIRD: Uuid = Uuid::from_u128(3);
/// Pages of the large slice: the second node of level 2 has two leaves, and the second leaf is never written.
const LARGE_PAGES: u64 = INNER_FIRST + 600;
/// Pages that the crash enumeration writes below the new nodes.
const NEW_PAGES: u64 = 8;
const EITHER: [(Kind, Lost); 4] = [
    (Kind::Memory, Lost::Leaf),
    (Kind::Memory, Lost::Inner),
    (Kind::File, Lost::Leaf),
    (Kind::File, Lost::Inner),
];

/// The highest node on the failed device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Leaf,
    Inner,
}

impl Lost {
    /// The pages below it.
    fn pages(self) -> Range<u64> {
        match self {
            Lost::Leaf => 512..PAGES,
            Lost::Inner => INNER_FIRST..LARGE_PAGES,
        }
    }

    /// A crash image of a pool with this node on the device, and the versions of its pages.
    fn crashed_pool(self, kind: Kind) -> (Image, Model) {
        let (near, far) = match self {
            Lost::Leaf => (PAGES, 0),
            Lost::Inner => (FIRST_LEAF_PAGES, 20),
        };
        let written = (0..near).chain(INNER_FIRST..INNER_FIRST + far);
        let (_pool, media, _client, model) = written_pool(kind, self.pages().end, written);
        media.take_crash_points();
        (media.crash_point().image(0), model)
    }
}

/// Replaces all lost nodes. Returns the number of steps.
fn replace_all(pool: &mut Pool<Recorder>) -> Result<u32, ObjectError> {
    let (mut at, mut steps) = (Some(NodeCursor::default()), 0);
    while let Some(from) = at {
        at = pool.replace_lost_nodes(from)?;
        steps += 1;
        assert!(steps < 1000, "the walk makes no progress");
    }
    Ok(steps)
}

fn is_damaged<T>(result: &Result<T, SliceError>) -> bool {
    matches!(result, Err(SliceError::Damaged { .. }))
}

fn write_request(page: u64, within: u64, bytes: Vec<u8>) -> SliceRequest {
    SliceRequest::Write {
        offset: page * PAGE + within,
        data: bytes.into(),
        stamp: Client::stamp(),
    }
}

fn clear_request(page: u64) -> SliceRequest {
    SliceRequest::Clear {
        offset: page * PAGE,
        len: PAGE,
        stamp: Client::stamp(),
    }
}

fn copy_request(page: u64, birth: u32, data: Vec<u8>) -> SliceRequest {
    SliceRequest::Copy {
        page: PageNo(page),
        births: vec![Epoch(birth)],
        data: data.into(),
        stamp: Client::stamp(),
    }
}

/// Whether a page counts as born at an epoch that no page reached.
fn is_dirty(client: &mut Client, page: u64) -> bool {
    let (since, from) = (Epoch(99), PageNo(page));
    match client.execute(SliceRequest::Dirty { since, from }) {
        Ok(SliceReply::Dirty { runs, .. }) => runs.first().is_some_and(|run| run.page == from),
        other => panic!("{other:?}"),
    }
}

fn birth_of(client: &mut Client, page: u64) -> Epoch {
    let (page, count) = (PageNo(page), 1);
    match client.execute(SliceRequest::Births { page, count }) {
        Ok(SliceReply::Births(births)) => births[0],
        other => panic!("{other:?}"),
    }
}

#[test]
fn page_below_a_replaced_node_is_written_and_cleared() {
    for (kind, lost) in EITHER {
        let (image, mut model) = lost.crashed_pool(kind);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        assert!(lost.pages().all(|page| damaged.contains(&page)), "{lost:?}");
        let mut client = Client::new(&mut pool);
        maintain(&mut pool);
        let first = lost.pages().start;
        let last = lost.pages().end - 1;
        let refused = client.write(first, 1);
        assert!(
            matches!(refused, Err(StoreError::Damaged { .. })),
            "{refused:?}"
        );
        let steps = replace_all(&mut pool).expect("room");
        // The inner node first, and then its leaves.
        assert!(lost == Lost::Leaf || steps >= 2, "{steps}");
        assert_eq!(damaged_pages(&mut pool, &model).as_ref(), Ok(&damaged));
        let mut execute = |request| {
            maintain(&mut pool);
            client.execute(request)
        };
        assert!(is_damaged(&execute(write_request(first, 100, vec![1; 50]))));
        assert_eq!(execute(clear_request(first)), Ok(SliceReply::Done));
        assert_eq!(execute(clear_request(last)), Ok(SliceReply::Done));
        let whole = write_request(last, 0, page_bytes(last, 7));
        assert_eq!(execute(whole), Ok(SliceReply::Done));
        let copy = copy_request(first + 1, 5, page_bytes(first + 1, 9));
        assert_eq!(execute(copy), Ok(SliceReply::Done));
        let hole = copy_request(first + 2, 6, Vec::new());
        assert_eq!(execute(hole), Ok(SliceReply::Done));
        let part = write_request(last, 0, page_bytes(last, 8)[..100].to_vec());
        assert_eq!(execute(part), Ok(SliceReply::Done));
        assert!(is_dirty(&mut client, first + 3));
        assert!(!is_dirty(&mut client, first + 1) && !is_dirty(&mut client, first + 2));
        assert_eq!(birth_of(&mut client, first + 1), Epoch(5));
        assert_eq!(birth_of(&mut client, first + 2), Epoch(6));
        assert_eq!(birth_of(&mut client, first + 3), Epoch(0));
        let part = write_request(last, 0, page_bytes(last, 7)[..100].to_vec());
        assert_eq!(client.execute(part), Ok(SliceReply::Done));
        for (page, version) in [(first, 0), (first + 1, 9), (first + 2, 0), (last, 7)] {
            model[page as usize] = version;
        }
        let is_left = |page: &u64| ![first, first + 1, first + 2, last].contains(page);
        let left: Vec<u64> = damaged.into_iter().filter(is_left).collect();
        client.end(&mut pool);
        assert_eq!(damaged_pages(&mut pool, &model).as_ref(), Ok(&left));
        pool.flush().expect("a sound medium");
        drop(pool);
        // A restart, before the checkpoint and after it.
        for _ in 0..2 {
            let mut pool = kind.open(&media, &[]).expect("a pool");
            assert_eq!(damaged_pages(&mut pool, &model).as_ref(), Ok(&left));
            assert_eq!(replace_all(&mut pool).expect("nothing to do"), 1);
            pool.close().expect("a sound medium");
        }
    }
}

#[test]
fn failed_device_with_nodes_leaves_after_repairs() {
    for (kind, lost) in EITHER {
        let (image, mut model) = lost.crashed_pool(kind);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        replace_all(&mut pool).expect("room");
        assert!(!pool.remove_device(DEVICE).expect("a sound pool"));
        add_device(&mut pool, THIRD);
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        let mut client = Client::new(&mut pool);
        for &page in &damaged {
            match model[page as usize] {
                0 => {
                    maintain(&mut pool);
                    let cleared = client.execute(clear_request(page));
                    assert_eq!(cleared, Ok(SliceReply::Done));
                }
                _ => client.write_maintained(&mut pool, page, &mut model),
            }
        }
        client.end(&mut pool);
        assert_eq!(damaged_pages(&mut pool, &model), Ok(Vec::new()));
        assert!(pool.remove_device(DEVICE).expect("a sound pool"));
        assert_eq!(state_of(&pool), None);
        pool.close().expect("a sound pool");
        // Frames that the lost leaf named are in use, and nothing names them.
        let (report, plan) = checked(&media, kind);
        let mut kinds = report.findings.iter().map(|it| &it.kind);
        assert!(report.is_complete && kinds.all(|it| matches!(it, FindingKind::Leaked(_))));
        plan.apply(&*media).expect("repaired");
        let (report, _) = checked(&media, kind);
        assert!(report.is_sound(), "{:?}", report.findings);
        let mut pool = kind.open(&media, &[]).expect("a pool");
        assert_eq!(damaged_pages(&mut pool, &model), Ok(Vec::new()));
    }
}

#[test]
fn replacement_on_a_full_pool_continues_with_room() {
    for (kind, lost) in EITHER {
        let (image, mut model) = lost.crashed_pool(kind);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        let runs: Vec<FrameRun> = std::iter::from_fn(|| pool.allocate_frames(1 << 20)).collect();
        let is_full = |pool: &mut Pool<Recorder>| {
            let refused = replace_all(pool);
            matches!(refused, Err(ObjectError::Store(StoreError::NoSpace)))
        };
        assert!(is_full(&mut pool));
        // Room for one node is taken by the highest one.
        let start = runs[0].start;
        pool.return_frames(FrameRun { start, len: 1 });
        assert_eq!(is_full(&mut pool), lost == Lost::Inner);
        add_device(&mut pool, THIRD);
        replace_all(&mut pool).expect("room");
        let mut client = Client::new(&mut pool);
        client.write_maintained(&mut pool, lost.pages().start, &mut model);
        client.end(&mut pool);
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        assert!(!damaged.contains(&lost.pages().start));
    }
}

/// Opens an image of a crash, and replaces the nodes that are left.
fn check_image(
    (kind, lost): (Kind, Lost),
    image: Image,
    model: &Model,
    newer: Range<u64>,
    may_be_damaged: impl Fn(u64) -> bool,
) -> Result<(), String> {
    let media = Arc::new(Recorder::unrecorded(image));
    let mut pool = kind.open(&media, &[]).map_err(|cause| cause.to_string())?;
    let damaged = damaged_or_newer_pages(&mut pool, model, newer.clone())?;
    if let Some(page) = damaged.iter().find(|page| !may_be_damaged(**page)) {
        return Err(format!("page {page} is damaged"));
    }
    replace_all(&mut pool).map_err(|cause| cause.to_string())?;
    if damaged_or_newer_pages(&mut pool, model, newer.clone())? != damaged {
        return Err("the replacement changes pages".into());
    }
    let mut client = Client::new(&mut pool);
    let mut written = model.clone();
    client.write_maintained(&mut pool, lost.pages().end - 1, &mut written);
    client.end(&mut pool);
    damaged_or_newer_pages(&mut pool, &written, newer)?;
    pool.close().map_err(|cause| cause.to_string())?;
    let (report, _) = checked(&media, kind);
    let is_wrong =
        |kind: &FindingKind| !matches!(kind, FindingKind::Leaked(_) | FindingKind::Data { .. });
    match report.findings.iter().find(|it| is_wrong(&it.kind)) {
        Some(finding) => Err(format!("the check finds {finding:?}")),
        None => Ok(()),
    }
}

fn check_points(
    points: Vec<CrashPoint>,
    mut check: impl FnMut(Image) -> Result<(), String>,
) -> Result<u32, String> {
    let mut images = 0;
    for point in points {
        for image in point.images(16, 4, 17) {
            images += 1;
            check(image)?;
        }
    }
    Ok(images)
}

/// Crashes at each step of a replacement, and of the writes after it. Returns the number of images.
fn crash_replacement(case: (Kind, Lost)) -> Result<u32, String> {
    let (kind, lost) = case;
    let (image, mut model) = lost.crashed_pool(kind);
    let media = kind.recorder(image);
    let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
    let damaged = damaged_pages(&mut pool, &model)?;
    let mut client = Client::new(&mut pool);
    maintain(&mut pool);
    media.take_crash_points();
    replace_all(&mut pool).expect("room");
    let first = lost.pages().start;
    let new = first..first + NEW_PAGES;
    let before = model.clone();
    for page in new.clone() {
        client.write_maintained(&mut pool, page, &mut model);
    }
    pool.flush().expect("a sound medium");
    let was_damaged = |page| damaged.contains(&page);
    let mut images = check_points(media.take_crash_points(), |image| {
        check_image(case, image, &before, new.clone(), was_damaged)
    })?;
    client.end(&mut pool);
    pool.checkpoint().expect("a sound medium");
    pool.close().expect("a sound medium");
    images += check_points(media.take_crash_points(), |image| {
        let is_left = |page| damaged.contains(&page) && !new.contains(&page);
        check_image(case, image, &model, 0..0, is_left)
    })?;
    Ok(images)
}

#[test]
fn crash_while_nodes_are_replaced_loses_no_more() {
    for case in EITHER {
        let images = crash_replacement(case);
        let images = images.unwrap_or_else(|wrong| panic!("{case:?}: {wrong}"));
        assert!(images > 50, "{case:?}: {images} images");
    }
}

fn with_defect(defect: Defect, case: (Kind, Lost)) -> Result<u32, String> {
    defect::set(Some(defect));
    let found = crash_replacement(case);
    defect::set(None);
    found
}

#[test]
fn empty_node_in_place_of_a_lost_one_is_found() {
    for case in EITHER {
        let found = with_defect(Defect::LostNodeEmptied, case);
        assert!(found.is_err_and(
            |text| text.contains("is not of version") || text.contains("changes pages")
        ));
    }
}

#[test]
fn new_node_that_is_named_before_its_sync_is_found() {
    let found = with_defect(Defect::NodeMovedBeforeSync, (Kind::File, Lost::Leaf));
    assert!(found.is_err(), "{found:?}");
}
