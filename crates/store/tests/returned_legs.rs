//! A leg that was away while snapshots were made: random histories of two legs. After the missing versions are copied, all
//! snapshots see the same contents and births on both, as the model has them.

use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    SliceReply, SliceRequest, Stamp, VERSION_EDITS_MAX, VersionEdit, VersionEdits, VersionList,
    VersionRange, plan_version_edits,
};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::Random;
use pagemesh_pmem::MappedMedia;
use pagemesh_store::check::{CheckOptions, check};
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::Session;
use pagemesh_store::test_api::PoolInternals;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGE: u64 = PAGE_BYTES as u64;
const POOL_BYTES: usize = 24 << 20;
const PAGES: u64 = 1100;
/// Histories of the test.
const SEEDS: u64 = 6;
/// Pages that most changes hit, so that they have many versions.
const BUSY_PAGES: u64 = 12;
const LEAF: u64 = 512;

/// The first byte of each page that is not a hole.
type Contents = BTreeMap<u64, u8>;

/// A pool, and a session of it.
struct Leg {
    media: Arc<MappedMedia>,
    pool: Pool<MappedMedia>,
    session: Session<MappedMedia>,
    handle: Handle,
}

impl Leg {
    fn new() -> Leg {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(POOL_BYTES as u64).expect("room");
        let media = Arc::new(MappedMedia::new(file, POOL_BYTES).expect("memory"));
        format(&*media, Uuid::from_u128(1)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        Leg::with(media, pool)
    }

    fn with(media: Arc<MappedMedia>, mut pool: Pool<MappedMedia>) -> Leg {
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.mapping().clone(), number);
        let session = session.with_owner_wait(std::time::Duration::ZERO);
        let handle = pool.handle(SLICE).expect("the slice");
        Leg {
            media,
            pool,
            session,
            handle,
        }
    }

    /// The owner dies, and the pool is opened again.
    fn reopen(&mut self) {
        let (pool, found) = Pool::open(self.media.clone(), self.media.clone()).expect("sound");
        assert!(!found.is_damaged(), "{found:?}");
        *self = Leg::with(self.media.clone(), pool);
    }

    fn run(&mut self, epoch: Epoch, request: &SliceRequest) -> SliceReply {
        for _ in 0..100 {
            while self.pool.maintain().expect("sound") {}
            match execute(&mut self.session, self.handle, epoch, request.clone()) {
                ExecuteOutcome::Done(Ok(reply)) => return reply,
                ExecuteOutcome::Done(Err(_)) => {}
                ExecuteOutcome::NeedsOwner(_) => panic!("{request:?}"),
            }
        }
        panic!("the owner makes no room for {request:?}");
    }

    fn births(&mut self, epoch: Epoch) -> Vec<Epoch> {
        let (page, count) = (PageNo(0), PAGES as u32);
        match self.run(epoch, &SliceRequest::Births { page, count }) {
            SliceReply::Births(births) => births,
            other => panic!("{other:?}"),
        }
    }

    /// The pages that a snapshot sees: their first bytes and births.
    fn view(&mut self, snapshot: Epoch) -> BTreeMap<u64, (u8, Option<Epoch>)> {
        let mut view = BTreeMap::new();
        for leaf in 0..PAGES.div_ceil(LEAF) {
            let seen = self.pool.version_leaf(SLICE, snapshot, leaf);
            let seen = seen.expect("sound");
            for index in 0..LEAF {
                let Some(frame) = seen.frame(index as usize) else {
                    continue;
                };
                let page = leaf * LEAF + index;
                let mut bytes = [0; PAGE_BYTES];
                let mapping = self.pool.mapping();
                let read = mapping.read_version(frame, PageNo(page), &mut bytes);
                read.expect("sound");
                let birth = (0..200).map(Epoch);
                // The newest epoch since which it may be born is its birth.
                let birth = birth.take_while(|it| seen.may_be_born_since(index as usize, *it));
                view.insert(page, (bytes[0], birth.last()));
            }
        }
        view
    }

    /// The bytes of a page that a snapshot sees.
    fn read_version(&mut self, snapshot: Epoch, page: PageNo) -> Vec<u8> {
        let seen = self.pool.version_leaf(SLICE, snapshot, page.0 / LEAF);
        let frame = seen.expect("sound").frame((page.0 % LEAF) as usize);
        let mut bytes = [0; PAGE_BYTES];
        let mapping = self.pool.mapping();
        let read = mapping.read_version(frame.expect("a page"), page, &mut bytes);
        read.expect("sound");
        bytes.to_vec()
    }

    /// Checks the pool on a copy: each frame in use belongs to a table or to the log.
    fn check_pool(&mut self) {
        self.pool.checkpoint().expect("sound");
        let named = self.pool.mapped_frames().expect("sound");
        assert_eq!(named, self.pool.used_frames(), "frames in use");
        let options = &mut CheckOptions {
            is_ordered: true,
            reads_data: true,
            progress: &mut |_, _| {},
        };
        let copy = self.media.overlay().expect("memory");
        let (report, _) = check(&copy, options).expect("a pool");
        assert!(report.is_sound(), "{report:?}");
    }
}

/// Two legs of a column, and the model of their volume.
struct Column {
    /// Always in sync.
    source: Leg,
    target: Leg,
    /// Whether changes reach the target.
    is_target_written: bool,
    /// Whether the pages of the target are those of the source.
    is_target_equal: bool,
    /// The epoch in which the target was lost.
    left_at: Epoch,
    random: Random,
    op: u64,
    /// The epoch of changes.
    stamp: u32,
    live: Contents,
    snapshots: BTreeMap<Epoch, Contents>,
    /// The snapshots that the target has as a whole.
    complete: BTreeSet<Epoch>,
}

impl Column {
    fn new(seed: u64) -> Column {
        Column {
            source: Leg::new(),
            target: Leg::new(),
            is_target_written: true,
            is_target_equal: true,
            left_at: Epoch(0),
            random: Random::new(seed),
            op: 0,
            stamp: 1,
            live: Contents::new(),
            snapshots: BTreeMap::new(),
            complete: BTreeSet::new(),
        }
    }

    fn next_stamp(&mut self) -> Stamp {
        self.op += 1;
        Stamp {
            epoch: Epoch(self.stamp),
            op: self.op,
            open_ops: 0,
        }
    }

    fn change(&mut self, request: &SliceRequest) {
        let epoch = Epoch(self.stamp);
        self.source.run(epoch, request);
        if self.is_target_written {
            self.target.run(epoch, request);
        }
    }

    fn draw_page(&mut self) -> u64 {
        match self.random.below(4) {
            0 => self.random.draw() % PAGES,
            1 => 600 + self.random.draw() % BUSY_PAGES,
            _ => self.random.draw() % BUSY_PAGES,
        }
    }

    /// Writes or clears a page.
    fn change_page(&mut self) {
        let (page, tag) = (self.draw_page(), 1 + self.random.below(255) as u8);
        let stamp = self.next_stamp();
        let offset = page * PAGE;
        if self.random.below(5) == 0 {
            let len = PAGE;
            self.change(&SliceRequest::Clear { offset, len, stamp });
            self.live.remove(&page);
        } else {
            let data = vec![tag; PAGE_BYTES].into();
            self.change(&SliceRequest::Write {
                offset,
                data,
                stamp,
            });
            self.live.insert(page, tag);
        }
    }

    /// Patches a part of a page, in place if no snapshot sees it.
    fn patch_page(&mut self) {
        let (page, tag) = (self.draw_page(), 1 + self.random.below(255) as u8);
        let stamp = self.next_stamp();
        let data = vec![tag; 90].into();
        let offset = page * PAGE;
        self.change(&SliceRequest::Write {
            offset,
            data,
            stamp,
        });
        self.live.insert(page, tag);
    }

    fn cut(&mut self) {
        self.stamp += 1;
        let snapshot = Epoch(self.stamp);
        let prepared = self.source.pool.prepare_snapshot(SLICE, snapshot);
        prepared.expect("room");
        if self.is_target_written {
            let prepared = self.target.pool.prepare_snapshot(SLICE, snapshot);
            prepared.expect("room");
        }
        self.snapshots.insert(snapshot, self.live.clone());
    }

    fn drop_one(&mut self) {
        let at = self.random.below(self.snapshots.len().max(1));
        let Some(&snapshot) = self.snapshots.keys().nth(at) else {
            return;
        };
        let mut legs = [&mut self.source, &mut self.target];
        for leg in &mut legs[..1 + usize::from(self.is_target_written)] {
            leg.pool.drop_snapshots(SLICE, &[snapshot]).expect("room");
        }
        self.snapshots.remove(&snapshot);
        self.complete.remove(&snapshot);
    }

    /// A barrier of a new layout.
    fn raise(&mut self) -> Epoch {
        self.stamp += 1;
        let epoch = Epoch(self.stamp);
        self.source.pool.raise_epoch(SLICE, epoch).expect("newer");
        if self.is_target_written {
            self.target.pool.raise_epoch(SLICE, epoch).expect("newer");
        }
        epoch
    }

    fn live_steps(&mut self, count: usize) {
        for _ in 0..count {
            match self.random.below(16) {
                0..=9 => self.change_page(),
                10..=11 if self.is_in_sync() => self.patch_page(),
                12..=13 => self.cut(),
                14 if self.random.below(3) == 0 => self.drop_one(),
                _ => self.reopen_some(),
            }
        }
    }

    /// A leg that is being copied gets no parts of pages in this test.
    fn is_in_sync(&self) -> bool {
        !self.is_target_written || self.is_target_equal
    }

    fn reopen_some(&mut self) {
        match self.random.below(6) {
            0 => self.source.reopen(),
            1 => self.target.reopen(),
            2 => self.source.pool.merge_versions_soon(),
            3 => self.target.pool.merge_versions_soon(),
            _ => {}
        }
    }

    /// The target is away, while the source changes. It is lost during some changes of the present epoch.
    fn leave(&mut self) {
        (self.is_target_written, self.is_target_equal) = (false, false);
        self.left_at = Epoch(self.stamp);
        for _ in 0..self.random.below(8) {
            self.change_page();
        }
        self.raise();
        let count = 20 + self.random.below(60);
        self.live_steps(count);
    }

    /// The target comes back: its pages are copied while clients write, and it adopts the snapshots.
    fn resync(&mut self) {
        self.is_target_written = true;
        let epoch = self.raise();
        let births = self.source.births(epoch);
        let of_target = self.target.births(epoch);
        let differs = |page: &u64| {
            let (birth, of_target) = (births[*page as usize], of_target[*page as usize]);
            birth != of_target || birth >= self.left_at
        };
        let mut dirty: Vec<u64> = (0..PAGES).filter(differs).collect();
        // Sometimes the snapshots are adopted after the last page.
        let adopts_at = self.random.below(2 * dirty.len() + 1);
        while !dirty.is_empty() {
            if dirty.len() == adopts_at {
                self.adopt();
            }
            if self.random.below(3) == 0 {
                self.live_steps(1);
            }
            let page = dirty.swap_remove(self.random.below(dirty.len()));
            self.copy_page(page);
        }
        self.adopt();
        self.is_target_equal = true;
    }

    /// Copies a page with its birth.
    fn copy_page(&mut self, page: u64) {
        let epoch = Epoch(self.stamp);
        let offset = page * PAGE;
        let births = self.source.births(epoch);
        let data = match self.live.get(&page) {
            Some(_) => {
                let len = PAGE_BYTES as u32;
                match self.source.run(epoch, &SliceRequest::Read { offset, len }) {
                    SliceReply::Data(data) => data,
                    other => panic!("{other:?}"),
                }
            }
            None => vec![],
        };
        let stamp = self.next_stamp();
        // While a third leg is stale, or if the birth is not known, the copy is born now.
        let birth = match self.random.below(4) {
            0 => epoch,
            _ => births[page as usize],
        };
        let request = SliceRequest::Copy {
            page: PageNo(page),
            births: vec![birth],
            data: data.into(),
            stamp,
        };
        self.target.run(epoch, &request);
    }

    fn adopt(&mut self) {
        let listed = self.target.pool.snapshots_of(SLICE).expect("the slice");
        let is_gone = |it: &Epoch| !self.snapshots.contains_key(it);
        let gone: Vec<Epoch> = listed.into_iter().filter(is_gone).collect();
        let pool = &mut self.target.pool;
        pool.drop_snapshots(SLICE, &gone).expect("room");
        let all: Vec<Epoch> = self.snapshots.keys().copied().collect();
        pool.adopt_snapshots(SLICE, &all).expect("room");
    }

    /// Copies the versions that the target lacks. Stops after some edits, if `limit` says so.
    fn copy_versions(&mut self, limit: Option<usize>) {
        let below = self.raise();
        let mut edited = 0;
        let present = |snapshots: &BTreeMap<Epoch, Contents>, complete: &BTreeSet<Epoch>| {
            let missing = snapshots.keys().filter(|it| !complete.contains(it));
            let missing: Vec<Epoch> = missing.filter(|it| **it < below).copied().collect();
            (missing, complete.iter().copied().collect::<Vec<Epoch>>())
        };
        let mut from = PageNo(0);
        let missing = loop {
            let (missing, complete) = present(&self.snapshots, &self.complete);
            if missing.is_empty() {
                break missing;
            }
            let range = VersionRange {
                below,
                snapshots: missing.clone(),
                from,
            };
            let mut lists = [&mut self.source, &mut self.target].map(|leg| list(leg, &range));
            let next = lists.iter().filter_map(|list| list.next).min();
            for list in &mut lists {
                list.versions
                    .retain(|it| next.is_none_or(|next| it.page < next));
            }
            let plan = plan_version_edits(
                (&lists[0].versions, &lists[1].versions),
                below,
                (&missing, &complete),
                &self.snapshots.keys().copied().collect::<Vec<_>>(),
            );
            assert_eq!(plan.unequal, []);
            for edits in plan
                .edits
                .chunk_by(|one, other| one.page.0 / LEAF == other.page.0 / LEAF)
            {
                for edits in edits.chunks(1 + self.random.below(VERSION_EDITS_MAX)) {
                    if limit.is_some_and(|limit| edited >= limit) {
                        return;
                    }
                    edited += edits.len();
                    if missing.iter().all(|it| self.snapshots.contains_key(it)) {
                        self.edit(below, edits, &missing);
                    }
                    self.live_steps(1);
                }
            }
            if plan.edits.is_empty() {
                let Some(next) = next else { break missing };
                from = next;
            }
        };
        self.complete.extend(missing);
        let later = self.snapshots.keys().filter(|it| **it > below);
        self.complete.extend(later);
    }

    fn edit(&mut self, below: Epoch, edits: &[VersionEdit], missing: &[Epoch]) {
        let mut data = Vec::new();
        let added = edits.iter().filter(|edit| edit.from.is_none());
        for (edit, snapshot) in added.filter_map(|edit| Some((edit, edit.to?))) {
            let mut page = self.source.read_version(snapshot, edit.page);
            assert_eq!(crc32c(&page), edit.sum, "{edit:?}");
            data.append(&mut page);
        }
        let request = VersionEdits {
            below,
            edits: edits.to_vec(),
            data: data.into(),
        };
        let edit = |leg: &mut Leg| leg.pool.edit_versions(SLICE, &request);
        if edit(&mut self.target).is_err() {
            // It was opened again, and has forgotten that its log is merged.
            let range = VersionRange {
                below,
                snapshots: missing.to_vec(),
                from: PageNo(0),
            };
            list(&mut self.target, &range);
            edit(&mut self.target).expect("room");
        }
    }

    fn check(&mut self) {
        for (&snapshot, contents) in &self.snapshots {
            let source = self.source.view(snapshot);
            let bytes = |view: &BTreeMap<u64, (u8, Option<Epoch>)>| -> Contents {
                view.iter().map(|(page, it)| (*page, it.0)).collect()
            };
            assert_eq!(
                &bytes(&source),
                contents,
                "snapshot {snapshot} of the source"
            );
            if self.complete.contains(&snapshot) {
                let target = self.target.view(snapshot);
                assert_eq!(
                    bytes(&target),
                    bytes(&source),
                    "snapshot {snapshot} of the target"
                );
                let are_births_right = target.iter().all(|(page, it)| it.1 >= source[page].1);
                assert!(are_births_right, "births of snapshot {snapshot}");
            }
        }
    }
}

/// The versions of a range, once the pool is ready.
fn list(leg: &mut Leg, range: &VersionRange) -> VersionList {
    for _ in 0..1000 {
        let list = leg.pool.list_versions(SLICE, range).expect("room");
        if list.next != Some(range.from) {
            return list;
        }
    }
    panic!("the versions are never merged");
}

fn run_history(seed: u64) {
    let mut column = Column::new(seed);
    let mut copied = 0;
    for _ in 0..4 {
        column.live_steps(40);
        let below = column.raise();
        if column.is_target_equal && column.complete.is_empty() {
            column
                .complete
                .extend(column.snapshots.keys().filter(|it| **it < below));
        }
        column.leave();
        column.resync();
        let missing = column.snapshots.len() - column.complete.len();
        match column.random.below(4) {
            // It is away again before all versions are there.
            0 => {
                let limit = column.random.below(10);
                column.copy_versions(Some(limit));
            }
            _ => {
                column.copy_versions(None);
                copied += missing;
            }
        }
        column.check();
    }
    column.copy_versions(None);
    column.check();
    assert!(
        column.snapshots.is_empty() || copied > 0,
        "no version was copied"
    );
    for leg in [&mut column.source, &mut column.target] {
        leg.pool.merge_versions_soon();
        while leg.pool.maintain().expect("sound") {}
        leg.check_pool();
    }
}

#[test]
fn returned_leg_gets_versions_of_all_snapshots() {
    for seed in 0..SEEDS {
        run_history(seed);
    }
}
