//! Deliberate defects: proof that checks can fail.
//!
//! Each is a way to break the product, named here and made at the place that
//! asks [`is`]. Tests switch one on for their thread and must see it caught:
//! `store/src/enumerate/defects.rs` by the images that crashes leave,
//! `store/src/models` and `volume/src/models.rs` by the orders of what threads do,
//! `sim/tests/defects.rs` by histories of a cluster, those of transactions also by
//! stories of a volume (`volume/src/testing/scenarios.rs`), those of guests by
//! `store/src/enumerate/guests` and `volume/src/testing/guests`.
//!
//! Only the feature `defects`, which nothing but those tests' dependencies turn
//! on, gives [`is`] something to look at, and only where debug assertions are
//! on. In every other build, and in every release build whatever its features,
//! it is a constant false and nothing is left.

/// A way to break the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Defect {
    /// A write is acknowledged without the fence that commits it.
    NoCommitFence,
    /// Slots are swapped before the fence.
    SwapBeforeFence,
    /// Locks are released before the fence.
    UnlockBeforeFence,
    /// Data is stored after the fence of the record that names it. Made by the
    /// medium of the tests.
    DataAfterRecord,
    /// Recovery takes the records of a group of which others are missing.
    GroupHalfRecovered,
    /// A session publishes a group before its last record is there.
    GroupPublishedEarly,
    /// Recovery does not look at the data of the last record.
    SkippedCrc,
    /// Recovery takes a page of the last record that is whole but for a bit.
    NearlyWholeKept,
    /// Frames that cannot be read are used again.
    UnreadableReused,
    /// Recovery takes a page that it cannot read for one that never was whole.
    UnreadableDropped,
    /// Slots above the leaves that lost a bit stay as they are in a pool at work.
    NodesNotCorrected,
    /// Pages with a damaged slot are not cleared.
    DamageNotCleared,
    /// A session does not flush the slots that it says are settled.
    SessionSlotsNotFlushed,
    /// A session says that the slots of its last record are settled, too.
    LastSlotsReportedFlushed,
    /// A checkpoint passes a record that is not published yet.
    CheckpointPassesUnpublished,
    /// A checkpoint goes back to a floor that is older than the one before.
    CheckpointGoesBack,
    /// A bypass passes a record that is not published yet.
    PartialCheckpointPassesUnpublished,
    /// A bypass leaves records in lanes that it has applied.
    PartialCheckpointKeepsRecords,
    /// A bypass does not list what may be missing on another leg.
    PartialCheckpointListsNothing,
    /// What a bypass listed of a session is forgotten when that dies.
    PartialCheckpointOfDeadForgotten,
    /// A bypass reads the seq after the ends of lanes.
    PartialCheckpointReadsSeqLate,
    /// The seq that a dead session took stays a hole that nobody closes.
    SeqHoleKept,
    /// Bytes of a part of a page are put there before the fence.
    PatchedBeforeFence,
    /// A page does not show that bytes are being put there.
    PatchNotMarked,
    /// A session does not flush the bytes that it says are settled.
    SessionPatchNotFlushed,
    /// A checkpoint leaves the flush of all bytes to sessions.
    CheckpointPatchNotFlushed,
    /// A checkpoint frees the frame that was changed in place.
    PatchedFrameFreed,
    /// Recovery puts bytes into a frame that another page has by now.
    PatchOnMovedFrame,
    /// Recovery takes a page that was changed in place for a torn one.
    PatchedPageTorn,
    /// Of a part of a page that a dead session had committed only the slot is shown.
    DeadPatchNotApplied,
    /// The operation that a dead session had committed is left undone.
    DeadNotRolledForward,
    /// Recovery does not list operations in flight.
    InFlightLost,
    /// Operations in flight are listed with the page behind theirs.
    InFlightMisplaced,
    /// What a dead session had in flight is not listed.
    InFlightOfDeadLost,
    /// A lane gives up records that may be missing on another leg.
    HeadPastOpen,
    /// A new node holds what its frame held.
    NodeNotZeroed,
    /// A pad is not fenced before the record behind it.
    PadNotFenced,
    /// The tables are fenced together with the superblock that counts on them.
    TablesWithSuperblock,
    /// The checkpoint does not flush the checksums of frames.
    FrameTableNotFlushed,
    /// `file-sync`: freed frames are granted before the records that freed them
    /// are durable.
    FrameReuse,
    /// Lane lines are used again without the superblock that gives them up.
    JournalReuse,
    /// A session's lane is used before the superblock names it.
    JournalNotNamed,
    /// Recovery overwrites a superblock before the one that it chose is durable.
    SuperblockNotFlushed,
    /// A checkpoint overwrites the older superblock though the newer is damaged.
    NewerSuperblockNotChecked,
    /// A scrub overwrites the older superblock, and not the newer, which is
    /// damaged.
    OlderSuperblockFirst,
    /// A scrub writes both superblocks with one fence.
    SuperblocksTogether,
    /// Slices are marked to be compared after the head has passed a record that
    /// cannot be read.
    SlicesMarkedAfterHead,
    /// Recovery stores slots before the records that it replays are durable.
    ReplayedBeforeFence,
    /// An opening goes on under the number of the one before.
    IncarnationKept,
    /// An object changes without a fence for its record.
    ObjectNotFenced,
    /// `file-sync`: a checkpoint applies what is not durable yet.
    CheckpointNotSynced,
    /// `file-sync`: a flush returns before anything is durable.
    FlushNotSynced,
    /// `file-sync`: records are applied lane by lane, not by their seqs.
    AppliedOutOfOrder,
    /// `file-sync`: recovery applies what a dead process left in the page cache
    /// and the disk may not have.
    RecoveryNotSynced,
    /// `file-sync`: recovery stores slots before the frames they free are
    /// durably free.
    SlotsBeforeFrames,
    /// `file-sync`: a node whose zeroes were lost is used as it is.
    LostNodeKept,
    /// `file-sync`: recovery applies the rest of a group of which a leaf was
    /// never linked.
    GroupWithoutLeaf,

    // Of what guests do on the direct path, or is done for them.
    /// A guest takes the number of its operation before the lock words.
    NumberedBeforeLocks,
    /// Locks are released behind the fence, before the slots are swapped.
    UnlockBeforePublish,
    /// Records go to the leg first that guests read.
    LastLegFirst,
    /// Settling looks at the newest operation on a page alone.
    RecoveredByNewest,
    /// A guest reads the leg whose record is written first.
    FirstLegRead,
    /// A guest begins although guests are kept away.
    AccessDisabledIgnored,
    /// What a dead guest left is made alike while other guests go on.
    ReconciledDuringClientWrites,
    /// The first page that a dead guest left unlike stays so.
    ReconciledInPart,
    /// Settling waits for what a dead guest left, which waits for the settling.
    RecoveryAwaitsReconcile,
    /// The row of a dead guest is cleared before its pages are alike.
    RowClearedFirst,
    /// Nothing is made alike where a guest died.
    NotReconciled,
    /// Who closes a board does not wait for guests that are inside.
    SharedFileMapNotAwaited,

    // Of what threads do at the same time: caught by the models.
    /// Who mends a slot does not look whether it is still the same.
    CorrectedBlindly,
    /// Who waits for a lock word sleeps without a mark on it.
    WaiterUnmarked,
    /// The lock words of a dead session stay taken.
    LocksKept,
    /// With a dead session's lock words all others are freed.
    LocksOfAllFreed,
    /// The lock words of a dead session are free before its operation is
    /// finished.
    LocksFreedFirst,
    /// A write does not take its lock words.
    NotLocked,
    /// A transaction takes the lock words of its first run only.
    GroupNotLocked,
    /// Whether the owner sleeps is looked at before the bell is rung.
    DoorbellMissed,
    /// A session enters the window after it was revoked.
    RevokedBeginsOperation,
    /// A session enters the window after its grants were taken back.
    RecallIgnored,
    /// Grants are taken back from who entered the window meanwhile.
    RecallNotAwaited,
    /// A recall that is given up goes on for ever.
    GivenUpRecallKept,
    /// The floor is published after the seq was taken.
    FloorAfterSeq,
    /// A reader does not look whether the slot is still the same.
    SlotNotRechecked,
    /// Who reads pages as of one moment does not look whether somebody changes them.
    LocksNotChecked,
    /// A change that finds nobody ahead of it is not counted.
    ChangeNotCounted,
    /// Readers that wait for changes are not told that these have ended.
    ReadersNotWoken,
    /// A read waits for all changes beside it but the first.
    FirstChangeNotAwaited,
    /// That a range is undecided is noted after its column was decided.
    LateIndeterminateRecorded,
    /// A wake-up is cleared before its descriptor is read.
    WakeClearedFirst,
    /// A channel takes a view without the connections that it was just told of.
    NewConnectionsMissed,

    // Of a brick, a volume or the manager: caught by the simulation.
    /// A slice takes requests of an epoch that is over.
    StaleEpochTaken,
    /// A client's old connection goes on beside the one that replaced it.
    OldConnectionTaken,
    /// A change is acknowledged when the first leg has it.
    OneLegAcknowledged,
    /// A leg that is still being brought up to date is read.
    SyncingLegRead,
    /// A stale leg is taken for one that is in-sync once it is connected.
    StaleLegRead,
    /// A returning leg is not given what changed in a region.
    RegionNotResynced,
    /// What changes while a leg is stale is not marked.
    RoundNotStamped,
    /// A returning leg keeps what was in flight on it.
    InFlightNotCopied,
    /// Settling copies from a leg that is still being brought up to date.
    RecoveredFromSyncing,
    /// Settling leaves the first page that differs as it is.
    RecoveredPageSkipped,
    /// A volume opens after an attach without being settled.
    NotRecovered,
    /// The manager answers before its store is durable.
    ManagerNotSynced,
    /// The manager shows the layout of another attachment as one's own.
    ForeignLayoutTaken,
    /// A read shows a change that is not on every leg yet.
    ReadNotDelayed,
    /// A read shows what a failed change left on one leg.
    IndeterminateRead,
    /// A hedged read counts a leg that it asked under an old epoch as failed.
    OutdatedLegFailed,
    /// A read does not wait for the changes of its channel before it.
    ReadOvertakes,
    /// Overlapping changes do not take turns. The models catch it, too.
    OverlapsNotSerialized,
    /// A transaction has the range locks of its first part alone.
    FirstPartLocked,
    /// A transaction that is sent again is only its first part.
    FirstPartResent,
    /// Settling copies a transaction page by page.
    RecoveredByPage,
    /// A view is shown before every leg has heard of its epoch.
    NoBarrier,
    /// A change is made although one before it failed on a connection that keeps
    /// their order.
    OrderNotKept,
    /// What is to be durable is acknowledged before the leg that follows has it.
    DurableNotAwaited,
    /// A leg is said to follow before it has what was changed while it was copied to.
    ReplicaReportedTooEarly,
    /// Changes wait for the leg that follows behind those that came later.
    ReplicatedOutOfOrder,
    /// The keeper changes a leg with an epoch that this was not told over the connection.
    EpochNotAnnounced,
    /// A client goes on with a leg that followed the client before it.
    ReplicaOfDeadClientKept,
}

/// The defect of a thread, on its way to one that it starts.
pub struct CarriedDefect {
    #[cfg(all(feature = "defects", debug_assertions))]
    defect: Option<Defect>,
}

/// Takes this thread's defect along, if it has one.
#[must_use]
pub fn capture() -> CarriedDefect {
    CarriedDefect {
        #[cfg(all(feature = "defects", debug_assertions))]
        defect: present(),
    }
}

impl CarriedDefect {
    /// Gives it to this thread.
    pub fn install(self) {
        #[cfg(all(feature = "defects", debug_assertions))]
        set(self.defect);
    }
}

#[cfg(all(feature = "defects", debug_assertions))]
mod present {
    use super::Defect;
    use std::cell::Cell;

    thread_local! {
        static PRESENT: Cell<Option<Defect>> = const { Cell::new(None) };
    }

    /// Whether this thread has the defect.
    #[must_use]
    pub fn is(defect: Defect) -> bool {
        PRESENT.get() == Some(defect)
    }

    /// Gives this thread a defect, or takes it away.
    pub fn set(defect: Option<Defect>) {
        PRESENT.set(defect);
    }

    /// The defect of this thread.
    #[must_use]
    pub fn present() -> Option<Defect> {
        PRESENT.get()
    }

    /// Runs something without the defect, if it is the one.
    pub fn without<T>(defect: Defect, run: impl FnOnce() -> T) -> T {
        let present = PRESENT.get();
        PRESENT.set(present.filter(|&present| present != defect));
        let result = run();
        PRESENT.set(present);
        result
    }
}

#[cfg(all(feature = "defects", debug_assertions))]
pub use present::{is, present, set, without};

/// Whether there is the defect: never.
#[cfg(not(all(feature = "defects", debug_assertions)))]
#[inline(always)]
#[must_use]
pub const fn is(_: Defect) -> bool {
    false
}
