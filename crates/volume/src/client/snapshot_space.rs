//! A snapshot of a volume as a read-only space.
//!
//! It attaches nothing at the manager, fences no client, and needs none: it reads the versions that bricks
//! keep. Each channel connects to one copy of each column, and to another one after an error.
//!
//! Invariants:
//! - A channel never blocks: threads connect to bricks.
//! - A piece of a request asks each copy at most [`ROUNDS_MAX`] times.
//! - Pieces in flight are bounded by [`PIECES_IN_FLIGHT_MAX`]. The rest of a request is a cursor.

use crate::engine::join_extents;
use crate::legs::connector::Connector;
use crate::snapshot::{ColumnExtent, ColumnGate, ColumnSnapshot, LayoutSnapshot, SegmentSnapshot};
use crate::wake::Wake;
use pagemesh_base::authority::{BrickAddress, ResolvedLayout};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::ids::{EPOCH_MAX, Epoch};
use pagemesh_base::layout::LegState;
use pagemesh_base::poison;
use pagemesh_base::slice::{Leg, SliceCompletion, SliceError, SliceReply, SliceRequest};
use pagemesh_base::space::{
    Channel, Completion, Extent, Reply, Request, Space, SpaceError, Token, check_range,
};
use slab::Slab;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Pieces of one channel in flight: enough for a brick to have the next one, and few MiB of answers.
const PIECES_IN_FLIGHT_MAX: usize = 32;
/// Pieces of one listing of extents: each covers a stripe at least.
const EXTENT_PIECES_MAX: u32 = 64;
/// How often a piece asks each copy. A copy is asked again after its connection was lost, for a brick
/// that restarted.
const ROUNDS_MAX: u32 = 2;

/// A copy that has the snapshot.
#[derive(Clone)]
struct SnapshotLeg {
    leg: pagemesh_base::layout::Leg,
    address: BrickAddress,
}

struct SnapshotSource {
    connector: Arc<dyn Connector>,
    snapshot: Epoch,
    /// The snapshot's name in errors.
    label: String,
    placement: LayoutSnapshot,
    /// By column.
    columns: Vec<Vec<SnapshotLeg>>,
    /// By column, if extents are the changes since an earlier snapshot: that one, or 0 for a column that it
    /// does not have.
    since: Option<Vec<Epoch>>,
}

/// A snapshot of a volume, for reads and extents. Changes fail with [`SpaceError::Unsupported`].
pub struct SnapshotSpace(Arc<SnapshotSource>);

impl SnapshotSpace {
    /// The snapshot of this epoch. `layout` is the layout that it was cut under; its in-sync legs are the
    /// copies that have the snapshot. Connects to nothing yet.
    ///
    /// # Errors
    /// When a part of the volume has no copy with the snapshot.
    pub fn new(
        connector: Arc<dyn Connector>,
        layout: &ResolvedLayout,
        snapshot: Epoch,
    ) -> Result<SnapshotSpace, SpaceError> {
        let placement = placement_of(layout);
        let segments = layout.layout.segments.iter();
        let columns = segments.flat_map(|segment| &segment.columns).map(|column| {
            let in_sync = column
                .legs
                .iter()
                .filter(|leg| leg.state == LegState::InSync);
            let legs = in_sync.map(|leg| SnapshotLeg {
                leg: leg.clone(),
                address: layout.bricks.get(&leg.brick).cloned().unwrap_or_default(),
            });
            legs.collect::<Vec<_>>()
        });
        let columns: Vec<_> = columns.collect();
        if let Some(column) = columns.iter().position(Vec::is_empty) {
            return Err(SpaceError::Unavailable(format!(
                "no copy of column {column} of {} has the snapshot",
                layout.layout.name
            )));
        }
        Ok(SnapshotSpace(Arc::new(SnapshotSource {
            connector,
            snapshot,
            label: format!("of epoch {snapshot} of {}", layout.layout.name),
            placement,
            columns,
            since: None,
        })))
    }

    /// The same snapshot. Its extents are the changes since an earlier one of the volume: a mapped extent
    /// may differ, and the others are equal. `layout` is the layout that the earlier one was cut under. Only
    /// copies that are in sync in both are asked: another copy may have got equal bytes by a resync alone.
    ///
    /// # Errors
    /// When it is not earlier, or no copy of a part of the volume has both snapshots.
    pub fn changes_since(
        &self,
        layout: &ResolvedLayout,
        earlier: Epoch,
    ) -> Result<SnapshotSpace, SpaceError> {
        let source = &self.0;
        if earlier >= source.snapshot || placement_of(layout).size_bytes > self.size_bytes() {
            let why = format!("snapshot {earlier} is not earlier than {}", source.snapshot);
            return Err(SpaceError::Unsupported(why));
        }
        let segments = layout.layout.segments.iter();
        let before: Vec<_> = segments.flat_map(|segment| &segment.columns).collect();
        let (mut columns, mut since) = (Vec::new(), Vec::new());
        for (at, legs) in source.columns.iter().enumerate() {
            let had = |leg: &&SnapshotLeg| {
                before.get(at).is_none_or(|column| {
                    let slices = column.legs.iter();
                    let mut in_sync = slices.filter(|it| it.state == LegState::InSync);
                    in_sync.any(|it| it.slice == leg.leg.slice)
                })
            };
            let both: Vec<_> = legs.iter().filter(had).cloned().collect();
            if both.is_empty() {
                return Err(SpaceError::Unavailable(format!(
                    "no copy of column {at} has both snapshots {earlier} and {}; send the later one in full",
                    source.snapshot
                )));
            }
            columns.push(both);
            since.push(before.get(at).map_or(Epoch(0), |_| earlier));
        }
        Ok(SnapshotSpace(Arc::new(SnapshotSource {
            connector: Arc::clone(&source.connector),
            snapshot: source.snapshot,
            label: source.label.clone(),
            placement: source.placement.clone(),
            columns,
            since: Some(since),
        })))
    }

    /// The epoch of the snapshot.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.0.snapshot
    }

    /// The same space, and its errors name the snapshot so, as in `VOLUME@NAME`.
    #[must_use]
    pub fn with_label(mut self, label: &str) -> SnapshotSpace {
        // No channel is open yet.
        if let Some(source) = Arc::get_mut(&mut self.0) {
            source.label = label.to_owned();
        }
        self
    }
}

/// The placement of the bytes of a layout. It names no legs.
fn placement_of(layout: &ResolvedLayout) -> LayoutSnapshot {
    let mut placement = LayoutSnapshot::empty();
    for segment in &layout.layout.segments {
        placement.segments.push(SegmentSnapshot {
            start: placement.size_bytes,
            bytes: segment.bytes,
            first_column: placement.columns.len(),
            column_count: segment.columns.len(),
        });
        placement.size_bytes += segment.bytes;
        let columns = segment.columns.iter().map(|_| ColumnSnapshot {
            legs: vec![],
            gate: ColumnGate::Open,
            replica_serial: 0,
        });
        placement.columns.extend(columns);
    }
    placement
}

impl Space for SnapshotSpace {
    fn size_bytes(&self) -> u64 {
        self.0.placement.size_bytes
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let wake = Wake::new().map_err(|error| {
            SpaceError::Unavailable(format!("no channel could be opened: {error}"))
        })?;
        let columns = self.0.columns.iter();
        let links = columns.map(|legs| legs.iter().map(|_| LinkState::default()).collect());
        Ok(Box::new(SnapshotChannel {
            source: Arc::clone(&self.0),
            links: links.collect(),
            jobs: Slab::new(),
            queue: VecDeque::new(),
            pieces: BTreeMap::new(),
            last_piece: 0,
            completions: vec![],
            reaped: vec![],
            connected: Arc::default(),
            wake: Arc::new(wake),
        }))
    }
}

/// The connection of a channel to one copy.
#[derive(Default)]
enum LinkState {
    #[default]
    Closed,
    /// A thread connects.
    Connecting,
    Open(Box<dyn Leg>),
}

/// Connections of a channel's threads: column, copy and result.
type Connected = Arc<Mutex<Vec<(usize, usize, Result<Box<dyn Leg>, SliceError>)>>>;

/// A request in progress.
struct ReadJob {
    token: Token,
    is_read: bool,
    begin: u64,
    /// The first byte that no piece covers yet.
    next: u64,
    end: u64,
    in_flight: u32,
    /// The pieces that were made.
    made: u32,
    data: Vec<u8>,
    extents: Vec<(u64, u64, Vec<Extent>)>,
    error: Option<SpaceError>,
}

/// A piece of a request.
struct ReadPiece {
    job: usize,
    place: ColumnExtent,
    leg: usize,
    is_sent: bool,
    /// The copies that it asked.
    asked: u32,
    /// By copy: whether it refused the piece.
    refused: Vec<bool>,
}

struct SnapshotChannel {
    source: Arc<SnapshotSource>,
    /// By column and copy.
    links: Vec<Vec<LinkState>>,
    jobs: Slab<ReadJob>,
    /// Jobs with pieces that are not made yet.
    queue: VecDeque<usize>,
    /// By tag.
    pieces: BTreeMap<u64, ReadPiece>,
    last_piece: u64,
    completions: Vec<Completion>,
    reaped: Vec<SliceCompletion>,
    connected: Connected,
    wake: Arc<Wake>,
}

impl Channel for SnapshotChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let (is_read, offset, len) = match request {
            Request::Read { offset, len } => (true, offset, u64::from(len)),
            Request::Extents { offset, len } => (false, offset, len),
            Request::Flush => return self.complete(token, Ok(Reply::Done)),
            _ => {
                let label = &self.source.label;
                let why = format!("the snapshot {label} is read-only; write to its volume");
                return self.complete(token, Err(SpaceError::Unsupported(why)));
            }
        };
        let checked = check_range(self.source.placement.size_bytes, offset, len);
        if let Err(error) = checked {
            return self.complete(token, Err(error));
        }
        let job = self.jobs.insert(ReadJob {
            token,
            is_read,
            begin: offset,
            next: offset,
            end: offset + len,
            in_flight: 0,
            made: 0,
            data: if is_read {
                vec![0; len as usize]
            } else {
                vec![]
            },
            extents: vec![],
            error: None,
        });
        self.queue.push_back(job);
        self.make_pieces();
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        if self.wake.take() {
            self.take_connected();
        }
        self.take_answers();
        self.make_pieces();
        into.append(&mut self.completions);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        into.push(self.wake.fd());
        self.busy_legs().for_each(|leg| leg.poll_fds(into));
    }

    fn deadline(&self) -> Option<Instant> {
        if !self.completions.is_empty() {
            return Some(Instant::now());
        }
        self.busy_legs().filter_map(|leg| leg.deadline()).min()
    }
}

impl SnapshotChannel {
    fn complete(&mut self, token: Token, result: Result<Reply, SpaceError>) {
        self.completions.push(Completion { token, result });
    }

    /// The connections that owe an answer.
    fn busy_legs(&self) -> impl Iterator<Item = &dyn Leg> {
        let links = self.links.iter().enumerate().flat_map(|(column, legs)| {
            let legs = legs.iter().enumerate();
            legs.map(move |(leg, link)| ((column, leg), link))
        });
        links.filter_map(|(place, link)| {
            let mut sent = self.pieces.values().filter(|piece| piece.is_sent);
            let is_busy = sent.any(|piece| (piece.place.column, piece.leg) == place);
            match link {
                LinkState::Open(leg) if is_busy => Some(&**leg),
                _ => None,
            }
        })
    }

    /// Makes pieces of the requests, in order.
    fn make_pieces(&mut self) {
        while let Some(&number) = self.queue.front() {
            let job = &mut self.jobs[number];
            // A listing may end before its range does.
            let is_listed = !job.is_read && job.made == EXTENT_PIECES_MAX;
            if job.next == job.end || job.error.is_some() || is_listed {
                self.queue.pop_front();
                job.end = job.next;
                self.finish_if_done(number);
                continue;
            }
            if self.pieces.len() >= PIECES_IN_FLIGHT_MAX {
                return;
            }
            let placement = &self.source.placement;
            let place = match job.is_read {
                true => placement.io_extent(job.next, job.end),
                false => placement.contiguous_extent(job.next, job.end),
            };
            let Some(place) = place else {
                job.end = job.next;
                continue;
            };
            job.next += place.len;
            job.in_flight += 1;
            job.made += 1;
            let copies = self.source.columns[place.column].len();
            self.last_piece += 1;
            let piece = ReadPiece {
                job: number,
                place,
                leg: 0,
                is_sent: false,
                asked: 0,
                refused: vec![false; copies],
            };
            self.pieces.insert(self.last_piece, piece);
            self.send(self.last_piece);
        }
    }

    /// Sends a piece to its copy, or connects that first.
    fn send(&mut self, tag: u64) {
        let Some(piece) = self.pieces.get_mut(&tag) else {
            return;
        };
        let ColumnExtent {
            column,
            offset,
            len,
            ..
        } = piece.place;
        let snapshot = self.source.snapshot;
        let request = match self.jobs[piece.job].is_read {
            true => SliceRequest::ReadVersion {
                snapshot,
                offset,
                len: len as u32,
            },
            false => match &self.source.since {
                None => SliceRequest::VersionExtents {
                    snapshot,
                    offset,
                    len,
                },
                Some(since) => SliceRequest::VersionChanges {
                    from: since[column],
                    to: snapshot,
                    offset,
                    len,
                },
            },
        };
        let leg = piece.leg;
        match &mut self.links[column][leg] {
            LinkState::Open(link) => {
                piece.is_sent = true;
                link.submit(tag, request);
            }
            LinkState::Connecting => {}
            closed @ LinkState::Closed => {
                *closed = LinkState::Connecting;
                self.start_connect(column, leg);
            }
        }
    }

    fn start_connect(&mut self, column: usize, leg: usize) {
        let (source, connected) = (Arc::clone(&self.source), Arc::clone(&self.connected));
        let wake = Arc::clone(&self.wake);
        let run = move || {
            let SnapshotLeg { leg: at, address } = &source.columns[column][leg];
            // The highest epoch: no layout refuses it, and an attach raises nothing.
            let epoch = Epoch(EPOCH_MAX);
            let result = source.connector.connect(at.brick, address, at.slice, epoch);
            poison::lock(&connected).push((column, leg, result));
            wake.raise();
        };
        let thread = std::thread::Builder::new().name("snapshot-connect".into());
        if let Err(error) = thread.spawn(run) {
            let why = SliceError::Lost(format!("no thread for a connection: {error}"));
            poison::lock(&self.connected).push((column, leg, Err(why)));
            self.wake.raise();
        }
    }

    fn take_connected(&mut self) {
        let connected = std::mem::take(&mut *poison::lock(&self.connected));
        for (column, leg, result) in connected {
            let tags = self.tags_of(column, leg);
            match result {
                Ok(link) => {
                    self.links[column][leg] = LinkState::Open(link);
                    tags.into_iter().for_each(|tag| self.send(tag));
                }
                Err(error) => {
                    self.links[column][leg] = LinkState::Closed;
                    tags.into_iter().for_each(|tag| self.ask_next(tag, &error));
                }
            }
        }
    }

    fn tags_of(&self, column: usize, leg: usize) -> Vec<u64> {
        let own = self.pieces.iter();
        let own = own.filter(|(_, it)| (it.place.column, it.leg) == (column, leg));
        own.map(|(tag, _)| *tag).collect()
    }

    fn take_answers(&mut self) {
        for column in 0..self.links.len() {
            for leg in 0..self.links[column].len() {
                let mut reaped = std::mem::take(&mut self.reaped);
                if let LinkState::Open(link) = &mut self.links[column][leg] {
                    link.reap(&mut reaped);
                }
                for answer in reaped.drain(..) {
                    if let Err(SliceError::Lost(_)) = &answer.result {
                        self.links[column][leg] = LinkState::Closed;
                    }
                    self.take_answer((column, leg), answer);
                }
                self.reaped = reaped;
            }
        }
    }

    fn take_answer(&mut self, place: (usize, usize), answer: SliceCompletion) {
        let piece = self.pieces.get(&answer.tag);
        // A lost connection may answer a piece that asks another copy already.
        let Some(piece) = piece.filter(|it| it.is_sent && (it.place.column, it.leg) == place)
        else {
            return;
        };
        let reply = match answer.result {
            Ok(SliceReply::Data(data)) if data.len() as u64 == piece.place.len => {
                Ok(SliceReply::Data(data))
            }
            Ok(SliceReply::Extents(extents)) if extents.iter().any(|it| it.len > 0) => {
                Ok(SliceReply::Extents(extents))
            }
            Ok(_) => Err(SliceError::Refused("its answer does not fit".into())),
            Err(error) => Err(error),
        };
        match reply {
            Ok(reply) => self.finish_piece(answer.tag, Ok(reply)),
            Err(error) => self.ask_next(answer.tag, &error),
        }
    }

    /// Asks the next copy after an error, or fails the piece with it.
    fn ask_next(&mut self, tag: u64, error: &SliceError) {
        let Some(piece) = self.pieces.get_mut(&tag) else {
            return;
        };
        let copies = piece.refused.len();
        // An unreachable brick may be back in the next round. A refusal or damage stays.
        piece.refused[piece.leg] |= !matches!(error, SliceError::Lost(_));
        piece.is_sent = false;
        piece.asked += 1;
        let next = (1..=copies).map(|step| (piece.leg + step) % copies);
        let next = next.into_iter().find(|&leg| !piece.refused[leg]);
        match next.filter(|_| piece.asked < ROUNDS_MAX * copies as u32) {
            Some(leg) => {
                piece.leg = leg;
                self.send(tag);
            }
            None => {
                let error = self.space_error(tag, error);
                self.finish_piece(tag, Err(error));
            }
        }
    }

    fn space_error(&self, tag: u64, error: &SliceError) -> SpaceError {
        let piece = &self.pieces[&tag];
        let ColumnExtent { column, .. } = piece.place;
        let SnapshotLeg { leg, address } = &self.source.columns[column][piece.leg];
        let brick = BrickLabel {
            id: leg.brick,
            name: address.name.clone(),
        };
        let label = &self.source.label;
        match error {
            SliceError::Damaged { offset } => SpaceError::Damaged {
                offset: self.source.placement.volume_offset(column, *offset),
                place: format!("brick {brick}, in the snapshot {label}"),
            },
            error => SpaceError::Unavailable(format!(
                "no copy of the snapshot {label} can be read; the last one, on brick {brick}: {error}"
            )),
        }
    }

    fn finish_piece(&mut self, tag: u64, result: Result<SliceReply, SpaceError>) {
        let Some(piece) = self.pieces.remove(&tag) else {
            return;
        };
        let job = &mut self.jobs[piece.job];
        job.in_flight -= 1;
        let ColumnExtent {
            len, volume_offset, ..
        } = piece.place;
        match result {
            Ok(SliceReply::Data(data)) => {
                let at = (volume_offset - job.begin) as usize;
                job.data[at..at + data.len()].copy_from_slice(&data);
            }
            Ok(SliceReply::Extents(extents)) => job.extents.push((volume_offset, len, extents)),
            Ok(_) => {}
            Err(error) => {
                job.error.get_or_insert(error);
            }
        }
        self.finish_if_done(piece.job);
    }

    fn finish_if_done(&mut self, number: usize) {
        let job = &self.jobs[number];
        if job.in_flight > 0 || self.queue.contains(&number) {
            return;
        }
        let job = self.jobs.remove(number);
        let result = match job.error {
            Some(error) => Err(error),
            None if job.is_read => Ok(Reply::Data(job.data)),
            None => Ok(Reply::Extents(join_extents(job.extents))),
        };
        self.complete(job.token, result);
    }
}
