//! Proof that the checks can fail: each deliberate defect must be caught by histories of a few
//! seeds. Prints the check that caught it, and after how many histories.

use pagemesh_base::defect::{self, Defect};
use pagemesh_sim::{HistoryReport, run, run_direct_clients, run_disks, run_files, run_snapshots};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// A defect counts as not caught after this many histories.
const SEEDS_MAX: u64 = 3000;

/// Distinctive parts of the checks' errors.
const LEGS_DIFFER_ERROR: &str = " differs: ";
const LINEARIZABILITY_ERROR: &str = " is not linearizable";
const SUPERSEDED_ERROR: &str = " was acknowledged, though attachment ";
const STALE_READ_ERROR: &str = "a stale leg was read";
const NOT_QUIESCENT_ERROR: &str = "not quiescent";
const POOL_FAILED_ERROR: &str = "the pool of brick ";

const FRAME_REUSE_ERROR: &str = " unreadable frames again";
const TORN_TRANSACTION_ERROR: &str = "half of a transaction";
const PROMOTED_COPY_ERROR: &str = " promoted copy";
const MOUNT_CONTENT_ERROR: &str = " finds: ";
const MOUNT_READ_ERROR: &str = " cannot read: ";
const FINAL_READ_ERROR: &str = " reads at the end: ";
const LAST_LOSS_ERROR: &str = "the last power loss has changed flushed pages";
const LOST_PAGE_ERROR: &str = " is lost";
const DAMAGED_ERROR: &str = " is damaged on ";
const LOST_LEG_ERROR: &str = " lost a leg at ";
const DAMAGED_METADATA_ERROR: &str = " is damaged";
const UNOPENED_POOL_ERROR: &str = "cannot open a pool";
const SNAPSHOT_CHANGES_ERROR: &str = " changes: sector ";
const SNAPSHOT_LATER_ERROR: &str = " has a later change";
const SNAPSHOT_LISTED_ERROR: &str = " is listed: ";
const SNAPSHOT_KEPT_ERROR: &str = " keeps the snapshot of epoch ";
const APPEND_ERROR: &str = "the appends are wrong";

/// Errors of differing legs: reads may find the difference before the final check does.
const DIVERGENCE_ERRORS: &[&str] = &[
    LEGS_DIFFER_ERROR,
    LINEARIZABILITY_ERROR,
    TORN_TRANSACTION_ERROR,
];

/// Defects that take many histories come first. Each is listed with the checks that may find it:
/// another check would mean that something else is wrong.
const BLOCK_DEFECTS: &[(Defect, &[&str])] = &[
    (
        Defect::DurableNotAwaited,
        &[PROMOTED_COPY_ERROR, SUPERSEDED_ERROR],
    ),
    (
        Defect::ReplicaOfDeadClientKept,
        &[PROMOTED_COPY_ERROR, NOT_QUIESCENT_ERROR],
    ),
    (Defect::RecoveredByPage, &[TORN_TRANSACTION_ERROR]),
    (Defect::DamageNotCleared, &[NOT_QUIESCENT_ERROR]),
    (Defect::UnreadableReused, &[FRAME_REUSE_ERROR]),
    (
        Defect::NodesNotCorrected,
        &[NOT_QUIESCENT_ERROR, POOL_FAILED_ERROR],
    ),
    (Defect::OldConnectionTaken, DIVERGENCE_ERRORS),
    (
        Defect::ForeignLayoutTaken,
        &[LINEARIZABILITY_ERROR, SUPERSEDED_ERROR],
    ),
    (Defect::ReadNotDelayed, &[LINEARIZABILITY_ERROR]),
    (Defect::InFlightNotCopied, DIVERGENCE_ERRORS),
    (Defect::RecoveredFromSyncing, DIVERGENCE_ERRORS),
    (Defect::InFlightLost, DIVERGENCE_ERRORS),
    (Defect::InFlightOfDeadLost, DIVERGENCE_ERRORS),
    (
        Defect::RecoveredPageSkipped,
        &[
            LEGS_DIFFER_ERROR,
            LINEARIZABILITY_ERROR,
            TORN_TRANSACTION_ERROR,
            NOT_QUIESCENT_ERROR,
        ],
    ),
    (Defect::NotRecovered, DIVERGENCE_ERRORS),
    (
        Defect::OneLegAcknowledged,
        &[
            LEGS_DIFFER_ERROR,
            LINEARIZABILITY_ERROR,
            TORN_TRANSACTION_ERROR,
            NOT_QUIESCENT_ERROR,
        ],
    ),
    (Defect::OverlapsNotSerialized, DIVERGENCE_ERRORS),
    (Defect::FirstPartResent, DIVERGENCE_ERRORS),
    (Defect::FirstPartLocked, DIVERGENCE_ERRORS),
    (Defect::ReadOvertakes, &[LINEARIZABILITY_ERROR]),
    (
        Defect::StaleEpochTaken,
        &[SUPERSEDED_ERROR, LEGS_DIFFER_ERROR, LINEARIZABILITY_ERROR],
    ),
    (Defect::SyncingLegRead, &[STALE_READ_ERROR]),
    (Defect::StaleLegRead, &[STALE_READ_ERROR]),
    (Defect::RegionNotResynced, DIVERGENCE_ERRORS),
    (Defect::BirthNotStored, DIVERGENCE_ERRORS),
    (Defect::DirtyAfterLossOnly, DIVERGENCE_ERRORS),
    (
        Defect::NoBarrier,
        &[SUPERSEDED_ERROR, LEGS_DIFFER_ERROR, LINEARIZABILITY_ERROR],
    ),
    (Defect::ManagerNotSynced, &[NOT_QUIESCENT_ERROR]),
];

type HistoryRun = fn(u64, bool) -> Result<HistoryReport, String>;

/// The first seed of file histories with `DurableNotAwaited`: seed 73 fails in another way, which
/// RFD 003 lists as open.
const DURABLE_FIRST_SEED: u64 = 5000;

/// The error that caught the defect, and the number of histories until then.
fn find_failing_seed(run: HistoryRun, from: u64, defect: Defect) -> Option<(u64, String)> {
    defect::set(Some(defect));
    let found = (0..SEEDS_MAX).find_map(|seed| Some((seed + 1, run(from + seed, false).err()?)));
    defect::set(None);
    found
}

#[test]
fn block_histories_catch_every_defect() {
    check_all_caught(run, 0, BLOCK_DEFECTS);
}

/// Defects that programs would notice in their files.
const FILE_DEFECTS: &[(Defect, &[&str])] = &[
    (
        Defect::RecoveredByPage,
        &[MOUNT_CONTENT_ERROR, MOUNT_READ_ERROR],
    ),
    (
        Defect::FirstPartResent,
        &[MOUNT_CONTENT_ERROR, FINAL_READ_ERROR],
    ),
    // This defect leaves differing legs, so the final comparison of the legs may find it, too. A client that cannot mount
    // while faults go on is replaced, and so are all that follow.
    (
        Defect::OneLegAcknowledged,
        &[
            MOUNT_CONTENT_ERROR,
            MOUNT_READ_ERROR,
            LEGS_DIFFER_ERROR,
            NOT_QUIESCENT_ERROR,
        ],
    ),
    // As above: operations that no client recovers leave differing legs.
    (
        Defect::NotRecovered,
        &[MOUNT_CONTENT_ERROR, MOUNT_READ_ERROR, LEGS_DIFFER_ERROR],
    ),
];

#[test]
fn file_histories_catch_defects() {
    check_all_caught(run_files, 0, FILE_DEFECTS);
    let durable: (Defect, &[&str]) = (Defect::DurableNotAwaited, &[MOUNT_CONTENT_ERROR]);
    check_all_caught(run_files, DURABLE_FIRST_SEED, &[durable]);
}

/// Errors of disks that lose what they promised to keep.
const DISK_ERRORS: &[&str] = &[
    LEGS_DIFFER_ERROR,
    LINEARIZABILITY_ERROR,
    LAST_LOSS_ERROR,
    LOST_PAGE_ERROR,
    DAMAGED_ERROR,
    UNOPENED_POOL_ERROR,
    NOT_QUIESCENT_ERROR,
    LOST_LEG_ERROR,
    DAMAGED_METADATA_ERROR,
];

/// Defects of disks.
const DISK_DEFECTS: &[(Defect, &[&str])] = &[
    (Defect::ChangeNotWritten, DISK_ERRORS),
    (Defect::SecondFlushSkipped, DISK_ERRORS),
    (Defect::DirtyPageEvicted, DISK_ERRORS),
    (Defect::StaleLoadTaken, DISK_ERRORS),
    (Defect::DeviceFlushIgnored, DISK_ERRORS),
];

#[test]
fn disk_histories_catch_defects() {
    check_all_caught(run_disks, 0, DISK_DEFECTS);
}

/// Errors that direct clients and the mount see in their files, or the final check in the legs.
const DIRECT_CLIENT_ERRORS: &[&str] = &[
    LEGS_DIFFER_ERROR,
    LINEARIZABILITY_ERROR,
    MOUNT_CONTENT_ERROR,
    APPEND_ERROR,
];

/// Defects of direct clients, or of the mount's work for them.
const DIRECT_CLIENT_DEFECTS: &[(Defect, &[&str])] = &[
    (Defect::FirstLegRead, DIRECT_CLIENT_ERRORS),
    (Defect::NumberedBeforeLocks, DIRECT_CLIENT_ERRORS),
    (Defect::NotReconciled, DIRECT_CLIENT_ERRORS),
    (Defect::ReconciledInPart, DIRECT_CLIENT_ERRORS),
    (Defect::SharedFileMapNotAwaited, DIRECT_CLIENT_ERRORS),
    (Defect::AccessDisabledIgnored, DIRECT_CLIENT_ERRORS),
    (Defect::ReconciledDuringClientWrites, DIRECT_CLIENT_ERRORS),
];

#[test]
fn direct_client_histories_catch_defects() {
    check_all_caught(run_direct_clients, 0, DIRECT_CLIENT_DEFECTS);
}

/// Snapshots with other bytes than the volume had at any moment of their cut.
const SNAPSHOT_ERRORS: &[&str] = &[
    LINEARIZABILITY_ERROR,
    SNAPSHOT_CHANGES_ERROR,
    SNAPSHOT_LATER_ERROR,
    TORN_TRANSACTION_ERROR,
];

/// Catches one defect of snapshots. Each is a test of its own, because their histories take long.
#[track_caller]
fn check_snapshot_defect(defect: Defect, errors: &[&str]) {
    check_all_caught(run_snapshots, 0, &[(defect, errors)]);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn snapshot_cut_without_flush_is_caught() {
    check_snapshot_defect(Defect::CutNotFlushed, SNAPSHOT_ERRORS);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn snapshot_cut_before_older_changes_is_caught() {
    check_snapshot_defect(Defect::OlderChangesNotAwaited, SNAPSHOT_ERRORS);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn snapshot_stamped_before_prepared_is_caught() {
    check_snapshot_defect(Defect::StampedBeforePrepared, SNAPSHOT_ERRORS);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn snapshot_of_changed_layout_is_caught() {
    check_snapshot_defect(Defect::CutOfChangedLayoutTaken, SNAPSHOT_ERRORS);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn snapshot_on_syncing_leg_is_caught() {
    check_snapshot_defect(Defect::SyncingLegHasSnapshot, SNAPSHOT_ERRORS);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn uncommitted_snapshot_in_list_is_caught() {
    let errors = &[SNAPSHOT_LISTED_ERROR];
    check_snapshot_defect(Defect::UncommittedSnapshotListed, errors);
}

#[test]
#[ignore = "takes more than five minutes: `cargo nextest run --run-ignored only`"]
fn forgotten_snapshot_on_brick_is_caught() {
    let errors = &[SNAPSHOT_KEPT_ERROR];
    check_snapshot_defect(Defect::GivenUpSnapshotForgotten, errors);
}

fn check_all_caught(run: HistoryRun, from: u64, defects: &[(Defect, &[&str])]) {
    let (next, (sender, receiver)) = (AtomicUsize::new(0), mpsc::channel());
    thread::scope(|scope| {
        for _ in 0..2 {
            let sender = sender.clone();
            scope.spawn(|| {
                let sender = sender;
                while let Some(&(defect, checks)) =
                    defects.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let began = std::time::Instant::now();
                    let found = find_failing_seed(run, from, defect);
                    let s = began.elapsed().as_secs_f64();
                    sender
                        .send((defect, checks, found, s))
                        .expect("the test waits");
                }
            });
        }
    });
    drop(sender);
    println!("{:22} {:>5} {:>6}  caught by", "defect", "seeds", "s");
    let (mut missed, mut otherwise) = (vec![], vec![]);
    for (defect, checks, found, s) in receiver {
        let Some((histories, broken)) = found else {
            println!(
                "{:22} {:>5} {s:>6.1}  not caught",
                format!("{defect:?}"),
                ""
            );
            missed.push(defect);
            continue;
        };
        let check: String = broken
            .lines()
            .next()
            .unwrap_or_default()
            .chars()
            .take(110)
            .collect();
        println!(
            "{:22} {:>5} {s:>6.1}  {check}",
            format!("{defect:?}"),
            histories
        );
        let first = broken.lines().next().unwrap_or_default();
        if !checks.iter().any(|check| first.contains(check)) {
            otherwise.push(format!("{defect:?}: {broken}"));
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
    assert!(
        otherwise.is_empty(),
        "caught by another check: {}",
        otherwise.join("\n")
    );
}
