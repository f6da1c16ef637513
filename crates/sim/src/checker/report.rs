//! The events of a sector, for people.

use super::{Event, HistoryChecker, OpKind, Search};
use std::collections::BTreeSet;
use std::fmt::Write;

impl HistoryChecker {
    pub(super) fn failure_report(
        &self,
        sector: u64,
        events: &[Event],
        at: usize,
        search: &Search<'_>,
    ) -> String {
        let mut story = format!("sector {sector} is not linearizable:\n");
        story += &self.event_report(sector, &events[..=at]);
        let values: BTreeSet<u64> = search.states_before.iter().map(|state| state.0).collect();
        let _ = write!(story, "  before that it was one of {values:?}");
        story
    }

    pub(super) fn event_report(&self, sector: u64, events: &[Event]) -> String {
        let mut story = String::new();
        for event in events {
            // Writing to a string does not fail.
            let _ = match *event {
                Event::Begin(number) => writeln!(story, "  begin {}", self.describe(number)),
                Event::End(number, ending) => {
                    let operation = &self.operations[number];
                    let seen = match (&operation.kind, operation.value(sector)) {
                        (OpKind::Read(_), Some(value)) => format!(" saw {value}"),
                        _ => String::new(),
                    };
                    writeln!(story, "  {ending:?} {}{seen}", self.describe(number))
                }
                Event::Attached(attachment) => writeln!(story, "  attachment {attachment}"),
                Event::Promoted(cut) => {
                    let held = self.promotions[cut].value(sector);
                    writeln!(story, "  a promoted replica takes over with {held:?}")
                }
                other => writeln!(story, "  {other:?}"),
            };
        }
        story
    }
}
