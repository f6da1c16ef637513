//! The changes that watching clients are told: a bounded queue of encoded messages for all of them.
//!
//! Invariants: the queue holds at most [`QUEUE_MESSAGES`] messages of about [`MESSAGE_BYTES_MAX`]
//! bytes, however many clients read it; a client that falls behind it is told so, and starts anew.
//! Without clients nothing is remembered. A client that subscribes gets every later
//! event once: the position of the publisher and the subscription change under one lock.
//!
//! A change only marks the thing as changed. The publisher then reads its present state, so a thing
//! that changes often costs one message per turn of the publisher.

use super::record::EventRecord;
use crate::wire::ClusterStatus;
use hyper::body::Bytes;
use pagemesh_base::layout::{BrickId, VolumeName};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
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
    sender: broadcast::Sender<Bytes>,
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
    pub messages: broadcast::Receiver<Bytes>,
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
    /// after a number, and the number of the last one.
    pub(crate) fn send<E: Iterator<Item = (u64, Vec<u8>)>>(
        &self,
        mut messages: MessageQueue,
        events: impl FnOnce(u64) -> E,
    ) {
        let mut position = locked(&self.position);
        for (seq, frame) in events(*position) {
            *position = seq;
            messages.push(&frame);
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

/// Messages in the making.
#[derive(Default)]
pub(crate) struct MessageQueue(Vec<Vec<u8>>);

impl MessageQueue {
    pub(crate) fn push(&mut self, frame: &[u8]) {
        match self.0.last_mut() {
            Some(last) if last.len() < MESSAGE_BYTES_MAX => last.extend_from_slice(frame),
            _ => self.0.push(frame.to_vec()),
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
