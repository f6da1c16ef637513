//! A model of bricks: slices with pages, stamps, epochs, rounds, sessions and in-flight tables.
//! A connection makes progress only when it is stepped.

use super::Rng;
use super::mapped_sessions::MappedSession;
use crate::legs::connector::Connector;
use pagemesh_base::authority::BrickAddress;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison;
use pagemesh_base::slice::{
    InFlightOp, Leg, PageRun, SliceCompletion, SliceError, SliceReply, SliceRequest, Stamp,
    TransactionPart, check_parts,
};
use pagemesh_base::space::Extent;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub(super) const PAGE: u64 = 4096;
/// The pages that one record can cover.
const LEAF_PAGES: u64 = 512;
/// The default of the maximum of table entries of a slice. Beyond it the slice drops its table.
const TABLE_MAX: usize = 48;

pub(crate) type Page = Option<Box<[u8; 4096]>>;

/// The state that survives a crash. On a buffering brick only the last flushed state survives.
#[derive(Clone, Default)]
struct SliceState {
    pages: Vec<Page>,
    stamps: Vec<u8>,
    epoch: u32,
    round: u8,
    table_max: usize,
    /// The in-flight table; none once it had too many entries.
    table: Option<Vec<InFlightOp>>,
    /// By connection: operations that may be incomplete on other legs.
    open_by_connection: BTreeMap<u64, Vec<InFlightOp>>,
}

impl SliceState {
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
    pub(crate) fn pages(&self) -> &[Page] {
        &self.current.pages
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
        }
    }

    pub(crate) fn damage_page(&mut self, page: u64) {
        self.damaged.insert(page);
    }
}

pub(crate) struct Brick {
    pub up: bool,
    /// The pages that can still be allocated. Freed pages do not count again.
    pub room: u64,
    /// Whether it accepts requests without doing or answering them.
    pub frozen: bool,
    pub buffers: bool,
    /// The maximum of concurrent connections.
    pub sessions_max: usize,
    pub slices: BTreeMap<SliceId, Slice>,
}

struct Connection {
    brick: BrickId,
    slice: SliceId,
    /// The newest epoch that it used.
    epoch: Epoch,
    /// The client's end is gone. The brick may still do requests that were sent.
    orphan: bool,
    lost: bool,
    /// A later connection announced the same epoch to the slice again.
    superseded: bool,
    /// Whether a failed change fails the changes after it.
    keeps_order: bool,
    /// Whether a change has failed.
    is_broken: bool,
    queue: VecDeque<(u64, SliceRequest)>,
    /// Answers of requests that are done, on their way to the client.
    answers: VecDeque<SliceCompletion>,
    arrived: Vec<SliceCompletion>,
}

#[derive(Default)]
pub(crate) struct Bricks {
    pub bricks: BTreeMap<BrickId, Brick>,
    connections: BTreeMap<u64, Connection>,
    /// Sessions of direct clients.
    pub mapped: BTreeMap<u64, MappedSession>,
    pub next: u64,
    /// Whether barriers are delayed on their way.
    pub hold_barriers: bool,
    /// The table limit of slices that are created from now on.
    pub table_max: Option<usize>,
    /// Whether requests are done as they come, and answered at once.
    pub is_synchronous: bool,
    /// The time that legs return.
    pub clock: Option<Instant>,
}

#[derive(Clone, Default)]
pub(crate) struct Fabric(pub Arc<Mutex<Bricks>>);

impl Bricks {
    pub(crate) fn add(&mut self, id: BrickId, buffers: bool) {
        let brick = Brick {
            up: true,
            room: u64::MAX,
            frozen: false,
            buffers,
            sessions_max: usize::MAX,
            slices: BTreeMap::new(),
        };
        self.bricks.insert(id, brick);
    }

    pub(crate) fn create(&mut self, brick: BrickId, slice: SliceId, bytes: u64) {
        let pages = bytes.div_ceil(PAGE) as usize;
        let kept = SliceState {
            pages: vec![None; pages],
            stamps: vec![0; pages],
            table_max: self.table_max.unwrap_or(TABLE_MAX),
            table: Some(vec![]),
            ..SliceState::default()
        };
        let slice_model = Slice {
            durable: kept.clone(),
            current: kept,
            ..Slice::default()
        };
        let slices = &mut self.bricks.get_mut(&brick).expect("brick").slices;
        slices.insert(slice, slice_model);
    }

    pub(crate) fn slice(&self, brick: BrickId, slice: SliceId) -> &Slice {
        &self.bricks[&brick].slices[&slice]
    }

    pub(crate) fn slice_mut(&mut self, brick: BrickId, slice: SliceId) -> &mut Slice {
        let slices = &mut self.bricks.get_mut(&brick).expect("brick").slices;
        slices.get_mut(&slice).expect("slice")
    }

    /// Kills the process. A buffering brick loses unflushed changes.
    pub(crate) fn kill(&mut self, id: BrickId) {
        for number in self.connections_of(id) {
            self.break_connection(number);
        }
        self.lose_mapped(id);
        let brick = self.bricks.get_mut(&id).expect("brick");
        brick.up = false;
        let buffers = brick.buffers;
        for slice in brick.slices.values_mut() {
            if buffers {
                slice.current = slice.durable.clone();
            }
            slice.end_sessions();
        }
    }

    /// Restarts a brick. It stays down while direct clients still map the pool of the old
    /// process.
    pub(crate) fn restart(&mut self, id: BrickId) {
        if !self.bricks[&id].up && !self.recover_mapped(id) {
            return;
        }
        self.bricks.get_mut(&id).expect("brick").up = true;
    }

    pub(crate) fn connections_of(&self, id: BrickId) -> Vec<u64> {
        let own = self.connections.iter().filter(|(_, c)| c.brick == id);
        own.map(|(number, _)| *number).collect()
    }

    pub(crate) fn connections(&self) -> Vec<u64> {
        self.connections.keys().copied().collect()
    }

    /// The number of requests that a brick has received and not done.
    pub(crate) fn queued(&self, brick: BrickId) -> usize {
        let connections = self.connections.values();
        let of_it = connections.filter(|connection| connection.brick == brick);
        of_it.map(|connection| connection.queue.len()).sum()
    }

    /// The connections that can make a step.
    pub(crate) fn busy(&self) -> Vec<u64> {
        let busy = self.connections.iter().filter(|(_, c)| {
            let waits = !c.queue.is_empty() || !c.answers.is_empty() || c.orphan;
            waits && !self.bricks[&c.brick].frozen
        });
        busy.map(|(number, _)| *number).collect()
    }

    /// Whether a frozen brick has requests.
    pub(crate) fn has_request_to_frozen(&self) -> bool {
        let mut all = self.connections.values();
        all.any(|c| !c.queue.is_empty() && self.bricks[&c.brick].frozen)
    }

    /// Whether an answer has arrived that was not reaped.
    pub(crate) fn has_unreaped(&self) -> bool {
        self.connections.values().any(|c| !c.arrived.is_empty())
    }

    /// The connections of clients that are gone, with their requests.
    pub(crate) fn orphans(&self) -> Vec<u64> {
        let orphans = self.connections.iter().filter(|(_, c)| c.orphan);
        orphans.map(|(number, _)| *number).collect()
    }

    /// Takes all requests on their way to bricks out of the network.
    pub(crate) fn take_messages(&mut self) -> Vec<(u64, u64, SliceRequest)> {
        let mut all = vec![];
        for (number, connection) in &mut self.connections {
            let queue = connection.queue.drain(..);
            all.extend(queue.map(|(tag, request)| (*number, tag, request)));
        }
        all
    }

    /// Puts requests back into the network.
    pub(crate) fn restore_messages(&mut self, messages: Vec<(u64, u64, SliceRequest)>) {
        for (number, tag, request) in messages {
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.queue.push_back((tag, request));
            }
        }
    }

    /// Whether some client has yet to notice the loss of a connection.
    pub(crate) fn has_lost(&self) -> bool {
        self.connections.values().any(|connection| connection.lost)
    }

    /// Breaks a random connection, if there is any. Its session at the brick ends.
    pub(crate) fn break_any_connection(&mut self, dice: &mut Rng) {
        let connections = self.connections();
        if !connections.is_empty() {
            let at = dice.below(connections.len() as u64) as usize;
            self.break_connection(connections[at]);
        }
    }

    pub(crate) fn break_connection(&mut self, number: u64) {
        let connection = self.connections.get_mut(&number).expect("connection");
        if connection.lost {
            return;
        }
        connection.lost = true;
        let lost = || SliceError::Lost("the connection broke".into());
        let tags = connection.answers.drain(..).map(|answer| answer.tag);
        let tags: Vec<u64> = tags
            .chain(connection.queue.drain(..).map(|(tag, _)| tag))
            .collect();
        let fail = |tag| SliceCompletion {
            tag,
            result: Err(lost()),
        };
        connection.arrived.extend(tags.into_iter().map(fail));
        let (brick, slice) = (connection.brick, connection.slice);
        if connection.orphan {
            self.connections.remove(&number);
        }
        self.slice_mut(brick, slice).end_session(number);
    }

    /// Does one request of a connection, or delivers one answer; false if there is neither.
    pub(crate) fn step(&mut self, number: u64, dice: &mut Rng) -> bool {
        let Some(connection) = self.connections.get_mut(&number) else {
            return false;
        };
        let barrier = matches!(
            connection.queue.front(),
            Some((_, SliceRequest::RaiseEpoch { .. }))
        );
        if self.bricks[&connection.brick].frozen || barrier && self.hold_barriers {
            return false;
        }
        if barrier {
            let slice = connection.slice;
            if !self.drain_mapped(slice) {
                return false;
            }
        }
        let connection = self.connections.get_mut(&number).expect("connection");
        let deliver = !connection.answers.is_empty() && dice.one_in(2);
        if !deliver && let Some((tag, request)) = connection.queue.pop_front() {
            let (brick, slice) = (connection.brick, connection.slice);
            let result = self.execute(brick, slice, number, request);
            let connection = self.connections.get_mut(&number).expect("connection");
            connection
                .answers
                .push_back(SliceCompletion { tag, result });
        } else if let Some(answer) = connection.answers.pop_front() {
            connection.arrived.push(answer);
        } else if connection.orphan {
            self.break_connection(number);
        } else {
            return false;
        }
        true
    }

    fn execute(
        &mut self,
        brick: BrickId,
        slice: SliceId,
        connection: u64,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let attached = self.connections.get(&connection);
        if attached.is_some_and(|connection| connection.superseded) {
            return Err(SliceError::Lost("the client has come back".into()));
        }
        if let SliceRequest::RaiseEpoch { epoch, .. } = request
            && epoch.0 == self.slice(brick, slice).current.epoch
        {
            let older = self.connections.range_mut(..connection);
            let older = older.filter(|(_, c)| (c.brick, c.slice) == (brick, slice));
            older.for_each(|(_, connection)| connection.superseded = true);
        }
        let brick = self.bricks.get_mut(&brick).expect("brick");
        let slice = brick.slices.get_mut(&slice).expect("slice");
        let number = connection;
        let Some(connection) = self.connections.get_mut(&number) else {
            return slice.execute(number, &mut brick.room, request);
        };
        let is_change = request.is_change();
        if connection.is_broken && is_change {
            return Err(SliceError::Refused("a change before it failed".into()));
        }
        connection.keeps_order |= request == SliceRequest::KeepOrder;
        let admitted = slice.check_connection_epoch(connection, &request);
        let done = admitted.and_then(|()| slice.execute(number, &mut brick.room, request));
        let breaks = connection.keeps_order && is_change && done.is_err();
        connection.is_broken |= breaks && !defect::is(Defect::OrderNotKept);
        done
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
    pub(super) fn end_session(&mut self, number: u64) {
        for kept in [&mut self.current, &mut self.durable] {
            if let Some(open) = kept.open_by_connection.remove(&number) {
                kept.add_entries(&open);
            }
        }
    }

    fn execute(
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
            SliceRequest::Flush => {
                self.durable = self.current.clone();
                Ok(SliceReply::Done)
            }
            SliceRequest::Extents { offset, len } => Ok(self.extents(offset, len)),
            SliceRequest::Checksums { page, count } => self.checksums(page.0, count),
            SliceRequest::Dirty { round, from } => Ok(self.dirty(round, from.0)),
            SliceRequest::InFlight => Ok(SliceReply::InFlight(self.in_flight())),
            SliceRequest::ForgetInFlight => {
                self.current.table = Some(vec![]);
                self.durable.table = Some(vec![]);
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { epoch, round } => self.raise(epoch, round),
            SliceRequest::KeepOrder => Ok(SliceReply::Done),
        }
    }

    /// Checks the epoch of a request without a stamp: it is the newest that its connection
    /// used.
    fn check_connection_epoch(
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

    fn raise(&mut self, epoch: Epoch, round: u8) -> Result<SliceReply, SliceError> {
        if epoch.0 < self.current.epoch {
            let current = Epoch(self.current.epoch);
            return Err(SliceError::StaleEpoch { current });
        }
        self.current.epoch = epoch.0;
        self.current.round = round;
        let in_flight = self.in_flight();
        if in_flight.is_none() {
            // There are too many entries to stamp. All pages are compared when the leg returns.
            self.current.table = None;
        }
        if round != 0 {
            for entry in in_flight.iter().flatten() {
                for page in entry.page.0..entry.page.0 + u64::from(entry.count) {
                    self.current.stamps[page as usize] = round;
                    self.durable.stamps[page as usize] = round;
                }
            }
        }
        // The barrier itself becomes durable, and no earlier write.
        self.durable.epoch = self.current.epoch;
        self.durable.round = self.current.round;
        self.durable.table = self.current.table.clone();
        self.durable.open_by_connection = self.current.open_by_connection.clone();
        Ok(SliceReply::Done)
    }

    /// The operations of ended sessions, and the incomplete ones of live sessions.
    fn in_flight(&self) -> Option<Vec<InFlightOp>> {
        let mut all = self.current.clone();
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
            && self.current.open_by_connection.values().all(Vec::is_empty)
    }

    fn trim_completed(&mut self, connection: u64, stamp: Stamp) {
        let oldest = stamp.op - u64::from(stamp.open_ops);
        if let Some(open) = self.current.open_by_connection.get_mut(&connection) {
            open.retain(|earlier| earlier.op >= oldest);
        }
    }

    pub(super) fn read(&mut self, offset: u64, len: u32) -> Result<SliceReply, SliceError> {
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

    /// Stamps one page by the rule of the round.
    fn stamp(&mut self, page: u64, whole: bool) {
        let round = self.current.round;
        if whole || round != 0 {
            self.current.stamps[page as usize] = round;
        }
    }

    /// Makes a change as a pool does. A part of a page is one record, and so is a run of whole
    /// pages. The first failure ends the change, and earlier records stay. A record without
    /// effect is neither recorded nor stamped.
    pub(super) fn change(
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
            if self.change_record(room, at, to, data)? {
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
    ) -> Result<bool, SliceError> {
        let pages = from / PAGE..to.div_ceil(PAGE);
        let whole = (to - from).is_multiple_of(PAGE);
        let mapped = |slice: &Slice, page: u64| slice.current.pages[page as usize].is_some();
        // If no page is mapped, the damage is in the slot. Only a write of the whole page
        // replaces it without a read.
        if data.is_none() {
            self.check_slots(pages.clone())?;
        }
        if data.is_none() && !pages.clone().any(|page| mapped(self, page)) {
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
            let slot = &mut self.current.pages[page as usize];
            match data {
                None if whole && slot.is_none() => continue,
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
            self.stamp(page, whole);
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

    fn dirty(&self, round: u8, from: u64) -> SliceReply {
        let mut runs: Vec<PageRun> = vec![];
        for page in from..self.current.stamps.len() as u64 {
            if self.current.stamps[page as usize] != round {
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

struct FakeLeg {
    fabric: Fabric,
    number: u64,
}

impl Leg for FakeLeg {
    fn submit(&mut self, tag: u64, request: SliceRequest) {
        let mut bricks = poison::lock(&self.fabric.0);
        let at_once = bricks.is_synchronous;
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        let lost = connection.lost;
        let (brick, slice) = (connection.brick, connection.slice);
        if lost {
            let result = Err(SliceError::Lost("the connection broke before".into()));
            connection.arrived.push(SliceCompletion { tag, result });
        } else if at_once {
            let result = bricks.execute(brick, slice, self.number, request);
            let connection = bricks
                .connections
                .get_mut(&self.number)
                .expect("connection");
            connection.arrived.push(SliceCompletion { tag, result });
        } else {
            connection.queue.push_back((tag, request));
        }
    }

    fn reap(&mut self, into: &mut Vec<SliceCompletion>) {
        let mut bricks = poison::lock(&self.fabric.0);
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        into.append(&mut connection.arrived);
    }

    fn poll_closed(&mut self) -> Option<SliceError> {
        let bricks = poison::lock(&self.fabric.0);
        let connection = bricks.connections.get(&self.number).expect("connection");
        let is_idle = connection.arrived.is_empty();
        (connection.lost && is_idle).then(|| SliceError::Lost("the connection broke".into()))
    }

    fn poll_fds(&self, _into: &mut Vec<RawFd>) {}

    fn now(&self) -> Option<Instant> {
        let bricks = poison::lock(&self.fabric.0);
        bricks.clock.filter(|_| !bricks.is_synchronous)
    }
}

impl Drop for FakeLeg {
    /// The brick may still do requests that were sent.
    fn drop(&mut self) {
        let mut bricks = poison::lock(&self.fabric.0);
        let at_once = bricks.is_synchronous;
        let connection = bricks
            .connections
            .get_mut(&self.number)
            .expect("connection");
        connection.orphan = true;
        if connection.lost {
            bricks.connections.remove(&self.number);
        } else if at_once {
            bricks.break_connection(self.number);
        }
    }
}

impl Connector for Fabric {
    fn connect(
        &self,
        brick: BrickId,
        _address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError> {
        let mut bricks = poison::lock(&self.0);
        let present = bricks.bricks.get(&brick).filter(|brick| brick.up);
        let Some(present) = present else {
            return Err(SliceError::Lost("no process listens".into()));
        };
        let model = present
            .slices
            .get(&slice)
            .ok_or(SliceError::NoSuchSlice(slice))?;
        if epoch.0 < model.current.epoch {
            let current = Epoch(model.current.epoch);
            return Err(SliceError::StaleEpoch { current });
        }
        if bricks.connections_of(brick).len() >= bricks.bricks[&brick].sessions_max {
            return Err(SliceError::NoSession("all sessions are in use".into()));
        }
        bricks.next += 1;
        let number = bricks.next;
        let connection = Connection {
            brick,
            slice,
            epoch,
            orphan: false,
            lost: false,
            superseded: false,
            keeps_order: false,
            is_broken: false,
            queue: VecDeque::new(),
            answers: VecDeque::new(),
            arrived: vec![],
        };
        bricks.connections.insert(number, connection);
        Ok(Box::new(FakeLeg {
            fabric: self.clone(),
            number,
        }))
    }
}
