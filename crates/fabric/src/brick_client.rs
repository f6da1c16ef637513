//! Blocking calls to a brick at the other end of a connection, TCP or unix.
//!
//! Invariants: a call ends within its limit. After any failure but a refusal the connection is
//! lost: every later call fails at once, and nothing is retried.

use crate::limits::LIST_ANSWERS_MAX;
use crate::message::reply::{self, Answer, AttachReply, ExpectedLen, Reply};
use crate::message::request::{
    Control, Request, check_dropped, check_limits, check_version_edits, check_version_range,
};
use crate::message::{Direction, MalformedMessage};
use crate::receive_buffer::ReceiveBuffer;
use crate::send_queue::SendQueue;
use crate::stream::Stream;
use crate::wire::{ReceiveResult, WaitFor, Wire};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison::lock;
use pagemesh_base::slice::{
    BrickControl, BrickStatus, CLONES_UNKNOWN, CloneProgress, CloneSource, SPACE_UNKNOWN,
    SeenPagesList, SliceError, SliceInfo, SliceReply, SliceRequest, VERSION_COPIES_UNKNOWN,
    VersionEdits, VersionList, VersionRange,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A connection to a brick for blocking calls. One call runs at a time.
#[derive(Debug)]
pub struct BrickClient<W = Stream> {
    stream: W,
    calls: Mutex<CallState>,
    brick: BrickId,
    limit: Duration,
    knows_hints: bool,
    knows_snapshots: bool,
    knows_clones: bool,
    knows_space: bool,
    knows_version_copies: bool,
}

struct CallState {
    inflow: ReceiveBuffer,
    outflow: SendQueue,
    tag: u64,
    lost_reason: Option<String>,
}

impl std::fmt::Debug for CallState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Calls")
            .field("lost", &self.lost_reason)
            .finish()
    }
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
enum CallError {
    #[error("{0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
    #[error("it closed the connection")]
    Closed,
}

impl<W: Wire> BrickClient<W> {
    /// Makes a client over a connection to a peer that is known to be this brick. Each call has
    /// `limit`.
    pub fn new(stream: W, brick: BrickId, limit: Duration) -> BrickClient<W> {
        BrickClient {
            stream,
            calls: Mutex::new(CallState {
                inflow: ReceiveBuffer::new(Direction::Reply, false),
                outflow: SendQueue::default(),
                tag: 0,
                lost_reason: None,
            }),
            brick,
            limit,
            knows_hints: false,
            knows_snapshots: false,
            knows_clones: false,
            knows_space: false,
            knows_version_copies: false,
        }
    }

    /// The same with a peer that knows tier hints, if it does.
    #[must_use]
    pub fn with_hints(self, knows_hints: bool) -> BrickClient<W> {
        BrickClient {
            knows_hints,
            ..self
        }
    }

    /// Whether the peer knows tier hints.
    #[must_use]
    pub fn knows_hints(&self) -> bool {
        self.knows_hints
    }

    /// The same with a peer that knows the messages of snapshots, if it does.
    #[must_use]
    pub fn with_snapshots(self, knows_snapshots: bool) -> BrickClient<W> {
        BrickClient {
            knows_snapshots,
            ..self
        }
    }

    /// Whether the peer knows the messages of snapshots.
    #[must_use]
    pub fn knows_snapshots(&self) -> bool {
        self.knows_snapshots
    }

    /// Refuses a message that the peer does not know: it would end the connection.
    /// Sets whether the brick knows the messages of clones. A client refuses them otherwise.
    #[must_use]
    pub fn with_clones(self, knows_clones: bool) -> BrickClient<W> {
        BrickClient {
            knows_clones,
            ..self
        }
    }

    /// Sets whether the brick knows the messages that copy versions of snapshots. A client refuses them otherwise.
    #[must_use]
    pub fn with_version_copies(self, knows_version_copies: bool) -> BrickClient<W> {
        BrickClient {
            knows_version_copies,
            ..self
        }
    }

    /// A call that copies versions of snapshots.
    fn call_versions(&self, control: Control) -> Result<Reply, SliceError> {
        match self.knows_version_copies {
            true => self.call(&Request::Control(control)),
            false => Err(SliceError::Refused(VERSION_COPIES_UNKNOWN.into())),
        }
    }

    /// Sets whether the brick counts the space of snapshots. A client refuses such calls otherwise.
    #[must_use]
    pub fn with_space(self, knows_space: bool) -> BrickClient<W> {
        BrickClient {
            knows_space,
            ..self
        }
    }

    fn check_knows_snapshots(&self) -> Result<(), SliceError> {
        match self.knows_snapshots {
            true => Ok(()),
            false => Err(SliceError::snapshots_unknown()),
        }
    }

    /// The brick's identity, as the brick stated it and, over TCP, proved it.
    #[must_use]
    pub fn brick(&self) -> BrickId {
        self.brick
    }

    /// Whether the brick has closed the connection. The descriptor of [`AsFd`] becomes readable
    /// when it does, and also briefly whenever another thread's call is answered.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        self.stream.has_hung_up()
    }

    /// Attaches a slice as a client of this epoch.
    ///
    /// # Errors
    /// When there is no such slice, it has a newer epoch, or the brick is
    /// lost.
    pub fn attach(&self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError> {
        match self.call(&Request::Attach { slice, epoch })? {
            Reply::Attach(attached) => Ok(attached),
            _ => Err(self.unexpected_reply()),
        }
    }

    /// Sends a request for an attached slice and waits for the answer.
    ///
    /// # Errors
    /// The slice's error, or [`SliceError::Lost`] when the brick is lost.
    pub fn execute(&self, handle: u32, request: SliceRequest) -> Result<SliceReply, SliceError> {
        check_limits(&request)?;
        if request.is_of_snapshot() {
            self.check_knows_snapshots()?;
        }
        let expected = ExpectedLen::of(&request);
        match self.call(&Request::Slice { handle, request })? {
            Reply::Slice(reply) if expected.fits(&reply) => Ok(reply),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn call_clone(&self, control: Control) -> Result<CloneProgress, SliceError> {
        if !self.knows_clones {
            return Err(SliceError::Refused(CLONES_UNKNOWN.into()));
        }
        match self.call(&Request::Control(control))? {
            Reply::Progress(progress) if progress.done <= progress.all => Ok(progress),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn call_control(&self, control: Control) -> Result<(), SliceError> {
        match self.call(&Request::Control(control))? {
            Reply::Slice(SliceReply::Done) => Ok(()),
            _ => Err(self.unexpected_reply()),
        }
    }

    /// Closes the connection: the brick's answer does not fit the request.
    fn unexpected_reply(&self) -> SliceError {
        self.mark_lost(&mut self.calls(), "its answer does not fit the request")
    }

    fn mark_lost(&self, calls: &mut CallState, cause: &str) -> SliceError {
        let reason = format!("brick {}: {cause}", self.brick);
        calls.lost_reason = Some(reason.clone());
        self.stream.close();
        SliceError::Lost(reason)
    }

    fn calls(&self) -> MutexGuard<'_, CallState> {
        lock(&self.calls)
    }

    fn call(&self, request: &Request) -> Answer {
        let mut calls = self.calls();
        if let Some(reason) = &calls.lost_reason {
            return Err(SliceError::Lost(reason.clone()));
        }
        let until = self.stream.now() + self.limit;
        match calls.exchange(&self.stream, request, until) {
            Ok(Err(SliceError::Lost(reason))) => Err(self.mark_lost(&mut calls, &reason)),
            Ok(answer) => answer,
            Err(cause) => Err(self.mark_lost(&mut calls, &describe(&cause, self.limit))),
        }
    }

    /// Hands the connection over for another use, after calls that did not fail.
    pub(crate) fn into_stream(self) -> W {
        self.stream
    }
}

/// Whether these slices are in order and all after `after`: a listing that makes no progress would
/// never end.
fn is_progress(after: Option<SliceId>, slices: &[SliceInfo]) -> bool {
    let ids = slices.iter().map(|info| info.slice);
    after.into_iter().chain(ids).is_sorted_by(|a, b| a < b)
}

/// The cause as a text for people.
fn describe(cause: &CallError, limit: Duration) -> String {
    match cause {
        CallError::Socket(cause) if cause.kind() == io::ErrorKind::TimedOut => {
            format!("no answer within {} ms", limit.as_millis())
        }
        cause => cause.to_string(),
    }
}

impl CallState {
    fn exchange(
        &mut self,
        stream: &impl Wire,
        request: &Request,
        until: Instant,
    ) -> Result<Answer, CallError> {
        self.tag += 1;
        let (header, body) = request.encode(self.tag);
        self.outflow.push(&header, body);
        loop {
            self.outflow.flush(stream)?;
            if self.outflow.is_empty() {
                break;
            }
            stream.wait(WaitFor::Writable, until)?;
        }
        loop {
            if let Some((found, body)) = self.inflow.next_message()? {
                if (found.tag, found.kind) != (header.tag, header.kind) {
                    return Err(MalformedMessage::UnexpectedReply(found.tag).into());
                }
                return Ok(reply::decode(&found, self.inflow.take(body))?);
            }
            match self.inflow.receive(stream)? {
                ReceiveResult::Bytes { .. } => {}
                ReceiveResult::WouldBlock => stream.wait(WaitFor::Readable, until)?,
                ReceiveResult::End => return Err(CallError::Closed),
            }
        }
    }
}

impl AsFd for BrickClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl<W: Wire + Send + Sync> BrickControl for BrickClient<W> {
    fn create(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.call_control(Control::Create { slice, size_bytes })
    }

    fn resize(&self, slice: SliceId, size_bytes: u64) -> Result<(), SliceError> {
        self.call_control(Control::Resize { slice, size_bytes })
    }

    fn delete(&self, slice: SliceId) -> Result<(), SliceError> {
        self.call_control(Control::Delete { slice })
    }

    fn list(&self) -> Result<Vec<SliceInfo>, SliceError> {
        let mut all: Vec<SliceInfo> = Vec::new();
        for _ in 0..LIST_ANSWERS_MAX {
            let after = all.last().map(|info| info.slice);
            match self.call(&Request::Control(Control::List { after }))? {
                Reply::List { slices, more } if is_progress(after, &slices) => {
                    let more = more && !slices.is_empty();
                    all.extend(slices);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(self.unexpected_reply()),
            }
        }
        let cause = format!("the list of slices of brick {} does not end", self.brick);
        Err(SliceError::Refused(cause))
    }

    fn status(&self) -> Result<BrickStatus, SliceError> {
        match self.call(&Request::Control(Control::Status))? {
            Reply::Status(status) => Ok(status),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn prepare_snapshot(&self, slice: SliceId, snapshot: Epoch) -> Result<(), SliceError> {
        self.check_knows_snapshots()?;
        self.call_control(Control::PrepareSnapshot { slice, snapshot })
    }

    fn drop_snapshots(&self, slice: SliceId, dropped: &[Epoch]) -> Result<(), SliceError> {
        self.check_knows_snapshots()?;
        check_dropped(dropped)?;
        if dropped.is_empty() {
            return Ok(());
        }
        let snapshots = dropped.to_vec();
        self.call_control(Control::DropSnapshots { slice, snapshots })
    }

    fn create_clone(
        &self,
        slice: SliceId,
        source: CloneSource,
        size_bytes: u64,
    ) -> Result<CloneProgress, SliceError> {
        self.call_clone(Control::CreateClone {
            slice,
            source,
            size_bytes,
        })
    }

    fn promote_clone(&self, slice: SliceId) -> Result<CloneProgress, SliceError> {
        self.call_clone(Control::PromoteClone { slice })
    }

    fn count_seen_pages(&self, slice: SliceId, from: PageNo) -> Result<SeenPagesList, SliceError> {
        if !self.knows_space {
            return Err(SliceError::Refused(SPACE_UNKNOWN.into()));
        }
        match self.call(&Request::Control(Control::CountSeenPages { slice, from }))? {
            Reply::SeenPages(list) if list.next.is_none_or(|next| next > from) => Ok(list),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn adopt_snapshots(&self, slice: SliceId, adopted: &[Epoch]) -> Result<(), SliceError> {
        check_dropped(adopted)?;
        if adopted.is_empty() {
            return Ok(());
        }
        let snapshots = adopted.to_vec();
        match self.call_versions(Control::AdoptSnapshots { slice, snapshots })? {
            Reply::Slice(SliceReply::Done) => Ok(()),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn list_versions(
        &self,
        slice: SliceId,
        range: &VersionRange,
    ) -> Result<VersionList, SliceError> {
        check_version_range(range)?;
        let range = range.clone();
        let from = range.from;
        match self.call_versions(Control::ListVersions { slice, range })? {
            Reply::Versions(list)
                if list.versions.is_sorted() && list.next.is_none_or(|next| next >= from) =>
            {
                Ok(list)
            }
            _ => Err(self.unexpected_reply()),
        }
    }

    fn edit_versions(&self, slice: SliceId, edits: &VersionEdits) -> Result<(), SliceError> {
        check_version_edits(edits)?;
        let edits = edits.clone();
        match self.call_versions(Control::EditVersions { slice, edits })? {
            Reply::Slice(SliceReply::Done) => Ok(()),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn read_version(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> Result<Vec<u8>, SliceError> {
        let range = (offset, len);
        let asked = Control::ReadVersion {
            slice,
            snapshot,
            range,
        };
        match self.call_versions(asked)? {
            Reply::Slice(SliceReply::Data(data)) if data.len() == len as usize => Ok(data),
            _ => Err(self.unexpected_reply()),
        }
    }

    fn snapshots(&self, slice: SliceId) -> Result<Vec<Epoch>, SliceError> {
        self.check_knows_snapshots()?;
        let mut all: Vec<Epoch> = Vec::new();
        for _ in 0..LIST_ANSWERS_MAX {
            let after = all.last().copied().unwrap_or(Epoch(0));
            match self.call(&Request::Control(Control::Snapshots { slice, after }))? {
                Reply::Snapshots { snapshots, more }
                    if std::iter::once(&after)
                        .chain(&snapshots)
                        .is_sorted_by(|a, b| a < b) =>
                {
                    let more = more && !snapshots.is_empty();
                    all.extend(snapshots);
                    if !more {
                        return Ok(all);
                    }
                }
                _ => return Err(self.unexpected_reply()),
            }
        }
        let cause = format!("the list of snapshots of slice {slice} does not end");
        Err(SliceError::Refused(cause))
    }
}
