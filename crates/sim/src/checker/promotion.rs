//! The remaining data where a promoted asynchronous replica takes over.
//!
//! Such a replica is a prefix of the volume's one replication queue. The order of two changes in
//! the queue is known here if one was acknowledged before the other began, or if both are of one
//! channel and one sector. So the lost changes must be a suffix by that order, and a transaction is
//! lost as a whole. No change is lost that was acknowledged as durable, or before an acknowledged
//! flush began.
//!
//! The first client that attaches the replica reads its contents before any client writes. The
//! search of each sector continues from them.
//!
//! An earlier client may still have an in-sync leg to itself and not know that it is superseded. It
//! goes on acknowledging writes, and all of them are lost; but it acknowledges no durable write
//! without the replica.

use super::{Event, HistoryChecker, OpKind, Operation};
use std::collections::BTreeSet;

/// A replica took over.
pub(super) struct PromotionPoint {
    /// Clients that attached with a lower epoch are superseded.
    epoch: u32,
    /// Event index of the first client's attach.
    event_index: usize,
    /// The sectors' values at that time, once a client has read them.
    values: Vec<Option<u64>>,
}

impl PromotionPoint {
    pub(super) fn value(&self, sector: u64) -> Option<u64> {
        self.values[sector as usize]
    }
}

impl HistoryChecker {
    /// The epoch of the last promotion that a client has attached to; 0 before any.
    pub(crate) fn last_promotion_epoch(&self) -> u32 {
        self.promotions.last().map_or(0, |cut| cut.epoch)
    }

    /// Records a promotion with this epoch, before the first client attaches.
    pub(crate) fn record_promotion(&mut self, epoch: u32, sectors: u64) {
        self.events.push(Event::Promoted(self.promotions.len()));
        self.promotions.push(PromotionPoint {
            epoch,
            event_index: self.events.len(),
            values: vec![None; sectors as usize],
        });
    }

    /// Whether writes must wait because the contents of a promoted replica are not known yet.
    pub(crate) fn awaits_reads(&self) -> bool {
        let last = self.promotions.last();
        last.is_some_and(|cut| cut.values.contains(&None))
    }

    /// Takes the values of a read that is one of the first after a promotion.
    pub(super) fn record_promoted_values(&mut self, number: usize, values: &[u64]) {
        let Operation {
            attachment,
            sectors,
            ..
        } = &self.operations[number];
        if let Some(cut) = self.promotions.last_mut()
            && *attachment >= cut.epoch
        {
            let held = &mut cut.values[sectors.start as usize..sectors.end as usize];
            for (held, value) in held.iter_mut().zip(values) {
                held.get_or_insert(*value);
            }
        }
    }

    /// Marks a change that its acknowledgement will declare durable.
    pub(crate) fn mark_durable(&mut self, number: usize) {
        self.operations[number].is_durable = true;
    }

    /// The event index at which an operation submitted now begins.
    pub(crate) fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Records an acknowledged flush that began at this event index.
    pub(crate) fn record_flush(&mut self, attachment: u32, began: usize) {
        // Without disks no flush covers anything that could be lost.
        self.events.push(Event::Flushed(self.flushes.len()));
        self.flushes.push((attachment, began));
    }

    /// Whether a change of a superseded client may be acknowledged and lost.
    pub(super) fn may_be_lost(&self, number: usize) -> bool {
        let operation = &self.operations[number];
        let is_change = !matches!(operation.kind, OpKind::Read(_));
        let is_over = operation.attachment < self.last_promotion_epoch();
        is_change && is_over && !operation.is_durable && self.is_unfenced(number)
    }

    /// Counts the acknowledged changes that were lost, and the durable ones that were kept.
    pub(super) fn check_promotions(&self) -> Result<(u64, u64), String> {
        let changes = || self.operations.iter().enumerate();
        for (number, operation) in changes().filter(|(_, it)| it.is_after_fence) {
            let mut flushes = self.flushes.iter();
            let is_its = |&&(whose, began): &&(u32, usize)| {
                let acknowledged = operation.acknowledged_at.filter(|_| operation.is_change());
                whose == operation.attachment && acknowledged.is_some_and(|at| at < began)
            };
            if flushes.any(|flush| is_its(&flush)) {
                let name = self.describe(number);
                return Err(format!("{name} was flushed, and is of a superseded client"));
            }
        }
        let mut counts = (0, 0);
        for at in 0..self.promotions.len() {
            let (lost, lasted) = self.check_promotion(at)?;
            counts = (counts.0 + lost, counts.1 + lasted);
        }
        Ok(counts)
    }

    fn check_promotion(&self, at: usize) -> Result<(u64, u64), String> {
        let cut = &self.promotions[at];
        let before = at.checked_sub(1).map(|at| &self.promotions[at]);
        let since = before.map_or(0, |before| before.event_index);
        let changes: Vec<usize> = (0..self.operations.len())
            .filter(|number| {
                let it = &self.operations[*number];
                it.is_change()
                    && !it.is_after_fence
                    && (since..cut.event_index).contains(&it.began_at)
            })
            .collect();
        let (mut lost, mut there) = (BTreeSet::new(), BTreeSet::new());
        for sector in 0..cut.values.len() as u64 {
            let was = before.map_or(Some(0), |before| before.value(sector));
            let its = changes.iter().copied();
            let its = its.filter_map(|it| Some((it, self.operations[it].value(sector)?)));
            self.classify_changes(cut.value(sector), was, its.collect(), &mut lost, &mut there)
                .map_err(|why| format!("sector {sector} of a promoted copy: {why}"))?;
        }
        let newest = there.iter().map(|it| self.operations[*it].began_at).max();
        let is_before = |&&(whose, _): &&(u32, usize)| whose < cut.epoch;
        let flushed = self.flushes.iter().filter(is_before).map(|it| it.1).max();
        for &number in &lost {
            let operation = &self.operations[number];
            let is_before = |other: Option<usize>| {
                let acknowledged = operation.acknowledged_at.zip(other);
                acknowledged.is_some_and(|(acknowledged, began)| acknowledged < began)
            };
            let why = match operation.acknowledged_at {
                _ if there.contains(&number) && self.is_transaction(number) => {
                    "half of a transaction is present"
                }
                Some(_) if operation.is_durable => "it was durable",
                _ if is_before(flushed) => "it was flushed",
                _ if is_before(newest) => "a later change is present",
                _ => continue,
            };
            let name = self.describe(number);
            return Err(format!("a promoted copy lacks {name}: {why}"));
        }
        let is_acknowledged = |it: &&usize| self.operations[**it].acknowledged_at.is_some();
        let is_durable = |it: &&usize| self.operations[**it].is_durable;
        let lasted = changes.iter().filter(is_acknowledged).filter(is_durable);
        let lost = lost.iter().filter(is_acknowledged).count();
        Ok((lost as u64, lasted.count() as u64))
    }

    /// Classifies the changes of a sector by its value: present or lost. Zeroes may be of any
    /// clear.
    fn classify_changes(
        &self,
        held: Option<u64>,
        was: Option<u64>,
        changes: Vec<(usize, u64)>,
        lost: &mut BTreeSet<usize>,
        there: &mut BTreeSet<usize>,
    ) -> Result<(), String> {
        let of = |number: usize| &self.operations[number];
        let shown = changes.iter().filter(|(_, value)| Some(*value) == held);
        let shown: Vec<usize> = shown.map(|it| it.0).collect();
        if shown.is_empty() && held != was {
            return Err(format!("it has {held:?}, which no client wrote"));
        }
        if held != Some(0) {
            there.extend(&shown);
        }
        let is_later = |number: usize, than: usize| {
            let is_behind = of(than)
                .acknowledged_at
                .is_some_and(|at| at < of(number).began_at);
            is_behind || number > than && of(number).channel == of(than).channel
        };
        let others = changes.iter().filter(|(_, value)| Some(*value) != held);
        let gone = others.filter(|(number, _)| shown.iter().all(|it| is_later(*number, *it)));
        lost.extend(gone.map(|it| it.0));
        Ok(())
    }
}

impl Operation {
    fn is_change(&self) -> bool {
        !matches!(self.kind, OpKind::Read(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::{OpOutcome, fill};

    /// A client writes to two sectors, a replica is promoted, and another client reads.
    struct PromotionTest(HistoryChecker);

    impl PromotionTest {
        fn new() -> PromotionTest {
            let mut checker = HistoryChecker::default();
            checker.record_attach(1, false);
            PromotionTest(checker)
        }

        fn begin(&mut self, channel: u32, sectors: &[u64], value: u64, durable: bool) -> usize {
            let parts = sectors.iter().map(|at| (*at..at + 1, value)).collect();
            let first = *sectors.iter().min().expect("a sector");
            let last = *sectors.iter().max().expect("a sector");
            let number = self
                .0
                .begin(1, channel, first..last + 1, OpKind::Transact(parts));
            if durable {
                self.0.mark_durable(number);
            }
            number
        }

        fn acknowledge(&mut self, number: usize) {
            self.0
                .end(number, OpOutcome::Done)
                .expect("nothing is wrong");
        }

        fn write(&mut self, sectors: &[u64], value: u64, durable: bool) {
            let number = self.begin(1, sectors, value, durable);
            self.acknowledge(number);
        }

        /// The count of lost changes, or the cause of the failure.
        fn promote_and_read(mut self, held: [u64; 2]) -> Result<u64, String> {
            self.0.record_promotion(2, 2);
            self.0.record_attach(3, true);
            assert!(self.0.awaits_reads());
            for (sector, value) in (0..).zip(held) {
                let number = self.0.begin(3, 9, sector..sector + 1, OpKind::Read(vec![]));
                self.0.read(number, &fill(value, 1))?;
            }
            assert!(!self.0.awaits_reads());
            Ok(self.0.check(2)?.lost)
        }
    }

    #[track_caller]
    fn check(tell: impl Fn(&mut PromotionTest), held: [u64; 2], expected: Result<u64, &str>) {
        let mut told = PromotionTest::new();
        tell(&mut told);
        match (told.promote_and_read(held), expected) {
            (Ok(lost), Ok(expected)) => assert_eq!(lost, expected),
            (Err(why), Err(expected)) => assert!(why.contains(expected), "{why}"),
            (told, expected) => panic!("{told:?}, not {expected:?}"),
        }
    }

    fn write_three(told: &mut PromotionTest) {
        told.write(&[0], 5, false);
        told.write(&[1], 6, false);
        told.write(&[0], 7, false);
    }

    #[test]
    fn lost_changes_are_a_suffix() {
        for (held, lost) in [([7, 6], 0), ([5, 6], 1), ([5, 0], 2), ([0, 0], 3)] {
            check(write_three, held, Ok(lost));
        }
        check(write_three, [7, 0], Err("a later change is present"));
        check(write_three, [0, 6], Err("a later change is present"));
        check(write_three, [8, 6], Err("no client wrote"));
    }

    #[test]
    fn durable_changes_survive_promotion() {
        let durable = |told: &mut PromotionTest| {
            told.write(&[0], 5, true);
            told.write(&[1], 6, false);
        };
        check(durable, [5, 0], Ok(1));
        check(durable, [0, 0], Err("it was durable"));
        let flushed = |told: &mut PromotionTest| {
            told.write(&[0], 5, false);
            let began = told.0.event_count();
            told.write(&[1], 6, false);
            told.0.record_flush(1, began);
        };
        check(flushed, [5, 0], Ok(1));
        check(flushed, [0, 0], Err("it was flushed"));
    }

    #[test]
    fn concurrent_changes_have_no_order() {
        let beside = |told: &mut PromotionTest| {
            let (first, second) = (told.begin(1, &[0], 5, false), told.begin(2, &[1], 6, false));
            told.acknowledge(first);
            told.acknowledge(second);
        };
        for held in [[5, 0], [0, 6]] {
            check(beside, held, Ok(1));
        }
        let of_one_channel = |told: &mut PromotionTest| {
            let (first, second) = (told.begin(1, &[0], 5, false), told.begin(1, &[0], 6, true));
            told.acknowledge(first);
            told.acknowledge(second);
        };
        check(of_one_channel, [5, 0], Err("it was durable"));
    }

    #[test]
    fn transaction_is_lost_as_a_whole() {
        let whole = |told: &mut PromotionTest| told.write(&[0, 1], 5, false);
        check(whole, [5, 5], Ok(0));
        check(whole, [0, 0], Ok(1));
        check(whole, [0, 5], Err("half of a transaction"));
        let cut_off = |told: &mut PromotionTest| {
            told.begin(1, &[0, 1], 5, false);
        };
        check(cut_off, [0, 0], Ok(0));
        check(cut_off, [5, 0], Err("half of a transaction"));
    }

    #[test]
    fn superseded_client_acknowledges_only_undurable_writes() {
        let told = |durable: bool, reached: bool| {
            let mut told = PromotionTest::new();
            told.0.record_promotion(2, 0);
            told.0.record_attach(3, true);
            if reached {
                told.0.record_all_legs_reached();
            }
            let late = told.begin(1, &[0], 5, durable);
            told.0.end(late, OpOutcome::Done).is_ok()
        };
        assert!(told(false, false));
        assert!(!told(true, false));
        assert!(!told(false, true));
    }

    #[test]
    fn superseded_client_cannot_flush() {
        let mut told = PromotionTest::new();
        told.0.record_promotion(2, 0);
        told.0.record_attach(3, true);
        told.write(&[0], 5, false);
        assert!(told.0.check_promotions().is_ok());
        let now = told.0.event_count();
        told.0.record_flush(1, now);
        assert!(told.0.check_promotions().is_err());
    }
}
