//! The contents of a volume after all its current copies lost their power.
//!
//! Copies on disks may lose acknowledged changes that no flush covers, of each sector on its own. So a sector then has a value
//! since the last flush that was acknowledged: one that was possible when the flush began, or one of a change since. A durable
//! change covers its sectors alone: the value is its own, or of a change that was in progress when it began, or
//! later. The constraints of all flushes and durable changes hold together.
//!
//! A client whose last acknowledged change was lost learns that from its next flush, which fails. If it was acknowledged, no
//! such change may be missing.
//!
//! Changes without an answer at that time may happen again: their clients send them again.
//!
//! A transaction that was acknowledged and not flushed may be lost in part, if later changes of its pages survive. So
//! [`HistoryChecker::check_atomicity`] is not called for such a history.

use super::{Event, HistoryChecker, OpKind, OpOutcome, Operation, Search, SearchLimit};
use std::collections::{BTreeMap, BTreeSet};

/// The values that a sector may have after a loss.
#[derive(Default)]
pub(super) struct SurvivingValues {
    now: BTreeSet<u64>,
    /// Those that a flush in progress will leave, by its number.
    of_flushes: BTreeMap<usize, BTreeSet<u64>>,
    /// The same for durable changes in progress.
    of_changes: BTreeMap<usize, BTreeSet<u64>>,
    /// The flushes in progress at the last loss.
    interrupted: BTreeSet<usize>,
    /// The attachment whose change the last loss took, if it took one.
    loser: Option<u32>,
}

/// A bit of a state: a loss took the last acknowledged change, and nothing was written since.
pub(super) const IS_LOST: u64 = 1 << 63;

impl SurvivingValues {
    fn keep(&mut self, values: Option<BTreeSet<u64>>) {
        if let Some(values) = values {
            self.now.retain(|value| values.contains(value));
        }
    }
}

impl HistoryChecker {
    /// Records that all current copies of some bytes have lost their power.
    pub(crate) fn record_power_loss(&mut self) {
        self.has_lost_power = true;
        self.events.push(Event::PowerLost);
    }

    /// Records that a flush of this attachment failed, because changes may be lost.
    pub(crate) fn record_loss_report(&mut self, attachment: u32) {
        self.events.push(Event::LossReported(attachment));
    }

    /// The acknowledged flushes that began before the event of an index, and after the one before.
    pub(super) fn flushes_begun_at(&self) -> BTreeMap<usize, Vec<Event>> {
        let mut begun: BTreeMap<usize, Vec<Event>> = BTreeMap::new();
        if self.has_lost_power {
            for (number, (_, began)) in self.flushes.iter().enumerate() {
                begun
                    .entry(*began)
                    .or_default()
                    .push(Event::FlushBegan(number));
            }
        }
        begun
    }
}

impl Search<'_> {
    /// The values of changes in progress.
    fn open_values(&self) -> BTreeSet<u64> {
        let open = self.open.iter().flatten();
        let writes = open.filter(|open| !open.is_read && !open.is_closed);
        writes.map(|open| open.value).collect()
    }

    /// A change begins; it is open already.
    pub(super) fn begin_change(&mut self, number: usize, operation: &Operation) {
        let Some(value) = operation.value(self.sector) else {
            return;
        };
        if !self.checker.has_lost_power || matches!(operation.kind, OpKind::Read(_)) {
            return;
        }
        let open = self.open_values();
        let surviving = &mut self.surviving;
        let sets = surviving.of_flushes.values_mut();
        for set in sets.chain(surviving.of_changes.values_mut()) {
            set.insert(value);
        }
        surviving.now.insert(value);
        if operation.is_durable {
            surviving.of_changes.insert(number, open);
        }
    }

    /// A change was acknowledged, or not.
    pub(super) fn end_change(&mut self, number: usize, is_acknowledged: bool) {
        let values = self.surviving.of_changes.remove(&number);
        self.surviving.keep(values.filter(|_| is_acknowledged));
    }

    pub(super) fn run_durability(&mut self, event: Event) -> Result<(), SearchLimit> {
        match event {
            Event::FlushBegan(number) => {
                let mut values = self.open_values();
                values.extend(self.states.iter().map(|(value, _)| *value));
                self.surviving.of_flushes.insert(number, values);
                Ok(())
            }
            Event::Flushed(number) => {
                let values = self.surviving.of_flushes.remove(&number);
                self.surviving.keep(values);
                let is_whole = !self.surviving.interrupted.remove(&number);
                // It would say that the lost change is durable.
                if is_whole && self.surviving.loser == Some(self.checker.flushes[number].0) {
                    self.states.retain(|(_, bits)| bits & IS_LOST == 0);
                }
                Ok(())
            }
            Event::LossReported(attachment) => {
                // By the promise of a flush, a client that lost all its connections at once may lose changes, too.
                let loser = self.surviving.loser.filter(|loser| *loser != attachment);
                self.lose_power()?;
                self.surviving.loser = loser;
                Ok(())
            }
            _ => self.lose_power(),
        }
    }

    /// All values since the last flush, with each set of the open changes done.
    fn lose_power(&mut self) -> Result<(), SearchLimit> {
        let reached = self.reachable_states()?;
        let open = self.open.iter().enumerate();
        let open = open.filter_map(|(bit, open)| Some((bit, open.as_ref()?)));
        let (mut writes, mut unanswered) = (0, 0);
        for (bit, open) in open.filter(|(_, open)| !open.is_read && !open.must_happen) {
            match self.operation(open.number).ending {
                OpOutcome::Unknown => unanswered |= 1 << bit,
                OpOutcome::Done | OpOutcome::Decided => writes |= 1 << bit,
            }
        }
        // Nothing requires a change that never has an answer: a state without it allows all that one with it does.
        let kept = reached.iter().map(|(_, bits)| *bits & !unanswered);
        let mut kept: BTreeSet<u64> = kept.collect();
        let mut next: Vec<u64> = kept.iter().copied().collect();
        while let Some(bits) = next.pop() {
            let mut done = bits & writes;
            while done != 0 {
                let fewer = bits & !(1 << done.trailing_zeros());
                done &= done - 1;
                if kept.insert(fewer) {
                    next.push(fewer);
                }
            }
            if kept.len() > self.states_max {
                return Err(SearchLimit);
            }
        }
        let values = self.surviving.now.clone();
        if kept.len() * values.len() > self.states_max {
            return Err(SearchLimit);
        }
        let last: BTreeSet<u64> = reached.iter().map(|(value, _)| *value).collect();
        self.surviving.loser = self.writer_of(&last);
        let interrupted = self.surviving.of_flushes.keys();
        self.surviving.interrupted = interrupted.copied().collect();
        let states = values.iter().flat_map(|value| {
            let mark = if last.contains(value) { 0 } else { IS_LOST };
            kept.iter()
                .map(move |bits| (*value, *bits & !IS_LOST | mark))
        });
        self.states = states.map(|state| self.apply_reads(state)).collect();
        Ok(())
    }

    /// The attachment that has written all of these values.
    fn writer_of(&self, values: &BTreeSet<u64>) -> Option<u32> {
        let operations = &self.checker.operations;
        let mut writers = values.iter().map(|wanted| {
            let has_written = |operation: &&Operation| {
                let is_change = !matches!(operation.kind, OpKind::Read(_));
                is_change && operation.value(self.sector) == Some(*wanted)
            };
            // Zeroes have many writers.
            let writer = operations.iter().find(has_written).filter(|_| *wanted != 0);
            writer.map(|operation| operation.attachment)
        });
        let first = writers.next()??;
        writers.all(|writer| writer == Some(first)).then_some(first)
    }
}

impl<'c> Search<'c> {
    /// A new volume reads as zeroes.
    pub(super) fn new_surviving() -> SurvivingValues {
        SurvivingValues {
            now: BTreeSet::from([0]),
            ..SurvivingValues::default()
        }
    }
}
