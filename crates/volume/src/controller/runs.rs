//! Sets of pages, as runs in order that neither touch nor overlap.

use pagemesh_base::ids::PageNo;
use pagemesh_base::slice::PageRun;
use std::ops::Range;

fn run(pages: Range<u64>) -> PageRun {
    PageRun {
        page: PageNo(pages.start),
        count: pages.end - pages.start,
    }
}

fn pages(run: &PageRun) -> Range<u64> {
    run.page.0..run.page.0.saturating_add(run.count)
}

/// Merges runs in any order.
pub(super) fn merge(mut runs: Vec<PageRun>) -> Vec<PageRun> {
    runs.sort_unstable_by_key(|run| run.page);
    let mut merged: Vec<PageRun> = Vec::with_capacity(runs.len());
    for next in runs.iter().map(pages).filter(|pages| !pages.is_empty()) {
        match merged.last_mut() {
            Some(last) if pages(last).end >= next.start => {
                *last = run(last.page.0..pages(last).end.max(next.end));
            }
            _ => merged.push(run(next)),
        }
    }
    merged
}

/// The pages of a set that lie within a range, and not in another set.
pub(super) fn without(set: &[PageRun], other: &[PageRun], within: Range<u64>) -> Vec<PageRun> {
    let mut left = Vec::new();
    let mut other = other.iter().map(pages).peekable();
    for all in set.iter().map(pages) {
        let (mut at, end) = (all.start.max(within.start), all.end.min(within.end));
        while at < end {
            match other.peek() {
                Some(gone) if gone.end <= at => {
                    other.next();
                }
                Some(gone) if gone.start <= at => at = gone.end,
                gone => {
                    let stop = gone.map_or(end, |gone| gone.start.min(end));
                    left.push(run(at..stop));
                    at = stop;
                }
            }
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(runs: &[PageRun]) -> BTreeSet<u64> {
        runs.iter().flat_map(pages).collect()
    }

    fn some_runs() -> impl Strategy<Value = Vec<PageRun>> {
        let one = (0u64..60, 0u64..8).prop_map(|(page, count)| run(page..page + count));
        prop::collection::vec(one, 0..12)
    }

    proptest! {
        #[test]
        fn runs_are_sets(one in some_runs(), other in some_runs(), from in 0u64..40, len in 0u64..60) {
            let (merged, gone) = (merge(one.clone()), merge(other.clone()));
            prop_assert_eq!(set(&merged), set(&one));
            for pair in merged.windows(2) {
                prop_assert!(pages(&pair[0]).end < pair[1].page.0, "in order, with a gap");
            }
            let within = from..from + len;
            let left = without(&merged, &gone, within.clone());
            let mut wanted: BTreeSet<u64> = &set(&one) - &set(&other);
            wanted.retain(|page| within.contains(page));
            prop_assert_eq!(set(&left), wanted);
            prop_assert!(left.iter().all(|run| run.count > 0));
        }
    }
}
