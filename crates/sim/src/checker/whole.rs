//! Whether transactions are whole.
//!
//! An acknowledged one has happened on each of its sectors: the search of each
//! sees to that. One without that answer may have happened or not, but on all of
//! its sectors alike. So the searches of its sectors must agree on an outcome:
//! each tells whether what was seen there can be if it happened, and if it did
//! not. Where one outcome is left it is taken for granted, which may decide other
//! transactions of these sectors, and so on until nothing more follows.
//!
//! That two transactions are whole by themselves is not that some outcomes of
//! both fit together everywhere; only what follows step by step is found.

use super::{Checker, Ending, Event, Kind, Outcomes, Search};
use std::collections::BTreeSet;

/// States that a sector may be in; one with more tells nothing of a transaction.
/// Fewer than where each sector is searched once.
const STATES_MAX: usize = 256;

/// What may have become of a transaction.
#[derive(Clone, Copy)]
struct Possible {
    happened: bool,
    vanished: bool,
}

impl Checker {
    /// How many transactions that were not acknowledged happened, how many did
    /// not, and of how many nothing was seen that tells.
    pub(super) fn check_whole(
        &self,
        of_sector: &[Vec<Event>],
        given_up: &BTreeSet<u64>,
    ) -> Result<(u64, u64, u64), String> {
        let mut outcomes = Outcomes::new();
        let mut open: Vec<usize> = (0..self.operations.len())
            .filter(|number| self.is_open_transaction(*number))
            .collect();
        // Of which sectors something more is known now than a round before.
        let mut news: BTreeSet<u64> = (0..of_sector.len() as u64).collect();
        while !news.is_empty() {
            let (mut left, mut told) = (vec![], BTreeSet::new());
            for number in open {
                let its = |sector: &u64| news.contains(sector) && !given_up.contains(sector);
                let sectors: Vec<u64> = self.sectors_of(number).filter(its).collect();
                let possible = self.possible(number, &sectors, of_sector, &mut outcomes)?;
                match possible.happened && possible.vanished {
                    true => left.push(number),
                    false => {
                        outcomes.insert(number, possible.happened);
                        told.extend(self.sectors_of(number));
                    }
                }
            }
            (open, news) = (left, told);
        }
        let happened = outcomes.values().filter(|it| **it).count();
        let vanished = outcomes.len() - happened;
        Ok((happened as u64, vanished as u64, open.len() as u64))
    }

    /// Sectors of transactions of clients before this one that have no answer.
    pub(crate) fn cut_off_before(&self, attachment: u32) -> Vec<(usize, std::ops::Range<u64>)> {
        let numbers = (0..self.operations.len()).filter(|number| {
            self.is_open_transaction(*number) && self.operations[*number].attachment < attachment
        });
        let parts = numbers.flat_map(|number| match &self.operations[number].kind {
            Kind::Transact(parts) => parts.iter().map(|it| (number, it.0.clone())).collect(),
            _ => vec![],
        });
        parts.collect()
    }

    fn sectors_of(&self, number: usize) -> impl Iterator<Item = u64> {
        let parts = match &self.operations[number].kind {
            Kind::Transact(parts) => &parts[..],
            _ => &[],
        };
        parts.iter().flat_map(|(sectors, _)| sectors.clone())
    }

    fn is_open_transaction(&self, number: usize) -> bool {
        let operation = &self.operations[number];
        self.is_transaction(number) && operation.ending != Ending::Done && !operation.after_fence
    }

    /// What may have become of a transaction, as all of these sectors allow.
    fn possible(
        &self,
        number: usize,
        sectors: &[u64],
        of_sector: &[Vec<Event>],
        outcomes: &mut Outcomes,
    ) -> Result<Possible, String> {
        let mut possible = Possible {
            happened: true,
            vanished: true,
        };
        let mut last: Option<u64> = None;
        let mut told: Option<(u64, bool)> = None;
        for &sector in sectors {
            let events = &of_sector[sector as usize];
            let is_like = |other: u64| {
                of_sector[other as usize] == *events && self.saw_the_same(sector, other, events)
            };
            if last.is_some_and(is_like) {
                continue;
            }
            last = Some(sector);
            let mut may = |outcome| {
                outcomes.insert(number, outcome);
                let mut search = Search::new(self, sector, outcomes);
                search.states_max = STATES_MAX;
                search.run(events).is_ok()
            };
            let here = Possible {
                happened: possible.happened && may(true),
                vanished: possible.vanished && may(false),
            };
            outcomes.remove(&number);
            if !here.happened && !here.vanished {
                let others = told.map(|(other, happened)| (other, happened, of_sector));
                return Err(self.half(number, others, (sector, events)));
            }
            if here.happened != here.vanished {
                told.get_or_insert((sector, here.happened));
            }
            possible = here;
        }
        Ok(possible)
    }

    fn half(
        &self,
        number: usize,
        told: Option<(u64, bool, &[Vec<Event>])>,
        (sector, events): (u64, &[Event]),
    ) -> String {
        let name = self.name(number);
        let mut story = match told {
            Some((first, happened, of_sector)) => {
                let (of, not) = match happened {
                    true => (first, sector),
                    false => (sector, first),
                };
                let tale = self.tale(first, &of_sector[first as usize]);
                format!(
                    "half of a transaction: {name} is on sector {of} and not on sector {not}\n\
                     sector {first}:\n{tale}"
                )
            }
            None => format!(
                "half of a transaction: {name} neither is on sector {sector} nor is not, with \
                 what is known of others\n"
            ),
        };
        story += &format!("sector {sector}:\n{}", self.tale(sector, events));
        story
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::{SECTOR, fill};

    const PARTS: [u64; 3] = [0, 16, 48];

    /// A transaction of these parts with this value has no answer when another
    /// client attaches.
    fn cut_off(checker: &mut Checker, value: u64, parts: &[u64]) -> usize {
        let parts: Vec<_> = parts.iter().map(|at| (*at..at + 8, value)).collect();
        let first = parts.iter().map(|it| it.0.start).min().expect("a part");
        let end = parts.iter().map(|it| it.0.end).max().expect("a part");
        let hull = first..end;
        checker.begin(1, 1, hull, Kind::Transact(parts))
    }

    fn sees(checker: &mut Checker, sector: u64, value: u64) {
        let number = checker.begin(2, 2, sector..sector + 1, Kind::Read(vec![]));
        let data = fill(value, 1);
        assert_eq!(data.len() as u64, SECTOR);
        checker.read(number, &data).expect("a whole sector");
    }

    fn check(seen: [u64; 3]) -> Result<(u64, u64, u64), String> {
        let mut checker = Checker::default();
        checker.attached(1, false);
        let number = cut_off(&mut checker, 7, &PARTS);
        checker.attached(2, false);
        assert_eq!(checker.cut_off_before(2).len(), 3);
        assert_eq!(checker.cut_off_before(2)[1], (number, 16..24));
        PARTS
            .iter()
            .zip(seen)
            .for_each(|(at, value)| sees(&mut checker, *at, value));
        let searched = checker.check(64)?;
        Ok((searched.happened, searched.vanished, searched.open))
    }

    #[test]
    fn all_of_a_transaction_happened_or_none_of_it() {
        assert_eq!(check([7, 7, 7]), Ok((1, 0, 0)));
        assert_eq!(check([0, 0, 0]), Ok((0, 1, 0)));
        for half in [[7, 0, 0], [0, 7, 7], [0, 0, 7], [7, 0, 7]] {
            let broken = check(half).expect_err("half of it");
            assert!(broken.starts_with("half of a transaction: "), "{broken}");
        }
    }

    #[test]
    fn what_nobody_read_may_be_either() {
        let mut checker = Checker::default();
        checker.attached(1, false);
        cut_off(&mut checker, 7, &PARTS);
        checker.attached(2, false);
        let searched = checker.check(64).expect("nothing is wrong");
        assert_eq!((searched.happened, searched.open), (0, 1));
    }

    /// The sector before in the transaction need not be the one before on the volume
    /// (seed 2905).
    #[test]
    fn parts_come_in_any_order() {
        for (seen, half) in [(7, false), (0, true)] {
            let mut checker = Checker::default();
            checker.attached(1, false);
            cut_off(&mut checker, 7, &[16, 0]);
            checker.attached(2, false);
            sees(&mut checker, 20, 7);
            sees(&mut checker, 3, seen);
            assert_eq!(checker.check(64).is_err(), half, "{seen}");
        }
    }

    /// Of two on the same sectors the later one hides the earlier, which must have
    /// happened for what is seen elsewhere.
    #[test]
    fn one_transaction_decides_another() {
        let told = |last: u64| {
            let mut checker = Checker::default();
            checker.attached(1, false);
            cut_off(&mut checker, 7, &[0, 16]);
            // The same channel: it comes after the first, if both happened.
            cut_off(&mut checker, 8, &[16, 48]);
            checker.attached(2, false);
            for (at, value) in [(0, 7), (16, 7), (48, last)] {
                sees(&mut checker, at, value);
            }
            checker.check(64)
        };
        let searched = told(0).expect("the first happened, the second did not");
        assert_eq!((searched.happened, searched.vanished), (1, 1));
        told(8).expect_err("the second is on one of its parts");
    }
}
