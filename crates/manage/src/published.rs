//! The bricks and the summary of the cluster as watching clients have them. The publisher finds by
//! it the changes that nothing marks.
//!
//! Invariants: without watching clients it is empty. Ages are no changes, because clients count
//! them on.

use crate::manager::LastHeartbeat;
use crate::wire::{BrickInfo, BrickScrub};
use pagemesh_base::layout::BrickId;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Two times of the next scrub that differ by less are the same. Heartbeats do not all take the same
/// time to arrive.
const SCRUB_TIME_TOLERANCE: Duration = Duration::from_secs(10);

/// The state that clients have.
#[derive(Debug, Default)]
pub(crate) struct PublishedState {
    bricks: BTreeMap<BrickId, PublishedBrick>,
    compared_at: Option<Instant>,
    status_at: Option<Instant>,
}

/// A brick without its ages.
#[derive(Debug)]
pub(crate) struct PublishedBrick {
    info: BrickInfo,
    /// The manager's time of the next scrub.
    next_scrub_at: Option<Duration>,
}

impl PublishedBrick {
    pub(crate) fn new(info: BrickInfo, heartbeat: Option<LastHeartbeat>) -> PublishedBrick {
        let next_scrub_at = heartbeat.and_then(|heard| {
            let next_in_ms = heard.scrub?.next_in_ms?;
            let next_in = Duration::from_millis(next_in_ms);
            Some(heard.received_at.saturating_add(next_in))
        });
        let without_ages = |scrub: BrickScrub| BrickScrub {
            next_in_ms: scrub.next_in_ms.map(|_| 0),
            ended_ms_ago: scrub.ended_ms_ago.map(|_| 0),
            ..scrub
        };
        PublishedBrick {
            info: BrickInfo {
                heartbeat_age_ms: info.heartbeat_age_ms.map(|_| 0),
                scrub: info.scrub.map(without_ages),
                ..info
            },
            next_scrub_at,
        }
    }

    fn is_same(&self, other: &PublishedBrick) -> bool {
        let next_scrubs = self.next_scrub_at.zip(other.next_scrub_at);
        let is_moved = next_scrubs.is_some_and(|(a, b)| a.abs_diff(b) > SCRUB_TIME_TOLERANCE);
        !is_moved && self.info == other.info
    }
}

impl PublishedState {
    /// Whether bricks have to be compared now; if so, the next comparison is due after this pause.
    pub(crate) fn begin_comparison(&mut self, now: Instant, pause: Duration) -> bool {
        let is_due = is_over(self.compared_at, now, pause);
        if is_due {
            self.compared_at = Some(now);
        }
        is_due
    }

    pub(crate) fn is_status_due(&self, now: Instant, pause: Duration) -> bool {
        is_over(self.status_at, now, pause)
    }

    pub(crate) fn record_status(&mut self, now: Instant) {
        self.status_at = Some(now);
    }

    /// Whether clients have this state of the brick.
    pub(crate) fn has_brick(&self, brick: &PublishedBrick) -> bool {
        let known = self.bricks.get(&brick.info.brick);
        known.is_some_and(|known| known.is_same(brick))
    }

    pub(crate) fn record_brick(&mut self, brick: PublishedBrick) {
        self.bricks.insert(brick.info.brick, brick);
    }

    pub(crate) fn remove_brick(&mut self, id: &BrickId) {
        self.bricks.remove(id);
    }
}

fn is_over(last: Option<Instant>, now: Instant, pause: Duration) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= pause)
}
