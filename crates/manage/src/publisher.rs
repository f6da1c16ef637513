//! The publisher: reads the present state of changed things, and puts messages about them into the
//! queue of watching clients.

use crate::events::{EventRecord, MessageQueue, Subscription, event_frame, frame};
use crate::manager::Manager;
use crate::volume_info::summary_info;
use crate::wire::{Acknowledged, Deleted};
use std::sync::Arc;

impl Manager {
    /// Puts the changes since the last call into the queue. Without clients it forgets them.
    pub(crate) fn publish_changes(&self) {
        let mut messages = MessageQueue::default();
        if self.feed.is_watched() {
            self.encode_items(&mut messages);
        } else {
            self.feed.take_changed();
        }
        self.send(messages);
    }

    /// A place in the queue after every event that is committed now. So a client that continues
    /// after an event that it has gets none of the events before it.
    pub(crate) fn subscribe(&self) -> Subscription {
        self.send(MessageQueue::default());
        self.feed.subscribe()
    }

    fn send(&self, messages: MessageQueue) {
        self.feed.send(messages, |position| {
            let events: Vec<Arc<EventRecord>> = self.events().after(position).cloned().collect();
            events
                .into_iter()
                .map(|event| (event.seq, event_frame(&event)))
        });
    }

    fn encode_items(&self, messages: &mut MessageQueue) {
        let mut book = self.state();
        self.refresh_living(&mut book);
        let changed = self.feed.take_changed();
        let status = self.status_of(&book);
        if self.feed.is_news(&status) {
            messages.push(&frame("status", None, &status));
        }
        let provisioned = book.provisioned();
        for id in &changed.bricks {
            let brick = book.bricks.get(id);
            let info = brick.map(|brick| self.brick_info(&book, &provisioned, brick));
            messages.push(&info.map_or_else(
                || frame("brick", None, &Deleted::new(id)),
                |info| frame("brick", None, &info),
            ));
        }
        for name in &changed.volumes {
            let entry = book.volumes.entry(name);
            let info = entry.map(|entry| summary_info(&entry.record, &entry.summary));
            messages.push(&info.map_or_else(
                || frame("volume", None, &Deleted::new(name)),
                |info| frame("volume", None, &info),
            ));
        }
        drop(book);
        for seq in changed.acknowledged {
            let event = self.events().get(seq).cloned();
            if let Some(acknowledged) = event.and_then(|event| event.acknowledged.clone()) {
                let news = Acknowledged { seq, acknowledged };
                messages.push(&frame("acknowledged", None, &news));
            }
        }
    }
}
