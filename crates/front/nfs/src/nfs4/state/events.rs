//! Effects of calls outside of the state.

use super::ids::{ClientId, FileKey};
use super::journal::JournalRecord;

/// The reason that the server removed a client with its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// The client asked for it.
    Destroyed,
    /// A restarted client has confirmed its new record, or another principal took an unused one.
    Replaced,
    /// The client did not confirm its record within a lease.
    Unconfirmed,
    /// The lease is over, and the client had no state.
    LeaseExpired,
    /// The lease is over, and another client needs a file or range of the client.
    Conflict,
    /// The lease is over for longer than expired clients keep their state.
    CourtesyEnded,
    /// The lease is over, and the server needs room for others.
    Limit,
    /// An operator asked for it.
    Operator,
}

impl RemovalReason {
    /// The number of reasons.
    pub const COUNT: usize = 8;
    /// All reasons.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Destroyed,
        Self::Replaced,
        Self::Unconfirmed,
        Self::LeaseExpired,
        Self::Conflict,
        Self::CourtesyEnded,
        Self::Limit,
        Self::Operator,
    ];

    /// The name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Destroyed => "destroyed",
            Self::Replaced => "replaced",
            Self::Unconfirmed => "unconfirmed",
            Self::LeaseExpired => "lease",
            Self::Conflict => "conflict",
            Self::CourtesyEnded => "courtesy",
            Self::Limit => "limit",
            Self::Operator => "command",
        }
    }
}

/// An effect of a call outside of the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateEvent {
    /// Append the record to the list of a file system. It is durable before any reply that grants state
    /// in that file system.
    Journal {
        /// The number of the file system.
        export: u32,
        /// The record.
        record: JournalRecord,
    },
    /// The last open of the file is gone.
    FileUnused(FileKey),
    /// A client is gone with all its state.
    ClientRemoved {
        /// The client.
        client: ClientId,
        /// The reason.
        reason: RemovalReason,
    },
    /// The grace period is over. Append [`JournalRecord::GraceEnded`] to all lists.
    GraceEnded,
}
