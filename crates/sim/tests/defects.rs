//! Proof that the checks can fail: each deliberate defect must be caught by
//! histories of a few seeds. Prints which check caught it, and after how many.

use pagemesh_base::defect::{self, Defect};
use pagemesh_sim::run;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

/// Histories after which a defect counts as not caught.
const SEEDS_MAX: u64 = 1000;

/// Those that take many histories first.
const DEFECTS: &[Defect] = &[
    Defect::OutdatedLegFailed,
    Defect::ForeignLayoutTaken,
    Defect::ReadNotHeld,
    Defect::InFlightNotCopied,
    Defect::SettledFromSyncing,
    Defect::InFlightLost,
    Defect::InFlightOfDeadLost,
    Defect::SettledPageSkipped,
    Defect::NotSettled,
    Defect::OneLegAcknowledged,
    Defect::NoTurns,
    Defect::ReadOvertakes,
    Defect::StaleEpochTaken,
    Defect::SyncingLegRead,
    Defect::RegionNotResynced,
    Defect::RoundNotStamped,
    Defect::NoBarrier,
];

/// Where to begin: the dice meet some once in a thousand histories; those
/// start shortly before the seed that found them in the product.
fn first(defect: Defect) -> u64 {
    match defect {
        Defect::OutdatedLegFailed => 4_020,
        _ => 0,
    }
}

/// What caught the defect, and after how many histories.
fn caught(defect: Defect) -> Option<(u64, String)> {
    defect::set(Some(defect));
    let first = first(defect);
    let mut seeds = first..first + SEEDS_MAX;
    let found = seeds.find_map(|seed| Some((seed - first + 1, run(seed, false).err()?)));
    defect::set(None);
    found
}

#[test]
fn every_defect_is_caught() {
    let (next, (sender, receiver)) = (AtomicUsize::new(0), mpsc::channel());
    thread::scope(|scope| {
        for _ in 0..2 {
            let sender = sender.clone();
            scope.spawn(|| {
                let sender = sender;
                while let Some(&defect) = DEFECTS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let began = std::time::Instant::now();
                    let found = caught(defect);
                    let s = began.elapsed().as_secs_f64();
                    sender.send((defect, found, s)).expect("the test waits");
                }
            });
        }
    });
    drop(sender);
    println!("{:22} {:>5} {:>6}  caught by", "defect", "seeds", "s");
    let mut missed = Vec::new();
    for (defect, found, s) in receiver {
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
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
