//! Events: the changes of the cluster that people ask for later.
//!
//! Invariants: the store commits an event in the transaction of the change that it reports, so after
//! a crash both are there or neither. Sequence numbers only rise, across restarts too. The ring holds
//! at most [`EVENTS_MAX`] events, in the store and in memory.
//!
//! A flapping brick must not push the other events out of the ring:
//!
//! - An event of a kind that flaps (bricks, legs, scrubs, refused logins, starts) *replaces* an equal
//!   one of the last hour: it has a new sequence number, and counts the repetitions. A reader that
//!   follows the numbers sees each repetition; the ring has one event for all of them. Equal events
//!   have the same subject, severity, actor and text (of a scrub the text may differ).
//! - All other events stay, because each is a decision of its actor.
//! - A full ring drops the oldest event of its most frequent kind. Refused logins have a limit of
//!   their own, because unauthenticated requests cause them.

mod devices;
mod draft;
mod feed;
mod leg_changes;
mod list;
mod record;
mod ring;
mod scrubs;
mod snapshot_draft;

pub use feed::QUEUE_MESSAGES;
pub use list::EventFilter;
pub use record::{Acknowledgement, EventKind, EventRecord, Severity, Subject, SubjectKind};
pub use ring::{EVENTS_MAX, LOGIN_REFUSED_MAX, REPEAT_PERIOD};

pub(crate) use devices::device_drafts;
pub(crate) use draft::{EventDraft, LossEffect};
pub(crate) use feed::{Feed, MessageQueue, Subscription, event_frame, frame};
pub(crate) use leg_changes::leg_drafts;
pub(crate) use ring::{EventRing, RingChange};
pub(crate) use scrubs::scrub_drafts;
