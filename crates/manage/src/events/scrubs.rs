//! The events of scrubs, by comparison of a brick's heartbeats.

use super::draft::EventDraft;
use crate::records::BrickRecord;
use crate::wire::{BrickScrub, ScrubRequest, ScrubState};

/// The events of a heartbeat. Without an earlier heartbeat the manager cannot tell corrections of
/// today from earlier ones, so then it reports only damage that is there still. The last argument is
/// the pending request, and its actor.
pub(crate) fn scrub_drafts(
    record: &BrickRecord,
    before: Option<BrickScrub>,
    scrub: Option<BrickScrub>,
    (request, actor): (Option<ScrubRequest>, Option<&str>),
) -> Vec<EventDraft> {
    let Some(scrub) = scrub else {
        return vec![];
    };
    let Some(before) = before else {
        let damaged = scrub.damaged();
        let found = EventDraft::scrub_found(record, scrub.corrected, damaged);
        return if damaged > 0 { vec![found] } else { vec![] };
    };
    let mut drafts = Vec::new();
    let is_new = before.state != ScrubState::Running;
    if is_new && (scrub.state == ScrubState::Running || scrub.passes > before.passes) {
        let is_asked = request.is_some_and(|request| scrub.fulfilled == Some(request.id));
        let actor = actor.filter(|_| is_asked).unwrap_or("manager");
        drafts.push(EventDraft::scrub_started(record, actor));
    }
    let corrected = scrub.corrected.saturating_sub(before.corrected);
    let is_worse = scrub.damaged() > before.damaged();
    if corrected > 0 || is_worse {
        let damaged = if is_worse { scrub.damaged() } else { 0 };
        drafts.push(EventDraft::scrub_found(record, corrected, damaged));
    }
    drafts
}
