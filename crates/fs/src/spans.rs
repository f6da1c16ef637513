//! Which pages of the space are given out: spans of 2^0 to 2^9 pages, by the
//! buddy method (Knowlton, 1965). In memory only; mounting marks what inodes own.
//! The lowest span that fits is taken, so that page tables stay small.

use crate::format::CHUNK_ORDER;
use std::collections::BTreeSet;

const CHUNK_PAGES: u64 = 1 << CHUNK_ORDER;

/// A run of 2^order pages at a multiple of its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub(crate) page: u64,
    pub(crate) order: u8,
}

impl Span {
    pub(crate) fn end(self) -> u64 {
        self.page + (1 << self.order)
    }
}

#[derive(Debug)]
pub(crate) struct Spans {
    /// Free spans by order.
    free: [BTreeSet<u64>; CHUNK_ORDER as usize + 1],
    /// Chunks from here on were never given out.
    frontier: u64,
    /// The end of the space, whole chunks.
    end: u64,
}

impl Spans {
    /// All of a space of so many pages is free, but what is `used`.
    ///
    /// # Errors
    /// The span that overlaps one before it or lies beyond the end.
    pub(crate) fn new(pages: u64, mut used: Vec<Span>) -> Result<Spans, Span> {
        used.sort_unstable();
        let mut spans = Spans {
            free: Default::default(),
            frontier: 0,
            end: pages / CHUNK_PAGES * CHUNK_PAGES,
        };
        for span in used {
            let is_within = span.page < pages && span.end() <= pages;
            if span.page < spans.frontier || !is_within {
                return Err(span);
            }
            spans.skip_to(span.page);
            spans.frontier = span.end();
        }
        spans.skip_to(spans.frontier.next_multiple_of(CHUNK_PAGES));
        Ok(spans)
    }

    /// Frees what lies between the frontier and a page.
    fn skip_to(&mut self, end: u64) {
        while self.frontier < end {
            let by_place = self.frontier.trailing_zeros().min(u32::from(CHUNK_ORDER));
            let by_room = (end - self.frontier).ilog2();
            let order = by_place.min(by_room);
            self.free[order as usize].insert(self.frontier);
            self.frontier += 1 << order;
        }
    }

    /// The lowest free span of this order.
    pub(crate) fn take(&mut self, order: u8) -> Option<Span> {
        assert!(order <= CHUNK_ORDER, "a span of 2^{order} pages");
        let orders = order..=CHUNK_ORDER;
        let (mut found, page) = orders
            .filter_map(|order| Some((order, *self.free[usize::from(order)].first()?)))
            .min_by_key(|&(_, page)| page)
            .or_else(|| self.advance())?;
        self.free[usize::from(found)].remove(&page);
        while found > order {
            found -= 1;
            self.free[usize::from(found)].insert(page + (1 << found));
        }
        Some(Span { page, order })
    }

    fn advance(&mut self) -> Option<(u8, u64)> {
        let page = self.frontier;
        (page < self.end).then(|| {
            self.frontier += CHUNK_PAGES;
            (CHUNK_ORDER, page)
        })
    }

    pub(crate) fn give(&mut self, span: Span) {
        let Span { mut page, order } = span;
        let mut order = order;
        while order < CHUNK_ORDER && self.free[usize::from(order)].remove(&(page ^ (1 << order))) {
            page &= !(1 << order);
            order += 1;
        }
        let is_new = self.free[usize::from(order)].insert(page);
        assert!(is_new && page < self.frontier, "{span:?} was not given out");
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
            let mut spans = Spans::new(PAGES, vec![head]).expect("no overlap");
            let mut taken = vec![head];
            for (order, gives, index) in steps {
                if gives && taken.len() > 1 {
                    let span = taken.swap_remove(1 + index % (taken.len() - 1));
                    spans.give(span);
                } else if let Some(span) = spans.take(order) {
                    prop_assert!(span.page.is_multiple_of(1 << order) && span.end() <= PAGES);
                    let apart = |other: &Span| {
                        other.end() <= span.page || span.end() <= other.page
                    };
                    prop_assert!(taken.iter().all(apart));
                    taken.push(span);
                }
                // What a mount makes of the same inodes gives out the same.
                let mut again = Spans::new(PAGES, taken.clone()).expect("no overlap");
                prop_assert_eq!(again.take(order), spans.take(order).inspect(|&w| spans.give(w)));
            }
            let used: u64 = taken.iter().map(|span| 1 << span.order).sum();
            let mut again = Spans::new(PAGES, taken.clone()).expect("no overlap");
            let free = std::iter::from_fn(|| again.take(0)).count() as u64;
            prop_assert_eq!(free, PAGES - used);
            for span in taken.drain(..) {
                spans.give(span);
            }
            spans.skip_to(PAGES);
            prop_assert_eq!(spans.free[usize::from(CHUNK_ORDER)].len(), 8);
        }
    }

    #[test]
    fn a_span_that_two_own_is_found() {
        let used = [(8, 3), (0, 4)].map(|(page, order)| Span { page, order });
        assert_eq!(Spans::new(512, used.to_vec()).err(), Some(used[0]));
        let beyond = Span {
            page: 512,
            order: 0,
        };
        assert_eq!(Spans::new(512, vec![beyond]).err(), Some(beyond));
    }
}
