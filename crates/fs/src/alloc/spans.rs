//! The allocator of the space: spans of 2^0 to 2^9 pages, by the buddy method (Knowlton, 1965). Its
//! state is in memory only; mounting marks the spans of inodes. The lowest span that fits is taken,
//! so that page tables stay small.

use crate::alloc::range_set::RangeSet;
use crate::format::inode::Ino;
use crate::format::page_map::{CHUNK_ORDER, Span};
use std::collections::BTreeSet;

const CHUNK_PAGES: u64 = 1 << CHUNK_ORDER;

/// Pages of a space that spans can use: whole chunks.
pub(crate) fn usable_pages(pages: u64) -> u64 {
    pages / CHUNK_PAGES * CHUNK_PAGES
}

/// A span that an inode names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OwnedSpan {
    pub(crate) span: Span,
    pub(crate) owner: Ino,
}

/// Calls `tell` with each span that overlaps an earlier one, and with that one.
pub(crate) fn for_each_overlap(used: &mut [OwnedSpan], mut tell: impl FnMut(OwnedSpan, OwnedSpan)) {
    used.sort_unstable();
    let Some((&first, rest)) = used.split_first() else {
        return;
    };
    let mut furthest = first;
    for &owned in rest {
        if owned.span.page < furthest.span.end() {
            tell(owned, furthest);
        }
        if owned.span.end() > furthest.span.end() {
            furthest = owned;
        }
    }
}

#[derive(Debug)]
pub(crate) struct SpanAllocator {
    /// Free spans by order, for orders below a chunk's.
    free: [BTreeSet<u64>; CHUNK_ORDER as usize],
    /// Free chunks, counted from the first of the space.
    chunks: RangeSet,
}

impl SpanAllocator {
    /// An allocator for `pages` [`usable_pages`]. All pages are free except `used`: sorted, within
    /// the space, without overlaps.
    pub(crate) fn new(pages: u64, used: impl Iterator<Item = Span>) -> SpanAllocator {
        let mut spans = SpanAllocator {
            free: Default::default(),
            chunks: RangeSet::default(),
        };
        let mut end = 0;
        for span in used {
            let is_sound = end <= span.page && span.end() <= pages;
            assert!(is_sound, "{span:?} was checked");
            spans.add_free(end, span.page);
            end = span.end();
        }
        spans.add_free(end, pages);
        spans
    }

    /// Frees a range of pages above all free ones.
    fn add_free(&mut self, mut page: u64, end: u64) {
        while page < end {
            let by_place = page.trailing_zeros().min(u32::from(CHUNK_ORDER));
            let by_room = (end - page).ilog2();
            let order = by_place.min(by_room);
            if order == u32::from(CHUNK_ORDER) {
                let chunks = page / CHUNK_PAGES..end / CHUNK_PAGES;
                page = chunks.end * CHUNK_PAGES;
                self.chunks.append_range(chunks);
            } else {
                self.free[order as usize].insert(page);
                page += 1 << order;
            }
        }
    }

    /// Allocates the lowest free span of this order.
    pub(crate) fn allocate(&mut self, order: u8) -> Option<Span> {
        assert!(order <= CHUNK_ORDER, "a span of 2^{order} pages");
        let orders = order..CHUNK_ORDER;
        let smaller =
            orders.filter_map(|order| Some((*self.free[usize::from(order)].first()?, order)));
        let chunk = self
            .chunks
            .lowest()
            .map(|chunk| (chunk * CHUNK_PAGES, CHUNK_ORDER));
        let (page, mut found) = smaller.chain(chunk).min()?;
        match self.free.get_mut(usize::from(found)) {
            Some(spans) => drop(spans.remove(&page)),
            None => drop(self.chunks.pop_lowest()),
        }
        while found > order {
            found -= 1;
            self.free[usize::from(found)].insert(page + (1 << found));
        }
        Some(Span { page, order })
    }

    pub(crate) fn free(&mut self, span: Span) {
        let Span {
            mut page,
            mut order,
        } = span;
        while order < CHUNK_ORDER && self.free[usize::from(order)].remove(&(page ^ (1 << order))) {
            page &= !(1 << order);
            order += 1;
        }
        let is_new = match self.free.get_mut(usize::from(order)) {
            Some(spans) => spans.insert(page),
            None => self.chunks.insert(page / CHUNK_PAGES),
        };
        assert!(is_new, "{span:?} was not given out");
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn spans_never_overlap_and_all_comes_back(
            steps in proptest::collection::vec((0u8..=CHUNK_ORDER, any::<bool>(), any::<usize>()), 1..100)
        ) {
            const PAGES: u64 = 8 * CHUNK_PAGES;
            let head = Span { page: 0, order: 0 };
            let again = |taken: &[Span]| {
                let mut taken = taken.to_vec();
                taken.sort_unstable();
                SpanAllocator::new(PAGES, taken.into_iter())
            };
            let mut spans = again(&[head]);
            let mut taken = vec![head];
            for (order, gives, index) in steps {
                if gives && taken.len() > 1 {
                    let span = taken.swap_remove(1 + index % (taken.len() - 1));
                    spans.free(span);
                } else if let Some(span) = spans.allocate(order) {
                    prop_assert!(span.page.is_multiple_of(1 << order) && span.end() <= PAGES);
                    let apart = |other: &Span| {
                        other.end() <= span.page || span.end() <= other.page
                    };
                    prop_assert!(taken.iter().all(apart));
                    taken.push(span);
                }
                // A mount with the same inodes would allocate the same span.
                prop_assert_eq!(again(&taken).allocate(order), spans.allocate(order).inspect(|&w| spans.free(w)));
            }
            let used: u64 = taken.iter().map(|span| 1 << span.order).sum();
            let mut again = again(&taken);
            let free = std::iter::from_fn(|| again.allocate(0)).count() as u64;
            prop_assert_eq!(free, PAGES - used);
            for span in taken.drain(..) {
                spans.free(span);
            }
            prop_assert_eq!(spans.chunks.count(), 8);
        }
    }

    /// The scan may report spans anywhere in a volume of any size.
    #[test]
    fn span_allocator_memory_follows_used_spans() {
        const PAGES: u64 = 1 << 40;
        let used = [3 << 30, 1 << 39].map(|page| Span { page, order: 3 });
        let (mut spans, bytes) =
            pagemesh_fuzz::measure_allocation(|| SpanAllocator::new(PAGES, used.into_iter()));
        assert!(bytes < 100_000, "{bytes} bytes");
        assert_eq!(spans.allocate(0).map(|span| span.page), Some(0));
    }

    #[test]
    fn overlapping_spans_are_reported() {
        let owned = |page, order, owner| OwnedSpan {
            span: Span { page, order },
            owner: Ino(owner),
        };
        let mut used = [(8, 3, 1), (0, 4, 2), (16, 3, 3), (24, 0, 4), (16, 0, 5)]
            .map(|(page, order, owner)| owned(page, order, owner));
        let mut found = Vec::new();
        for_each_overlap(&mut used, |one, other| {
            found.push((one.owner.0, other.owner.0))
        });
        assert_eq!(found, [(1, 2), (3, 5)]);
    }
}
