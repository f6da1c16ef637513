//! The pages on which the legs of a column may differ after a crash, computed from the legs'
//! tables of operations in flight.
//!
//! Invariants: pure. Of each page exactly one in-sync leg wins: the one with the newest
//! operations.

use crate::snapshot::LegSet;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::InFlightOp;
use std::collections::BTreeMap;

/// Pages that differ, the leg that has them right, and the legs that get them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DivergentPages {
    pub page: u64,
    pub count: u64,
    /// The newest operation that any leg lists.
    pub newest: Option<(Epoch, u64)>,
    pub winner: usize,
    pub outdated: LegSet,
}

/// Groups pages by operation, in the order of each operation's first page.
pub(super) fn group_by_operation(
    all: impl Iterator<Item = DivergentPages>,
) -> Vec<Vec<DivergentPages>> {
    let mut operations: Vec<Vec<DivergentPages>> = Vec::new();
    let mut places = BTreeMap::new();
    for unequal in all {
        let place = match unequal.newest {
            Some(newest) => *places
                .entry((newest, unequal.winner, unequal.outdated))
                .or_insert(operations.len()),
            None => operations.len(),
        };
        match operations.get_mut(place) {
            Some(operation) => operation.push(unequal),
            None => operations.push(vec![unequal]),
        }
    }
    operations
}

/// The pages that must be copied according to the tables of the legs.
pub(super) fn divergent_pages(
    tables: &[Vec<InFlightOp>],
    in_sync: LegSet,
    syncing: LegSet,
) -> Vec<DivergentPages> {
    let mut edges: Vec<u64> = Vec::new();
    for entry in tables.iter().flatten() {
        edges.push(entry.page.0);
        edges.push(entry.page.0 + u64::from(entry.count));
    }
    edges.sort_unstable();
    edges.dedup();
    let mut sweeps: Vec<TableSweep> = tables.iter().map(|table| TableSweep::new(table)).collect();
    let mut all = Vec::new();
    for pair in edges.windows(2) {
        let (page, end) = (pair[0], pair[1]);
        let listed: Vec<Vec<(Epoch, u64)>> =
            sweeps.iter_mut().map(|s| s.operations_at(page)).collect();
        if listed.iter().all(Vec::is_empty) {
            continue;
        }
        // Among equal legs any wins. If no in-sync leg lists the page, any in-sync leg wins.
        let sources = match defect::is(Defect::RecoveredFromSyncing) && !syncing.is_empty() {
            true => syncing,
            false => in_sync,
        };
        let Some(winner) = sources.legs().max_by_key(|&leg| &listed[leg]) else {
            continue;
        };
        let behind = LegSet::from_fn(|leg| {
            leg != winner
                && (syncing.contains(leg) || in_sync.contains(leg) && listed[leg] != listed[winner])
        });
        if !behind.is_empty() {
            all.push(DivergentPages {
                page,
                count: end - page,
                newest: listed[winner].first().copied(),
                winner,
                outdated: behind,
            });
        }
    }
    all
}

/// Walks the pages of one table, and returns the operations on each.
struct TableSweep {
    /// By first page, the last one first.
    upcoming: Vec<InFlightOp>,
    current: Vec<InFlightOp>,
}

impl TableSweep {
    fn new(table: &[InFlightOp]) -> TableSweep {
        let mut later = table.to_vec();
        later.sort_by_key(|entry| std::cmp::Reverse(entry.page));
        TableSweep {
            upcoming: later,
            current: Vec::new(),
        }
    }

    /// The operations on this page, newest first.
    fn operations_at(&mut self, page: u64) -> Vec<(Epoch, u64)> {
        while let Some(entry) = self.upcoming.pop_if(|entry| entry.page.0 <= page) {
            self.current.push(entry);
        }
        self.current
            .retain(|entry| entry.page.0 + u64::from(entry.count) > page);
        let mut listed: Vec<_> = self.current.iter().map(|it| (it.epoch, it.op)).collect();
        listed.sort_unstable_by(|a, b| b.cmp(a));
        listed.dedup();
        listed.truncate(match defect::is(Defect::RecoveredByNewest) {
            true => 1,
            false => usize::MAX,
        });
        listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::ids::PageNo;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// The sweep finds for each page the same as a look at every entry.
        #[test]
        fn newest_operation_wins(
            tables in prop::collection::vec(
                prop::collection::vec((0u64..20, 1u32..6, 1u32..3, 1u64..9), 0..6), 3),
            syncing in any::<bool>(),
        ) {
            let tables: Vec<Vec<InFlightOp>> = tables.iter().map(|table| {
                let entry = |&(page, count, epoch, op): &_| InFlightOp {
                    page: PageNo(page), count, epoch: Epoch(epoch), op,
                };
                table.iter().map(entry).collect()
            }).collect();
            let in_sync = LegSet::from_fn(|leg| leg < 2 || !syncing);
            let behind = LegSet::from_fn(|leg| leg == 2 && syncing);
            let found = divergent_pages(&tables, in_sync, behind);
            for page in 0..30u64 {
                let listed = |leg: usize| {
                    let on_page = tables[leg].iter()
                        .filter(|e| (e.page.0..e.page.0 + u64::from(e.count)).contains(&page));
                    let listed: BTreeSet<_> = on_page.map(|e| (e.epoch, e.op)).collect();
                    listed.into_iter().rev().collect::<Vec<_>>()
                };
                let best = in_sync.legs().map(listed).max().unwrap_or_default();
                let is_listed = (0..3).any(|leg| !listed(leg).is_empty());
                let expected = LegSet::from_fn(|leg| {
                    is_listed && (in_sync.contains(leg) && listed(leg) != best || behind.contains(leg))
                });
                let here: Vec<_> = found.iter()
                    .filter(|u| (u.page..u.page + u.count).contains(&page)).collect();
                prop_assert!(here.len() <= 1);
                // Without any entry in-sync all in-sync legs are equal.
                let got = here.first().map_or(LegSet::NONE, |u| u.outdated);
                prop_assert_eq!(got, expected, "page {}", page);
                if let Some(one) = here.first() {
                    prop_assert_eq!(listed(one.winner), best);
                }
            }
        }
    }
}
