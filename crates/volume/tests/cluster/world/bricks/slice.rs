//! The model of a slice: pages, births, epoch, and the table of operations in flight.

use super::{Connection, PAGE};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{
    InFlightOp, PageRun, SliceError, SliceReply, SliceRequest, Stamp, TransactionPart, check_parts,
};
use pagemesh_base::space::Extent;
use std::collections::{BTreeMap, BTreeSet};

/// The pages that one record can cover.
const LEAF_PAGES: u64 = 512;
/// The default of the maximum of table entries of a slice. Beyond it the slice drops its table.
const TABLE_MAX: usize = 48;

pub(crate) type Page = Option<Box<[u8; 4096]>>;

/// A page before it was replaced: a snapshot between birth and death sees it.
#[derive(Clone)]
struct Version {
    page: u64,
    birth: u32,
    death: u32,
    bytes: Page,
}

/// The state that survives a crash. On a buffering brick only the last flushed state survives.
#[derive(Clone, Default)]
struct SliceState {
    pages: Vec<Page>,
    /// The epochs of the changes; 0 for pages that were never written.
    births: Vec<u32>,
    epoch: u32,
    snapshots: BTreeSet<u32>,
    /// Replaced pages that a snapshot sees.
    versions: Vec<Version>,
    table_max: usize,
    /// The in-flight table; none once it had too many entries.
    table: Option<Vec<InFlightOp>>,
    /// Operations from before the loss of a leg that is still behind. They may be complete by now.
    retained: Vec<InFlightOp>,
    /// By connection: operations that may be incomplete on other legs.
    open_by_connection: BTreeMap<u64, Vec<InFlightOp>>,
}

impl SliceState {
    /// Keeps a page that is replaced at this epoch, if a snapshot sees it.
    fn keep_version(&mut self, page: u64, death: u32) {
        let birth = self.births[page as usize];
        if birth < death && self.snapshots.range(birth + 1..=death).next().is_some() {
            let bytes = self.pages[page as usize].clone();
            self.versions.push(Version {
                page,
                birth,
                death,
                bytes,
            });
        }
    }

    /// A page as a snapshot sees it.
    fn version(&self, page: u64, snapshot: u32) -> Page {
        let sees = |it: &&Version| it.page == page && it.birth < snapshot && snapshot <= it.death;
        let mut kept = self.versions.iter().filter(sees);
        let is_live = self.births[page as usize] < snapshot;
        match (kept.next(), is_live) {
            (Some(version), false) => {
                assert!(kept.next().is_none(), "one version of page {page}");
                version.bytes.clone()
            }
            (None, true) => self.pages[page as usize].clone(),
            (kept, _) => panic!("page {page}: {} versions", 1 + u32::from(kept.is_some())),
        }
    }

    fn add_entries(&mut self, entries: &[InFlightOp]) {
        let Some(table) = &mut self.table else {
            return;
        };
        for entry in entries {
            if !table.contains(entry) {
                table.push(*entry);
            }
        }
        if table.len() > self.table_max {
            self.table = None;
        }
    }
}

#[derive(Default)]
pub(crate) struct Slice {
    current: SliceState,
    durable: SliceState,
    pub damaged: BTreeSet<u64>,
    pub reads: u64,
}

impl Slice {
    /// A slice of holes.
    pub(super) fn new(bytes: u64, table_max: Option<usize>) -> Slice {
        let pages = bytes.div_ceil(PAGE) as usize;
        let kept = SliceState {
            pages: vec![None; pages],
            births: vec![0; pages],
            table_max: table_max.unwrap_or(TABLE_MAX),
            table: Some(vec![]),
            ..SliceState::default()
        };
        Slice {
            durable: kept.clone(),
            current: kept,
            ..Slice::default()
        }
    }

    /// The brick's process dies. A buffering brick loses all unflushed data.
    pub(super) fn crash(&mut self, buffers: bool) {
        if buffers {
            self.current = self.durable.clone();
        }
        for kept in [&mut self.current, &mut self.durable] {
            let retained = std::mem::take(&mut kept.retained);
            kept.add_entries(&retained);
        }
        self.end_sessions();
    }

    pub(crate) fn pages(&self) -> &[Page] {
        &self.current.pages
    }

    pub(crate) fn births(&self) -> &[u32] {
        &self.current.births
    }

    /// The first page with two known births that differ, and these births.
    pub(crate) fn differing_births(&self, other: &Slice) -> Option<(usize, u32, u32)> {
        let pairs = self.births().iter().zip(other.births()).enumerate();
        let mut pairs = pairs.map(|(page, (own, theirs))| (page, *own, *theirs));
        pairs.find(|(_, own, theirs)| own != theirs && *own > 0 && *theirs > 0)
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.current.epoch
    }

    /// Sets a page, as if another volume had left it.
    pub(crate) fn set_page(&mut self, page: usize, bytes: &[u8]) {
        for kept in [&mut self.current, &mut self.durable] {
            let mut own = Box::new([0; 4096]);
            own.copy_from_slice(bytes);
            kept.pages[page] = Some(own);
            kept.births[page] = 1;
        }
    }

    pub(crate) fn damage_page(&mut self, page: u64) {
        self.damaged.insert(page);
    }
}

impl Slice {
    fn end_sessions(&mut self) {
        let numbers: Vec<u64> = self.current.open_by_connection.keys().copied().collect();
        numbers
            .into_iter()
            .for_each(|number| self.end_session(number));
    }

    /// Moves the session's incomplete operations to the table.
    pub(crate) fn end_session(&mut self, number: u64) {
        for kept in [&mut self.current, &mut self.durable] {
            if let Some(open) = kept.open_by_connection.remove(&number) {
                kept.add_entries(&open);
            }
        }
    }

    pub(super) fn execute(
        &mut self,
        connection: u64,
        room: &mut u64,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        match request {
            SliceRequest::Read { offset, len } => self.read(offset, len),
            SliceRequest::Write {
                offset,
                data,
                stamp,
            } => {
                self.check_epoch(stamp)?;
                self.change(
                    connection,
                    room,
                    offset,
                    data.len() as u64,
                    Some(&data),
                    stamp,
                )
            }
            SliceRequest::Clear { len: 0, stamp, .. } => {
                self.check_epoch(stamp)?;
                self.trim_completed(connection, stamp);
                Ok(SliceReply::Done)
            }
            SliceRequest::Clear { offset, len, stamp } => {
                self.check_epoch(stamp)?;
                self.change(connection, room, offset, len, None, stamp)
            }
            SliceRequest::Transact { parts, stamp } => {
                self.check_epoch(stamp)?;
                self.transact(connection, room, &parts, stamp)
            }
            SliceRequest::Durable { change } => {
                let reply = self.execute(connection, room, *change)?;
                self.durable = self.current.clone();
                Ok(reply)
            }
            SliceRequest::Flush => {
                self.durable = self.current.clone();
                Ok(SliceReply::Done)
            }
            SliceRequest::Extents { offset, len } => Ok(self.extents(offset, len)),
            SliceRequest::Checksums { page, count } => self.checksums(page.0, count),
            SliceRequest::Dirty { since, from } => Ok(self.dirty(since, from.0)),
            SliceRequest::Births { page, count } => Ok(self.listed_births(page.0, count)),
            SliceRequest::Copy {
                page,
                births,
                data,
                stamp,
            } => {
                self.check_epoch(stamp)?;
                self.copy(connection, room, (page.0, &births, &data), stamp)
            }
            SliceRequest::InFlight => Ok(SliceReply::InFlight(self.in_flight())),
            SliceRequest::ForgetInFlight => {
                for kept in [&mut self.current, &mut self.durable] {
                    kept.table = Some(vec![]);
                    kept.retained.clear();
                }
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { epoch, lost_since } => self.raise(epoch, lost_since),
            SliceRequest::KeepOrder => Ok(SliceReply::Done),
            SliceRequest::PrepareSnapshot { snapshot } => {
                for kept in [&mut self.current, &mut self.durable] {
                    kept.snapshots.insert(snapshot.0);
                }
                Ok(SliceReply::Done)
            }
            SliceRequest::ReadVersion {
                snapshot,
                offset,
                len,
            } => self.read_version(snapshot, offset, len),
            SliceRequest::VersionExtents {
                snapshot,
                offset,
                len,
            } => self.version_extents(snapshot, offset, len),
            SliceRequest::VersionLeaf { .. } => {
                Err(SliceError::Refused("its memory is not mapped".into()))
            }
            SliceRequest::VersionChanges {
                from,
                to,
                offset,
                len,
            } => self.version_changes(from, to, offset, len),
        }
    }

    /// Checks the epoch of a request without a stamp: it is the newest that its connection
    /// used.
    pub(super) fn check_connection_epoch(
        &self,
        connection: &mut Connection,
        request: &SliceRequest,
    ) -> Result<(), SliceError> {
        let says = request.epoch();
        connection.epoch = says.map_or(connection.epoch, |it| it.max(connection.epoch));
        let looks = matches!(
            request,
            SliceRequest::Read { .. }
                | SliceRequest::Extents { .. }
                | SliceRequest::Checksums { .. }
                | SliceRequest::Dirty { .. }
                | SliceRequest::Births { .. }
                | SliceRequest::ForgetInFlight
        );
        if looks && connection.epoch.0 < self.current.epoch {
            let current = Epoch(self.current.epoch);
            return Err(SliceError::StaleEpoch { current });
        }
        Ok(())
    }

    fn check_epoch(&self, stamp: Stamp) -> Result<(), SliceError> {
        if stamp.epoch.0 < self.current.epoch {
            let current = Epoch(self.current.epoch);
            return Err(SliceError::StaleEpoch { current });
        }
        Ok(())
    }

    fn raise(&mut self, epoch: Epoch, lost_since: Epoch) -> Result<SliceReply, SliceError> {
        if epoch.0 < self.current.epoch {
            let current = Epoch(self.current.epoch);
            return Err(SliceError::StaleEpoch { current });
        }
        self.current.epoch = epoch.0;
        let kept = &mut self.current;
        let open = kept.open_by_connection.values().flatten();
        kept.retained.extend(open);
        kept.retained.retain(|entry| entry.epoch < lost_since);
        let in_flight = self.in_flight();
        if in_flight.is_none() {
            // There are too many entries. All pages are compared when the leg returns.
            self.current.table = None;
        }
        // The barrier itself becomes durable, and no earlier write.
        self.durable.epoch = self.current.epoch;
        self.durable.table = self.current.table.clone();
        self.durable.retained = self.current.retained.clone();
        self.durable.open_by_connection = self.current.open_by_connection.clone();
        Ok(SliceReply::Done)
    }

    /// The operations of ended sessions, and the incomplete ones of live sessions.
    fn in_flight(&self) -> Option<Vec<InFlightOp>> {
        let mut all = self.current.clone();
        all.add_entries(&self.current.retained);
        let open: Vec<InFlightOp> = self
            .current
            .open_by_connection
            .values()
            .flatten()
            .copied()
            .collect();
        all.add_entries(&open);
        all.table
    }

    fn record_in_flight(&mut self, connection: u64, offset: u64, len: u64, stamp: Stamp) {
        let page = offset / PAGE;
        let entry = InFlightOp {
            page: PageNo(page),
            count: ((offset + len).div_ceil(PAGE) - page) as u32,
            epoch: stamp.epoch,
            op: stamp.op,
        };
        self.trim_completed(connection, stamp);
        self.current
            .open_by_connection
            .entry(connection)
            .or_default()
            .push(entry);
    }

    /// Whether a client's death would leave nothing to recover.
    pub(crate) fn has_nothing_in_flight(&self) -> bool {
        self.current.table == Some(vec![])
            && self.current.retained.is_empty()
            && self.current.open_by_connection.values().all(Vec::is_empty)
    }

    fn trim_completed(&mut self, connection: u64, stamp: Stamp) {
        let oldest = stamp.op - u64::from(stamp.open_ops);
        if let Some(open) = self.current.open_by_connection.get_mut(&connection) {
            open.retain(|earlier| earlier.op >= oldest);
        }
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Result<SliceReply, SliceError> {
        self.reads += 1;
        let end = offset + u64::from(len);
        assert!(
            end <= self.current.pages.len() as u64 * PAGE,
            "a read beyond the slice"
        );
        let mut data = Vec::with_capacity(len as usize);
        for page in offset / PAGE..end.div_ceil(PAGE) {
            if self.damaged.contains(&page) {
                let offset = page * PAGE;
                return Err(SliceError::Damaged { offset });
            }
            let start = page * PAGE;
            let (from, to) = (offset.max(start) - start, end.min(start + PAGE) - start);
            match &self.current.pages[page as usize] {
                Some(bytes) => data.extend_from_slice(&bytes[from as usize..to as usize]),
                None => data.resize(data.len() + (to - from) as usize, 0),
            }
        }
        Ok(SliceReply::Data(data))
    }

    /// Replaces pages, or makes them holes, and sets their births.
    fn copy(
        &mut self,
        connection: u64,
        room: &mut u64,
        (page, births, data): (u64, &[Epoch], &[u8]),
        stamp: Stamp,
    ) -> Result<SliceReply, SliceError> {
        for (at, birth) in births.iter().enumerate() {
            let page = page + at as u64;
            let bytes = data.as_chunks::<{ PAGE as usize }>().0.get(at);
            let is_known = birth.0 > 0;
            let is_hole = self.current.pages[page as usize].is_none();
            if bytes.is_none() && !is_known && is_hole && !self.damaged.contains(&page) {
                continue;
            }
            if bytes.is_some() {
                *room = match *room {
                    u64::MAX => u64::MAX,
                    room => room.checked_sub(1).ok_or(SliceError::NoSpace)?,
                };
            }
            let kept = &mut self.current;
            let death = if is_known { birth.0 } else { stamp.epoch.0 };
            kept.keep_version(page, death);
            kept.pages[page as usize] = bytes.map(|bytes| Box::new(*bytes));
            kept.births[page as usize] = if is_known { birth.0 } else { stamp.epoch.0 };
            self.damaged.remove(&page);
            self.record_in_flight(connection, page * PAGE, PAGE, stamp);
        }
        Ok(SliceReply::Done)
    }

    /// Whether a snapshot was prepared.
    pub(crate) fn has_snapshot(&self, snapshot: Epoch) -> bool {
        self.current.snapshots.contains(&snapshot.0)
    }

    /// All pages as a snapshot sees them.
    pub(crate) fn snapshot_pages(&self, snapshot: Epoch) -> Vec<Page> {
        let pages = 0..self.current.pages.len() as u64;
        pages
            .map(|page| self.current.version(page, snapshot.0))
            .collect()
    }

    fn check_snapshot(&self, snapshot: Epoch) -> Result<(), SliceError> {
        match self.has_snapshot(snapshot) {
            true => Ok(()),
            false => Err(SliceError::Refused("there is no such snapshot".into())),
        }
    }

    fn read_version(
        &mut self,
        snapshot: Epoch,
        offset: u64,
        len: u32,
    ) -> Result<SliceReply, SliceError> {
        self.reads += 1;
        self.check_snapshot(snapshot)?;
        let mut data = vec![0; len as usize];
        for (at, byte) in data.iter_mut().enumerate() {
            let from = offset + at as u64;
            if self.damaged.contains(&(from / PAGE)) {
                let offset = from / PAGE * PAGE;
                return Err(SliceError::Damaged { offset });
            }
            let page = self.current.version(from / PAGE, snapshot.0);
            *byte = page.map_or(0, |bytes| bytes[(from % PAGE) as usize]);
        }
        Ok(SliceReply::Data(data))
    }

    fn version_extents(
        &self,
        snapshot: Epoch,
        offset: u64,
        len: u64,
    ) -> Result<SliceReply, SliceError> {
        self.check_snapshot(snapshot)?;
        let end = offset + len;
        let extents = (offset / PAGE..end.div_ceil(PAGE)).map(|page| Extent {
            len: end.min((page + 1) * PAGE) - offset.max(page * PAGE),
            mapped: self.current.version(page, snapshot.0).is_some(),
        });
        Ok(SliceReply::Extents(extents.collect()))
    }

    fn version_changes(
        &self,
        from: Epoch,
        to: Epoch,
        offset: u64,
        len: u64,
    ) -> Result<SliceReply, SliceError> {
        if from == Epoch(0) {
            return self.version_extents(to, offset, len);
        }
        self.check_snapshot(from)?;
        self.check_snapshot(to)?;
        let end = offset + len;
        let extents = (offset / PAGE..end.div_ceil(PAGE)).map(|page| Extent {
            len: end.min((page + 1) * PAGE) - offset.max(page * PAGE),
            mapped: self.current.version(page, from.0) != self.current.version(page, to.0),
        });
        Ok(SliceReply::Extents(extents.collect()))
    }

    fn listed_births(&self, page: u64, count: u32) -> SliceReply {
        let pages = page..page + u64::from(count);
        let birth = |page: u64| match self.damaged.contains(&page) {
            true => Epoch(0),
            false => Epoch(self.current.births[page as usize]),
        };
        SliceReply::Births(pages.map(birth).collect())
    }

    /// Makes a change as a pool does. A part of a page is one record, and so is a run of whole
    /// pages. The first failure ends the change, and earlier records stay. A record without
    /// effect is not recorded, and is no birth.
    pub(crate) fn change(
        &mut self,
        connection: u64,
        room: &mut u64,
        offset: u64,
        len: u64,
        data: Option<&[u8]>,
        stamp: Stamp,
    ) -> Result<SliceReply, SliceError> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let page = at / PAGE;
            let whole = at.is_multiple_of(PAGE) && end - at >= PAGE;
            let to = if whole {
                (end / PAGE).min((page / LEAF_PAGES + 1) * LEAF_PAGES) * PAGE
            } else {
                end.min((page + 1) * PAGE)
            };
            let data = data.map(|data| &data[(at - offset) as usize..(to - offset) as usize]);
            if self.change_record(room, at, to, data, stamp.epoch)? {
                self.record_in_flight(connection, at, to - at, stamp);
            }
            at = to;
        }
        Ok(SliceReply::Done)
    }

    /// Makes all parts or none, with one table entry for each run.
    fn transact(
        &mut self,
        connection: u64,
        room: &mut u64,
        parts: &[TransactionPart],
        stamp: Stamp,
    ) -> Result<SliceReply, SliceError> {
        check_parts(parts, self.current.pages.len() as u64 * PAGE).expect("the volume has checked");
        let mut needed = 0;
        for part in parts {
            let pages = part.offset() / PAGE..(part.offset() + part.len()) / PAGE;
            match part {
                TransactionPart::Write { .. } => needed += pages.end - pages.start,
                TransactionPart::Clear { .. } => self.check_slots(pages)?,
            }
        }
        if needed > *room {
            return Err(SliceError::NoSpace);
        }
        for part in parts {
            let (offset, len) = (part.offset(), part.len());
            let data = match part {
                TransactionPart::Write { data, .. } => Some(&data[..]),
                TransactionPart::Clear { .. } => None,
            };
            let done = self.change(connection, room, offset, len, data, stamp);
            done.expect("nothing fails after the look at all parts");
        }
        Ok(SliceReply::Done)
    }

    /// A clear needs slots that can be read.
    fn check_slots(&self, pages: std::ops::Range<u64>) -> Result<(), SliceError> {
        let is_mapped = |page: u64| self.current.pages[page as usize].is_some();
        let mut unread = pages.filter(|page| !is_mapped(*page) && self.damaged.contains(page));
        match unread.next() {
            Some(page) => Err(SliceError::Damaged {
                offset: page * PAGE,
            }),
            None => Ok(()),
        }
    }

    /// Makes one record of a change; true if it had an effect.
    fn change_record(
        &mut self,
        room: &mut u64,
        from: u64,
        to: u64,
        data: Option<&[u8]>,
        birth: Epoch,
    ) -> Result<bool, SliceError> {
        let pages = from / PAGE..to.div_ceil(PAGE);
        let whole = (to - from).is_multiple_of(PAGE);
        let mapped = |slice: &Slice, page: u64| slice.current.pages[page as usize].is_some();
        // A hole of an earlier epoch is born anew.
        let born_anew = |slice: &Slice, page: u64| {
            let before = slice.current.births[page as usize];
            !mapped(slice, page) && (1..birth.0).contains(&before)
        };
        // If no page is mapped, the damage is in the slot. Only a write of the whole page
        // replaces it without a read.
        if data.is_none() {
            self.check_slots(pages.clone())?;
        }
        let changes = |page| mapped(self, page) || whole && born_anew(self, page);
        if data.is_none() && !pages.clone().any(changes) {
            return Ok(false);
        }
        if !whole && self.damaged.contains(&pages.start) {
            let offset = pages.start * PAGE;
            return Err(SliceError::Damaged { offset });
        }
        if data.is_some() || !whole {
            let needed = pages.end - pages.start;
            *room = match *room {
                u64::MAX => u64::MAX,
                room => room.checked_sub(needed).ok_or(SliceError::NoSpace)?,
            };
        }
        for page in pages {
            let start = page * PAGE;
            let (first, last) = (from.max(start), to.min(start + PAGE));
            let within = (first - start) as usize..(last - start) as usize;
            let anew = born_anew(self, page);
            self.current.keep_version(page, birth.0);
            let slot = &mut self.current.pages[page as usize];
            match data {
                None if whole && slot.is_none() && !anew => continue,
                None if whole => *slot = None,
                _ => {
                    let bytes = slot.get_or_insert_with(|| Box::new([0; 4096]));
                    match data {
                        Some(data) => bytes[within].copy_from_slice(
                            &data[(first - from) as usize..(last - from) as usize],
                        ),
                        None => bytes[within].fill(0),
                    }
                }
            }
            if whole {
                self.damaged.remove(&page);
            }
            self.current.births[page as usize] = birth.0;
        }
        Ok(true)
    }

    fn extents(&self, offset: u64, len: u64) -> SliceReply {
        let end = offset + len;
        let mut all: Vec<Extent> = vec![];
        for page in offset / PAGE..end.div_ceil(PAGE) {
            let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
            // A damaged page counts as mapped, since its state is unknown.
            let mapped =
                self.current.pages[page as usize].is_some() || self.damaged.contains(&page);
            match all.last_mut() {
                Some(last) if last.mapped == mapped => last.len += to - from,
                _ => all.push(Extent {
                    len: to - from,
                    mapped,
                }),
            }
        }
        SliceReply::Extents(all)
    }

    fn checksums(&self, page: u64, count: u32) -> Result<SliceReply, SliceError> {
        let mut sums = vec![];
        for page in page..page + u64::from(count) {
            if self.damaged.contains(&page) {
                let offset = page * PAGE;
                return Err(SliceError::Damaged { offset });
            }
            let zero = [0; 4096];
            let bytes = self.current.pages[page as usize]
                .as_deref()
                .unwrap_or(&zero);
            // FNV-1a, folded. Sectors with the same repeated number must not cancel each other
            // out.
            let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let sum = (hash >> 32) as u32 ^ hash as u32;
            sums.push(sum);
        }
        Ok(SliceReply::Checksums(sums))
    }

    fn dirty(&self, since: Epoch, from: u64) -> SliceReply {
        let mut runs: Vec<PageRun> = vec![];
        for page in from..self.current.births.len() as u64 {
            let birth = self.current.births[page as usize];
            if (birth == 0 || birth < since.0) && !self.damaged.contains(&page) {
                continue;
            }
            let full = runs.len() == 3;
            match runs.last_mut() {
                Some(run) if run.page.0 + run.count == page => run.count += 1,
                // Answers are short, so that continuation is tested, too.
                _ if full => {
                    let next = Some(PageNo(page));
                    return SliceReply::Dirty { runs, next };
                }
                _ => runs.push(PageRun {
                    page: PageNo(page),
                    count: 1,
                }),
            }
        }
        SliceReply::Dirty { runs, next: None }
    }
}
