//! The events of changed leg states.

use super::draft::EventDraft;
use crate::layout_state::is_up_to_date;
use crate::wire::LegChange;
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::{BrickId, Layout, Leg, LegState};

/// The events of legal changes of a layout: one for all legs that are lost, one for all that are up
/// to date again. Syncing legs have none; the end of the resync has.
pub(crate) fn leg_drafts(
    before: &Layout,
    changes: &[LegChange],
    actor: &str,
    label: impl Fn(BrickId) -> BrickLabel,
) -> Vec<EventDraft> {
    let changed = |wanted: fn(LegState) -> bool| {
        let legs = changes.iter().filter(move |change| wanted(change.to));
        let legs = legs.filter_map(|change| Some((change, leg_of(before, change)?)));
        legs.filter(|(change, leg)| change.to != leg.state)
    };
    let is_stale = |it| it == LegState::Stale;
    let lost: Vec<BrickLabel> = changed(is_stale).map(|(_, leg)| label(leg.brick)).collect();
    let back: Vec<BrickLabel> = changed(is_up_to_date)
        .map(|(_, leg)| label(leg.brick))
        .collect();
    let mut notes = changed(is_stale).filter_map(|(change, _)| change.note.as_deref());
    let mut drafts = Vec::new();
    if !lost.is_empty() {
        drafts.push(EventDraft::legs_lost(
            &before.name,
            actor,
            &lost,
            notes.next(),
        ));
    }
    if !back.is_empty() {
        drafts.push(EventDraft::legs_returned(&before.name, actor, &back));
    }
    drafts
}

fn leg_of<'l>(layout: &'l Layout, change: &LegChange) -> Option<&'l Leg> {
    let segment = layout.segments.get(change.segment)?;
    segment.columns.get(change.column)?.legs.get(change.leg)
}
