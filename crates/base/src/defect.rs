//! Deliberate defects: proof that checks can fail.
//!
//! Each defect is a way to break the product, named here and implemented at the place that calls
//! [`is`]. A test enables one for its thread and must catch it. The tests are:
//!
//! - `store/tests/enumerate/defects.rs`, by the images that crashes leave;
//! - `store/tests/models` and `volume/tests/models`, by thread interleavings;
//! - `sim/tests/defects.rs`, by histories of a cluster;
//! - `fs/tests/deferred_commit.rs`, by power cuts of a file system;
//! - `volume/tests/cluster/scenarios`, by scenarios of a volume, for transactions and births;
//! - `store/tests/enumerate/direct_clients` and `volume/tests/cluster/histories/direct_clients`,
//!   for direct clients.
//!
//! [`is`] reads the defect only with the feature `defects`, which only the dependencies of those
//! tests enable, and only with debug assertions. In every other build, and in every release build
//! with any features, it is a constant false and compiles to nothing.

/// A way to break the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Defect {
    /// Pages of a file are discarded before the removal of its last name is committed.
    DiscardBeforeRemoval,
    /// A batch of acknowledged changes is sent without its flush.
    DeferredBatchNotFlushed,
    /// A batch that is sent because it is full is not durable when the next one is sent.
    FullBatchNotFlushed,
    /// A sync of a file does not commit acknowledged changes.
    SyncSkipsAcknowledged,
    /// A file is read from its volume although its pages are not committed yet.
    UncommittedPagesRead,
    /// A checkpoint frees replaced pages that a snapshot sees.
    SeenVersionFreed,
    /// A checkpoint writes its superblock before the lines that it appended to the version log.
    VersionLogNotFenced,
    /// Recovery does not keep the versions that its records replaced.
    RecoveredVersionsLost,
    /// A page that a snapshot sees is changed in place.
    SeenPagePatched,
    /// The head of the version log passes lines before their frames are linked.
    VersionLogHeadEarly,
    /// A version that a snapshot sees is dropped with another snapshot.
    SeenVersionDropped,
    /// On a file, frames of versions are linked before the entries that describe them are durable.
    VersionsUnordered,
    /// A sweep frees versions that the version log still names.
    SweptBeforeLogHead,
    /// A checkpoint frees frames of an origin that a clone names.
    OriginFrameFreed,
    /// Recovery frees frames of an origin that a clone names.
    OriginFrameFreedByReplay,
    /// Recovery zeroes the leaf that a clone linked.
    CloneLeafZeroed,
    /// A write is acknowledged without the fence that commits it.
    NoCommitFence,
    /// Slots are swapped before the fence.
    SwapBeforeFence,
    /// Locks are released before the fence.
    UnlockBeforeFence,
    /// Data is stored after the fence of the record that names it. The medium of the tests
    /// implements it.
    DataAfterRecord,
    /// Recovery applies an incomplete group of records.
    GroupHalfRecovered,
    /// A session publishes a group before its last record is there.
    GroupPublishedEarly,
    /// Recovery does not check the data of the last record.
    SkippedCrc,
    /// Recovery accepts a page of the last record that has one flipped bit.
    NearlyWholeKept,
    /// Unreadable frames are reused.
    UnreadableReused,
    /// Recovery treats an unreadable page as one that was never complete.
    UnreadableDropped,
    /// Flipped bits in slots above the leaves are not corrected while the pool runs.
    NodesNotCorrected,
    /// Pages with a damaged slot are not cleared.
    DamageNotCleared,
    /// A session does not flush the slots that it reports as flushed.
    SessionSlotsNotFlushed,
    /// A session also reports the slots of its last record as flushed.
    LastSlotsReportedFlushed,
    /// A checkpoint passes an unpublished record.
    CheckpointPassesUnpublished,
    /// A checkpoint publishes a floor older than the previous one.
    CheckpointGoesBack,
    /// A partial checkpoint passes an unpublished record.
    PartialCheckpointPassesUnpublished,
    /// A partial checkpoint keeps the records that it applied in the journals.
    PartialCheckpointKeepsRecords,
    /// A partial checkpoint does not list the operations that may be missing on another leg.
    PartialCheckpointListsNothing,
    /// The operations that a partial checkpoint listed for a session are forgotten when it dies.
    PartialCheckpointOfDeadForgotten,
    /// A partial checkpoint reads the seq after the ends of the journals.
    PartialCheckpointReadsSeqLate,
    /// The seq that a dead session took stays an open hole.
    SeqHoleKept,
    /// A patch is written into its page before the fence.
    PatchedBeforeFence,
    /// The page's slot is not marked while a patch is copied in.
    PatchNotMarked,
    /// A session does not flush the patches that it reports as flushed.
    SessionPatchNotFlushed,
    /// A checkpoint does not flush patches itself.
    CheckpointPatchNotFlushed,
    /// A checkpoint frees the frame of a page that was patched in place.
    PatchedFrameFreed,
    /// Recovery patches a frame that belongs to another page now.
    PatchOnMovedFrame,
    /// Recovery treats a patched page as torn.
    PatchedPageTorn,
    /// A dead session's committed patch is published in the slot but not copied into the page.
    DeadPatchNotApplied,
    /// A dead session's committed operation is not rolled forward.
    DeadNotRolledForward,
    /// Recovery does not list operations in flight.
    InFlightLost,
    /// Operations in flight are listed with the page after theirs.
    InFlightMisplaced,
    /// A dead session's operations in flight are not listed.
    InFlightOfDeadLost,
    /// A journal drops records that may be missing on another leg.
    HeadPastOpen,
    /// A new node is not zeroed.
    NodeNotZeroed,
    /// A pad is not fenced before the next record.
    PadNotFenced,
    /// The tables are fenced together with the superblock that relies on them.
    TablesWithSuperblock,
    /// A write stores the birth of the page that its frame held before.
    BirthNotStored,
    /// A page that is copied or moved is born anew.
    CopyBornNow,
    /// A list of the pages born since a loss lacks those born at its epoch.
    DirtyAfterLossOnly,
    /// The head of the log passes lines that were lost or given up, and no head of versions tells it.
    DamageNotStored,
    /// Pages of lost lines are holes in snapshots.
    LostLineForgotten,
    /// The checkpoint does not flush the checksums of frames.
    FrameTableNotFlushed,
    /// `file-sync`: freed frames are granted before the records that freed them
    /// are durable.
    FrameReuse,
    /// Journal lines are reused before the superblock that frees them.
    JournalReuse,
    /// A checkpoint sets bits in lines of the bitmap that were never used, and its superblock does not tell it.
    BitmapEndNotStored,
    /// A recovery does so.
    RecoveredBitmapEndNotStored,
    /// Lines of the bitmap between the used ones and a new one are not written.
    BitmapGapNotWritten,
    /// A session's journal is used before the superblock names it.
    JournalNotNamed,
    /// A device joins a pool, and no superblock names it.
    DeviceNotNamed,
    /// A device joins a pool, and the older superblock does not name it.
    DeviceInOneSuperblock,
    /// Superblocks name an opening before the headers of further devices have its number.
    DeviceHeadersLast,
    /// The superblocks name a device as failed only after the replay.
    FailureNamedAfterReplay,
    /// Both copies of a device's header are written without a sync between them.
    DeviceHeadersTogether,
    /// A device leaves a pool while frames of it are in use.
    DeviceRemovedInUse,
    /// `file-sync`: a node moves before the records of its slots are durable.
    NodeMovedBeforeSync,
    /// The pages below a node on a failed device become holes.
    LostNodeEmptied,
    /// A session goes on with the place of a leaf that has moved.
    MovedLeafCached,
    /// A page moves to flash before its data is durable there.
    DemotedBeforeSync,
    /// A page moves to another tier although it changed since it was copied.
    MovedWithoutCompare,
    /// The flash frame of a page that stayed is not returned.
    FlashFrameKept,
    /// The flash frame of a page that moved is returned all the same.
    FlashFrameFreedTwice,
    /// A checkpoint releases records before the tables on flash are durable.
    FlashTablesNotSynced,
    /// Recovery overwrites a superblock before the one that it chose is durable.
    SuperblockNotFlushed,
    /// A checkpoint overwrites the older superblock though the newer is damaged.
    NewerSuperblockNotChecked,
    /// A scrub overwrites the older superblock before the damaged newer one.
    OlderSuperblockFirst,
    /// A scrub writes both superblocks with one fence.
    SuperblocksTogether,
    /// Slices are marked for comparison after the head has passed an unreadable record.
    SlicesMarkedAfterHead,
    /// Recovery stores slots before the records that it replays are durable.
    ReplayedBeforeFence,
    /// An opening keeps the incarnation of the previous one.
    IncarnationKept,
    /// An object changes without a fence for its record.
    ObjectNotFenced,
    /// `file-sync`: a checkpoint applies records that are not durable yet.
    CheckpointNotSynced,
    /// `file-sync`: a flush returns before its data is durable.
    FlushNotSynced,
    /// `file-sync`: records are applied journal by journal, not in seq order.
    AppliedOutOfOrder,
    /// `file-sync`: recovery applies records of a dead process that are in the page cache and may
    /// not be on the disk.
    RecoveryNotSynced,
    /// `file-sync`: recovery stores slots before the frames that they free are durably free.
    SlotsBeforeFrames,
    /// `file-sync`: a node with lost zeroes is used as it is.
    LostNodeKept,
    /// `file-sync`: recovery applies the rest of a group with a leaf that was never linked.
    /// never linked.
    GroupWithoutLeaf,

    // Defects of direct clients, or of the work done for them.
    /// A direct client takes its operation number before the lock words.
    NumberedBeforeLocks,
    /// Locks are released after the fence, before the slots are swapped.
    UnlockBeforePublish,
    /// Records go first to the leg that direct clients read.
    LastLegFirst,
    /// The recovery of in-flight writes compares only the newest operation on a page.
    RecoveredByNewest,
    /// A direct client reads the leg that gets the record first.
    FirstLegRead,
    /// A direct client begins an operation although direct access is disabled.
    AccessDisabledIgnored,
    /// A torn operation is reconciled while other direct clients write.
    ReconciledDuringClientWrites,
    /// The first page of a torn operation is not reconciled.
    ReconciledInPart,
    /// The recovery of in-flight writes waits for a torn operation to be reconciled, and the
    /// reconcile waits for the recovery.
    RecoveryAwaitsReconcile,
    /// The row of a dead direct client is cleared before its pages are reconciled.
    RowClearedFirst,
    /// A torn operation is not reconciled.
    NotReconciled,
    /// Closing a shared file map does not wait for direct clients in an operation.
    SharedFileMapNotAwaited,

    // Defects of concurrent threads: caught by the models.
    /// A slot is corrected without a check that it is unchanged.
    CorrectedBlindly,
    /// A waiter for a lock word sleeps without setting its waiters bit.
    WaiterUnmarked,
    /// The lock words of a dead session stay taken.
    LocksKept,
    /// When a session dies, the lock words of all sessions are freed.
    LocksOfAllFreed,
    /// The lock words of a dead session are freed before its operation is rolled forward.
    LocksFreedFirst,
    /// A write does not take its lock words.
    NotLocked,
    /// A transaction takes only the lock words of its first run.
    GroupNotLocked,
    /// The check whether the owner sleeps precedes the ring of the doorbell.
    DoorbellMissed,
    /// A session begins an operation after it was revoked.
    RevokedBeginsOperation,
    /// A session begins an operation after its grants were recalled.
    RecallIgnored,
    /// A recall does not wait for a session that began an operation meanwhile.
    RecallNotAwaited,
    /// A recall that was given up stays in force.
    GivenUpRecallKept,
    /// The floor is published after the seq was taken.
    FloorAfterSeq,
    /// A reader does not recheck the slot.
    SlotNotRechecked,
    /// A consistent read does not check for changes in progress.
    LocksNotChecked,
    /// A change that does not wait for another is not counted.
    ChangeNotCounted,
    /// Readers that wait for changes are not woken at their end.
    ReadersNotWoken,
    /// A read waits for all concurrent changes but the first.
    FirstChangeNotAwaited,
    /// An indeterminate range is recorded after its column was resolved.
    LateIndeterminateRecorded,
    /// A wake flag is cleared before its descriptor is read.
    WakeClearedFirst,
    /// A channel adopts a layout snapshot without the connections announced just before.
    NewConnectionsMissed,

    // Defects of a disk: caught by the simulation.
    /// A change on a disk is answered before its group was written.
    ChangeNotWritten,
    /// Every second group that must end with a FLUSH does not.
    SecondFlushSkipped,
    /// The cache of a disk evicts dirty pages.
    DirtyPageEvicted,
    /// A load from a disk replaces bytes that were written meanwhile.
    StaleLoadTaken,
    /// The device below a disk ignores FLUSH.
    DeviceFlushIgnored,

    // Defects of a brick, a volume or the manager: caught by the simulation.
    /// A slice accepts requests of an old epoch.
    StaleEpochTaken,
    /// A client's old connection stays valid along with the one that replaced it.
    OldConnectionTaken,
    /// A change is acknowledged once the first leg has it.
    OneLegAcknowledged,
    /// A syncing leg is read.
    SyncingLegRead,
    /// A stale leg counts as in-sync once it is connected.
    StaleLegRead,
    /// A returning leg does not get the changes of a region.
    RegionNotResynced,
    /// A hole keeps its birth when it is cleared again.
    HoleKeepsBirth,
    /// A returning leg keeps its own operations in flight.
    InFlightNotCopied,
    /// The recovery of in-flight writes copies from a syncing leg.
    RecoveredFromSyncing,
    /// The recovery of in-flight writes skips the first page that differs.
    RecoveredPageSkipped,
    /// The recovery of in-flight writes gives the copied pages a birth of their own on the outdated legs.
    RecoveredBirthsDiffer,
    /// A full resync leaves other births on pages that have the same contents.
    ResyncedBirthsDiffer,
    /// A volume opens after an attach without the recovery of in-flight writes.
    NotRecovered,
    /// The manager answers before its store is durable.
    ManagerNotSynced,
    /// The manager's layout of another attachment is taken for the own one.
    ForeignLayoutTaken,
    /// A read returns a change that is not on every leg yet.
    ReadNotDelayed,
    /// A read returns data that a failed change left on one leg.
    IndeterminateRead,
    /// A hedged read counts a leg as failed that it asked under an old epoch.
    OutdatedLegFailed,
    /// A read does not wait for earlier changes of its channel.
    ReadOvertakes,
    /// Overlapping changes are not serialized. The models catch it, too.
    OverlapsNotSerialized,
    /// A transaction takes only the range locks of its first part.
    FirstPartLocked,
    /// Only the first part of a transaction is resent.
    FirstPartResent,
    /// The recovery of in-flight writes copies a transaction page by page.
    RecoveredByPage,
    /// A layout snapshot is published before every leg knows its epoch.
    NoBarrier,
    /// A connection that keeps the order of changes makes a change after a failed one.
    OrderNotKept,
    /// A durable change is acknowledged before the asynchronous replica has it.
    DurableNotAwaited,
    /// A leg is reported as an asynchronous replica before it has the changes made during its copy.
    ReplicaReportedTooEarly,
    /// Changes wait for the asynchronous replica behind later ones.
    ReplicatedOutOfOrder,
    /// The controller changes a leg with an epoch that was not announced over the connection.
    EpochNotAnnounced,
    /// A client continues with an asynchronous replica of the previous client.
    ReplicaOfDeadClientKept,
    /// Changes are stamped with a snapshot before all legs have prepared it.
    StampedBeforePrepared,
    /// A cut does not wait for the changes that began before it.
    OlderChangesNotAwaited,
    /// A cut does not flush the legs that buffer.
    CutNotFlushed,
    /// The manager commits a cut although the layout changed meanwhile.
    CutOfChangedLayoutTaken,
    /// A restarted manager commits the snapshots that were being made.
    UncommittedSnapshotListed,
    /// A syncing leg counts as one that has the whole snapshot.
    SyncingLegHasSnapshot,
    /// Snapshots that were given up are forgotten before the bricks drop them.
    GivenUpSnapshotForgotten,
}

/// The defect of a thread, carried to a thread that it starts.
pub struct CarriedDefect {
    #[cfg(all(feature = "defects", debug_assertions))]
    defect: Option<Defect>,
}

/// Captures this thread's defect, if it has one.
#[must_use]
pub fn capture() -> CarriedDefect {
    CarriedDefect {
        #[cfg(all(feature = "defects", debug_assertions))]
        defect: present(),
    }
}

impl CarriedDefect {
    /// Sets it on this thread.
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

    /// Sets or clears this thread's defect.
    pub fn set(defect: Option<Defect>) {
        PRESENT.set(defect);
    }

    /// The defect of this thread.
    #[must_use]
    pub fn present() -> Option<Defect> {
        PRESENT.get()
    }

    /// Runs a function without the defect, if it is the present one.
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
