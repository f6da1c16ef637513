//! A batch: the changes that become one transaction of the space, and the changes of the state in
//! memory that go with it.

use crate::format::inode::Ino;
use crate::format::page_map::Span;
use crate::format::{PAGE, Page};
use crate::hash::NumberSet;
use crate::live::inode::PendingTimes;
use bytes::Bytes;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::SpaceError;
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// When a call returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acknowledge {
    /// When its change is committed.
    Committed,
    /// When its change is in the batch, if the mount allows that.
    Deferrable,
    /// As `Committed`. Without a change: when the changes that it has read are committed.
    ReadCommitted,
    /// When its change is in the batch: until a sync the caller expects to lose it, as an UNSTABLE write of NFS (RFC 1813,
    /// section 3.3.7).
    Unstable,
}

/// A page that a transaction changes.
#[derive(Clone)]
pub(crate) enum PageChange {
    /// Of the name space.
    Metadata(Arc<Page>),
    /// Of a file.
    Data(Arc<Page>),
    Cleared,
}

impl PageChange {
    /// The page after the change.
    pub(super) fn bytes(&self) -> Arc<Page> {
        match self {
            PageChange::Metadata(bytes) | PageChange::Data(bytes) => Arc::clone(bytes),
            PageChange::Cleared => Arc::new([0; PAGE_BYTES]),
        }
    }
}

pub(crate) type PageChanges = BTreeMap<u64, PageChange>;

/// The result of a batch.
pub(crate) type BatchOutcome = Arc<OnceLock<std::result::Result<(), SpaceError>>>;

/// Changes that become one transaction.
#[derive(Default)]
pub(crate) struct Batch {
    pub(super) changes: PageChanges,
    pub(super) effects: BatchEffects,
    pub(super) outcome: BatchOutcome,
    pub(super) durable: bool,
    /// The hint of the data of files. `TierHint::None` if files differ.
    pub(super) data_hint: Option<TierHint>,
    pub(super) acknowledged: AcknowledgedChanges,
}

/// The hint of data of two files.
pub(super) fn join_hints(one: Option<TierHint>, other: TierHint) -> TierHint {
    match one {
        Some(one) if one != other => TierHint::None,
        _ => other,
    }
}

impl Batch {
    /// The hint of its transaction. Pages of the name space go along, so only pins count: demoted first, they would be
    /// read from flash by each later change.
    pub(super) fn hint(&self) -> TierHint {
        match self.data_hint {
            Some(TierHint::Memory) => TierHint::Memory,
            _ => TierHint::None,
        }
    }
}

/// A batch that was sent and has no result yet.
pub(crate) struct BatchInFlight {
    pub(super) changes: PageChanges,
    pub(super) outcome: BatchOutcome,
    pub(super) acknowledged: AcknowledgedChanges,
    pub(super) inos_freed: usize,
    pub(super) inos_allocated: Vec<Ino>,
}

/// The changes of a batch that are acknowledged before it is committed ([`crate::txn::deferred_commit`]).
#[derive(Clone, Default)]
pub(crate) struct AcknowledgedChanges {
    /// Their inodes.
    pub(super) inos: NumberSet<Ino>,
    /// The time of the first one.
    pub(super) since: Option<Instant>,
    /// Whether one of them is an unstable write: its caller expects to lose it until a sync.
    pub(super) has_unstable: bool,
    /// Whether one of them is another change, which must not be lost.
    pub(super) has_deferrable: bool,
}

impl AcknowledgedChanges {
    pub(super) fn is_empty(&self) -> bool {
        self.since.is_none()
    }

    pub(super) fn add(
        &mut self,
        inos: impl IntoIterator<Item = Ino>,
        (when, now): (Acknowledge, Instant),
    ) {
        self.since.get_or_insert(now);
        self.inos.extend(inos);
        match when {
            Acknowledge::Unstable => self.has_unstable = true,
            _ => self.has_deferrable = true,
        }
    }
}

/// Changes of the state in memory that go with a batch.
#[derive(Default)]
pub(crate) struct BatchEffects {
    pub(super) spans_allocated: Vec<Span>,
    pub(super) spans_freed: Vec<Span>,
    /// Changes of the number of sharers, by span.
    pub(super) share_changes: Vec<(Span, i64)>,
    pub(super) inos_allocated: Vec<Ino>,
    pub(super) inos_freed: Vec<Ino>,
    /// Pending times that are in their inodes now.
    pub(super) times_written: Vec<(Ino, PendingTimes)>,
    pub(super) page_delta: i64,
}

impl BatchEffects {
    pub(crate) fn add(&mut self, other: BatchEffects) {
        self.spans_allocated.extend(other.spans_allocated);
        self.spans_freed.extend(other.spans_freed);
        self.share_changes.extend(other.share_changes);
        self.inos_allocated.extend(other.inos_allocated);
        self.inos_freed.extend(other.inos_freed);
        self.times_written.extend(other.times_written);
        self.page_delta += other.page_delta;
    }
}

/// Changes as parts of a transaction; adjacent pages share a part.
pub(crate) fn transaction_parts(changes: &PageChanges) -> Vec<TransactionPart> {
    let mut parts = Vec::new();
    let mut written: Vec<u8> = Vec::new();
    let mut first = 0;
    let flush = |written: &mut Vec<u8>, first: u64, parts: &mut Vec<TransactionPart>| {
        if !written.is_empty() {
            parts.push(TransactionPart::Write {
                offset: first * PAGE,
                data: Bytes::from(std::mem::take(written)),
            });
        }
    };
    for (&page, change) in changes {
        let is_next = first + (written.len() / PAGE_BYTES) as u64 == page;
        match change {
            PageChange::Metadata(bytes) | PageChange::Data(bytes) => {
                if !is_next || written.is_empty() {
                    flush(&mut written, first, &mut parts);
                    first = page;
                }
                written.extend_from_slice(&bytes[..]);
            }
            PageChange::Cleared => {
                flush(&mut written, first, &mut parts);
                match parts.last_mut() {
                    Some(TransactionPart::Clear { offset, len })
                        if *offset + *len == page * PAGE =>
                    {
                        *len += PAGE;
                    }
                    _ => parts.push(TransactionPart::Clear {
                        offset: page * PAGE,
                        len: PAGE,
                    }),
                }
            }
        }
    }
    flush(&mut written, first, &mut parts);
    parts
}
