//! The space of snapshots, from the numbers of pages that runs of snapshots see.

use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SEEN_BY_SLICE, SeenPages};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};

/// Pages by the first and last snapshot that see them.
pub(crate) type PagesByRun = BTreeMap<(Epoch, Epoch), u64>;

/// Adds the counts of one slice.
pub(crate) fn add_runs(pages: &mut PagesByRun, runs: &[SeenPages]) {
    for run in runs {
        let sum = pages.entry((run.first, run.last)).or_default();
        *sum = sum.saturating_add(run.pages);
    }
}

/// More pages than all slices of a volume have.
const PAGES_MAX: u64 = 1 << 36;

/// The bytes of one snapshot, in one copy of the volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SnapshotBytes {
    /// Bytes that its deletion alone frees.
    pub(crate) exclusive: u64,
    /// Bytes that it keeps together with other snapshots.
    pub(crate) shared: u64,
    /// Bytes that it sees, those of the volume included.
    pub(crate) referenced: u64,
    /// Bytes that it sees and the snapshot before it does not.
    pub(crate) written: u64,
}

/// The bytes of a volume with its snapshots, in one copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeBytes {
    /// Bytes of the volume itself.
    pub(crate) live: u64,
    /// Bytes that only snapshots keep.
    pub(crate) kept: u64,
    /// Bytes of the volume that the newest snapshot does not see.
    pub(crate) written: u64,
    /// Bytes that a deletion of the chosen snapshots frees.
    pub(crate) freed: u64,
    /// In the order of the epochs.
    pub(crate) snapshots: Vec<SnapshotBytes>,
}

/// Adds up the pages of runs. `snapshots` are ascending; runs may name others, which bricks still drop or which are
/// being made.
pub(crate) fn account(
    pages: &PagesByRun,
    snapshots: &[Epoch],
    dropped: &BTreeSet<Epoch>,
) -> VolumeBytes {
    let mut bytes = VolumeBytes {
        snapshots: vec![SnapshotBytes::default(); snapshots.len()],
        ..VolumeBytes::default()
    };
    let kept_before: Vec<u64> = std::iter::once(0)
        .chain(snapshots.iter().scan(0, |kept, it| {
            *kept += u64::from(!dropped.contains(it));
            Some(*kept)
        }))
        .collect();
    // Sums over runs of neighbours, as differences.
    let (mut shared, mut referenced) = (Differences::new(snapshots), Differences::new(snapshots));
    for (&(first, last), count) in pages {
        // Bricks are other programs: their numbers may be anything.
        let size = (*count).min(PAGES_MAX) * PAGE_BYTES as u64;
        let from = snapshots.partition_point(|&it| it < first);
        let end = snapshots.partition_point(|&it| it <= last);
        let is_live = last == SEEN_BY_SLICE;
        match is_live {
            true => bytes.live += size,
            false => bytes.kept += size,
        }
        if from >= end {
            bytes.written += if is_live { size } else { 0 };
            continue;
        }
        bytes.snapshots[from].written += size;
        referenced.add(from..end, size);
        if is_live {
            continue;
        }
        match end - from {
            1 => bytes.snapshots[from].exclusive += size,
            _ => shared.add(from..end, size),
        }
        if kept_before[from] == kept_before[end] {
            bytes.freed += size;
        }
    }
    let sums = shared.sums().zip(referenced.sums());
    for (snapshot, (shared, referenced)) in bytes.snapshots.iter_mut().zip(sums) {
        (snapshot.shared, snapshot.referenced) = (shared, referenced);
    }
    bytes
}

/// Numbers that change at few places of a sequence.
struct Differences(Vec<i128>);

impl Differences {
    fn new(of: &[Epoch]) -> Differences {
        Differences(vec![0; of.len() + 1])
    }

    fn add(&mut self, range: std::ops::Range<usize>, number: u64) {
        self.0[range.start] += i128::from(number);
        self.0[range.end] -= i128::from(number);
    }

    fn sums(&self) -> impl Iterator<Item = u64> + '_ {
        self.0.iter().scan(0_i128, |sum, difference| {
            *sum += difference;
            u64::try_from(*sum).ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    /// A page of the model: the snapshots that see it, and whether the volume has it.
    type ModelPage = (usize, usize, bool);

    fn epoch(index: usize) -> Epoch {
        Epoch(10 * (index as u32 + 1))
    }

    fn runs_of(pages: &[ModelPage], count: usize) -> PagesByRun {
        let mut runs = PagesByRun::new();
        for &(from, len, is_live) in pages {
            let from = from % count;
            let last = (from + len).min(count - 1);
            let run = match is_live {
                true => (epoch(from), SEEN_BY_SLICE),
                false => (epoch(from), epoch(last)),
            };
            *runs.entry(run).or_default() += 1;
        }
        runs
    }

    proptest! {
        /// The numbers of pages that a naive count over all snapshots gives.
        #[test]
        fn bytes_add_up(
            pages in prop::collection::vec((0_usize..6, 0_usize..6, any::<bool>()), 0..60),
            dropped in prop::collection::btree_set(0_usize..6, 0..6),
        ) {
            let snapshots: Vec<Epoch> = (0..6).map(epoch).collect();
            let dropped: BTreeSet<Epoch> = dropped.into_iter().map(epoch).collect();
            let found = account(&runs_of(&pages, 6), &snapshots, &dropped);
            let sees = |&(from, len, is_live): &ModelPage, at: usize| {
                from <= at && (is_live || at <= from + len)
            };
            let seers = |page: &ModelPage| (0..6).filter(|at| sees(page, *at)).count();
            let bytes_where = |chosen: &dyn Fn(&ModelPage) -> bool| {
                pages.iter().filter(|page| chosen(page)).count() as u64 * PAGE
            };
            for at in 0..6 {
                let of = &found.snapshots[at];
                prop_assert_eq!(of.referenced, bytes_where(&|page| sees(page, at)));
                let alone = |page: &ModelPage| !page.2 && sees(page, at) && seers(page) == 1;
                prop_assert_eq!(of.exclusive, bytes_where(&alone));
                let together = |page: &ModelPage| !page.2 && sees(page, at) && seers(page) > 1;
                prop_assert_eq!(of.shared, bytes_where(&together));
                let new = |page: &ModelPage| sees(page, at) && (at == 0 || !sees(page, at - 1));
                prop_assert_eq!(of.written, bytes_where(&new));
            }
            let is_freed = |page: &ModelPage| {
                !page.2 && (0..6).all(|at| !sees(page, at) || dropped.contains(&epoch(at)))
            };
            prop_assert_eq!(found.freed, bytes_where(&is_freed));
            prop_assert_eq!(found.live, bytes_where(&|page| page.2));
            prop_assert_eq!(found.kept, bytes_where(&|page| !page.2));
        }
    }

    #[test]
    fn snapshots_that_are_dropped_already_count_as_kept_bytes() {
        let snapshots = [epoch(1)];
        let mut runs = PagesByRun::new();
        runs.insert((epoch(0), epoch(0)), 3);
        runs.insert((SEEN_BY_SLICE, SEEN_BY_SLICE), 2);
        let found = account(&runs, &snapshots, &BTreeSet::new());
        assert_eq!(
            (found.kept, found.live, found.written),
            (3 * PAGE, 2 * PAGE, 2 * PAGE)
        );
        assert_eq!(found.snapshots, [SnapshotBytes::default()]);
    }
}
