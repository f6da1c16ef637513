//! The changes that watching clients are told: a bounded queue of encoded messages for all of them.
//!
//! Invariants: the queue holds at most [`QUEUE_MESSAGES`] messages of about [`MESSAGE_BYTES_MAX`]
//! bytes, however many clients read it; a client that falls behind it is told so, and starts anew.
//! Without clients nothing is remembered. A client that subscribes gets every later
//! event once: the position of the publisher and the subscription change under one lock.
//!
//! A change only marks the thing as changed. The publisher then reads its present state, so a thing
//! that changes often costs one message per turn of the publisher.
//!
//! Events about tokens are for admins. Each message therefore has two forms, and a stream takes the
//! one of its role.

use super::record::{EventKind, EventRecord};
use crate::access::Role;
use crate::wire::ClusterStatus;
use hyper::body::Bytes;
use pagemesh_base::layout::{BrickId, VolumeName};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, broadcast};

/// Messages that a client may fall behind.
pub const QUEUE_MESSAGES: usize = 256;
/// Bytes after which a message takes no further item. A brick that dies may change the summary of
/// every volume; these share messages.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// The queue, and the changes that are not in it yet.
#[derive(Debug)]
pub(crate) struct Feed {
    /// Wakes the publisher.
    pub wake: Notify,
    sender: broadcast::Sender<FeedMessage>,
    /// The number of the last event in the queue.
    position: Mutex<u64>,
    changed: Mutex<ChangedItems>,
    /// The summary of the cluster that clients have; `None` if a client has none.
    status: Mutex<Option<ClusterStatus>>,
}

#[derive(Debug, Default)]
pub(crate) struct ChangedItems {
    pub bricks: BTreeSet<BrickId>,
    pub volumes: BTreeSet<VolumeName>,
    pub acknowledged: BTreeSet<u64>,
}

/// One client's place in the queue.
pub(crate) struct Subscription {
    /// The messages from now on.
    pub messages: broadcast::Receiver<FeedMessage>,
    /// The number of the last event that `messages` does not have.
    pub position: u64,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Feed {
    /// A feed after the event of this number.
    pub(crate) fn new(position: u64) -> Feed {
        Feed {
            wake: Notify::new(),
            sender: broadcast::Sender::new(QUEUE_MESSAGES),
            position: Mutex::new(position),
            changed: Mutex::default(),
            status: Mutex::default(),
        }
    }

    /// Whether any client reads.
    pub(crate) fn is_watched(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    pub(crate) fn subscribe(&self) -> Subscription {
        let position = locked(&self.position);
        let subscription = Subscription {
            messages: self.sender.subscribe(),
            position: *position,
        };
        // The publisher sends the summary of the cluster to the new client.
        *locked(&self.status) = None;
        self.wake.notify_one();
        subscription
    }

    /// The changes since the last call.
    pub(crate) fn take_changed(&self) -> ChangedItems {
        std::mem::take(&mut *locked(&self.changed))
    }

    /// Whether clients do not have this summary; from then on they have.
    pub(crate) fn is_news(&self, status: &ClusterStatus) -> bool {
        locked(&self.status).replace(status.clone()).as_ref() != Some(status)
    }

    /// Sends messages, and the events after the last one that was sent. `events` gives the events
    /// after a number.
    pub(crate) fn send(
        &self,
        mut messages: MessageQueue,
        events: impl FnOnce(u64) -> Vec<Arc<EventRecord>>,
    ) {
        let mut position = locked(&self.position);
        for event in events(*position) {
            *position = event.seq;
            messages.push_about(event.kind, &event_frame(&event));
        }
        for message in messages.0 {
            // An error means that the last client has gone.
            let _ = self.sender.send(message.into());
        }
    }

    fn mark(&self, mark: impl FnOnce(&mut ChangedItems)) {
        if self.is_watched() {
            mark(&mut locked(&self.changed));
            self.wake.notify_one();
        }
    }

    pub(crate) fn mark_brick(&self, brick: BrickId) {
        self.mark(|changed| {
            changed.bricks.insert(brick);
        });
    }

    pub(crate) fn mark_volume(&self, volume: &VolumeName) {
        self.mark(|changed| {
            changed.volumes.insert(volume.clone());
        });
    }

    pub(crate) fn mark_acknowledged(&self, seq: u64) {
        self.mark(|changed| {
            changed.acknowledged.insert(seq);
        });
    }
}

/// A message of the queue, in the two forms that roles may read.
#[derive(Clone, Debug)]
pub(crate) struct FeedMessage {
    all: Bytes,
    /// The same bytes without the frames for admins.
    public: Bytes,
}

impl FeedMessage {
    /// The frames that a role may read; `None` if there is none.
    pub(crate) fn readable_by(self, role: Role) -> Option<Bytes> {
        let bytes = if role >= Role::Admin {
            self.all
        } else {
            self.public
        };
        (!bytes.is_empty()).then_some(bytes)
    }
}

/// Messages in the making.
#[derive(Default)]
pub(crate) struct MessageQueue(Vec<MessageDraft>);

/// A message in the making. Without frames for admins both of its forms share their bytes.
#[derive(Default)]
struct MessageDraft {
    all: Vec<u8>,
    /// The frames for everyone, once there is another one.
    public: Option<Vec<u8>>,
}

impl MessageQueue {
    /// Adds a frame for everyone.
    pub(crate) fn push(&mut self, frame: &[u8]) {
        let last = self.last_with_room();
        last.all.extend_from_slice(frame);
        if let Some(public) = &mut last.public {
            public.extend_from_slice(frame);
        }
    }

    /// Adds a frame about an event of this kind, for the roles that may read it.
    pub(crate) fn push_about(&mut self, kind: EventKind, frame: &[u8]) {
        if !kind.is_for_admins() {
            return self.push(frame);
        }
        let last = self.last_with_room();
        last.public.get_or_insert_with(|| last.all.clone());
        last.all.extend_from_slice(frame);
    }

    fn last_with_room(&mut self) -> &mut MessageDraft {
        let has_room = |last: &MessageDraft| last.all.len() < MESSAGE_BYTES_MAX;
        if !self.0.last().is_some_and(has_room) {
            self.0.push(MessageDraft::default());
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }
}

impl From<MessageDraft> for FeedMessage {
    fn from(draft: MessageDraft) -> FeedMessage {
        let all = Bytes::from(draft.all);
        FeedMessage {
            public: draft.public.map_or_else(|| all.clone(), Bytes::from),
            all,
        }
    }
}

/// A frame of an event stream (WHATWG HTML, section 9.2). JSON has no line breaks.
pub(crate) fn frame(kind: &str, id: Option<u64>, data: &impl Serialize) -> Vec<u8> {
    let mut frame = format!("event: {kind}\n");
    if let Some(id) = id {
        frame += &format!("id: {id}\n");
    }
    let mut frame = (frame + "data: ").into_bytes();
    // Writing to a vector fails only for values that have no JSON; the bodies of REST have.
    let _ = serde_json::to_writer(&mut frame, data);
    frame.extend_from_slice(b"\n\n");
    frame
}

/// The frame of an event.
pub(crate) fn event_frame(event: &EventRecord) -> Vec<u8> {
    frame("event", Some(event.seq), event)
}
