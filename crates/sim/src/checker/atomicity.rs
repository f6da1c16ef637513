//! Checks that transactions are atomic.
//!
//! An acknowledged transaction has happened on each of its sectors; the search of each sector
//! checks that. A transaction without that answer may have happened or not, but alike on all of its
//! sectors. So the searches of its sectors must agree on an outcome: each says whether its
//! observations are possible if the transaction happened, and if it did not. Where one outcome is
//! left, the search assumes it, which may decide other transactions of these sectors, and so on
//! until no more follows.
//!
//! The check is incomplete: each of two transactions may be atomic alone while no pair of outcomes
//! fits everywhere. The check finds only violations that follow step by step.

use super::{AssumedOutcomes, Event, HistoryChecker, OpKind, OpOutcome, Search};
use std::collections::BTreeSet;

/// Maximum of states of a sector; a sector with more decides no transaction. It is lower than for
/// the single search of each sector.
const STATES_MAX: usize = 256;

/// The outcomes of a transaction that are still possible.
#[derive(Clone, Copy)]
struct PossibleOutcomes {
    may_have_happened: bool,
    may_have_rolled_back: bool,
}

impl HistoryChecker {
    /// Counts the unacknowledged transactions that happened, that did not, and that no observation
    /// decides.
    pub(super) fn check_atomicity(
        &self,
        of_sector: &[Vec<Event>],
        given_up: &BTreeSet<u64>,
    ) -> Result<(u64, u64, u64), String> {
        let mut outcomes = AssumedOutcomes::new();
        let mut open: Vec<usize> = (0..self.operations.len())
            .filter(|number| self.is_open_transaction(*number))
            .collect();
        // Sectors about which the last round found something new.
        let mut news: BTreeSet<u64> = (0..of_sector.len() as u64).collect();
        while !news.is_empty() {
            let (mut left, mut told) = (vec![], BTreeSet::new());
            for number in open {
                let its = |sector: &u64| news.contains(sector) && !given_up.contains(sector);
                let sectors: Vec<u64> = self.transaction_sectors(number).filter(its).collect();
                let possible =
                    self.possible_outcomes(number, &sectors, of_sector, &mut outcomes)?;
                match possible.may_have_happened && possible.may_have_rolled_back {
                    true => left.push(number),
                    false => {
                        outcomes.insert(number, possible.may_have_happened);
                        told.extend(self.transaction_sectors(number));
                    }
                }
            }
            (open, news) = (left, told);
        }
        let happened = outcomes.values().filter(|it| **it).count();
        let vanished = outcomes.len() - happened;
        Ok((happened as u64, vanished as u64, open.len() as u64))
    }

    /// Unanswered transactions of earlier clients, with their sectors.
    pub(crate) fn unanswered_transactions_before(
        &self,
        attachment: u32,
    ) -> Vec<(usize, std::ops::Range<u64>)> {
        let numbers = (0..self.operations.len()).filter(|number| {
            self.is_open_transaction(*number) && self.operations[*number].attachment < attachment
        });
        let parts = numbers.flat_map(|number| match &self.operations[number].kind {
            OpKind::Transact(parts) => parts.iter().map(|it| (number, it.0.clone())).collect(),
            _ => vec![],
        });
        parts.collect()
    }

    fn transaction_sectors(&self, number: usize) -> impl Iterator<Item = u64> {
        let parts = match &self.operations[number].kind {
            OpKind::Transact(parts) => &parts[..],
            _ => &[],
        };
        parts.iter().flat_map(|(sectors, _)| sectors.clone())
    }

    fn is_open_transaction(&self, number: usize) -> bool {
        let operation = &self.operations[number];
        self.is_transaction(number)
            && operation.ending != OpOutcome::Done
            && !operation.is_after_fence
    }

    /// The outcomes of a transaction that all of these sectors allow.
    fn possible_outcomes(
        &self,
        number: usize,
        sectors: &[u64],
        of_sector: &[Vec<Event>],
        outcomes: &mut AssumedOutcomes,
    ) -> Result<PossibleOutcomes, String> {
        let mut possible = PossibleOutcomes {
            may_have_happened: true,
            may_have_rolled_back: true,
        };
        let mut last: Option<u64> = None;
        let mut told: Option<(u64, bool)> = None;
        for &sector in sectors {
            let events = &of_sector[sector as usize];
            let is_like = |other: u64| {
                of_sector[other as usize] == *events && self.has_equal_values(sector, other, events)
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
            let here = PossibleOutcomes {
                may_have_happened: possible.may_have_happened && may(true),
                may_have_rolled_back: possible.may_have_rolled_back && may(false),
            };
            outcomes.remove(&number);
            if !here.may_have_happened && !here.may_have_rolled_back {
                let others = told.map(|(other, happened)| (other, happened, of_sector));
                return Err(self.torn_report(number, others, (sector, events)));
            }
            if here.may_have_happened != here.may_have_rolled_back {
                told.get_or_insert((sector, here.may_have_happened));
            }
            possible = here;
        }
        Ok(possible)
    }

    fn torn_report(
        &self,
        number: usize,
        told: Option<(u64, bool, &[Vec<Event>])>,
        (sector, events): (u64, &[Event]),
    ) -> String {
        let name = self.describe(number);
        let mut story = match told {
            Some((first, happened, of_sector)) => {
                let (of, not) = match happened {
                    true => (first, sector),
                    false => (sector, first),
                };
                let tale = self.event_report(first, &of_sector[first as usize]);
                format!(
                    "half of a transaction: {name} is on sector {of} and not on sector {not}\n\
                     sector {first}:\n{tale}"
                )
            }
            None => format!(
                "half of a transaction: {name} can neither be on sector {sector} nor be missing \
                 there, given the outcomes of others\n"
            ),
        };
        story += &format!("sector {sector}:\n{}", self.event_report(sector, events));
        story
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::{SECTOR, fill};

    const PARTS: [u64; 3] = [0, 16, 48];

    /// Begins a transaction of these parts with this value; another client attaches before its
    /// answer.
    fn begin_transaction(checker: &mut HistoryChecker, value: u64, parts: &[u64]) -> usize {
        let parts: Vec<_> = parts.iter().map(|at| (*at..at + 8, value)).collect();
        let first = parts.iter().map(|it| it.0.start).min().expect("a part");
        let end = parts.iter().map(|it| it.0.end).max().expect("a part");
        let hull = first..end;
        checker.begin(1, 1, hull, OpKind::Transact(parts))
    }

    fn read_value(checker: &mut HistoryChecker, sector: u64, value: u64) {
        let number = checker.begin(2, 2, sector..sector + 1, OpKind::Read(vec![]));
        let data = fill(value, 1);
        assert_eq!(data.len() as u64, SECTOR);
        checker.read(number, &data).expect("a whole sector");
    }

    fn check(seen: [u64; 3]) -> Result<(u64, u64, u64), String> {
        let mut checker = HistoryChecker::default();
        checker.record_attach(1, false);
        let number = begin_transaction(&mut checker, 7, &PARTS);
        checker.record_attach(2, false);
        assert_eq!(checker.unanswered_transactions_before(2).len(), 3);
        assert_eq!(
            checker.unanswered_transactions_before(2)[1],
            (number, 16..24)
        );
        PARTS
            .iter()
            .zip(seen)
            .for_each(|(at, value)| read_value(&mut checker, *at, value));
        let searched = checker.check(64)?;
        Ok((searched.happened, searched.rolled_back, searched.unknown))
    }

    #[test]
    fn transaction_happened_on_all_sectors_or_none() {
        assert_eq!(check([7, 7, 7]), Ok((1, 0, 0)));
        assert_eq!(check([0, 0, 0]), Ok((0, 1, 0)));
        for half in [[7, 0, 0], [0, 7, 7], [0, 0, 7], [7, 0, 7]] {
            let broken = check(half).expect_err("half of it");
            assert!(broken.starts_with("half of a transaction: "), "{broken}");
        }
    }

    #[test]
    fn unread_transaction_may_have_either_outcome() {
        let mut checker = HistoryChecker::default();
        checker.record_attach(1, false);
        begin_transaction(&mut checker, 7, &PARTS);
        checker.record_attach(2, false);
        let searched = checker.check(64).expect("nothing is wrong");
        assert_eq!((searched.happened, searched.unknown), (0, 1));
    }

    /// A transaction's previous sector need not be the previous one on the volume (seed 2905).
    #[test]
    fn transaction_parts_may_be_in_any_order() {
        for (seen, half) in [(7, false), (0, true)] {
            let mut checker = HistoryChecker::default();
            checker.record_attach(1, false);
            begin_transaction(&mut checker, 7, &[16, 0]);
            checker.record_attach(2, false);
            read_value(&mut checker, 20, 7);
            read_value(&mut checker, 3, seen);
            assert_eq!(checker.check(64).is_err(), half, "{seen}");
        }
    }

    /// Of two transactions on the same sectors the later one hides the earlier. Observations
    /// elsewhere show that the earlier one happened.
    #[test]
    fn one_transaction_decides_another() {
        let told = |last: u64| {
            let mut checker = HistoryChecker::default();
            checker.record_attach(1, false);
            begin_transaction(&mut checker, 7, &[0, 16]);
            // The same channel: the second comes after the first, if both happened.
            begin_transaction(&mut checker, 8, &[16, 48]);
            checker.record_attach(2, false);
            for (at, value) in [(0, 7), (16, 7), (48, last)] {
                read_value(&mut checker, at, value);
            }
            checker.check(64)
        };
        let searched = told(0).expect("the first happened, the second did not");
        assert_eq!((searched.happened, searched.rolled_back), (1, 1));
        told(8).expect_err("the second is on one of its parts");
    }
}
