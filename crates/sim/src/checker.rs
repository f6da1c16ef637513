//! Checks the clients' observations against a disk, sector by sector: reads and writes are
//! linearizable.
//!
//! Every write fills its sectors with a unique number; a sector is a register. The search follows
//! Wing and Gong (1993), in the just-in-time order of Lowe (2017). It carries all possible states
//! of a sector from event to event. It applies an operation when its answer says that it must be
//! applied, and a read as soon as possible, because a read changes nothing.
//!
//! Beyond linearizability:
//! - overlapping writes of one channel are in the order of their submission, and a read comes after
//!   the acknowledged writes that were submitted before it;
//! - once a client has attached, operations of earlier clients have happened or never will. Later
//!   submissions of those clients are never acknowledged and change nothing. Exception: reads, if
//!   the new client could not reach every leg, because no client fences a leg that only the old
//!   client reaches;
//! - the answer to a request without space says that the request happened or not, from that time
//!   on;
//! - a transaction that was never acknowledged happened on all of its sectors or on none
//!   (`checker/atomicity.rs`);
//! - a snapshot is one read of the whole volume, between its order and its end, and has all that was acknowledged before
//!   any change that it has began (`checker/snapshots.rs`);
//! - where an asynchronous replica is promoted, the last acknowledged writes may be gone
//!   (`checker/promotion.rs`).

mod atomicity;
mod power_loss;
mod promotion;
mod report;
mod snapshots;
mod values;

use power_loss::SurvivingValues;
use promotion::PromotionPoint;
use snapshots::SnapshotMoments;
pub(crate) use values::{fill, value_of};

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub(crate) const SECTOR: u64 = 512;
/// Maximum of operations open at once on a sector; the search skips a sector with more.
const OPEN_OPS_MAX: usize = 63;
/// Maximum of states of a sector; the search skips a sector with more.
const STATES_MAX: usize = 20_000;

/// The kind of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    /// Writes this value to every sector.
    Write(u64),
    /// Writes the value of each part to its sectors.
    Transact(Vec<(Range<u64>, u64)>),
    /// The values that were read from each sector, once they are known.
    Read(Vec<u64>),
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpOutcome {
    Done,
    /// It happened or not, and that is final.
    Decided,
    /// It may still happen.
    Unknown,
}

#[derive(Clone, Debug)]
struct Operation {
    /// The epoch of its client's attachment.
    attachment: u32,
    channel: u32,
    /// For a transaction, its sectors and all between them.
    sectors: Range<u64>,
    kind: OpKind,
    /// Whether the result of a read is known; it must be before the search.
    is_known: bool,
    is_after_fence: bool,
    /// Whether its acknowledgement makes it durable.
    is_durable: bool,
    ending: OpOutcome,
    /// Event indexes of the beginning and of the acknowledgement.
    began_at: usize,
    acknowledged_at: Option<usize>,
}

impl Operation {
    /// The value that the operation writes to or reads from a sector; none if it does not touch it.
    fn value(&self, sector: u64) -> Option<u64> {
        if !self.sectors.contains(&sector) {
            return None;
        }
        match &self.kind {
            OpKind::Write(value) => Some(*value),
            OpKind::Read(values) => values.get((sector - self.sectors.start) as usize).copied(),
            OpKind::Transact(parts) => {
                let part = parts.iter().find(|(sectors, _)| sectors.contains(&sector));
                part.map(|(_, value)| *value)
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Begin(usize),
    End(usize, OpOutcome),
    /// A client has attached; the epoch names its attachment.
    Attached(u32),
    /// A promoted replica takes over with its contents.
    Promoted(usize),
    /// See `checker/power_loss.rs`.
    FlushBegan(usize),
    Flushed(usize),
    PowerLost,
    LossReported(u32),
}

/// The record of a history.
#[derive(Default)]
pub(crate) struct HistoryChecker {
    operations: Vec<Operation>,
    events: Vec<Event>,
    /// The highest attachment.
    newest_attachment: u32,
    /// Whether a leg is out of the newest client's reach: an older client that reaches it may read
    /// there.
    is_partial: bool,
    /// Earlier clients may have read from such a leg with operations below this number.
    unfenced_below: usize,
    promotions: Vec<PromotionPoint>,
    /// Acknowledged flushes: attachment, and event index of the beginning.
    flushes: Vec<(u32, usize)>,
    has_lost_power: bool,
    /// The reads of snapshots.
    snapshots: BTreeSet<usize>,
}

/// The result of the search.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SearchReport {
    pub(crate) sectors: u64,
    /// Sectors with too much concurrency to be searched.
    pub(crate) skipped: u64,
    /// Unacknowledged transactions: observed to have happened, observed not to have happened, or
    /// neither.
    pub(crate) happened: u64,
    pub(crate) rolled_back: u64,
    pub(crate) unknown: u64,
    /// Acknowledged changes lost by promotions, and durable changes before those.
    pub(crate) lost: u64,
    pub(crate) durable_kept: u64,
}

impl HistoryChecker {
    /// Records that an operation is submitted; returns its number.
    pub(crate) fn begin(
        &mut self,
        attachment: u32,
        channel: u32,
        sectors: Range<u64>,
        kind: OpKind,
    ) -> usize {
        let number = self.operations.len();
        self.operations.push(Operation {
            attachment,
            channel,
            sectors,
            is_known: !matches!(kind, OpKind::Read(_)),
            kind,
            is_after_fence: attachment < self.newest_attachment,
            is_durable: false,
            ending: OpOutcome::Unknown,
            began_at: self.events.len(),
            acknowledged_at: None,
        });
        self.events.push(Event::Begin(number));
        number
    }

    /// Records that an operation has ended.
    pub(crate) fn end(&mut self, number: usize, ending: OpOutcome) -> Result<(), String> {
        let operation = &self.operations[number];
        if ending == OpOutcome::Done && operation.is_after_fence && !self.may_be_lost(number) {
            return Err(format!(
                "{} was acknowledged, though attachment {} was there before it was submitted",
                self.describe(number),
                self.newest_attachment
            ));
        }
        let is_done = ending == OpOutcome::Done;
        self.operations[number].acknowledged_at = is_done.then_some(self.events.len());
        self.operations[number].ending = ending;
        self.events.push(Event::End(number, ending));
        Ok(())
    }

    /// Records that a read has ended with these bytes.
    pub(crate) fn read(&mut self, number: usize, data: &[u8]) -> Result<(), String> {
        let values: Result<Vec<u64>, String> = data
            .chunks(SECTOR as usize)
            .map(|sector| {
                value_of(sector).map_err(|why| format!("{}: {why}", self.describe(number)))
            })
            .collect();
        let values = values?;
        self.record_promoted_values(number, &values);
        if self.is_unfenced(number) && self.operations[number].attachment < self.newest_attachment {
            return Ok(());
        }
        let operation = &mut self.operations[number];
        operation.kind = OpKind::Read(values);
        operation.is_known = true;
        self.end(number, OpOutcome::Done)
    }

    /// Whether an earlier client may still reach a leg that knows of no newer client.
    fn is_unfenced(&self, number: usize) -> bool {
        self.is_partial || number < self.unfenced_below
    }

    /// Records an attach: from now on older clients can do nothing.
    pub(crate) fn record_attach(&mut self, attachment: u32, is_partial: bool) {
        if attachment >= self.newest_attachment {
            self.record_all_legs_reached();
            self.is_partial = is_partial;
        }
        self.newest_attachment = self.newest_attachment.max(attachment);
        self.events.push(Event::Attached(attachment));
    }

    /// The highest attachment that a client has reported.
    pub(crate) fn newest_attachment(&self) -> u32 {
        self.newest_attachment
    }

    /// Records that the newest client has reached every leg, so later reads of older clients are
    /// refused.
    pub(crate) fn record_all_legs_reached(&mut self) {
        if std::mem::take(&mut self.is_partial) {
            self.unfenced_below = self.operations.len();
        }
    }

    /// Whether this is the newest attachment and its client has not reached every leg yet.
    pub(crate) fn is_partial(&self, attachment: u32) -> bool {
        self.is_partial && attachment == self.newest_attachment
    }

    pub(crate) fn is_transaction(&self, number: usize) -> bool {
        matches!(self.operations[number].kind, OpKind::Transact(_))
    }

    fn describe(&self, number: usize) -> String {
        let Operation {
            attachment,
            channel,
            sectors,
            kind,
            ..
        } = &self.operations[number];
        let what = match kind {
            OpKind::Write(value) => format!("write {value}"),
            OpKind::Transact(parts) => format!("transaction {parts:?}"),
            OpKind::Read(_) if self.snapshots.contains(&number) => "snapshot".to_owned(),
            OpKind::Read(_) => "read".to_owned(),
        };
        format!("{what} of {sectors:?} by channel {channel} of attachment {attachment} (#{number})")
    }

    /// Searches every sector.
    pub(crate) fn check(&self, sectors: u64) -> Result<SearchReport, String> {
        let of_sector = self.events_by_sector(sectors, &self.snapshot_moments()?);
        let none = AssumedOutcomes::new();
        let (mut searched, mut given_up) = (SearchReport::default(), BTreeSet::new());
        let (mut last, mut was_searched): (&[Event], _) = (&[], true);
        for (sector, events) in (0..).zip(&of_sector) {
            if sector == 0 || last != events || !self.has_equal_values(sector, sector - 1, events) {
                let mut search = Search::new(self, sector, &none);
                was_searched = match search.run(events) {
                    Ok(was_searched) => was_searched,
                    Err(at) => return Err(self.failure_report(sector, events, at, &search)),
                };
                last = events;
            }
            searched.sectors += 1;
            if !was_searched {
                given_up.insert(sector);
            }
        }
        searched.skipped = given_up.len() as u64;
        if !self.has_lost_power {
            let outcomes = self.check_atomicity(&of_sector, &given_up)?;
            (searched.happened, searched.rolled_back, searched.unknown) = outcomes;
        }
        (searched.lost, searched.durable_kept) = self.check_promotions()?;
        Ok(searched)
    }

    /// The events of each sector.
    fn events_by_sector(&self, sectors: u64, moments: &SnapshotMoments) -> Vec<Vec<Event>> {
        let mut of_sector: Vec<Vec<Event>> = vec![vec![]; sectors as usize];
        let flushes = self.flushes_begun_at();
        for (at, event) in self.events.iter().enumerate() {
            for began in flushes.get(&at).into_iter().flatten() {
                of_sector.iter_mut().for_each(|all| all.push(*began));
            }
            for begin in moments.begins_at(at) {
                of_sector.iter_mut().for_each(|all| all.push(begin));
            }
            match *event {
                Event::Begin(number) if moments.is_later(number) => {}
                Event::Begin(number) | Event::End(number, _) => {
                    let operation = &self.operations[number];
                    if operation.is_known {
                        let its = |sector: &u64| operation.value(*sector).is_some();
                        for sector in operation.sectors.clone().filter(its) {
                            of_sector[sector as usize].push(*event);
                        }
                    }
                }
                Event::Flushed(_) | Event::LossReported(_) if !self.has_lost_power => {}
                _ => {
                    of_sector.iter_mut().for_each(|all| all.push(*event));
                }
            }
        }
        of_sector
    }

    /// Whether all operations have the same values in two sectors. With equal events, the searches
    /// have the same result.
    fn has_equal_values(&self, sector: u64, other: u64, events: &[Event]) -> bool {
        events.iter().all(|event| match *event {
            Event::Begin(number) => {
                let operation = &self.operations[number];
                operation.value(sector) == operation.value(other)
            }
            Event::Promoted(cut) => {
                let held = &self.promotions[cut];
                held.value(sector) == held.value(other)
            }
            _ => true,
        })
    }
}

/// A value, and a bit for each open operation that is applied.
type SearchState = (u64, u64);

struct OpenOp {
    number: usize,
    /// The operation cannot be applied any more.
    is_closed: bool,
    is_read: bool,
    value: u64,
    /// The search assumes that the operation happened.
    must_happen: bool,
}

/// Too many concurrent operations or states to search.
struct SearchLimit;

/// Assumed outcomes of transactions: whether each happened.
type AssumedOutcomes = BTreeMap<usize, bool>;

struct Search<'c> {
    checker: &'c HistoryChecker,
    sector: u64,
    outcomes: &'c AssumedOutcomes,
    states: BTreeSet<SearchState>,
    states_before: BTreeSet<SearchState>,
    open: Vec<Option<OpenOp>>,
    states_max: usize,
    surviving: SurvivingValues,
}

impl<'c> Search<'c> {
    fn new(checker: &'c HistoryChecker, sector: u64, outcomes: &'c AssumedOutcomes) -> Search<'c> {
        Search {
            states_max: STATES_MAX,
            checker,
            sector,
            outcomes,
            states: BTreeSet::from([(0, 0)]),
            states_before: BTreeSet::new(),
            open: vec![],
            surviving: Self::new_surviving(),
        }
    }

    fn operation(&self, number: usize) -> &'c Operation {
        &self.checker.operations[number]
    }

    /// Processes the events. False if there are too many states. An error names the event after
    /// which no state is left.
    fn run(&mut self, events: &[Event]) -> Result<bool, usize> {
        for (at, event) in events.iter().enumerate() {
            self.states_before.clone_from(&self.states);
            let taken = match *event {
                Event::Begin(number) => self.begin(number),
                Event::End(number, ending) => self.end(number, ending),
                Event::Attached(attachment) => self.close_attachments_before(attachment),
                Event::Promoted(cut) => {
                    self.restart_from(self.checker.promotions[cut].value(self.sector));
                    Ok(())
                }
                other => self.run_durability(other),
            };
            if taken.is_err() {
                return Ok(false);
            }
            if self.states.is_empty() {
                return Err(at);
            }
        }
        // An operation without an answer may have happened, too.
        let wanted = self.required_bits(|_| true);
        if wanted == 0 {
            return Ok(true);
        }
        let Ok(last) = self.reachable_states() else {
            return Ok(false);
        };
        match last.iter().any(|(_, bits)| bits & wanted == wanted) {
            true => Ok(true),
            false => Err(events.len() - 1),
        }
    }

    /// The bits of the open operations of a kind that must happen.
    fn required_bits(&self, of: impl Fn(usize) -> bool) -> u64 {
        let open = self.open.iter().enumerate();
        let open = open.filter_map(|(bit, open)| Some((bit, open.as_ref()?)));
        let wanted = open.filter(|(_, open)| open.must_happen && of(open.number));
        wanted.fold(0, |bits, (bit, _)| bits | 1 << bit)
    }

    fn begin(&mut self, number: usize) -> Result<(), SearchLimit> {
        let outcome = self.outcomes.get(&number);
        let operation = self.operation(number);
        let is_read = matches!(operation.kind, OpKind::Read(_));
        // The changes of a superseded client have no effect.
        if outcome == Some(&false) || operation.is_after_fence && !is_read {
            return Ok(());
        }
        let free = self.open.iter().position(Option::is_none);
        let bit = free.unwrap_or(self.open.len());
        if bit >= OPEN_OPS_MAX {
            return Err(SearchLimit);
        }
        if bit == self.open.len() {
            self.open.push(None);
        }
        self.open[bit] = Some(OpenOp {
            number,
            is_closed: false,
            is_read,
            value: (operation.value(self.sector)).expect("an operation of this sector"),
            must_happen: outcome.is_some(),
        });
        self.begin_change(number, operation);
        if is_read {
            let states = std::mem::take(&mut self.states).into_iter();
            self.states = states.map(|state| self.apply_reads(state)).collect();
        }
        Ok(())
    }

    /// The reads or writes that are not applied yet.
    fn pending(&self, bits: u64, reads: bool) -> impl Iterator<Item = (usize, &OpenOp)> {
        let open = self.open.iter().enumerate();
        let open = open.filter_map(|(bit, open)| Some((bit, open.as_ref()?)));
        open.filter(move |(bit, open)| {
            bits & 1 << bit == 0 && !open.is_closed && open.is_read == reads
        })
    }

    /// Whether no earlier write of the same channel must come first.
    fn may_come_next(&self, bits: u64, of: &OpenOp) -> bool {
        let channel = self.operation(of.number).channel;
        let mut earlier = (self.pending(bits, false)).filter(|(_, it)| it.number < of.number);
        !earlier.any(|(_, it)| {
            let write = self.operation(it.number);
            write.channel == channel && (!of.is_read || write.ending == OpOutcome::Done)
        })
    }

    /// Applies the reads that fit the current value.
    fn apply_reads(&self, (value, bits): SearchState) -> SearchState {
        let reads = self.pending(bits, true);
        let now = reads.filter(|(_, it)| it.value == value && self.may_come_next(bits, it));
        (value, now.fold(bits, |bits, (bit, _)| bits | 1 << bit))
    }

    /// All states that are possible by now.
    fn reachable_states(&self) -> Result<BTreeSet<SearchState>, SearchLimit> {
        let mut found = self.states.clone();
        let mut next: Vec<SearchState> = found.iter().copied().collect();
        while let Some((_, bits)) = next.pop() {
            let writes = self.pending(bits, false);
            for (bit, write) in writes.filter(|(_, it)| self.may_come_next(bits, it)) {
                let state = self.apply_reads((write.value, bits & !power_loss::IS_LOST | 1 << bit));
                if found.insert(state) {
                    next.push(state);
                }
            }
            if found.len() > self.states_max {
                return Err(SearchLimit);
            }
        }
        Ok(found)
    }

    fn end(&mut self, number: usize, ending: OpOutcome) -> Result<(), SearchLimit> {
        self.end_change(number, ending == OpOutcome::Done);
        let is_it = |open: &Option<OpenOp>| open.as_ref().is_some_and(|open| open.number == number);
        let Some(bit) = self.open.iter().position(is_it) else {
            return Ok(());
        };
        let mask = 1 << bit;
        let all_in_place = self.states.iter().all(|(_, bits)| bits & mask != 0);
        let states = match ending {
            OpOutcome::Unknown => return Ok(()),
            OpOutcome::Done if all_in_place => std::mem::take(&mut self.states),
            OpOutcome::Done | OpOutcome::Decided => self.reachable_states()?,
        };
        let open = self.open[bit].take();
        let is_wanted = ending == OpOutcome::Done || open.is_some_and(|open| open.must_happen);
        self.states = states
            .into_iter()
            .filter(|(_, bits)| !is_wanted || bits & mask != 0)
            .map(|(value, bits)| (value, bits & !mask))
            .collect();
        Ok(())
    }

    /// Drops all earlier states and open operations.
    fn restart_from(&mut self, held: Option<u64>) {
        self.states = held.map(|value| (value, 0)).into_iter().collect();
        self.open.clear();
    }

    /// Operations of earlier attachments are applied by now or never.
    fn close_attachments_before(&mut self, attachment: u32) -> Result<(), SearchLimit> {
        self.states = self.reachable_states()?;
        let wanted = self.required_bits(|number| self.operation(number).attachment < attachment);
        self.states.retain(|(_, bits)| bits & wanted == wanted);
        let mut over = 0;
        for (bit, place) in self.open.iter_mut().enumerate() {
            let Some(open) = place else {
                continue;
            };
            let operation = &self.checker.operations[open.number];
            if operation.attachment < attachment {
                open.is_closed = true;
                // No answer will ask whether the operation is applied.
                if operation.ending == OpOutcome::Unknown {
                    over |= 1 << bit;
                    *place = None;
                }
            }
        }
        let states = std::mem::take(&mut self.states);
        self.states = states
            .into_iter()
            .map(|(value, bits)| (value, bits & !over))
            .collect();
        Ok(())
    }
}
