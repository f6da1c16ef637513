//! Histories from their seeds.

use super::{HistoryReport, Scenario, VolumeUse};
use crate::brick_host::catch_crash;
use crate::cluster::tell;
use pagemesh_store::wait::set_yield_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the history of a seed.
///
/// # Errors
/// The failed check.
pub fn run(seed: u64, is_printed: bool) -> Result<HistoryReport, String> {
    run_history(seed, VolumeUse::Blocks, is_printed)
}

/// Runs the history of a seed on disks.
///
/// # Errors
/// The failed check.
pub fn run_disks(seed: u64, is_printed: bool) -> Result<HistoryReport, String> {
    run_history(seed, VolumeUse::Disks, is_printed)
}

/// Runs the history of a seed on a volume that holds a file system.
///
/// # Errors
/// The failed check.
pub fn run_files(seed: u64, is_printed: bool) -> Result<HistoryReport, String> {
    run_history(seed, VolumeUse::Files, is_printed)
}

/// Runs the history of a seed on a volume with a file system that direct clients use, too.
///
/// # Errors
/// The failed check.
pub fn run_direct_clients(seed: u64, is_printed: bool) -> Result<HistoryReport, String> {
    run_history(seed, VolumeUse::DirectClients, is_printed)
}

/// Runs the history of a seed on a volume with snapshots.
///
/// # Errors
/// The failed check.
pub fn run_snapshots(seed: u64, is_printed: bool) -> Result<HistoryReport, String> {
    run_history(seed, VolumeUse::Snapshots, is_printed)
}

fn run_history(seed: u64, used: VolumeUse, is_printed: bool) -> Result<HistoryReport, String> {
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut scenario = Scenario::new(seed, used, is_printed);
        let lived = scenario.run();
        if let Err(broken) = lived {
            tell!(scenario.cluster, "{broken}");
            // A brick may be set to die in the operations that end it.
            let _ = catch_crash(|| drop(scenario));
            return Err(broken);
        }
        let mut outcome = scenario.report.clone();
        outcome.histories = 1;
        outcome.digest = scenario.cluster.digest();
        outcome.simulated_time = scenario.cluster.now();
        let net = scenario.cluster.net();
        outcome.messages = net.messages;
        for (name, times) in net.fault_counts.by_name() {
            outcome.count(name, times);
        }
        Ok(outcome)
    }));
    set_yield_fn(None);
    ended.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
        Err(text.unwrap_or_else(|| "a panic without a message".into()))
    })
}
