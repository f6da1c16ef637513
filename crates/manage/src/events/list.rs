//! The events that a request asks for.

use super::record::{EventRecord, Severity, SubjectKind};
use super::ring::EventRing;
use crate::access::Role;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use utoipa::IntoParams;

/// The events of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EventFilter {
    /// Events with a higher number only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<u64>,
    /// Events in one answer, 1 to 1000; 1000 if missing. `Link` has the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub limit: Option<usize>,
    /// Only the last so many events of all that match, 1 to 1000, in the order of their numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 1000)]
    pub last: Option<usize>,
    /// Events of this severity and of higher ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(value_type = Severity, required = false, inline)]
    pub severity: Option<Severity>,
    /// Events about the thing of this name, written `v1` or `volume:v1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
}

impl EventFilter {
    /// Whether an event matches, apart from its number.
    #[must_use]
    pub fn matches(&self, event: &EventRecord) -> bool {
        let severe = self.severity.is_none_or(|least| event.severity >= least);
        let named = |asked: &String| {
            let subject = &event.subject;
            let typed = [
                (SubjectKind::Brick, "brick:"),
                (SubjectKind::Volume, "volume:"),
                (SubjectKind::Token, "token:"),
                (SubjectKind::Manager, "manager:"),
            ];
            let typed = typed
                .iter()
                .filter_map(|(kind, prefix)| Some((*kind, asked.strip_prefix(prefix)?)));
            *asked == subject.name
                || typed
                    .into_iter()
                    .any(|(kind, name)| (kind, name) == (subject.kind, &*subject.name))
        };
        severe && self.subject.as_ref().is_none_or(named)
    }
}

impl EventRing {
    /// At most `limit` events that match and that the role may read, and whether more follow.
    pub(crate) fn page(
        &self,
        filter: &EventFilter,
        limit: usize,
        role: Role,
    ) -> (Vec<Arc<EventRecord>>, bool) {
        let after = filter.after.unwrap_or(0);
        let readable = self.after(after).filter(|it| it.kind.is_readable_by(role));
        let mut matching = readable.filter(|event| filter.matches(event));
        if let Some(last) = filter.last {
            let mut found: Vec<_> = matching.rev().take(last.min(limit)).cloned().collect();
            found.reverse();
            return (found, false);
        }
        let found = matching.by_ref().take(limit).cloned().collect();
        (found, matching.next().is_some())
    }
}
