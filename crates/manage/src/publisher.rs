//! The publisher: reads the present state of changed things, and puts messages about them into the
//! queue of watching clients. Commits and events mark the things that they change. Heartbeats and
//! slices change bricks without a mark, so the publisher compares bricks at intervals.

use crate::events::{MessageQueue, Subscription, frame};
use crate::manager::Manager;
use crate::published::{PublishedBrick, PublishedState};
use crate::volume_info::summary_info;
use crate::wire::{Acknowledged, Deleted};
use pagemesh_base::poison;
use std::time::Instant;

impl Manager {
    /// Puts the changes since the last call into the queue. Without clients it forgets them.
    pub(crate) fn publish_changes(&self) {
        let mut messages = MessageQueue::default();
        {
            let mut published = poison::lock(&self.published);
            if self.feed.is_watched() {
                self.encode_items(&mut published, &mut messages);
            } else {
                self.feed.take_changed();
                *published = PublishedState::default();
            }
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
            self.events().after(position).cloned().collect()
        });
    }

    fn encode_items(&self, published: &mut PublishedState, messages: &mut MessageQueue) {
        let times = self.settings.watch;
        let now = Instant::now();
        let mut book = self.state();
        self.refresh_living(&mut book);
        let mut changed = self.feed.take_changed();
        let status = self.status_of(&book);
        if self.feed.is_news(&status) || published.is_status_due(now, times.status_every) {
            messages.push(&frame("status", None, &status));
            published.record_status(now);
        }
        let provisioned = book.provisioned();
        if published.begin_comparison(now, times.compare_every) {
            for (id, brick) in &book.bricks {
                let info = self.brick_info(&book, &provisioned, brick);
                if !published.has_brick(&PublishedBrick::new(info, brick.last_heartbeat)) {
                    changed.bricks.insert(*id);
                }
            }
        }
        for id in &changed.bricks {
            let Some(brick) = book.bricks.get(id) else {
                published.remove_brick(id);
                messages.push(&frame("brick", None, &Deleted::new(id)));
                continue;
            };
            let info = self.brick_info(&book, &provisioned, brick);
            messages.push(&frame("brick", None, &info));
            published.record_brick(PublishedBrick::new(info, brick.last_heartbeat));
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
            let Some(event) = event else {
                continue;
            };
            if let Some(acknowledged) = event.acknowledged.clone() {
                let news = Acknowledged { seq, acknowledged };
                messages.push_about(event.kind, &frame("acknowledged", None, &news));
            }
        }
    }
}
