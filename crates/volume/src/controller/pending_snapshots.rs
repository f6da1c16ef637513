//! The snapshots on their way to the asynchronous replica, as [`replica_snapshots`](super::replica_snapshots) keeps them.

use crate::limits::REPLICA_SNAPSHOTS_REPORTED_MAX;
use pagemesh_base::authority::ReplicaSnapshot;

/// A snapshot that was cut, and that the replica does not have yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PendingSnapshot {
    pub(super) snapshot: ReplicaSnapshot,
    /// The serial of the replica's connection.
    pub(super) serial: u64,
    /// The last number of the changes that are older.
    pub(super) number: u64,
}

/// The snapshots on their way to the replica.
#[derive(Debug, Default)]
pub(super) struct ReplicaSnapshots {
    pub(super) pending: Vec<PendingSnapshot>,
    /// Snapshots that the replica has, and the manager may not know of.
    pub(super) complete: Vec<ReplicaSnapshot>,
    pub(super) has_task: bool,
}

impl ReplicaSnapshots {
    /// Gives up the snapshots that the replica does not have yet: a change came without the epoch of its stamp, so its side
    /// of their cuts is unknown.
    pub(super) fn give_up_pending(&mut self) {
        self.pending.clear();
    }

    /// The snapshots to report.
    pub(super) fn complete(&self) -> &[ReplicaSnapshot] {
        &self.complete
    }

    /// The manager has these.
    pub(super) fn forget(&mut self, reported: &[ReplicaSnapshot]) {
        self.complete.retain(|it| !reported.contains(it));
    }

    /// Sorts pending snapshots by the progress of the replica: `is_done` returns none for a connection that has ended.
    pub(super) fn collect(&mut self, is_done: impl Fn(u64, u64) -> Option<bool>) {
        let complete = &mut self.complete;
        self.pending
            .retain(|it| match is_done(it.serial, it.number) {
                Some(false) => true,
                Some(true) if complete.len() < REPLICA_SNAPSHOTS_REPORTED_MAX => {
                    complete.push(it.snapshot);
                    false
                }
                Some(true) | None => false,
            });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::ids::Epoch;
    use pagemesh_base::layout::SliceId;
    use uuid::Uuid;

    fn pending(epoch: u32, serial: u64, number: u64) -> PendingSnapshot {
        PendingSnapshot {
            snapshot: ReplicaSnapshot {
                slice: SliceId(Uuid::from_u128(7)),
                snapshot: Epoch(epoch),
            },
            serial,
            number,
        }
    }

    #[test]
    fn ended_connection_completes_no_snapshot() {
        let mut of = ReplicaSnapshots {
            pending: vec![pending(5, 1, 10), pending(6, 2, 20), pending(7, 2, 30)],
            ..ReplicaSnapshots::default()
        };
        // The second connection is the present one, and has the changes up to number 20.
        of.collect(|serial, number| (serial == 2).then_some(number <= 20));
        let epochs = of.complete().iter().map(|it| it.snapshot.0);
        assert_eq!(epochs.collect::<Vec<_>>(), [6]);
        assert_eq!(of.pending, [pending(7, 2, 30)]);
        let reported = of.complete().to_vec();
        of.forget(&reported);
        of.give_up_pending();
        of.collect(|_, _| Some(true));
        assert!(of.complete().is_empty(), "{of:?}");
    }
}
