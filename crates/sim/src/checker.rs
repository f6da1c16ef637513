//! Whether what clients saw is what a disk may show, sector by sector: reads and
//! writes are linearizable.
//!
//! Every write fills its sectors with a number of its own; a sector is a
//! register. The search is that of Wing and Gong (1993) in the just-in-time
//! order of Lowe (2017): all states that a sector may be in are carried from
//! event to event, and an operation is put into place when its answer says that
//! it must be in place. A read changes nothing, so it is put into place as soon
//! as it can be.
//!
//! Beyond linearizability:
//! - overlapping writes of one channel are in the order of their submission, and
//!   a read comes after the acknowledged ones that were submitted before it;
//! - once a client has attached, operations of clients before it have happened
//!   or never will, and what those submit later is never acknowledged, nor does
//!   it change anything.
//!   Except for reads, when the new client could not reach every leg: nothing
//!   fences a leg that only the old client reaches;
//! - who is refused for want of room knows at once that it happened or not;
//! - a transaction that was never acknowledged happened on all of its sectors or
//!   on none (`checker/whole.rs`);
//! - where a copy that followed is promoted, what was acknowledged last may be gone
//!   (`checker/cut.rs`).

mod cut;
mod whole;

use cut::Cut;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::ops::Range;

pub(crate) const SECTOR: u64 = 512;
/// Operations open at once on a sector that can be told apart; a sector with
/// more is given up.
const OPEN_MAX: usize = 64;
/// States that a sector may be in; a sector with more is given up.
const STATES_MAX: usize = 5_000;

/// What an operation does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Every sector becomes this.
    Write(u64),
    /// The sectors of each part become its value.
    Transact(Vec<(Range<u64>, u64)>),
    /// What each sector was, once it is known.
    Read(Vec<u64>),
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Done,
    /// It happened or did not, and that is decided.
    Decided,
    /// It may still happen.
    Unknown,
}

#[derive(Clone, Debug)]
struct Operation {
    /// The epoch that its client attached with.
    attachment: u32,
    channel: u32,
    /// Those of a transaction and all between them.
    sectors: Range<u64>,
    kind: Kind,
    /// What a read saw must be known before the search.
    is_known: bool,
    after_fence: bool,
    /// Its acknowledgement says that it lasts.
    is_durable: bool,
    ending: Ending,
    /// When, as events are counted; the end is that of an acknowledgement.
    began: usize,
    acknowledged: Option<usize>,
}

impl Operation {
    /// What it writes to or read from a sector, if that is one of its.
    fn value(&self, sector: u64) -> Option<u64> {
        if !self.sectors.contains(&sector) {
            return None;
        }
        match &self.kind {
            Kind::Write(value) => Some(*value),
            Kind::Read(values) => values.get((sector - self.sectors.start) as usize).copied(),
            Kind::Transact(parts) => {
                let part = parts.iter().find(|(sectors, _)| sectors.contains(&sector));
                part.map(|(_, value)| *value)
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Begin(usize),
    End(usize, Ending),
    /// A client has attached; the epoch names its attachment.
    Attached(u32),
    /// A copy goes on alone with what it has.
    Cut(usize),
}

/// The record of a history.
#[derive(Default)]
pub(crate) struct Checker {
    operations: Vec<Operation>,
    events: Vec<Event>,
    /// The highest attachment.
    present: u32,
    /// A leg is out of its reach: who still reaches that one may read there.
    is_partial: bool,
    /// Reads of clients before it with lower numbers may have been answered
    /// there.
    unfenced_below: usize,
    cuts: Vec<Cut>,
    /// Flushes that were acknowledged: whose, and when they began.
    flushes: Vec<(u32, usize)>,
}

/// What the search came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Searched {
    pub(crate) sectors: u64,
    /// With too much at once to be searched.
    pub(crate) given_up: u64,
    /// Transactions that were not acknowledged: what was seen says that they
    /// happened, that they did not, or neither.
    pub(crate) happened: u64,
    pub(crate) vanished: u64,
    pub(crate) open: u64,
    /// Acknowledged changes that promotions gave up, and durable ones before them.
    pub(crate) lost: u64,
    pub(crate) lasted: u64,
}

impl Checker {
    /// An operation is submitted; its number names it later.
    pub(crate) fn begin(
        &mut self,
        attachment: u32,
        channel: u32,
        sectors: Range<u64>,
        kind: Kind,
    ) -> usize {
        let number = self.operations.len();
        self.operations.push(Operation {
            attachment,
            channel,
            sectors,
            is_known: !matches!(kind, Kind::Read(_)),
            kind,
            after_fence: attachment < self.present,
            is_durable: false,
            ending: Ending::Unknown,
            began: self.events.len(),
            acknowledged: None,
        });
        self.events.push(Event::Begin(number));
        number
    }

    /// An operation has ended.
    pub(crate) fn end(&mut self, number: usize, ending: Ending) -> Result<(), String> {
        let operation = &self.operations[number];
        if ending == Ending::Done && operation.after_fence && !self.may_be_given_up(number) {
            return Err(format!(
                "{} was acknowledged, though attachment {} was there before it was submitted",
                self.name(number),
                self.present
            ));
        }
        let is_done = ending == Ending::Done;
        self.operations[number].acknowledged = is_done.then_some(self.events.len());
        self.operations[number].ending = ending;
        self.events.push(Event::End(number, ending));
        Ok(())
    }

    /// A read has ended with these bytes.
    pub(crate) fn read(&mut self, number: usize, data: &[u8]) -> Result<(), String> {
        let values: Result<Vec<u64>, String> = data
            .chunks(SECTOR as usize)
            .map(|sector| value_of(sector).map_err(|why| format!("{}: {why}", self.name(number))))
            .collect();
        let values = values?;
        self.hold(number, &values);
        if self.is_unfenced(number) && self.operations[number].attachment < self.present {
            return Ok(());
        }
        let operation = &mut self.operations[number];
        operation.kind = Kind::Read(values);
        operation.is_known = true;
        self.end(number, Ending::Done)
    }

    /// Whether a client before the newest may yet find a leg that knows of no other.
    fn is_unfenced(&self, number: usize) -> bool {
        self.is_partial || number < self.unfenced_below
    }

    /// From now on older clients can do nothing.
    pub(crate) fn attached(&mut self, attachment: u32, is_partial: bool) {
        if attachment >= self.present {
            self.reached_all();
            self.is_partial = is_partial;
        }
        self.present = self.present.max(attachment);
        self.events.push(Event::Attached(attachment));
    }

    /// The newest client has reached every leg: what older ones read from now
    /// on is refused.
    pub(crate) fn reached_all(&mut self) {
        if std::mem::take(&mut self.is_partial) {
            self.unfenced_below = self.operations.len();
        }
    }

    /// Whether the newest client has this attachment, and has not reached every
    /// leg yet.
    pub(crate) fn is_partial(&self, attachment: u32) -> bool {
        self.is_partial && attachment == self.present
    }

    pub(crate) fn is_transaction(&self, number: usize) -> bool {
        matches!(self.operations[number].kind, Kind::Transact(_))
    }

    fn name(&self, number: usize) -> String {
        let Operation {
            attachment,
            channel,
            sectors,
            kind,
            ..
        } = &self.operations[number];
        let what = match kind {
            Kind::Write(value) => format!("write {value}"),
            Kind::Transact(parts) => format!("transaction {parts:?}"),
            Kind::Read(_) => "read".to_owned(),
        };
        format!("{what} of {sectors:?} by channel {channel} of attachment {attachment} (#{number})")
    }

    /// Searches every sector.
    pub(crate) fn check(&self, sectors: u64) -> Result<Searched, String> {
        let of_sector = self.of_sectors(sectors);
        let none = Outcomes::new();
        let (mut searched, mut given_up) = (Searched::default(), BTreeSet::new());
        let (mut last, mut was_searched): (&[Event], _) = (&[], true);
        for (sector, events) in (0..).zip(&of_sector) {
            if sector == 0 || last != events || !self.saw_the_same(sector, sector - 1, events) {
                let mut search = Search::new(self, sector, &none);
                was_searched = match search.run(events) {
                    Ok(was_searched) => was_searched,
                    Err(at) => return Err(self.story(sector, events, at, &search)),
                };
                last = events;
            }
            searched.sectors += 1;
            if !was_searched {
                given_up.insert(sector);
            }
        }
        searched.given_up = given_up.len() as u64;
        let outcomes = self.check_whole(&of_sector, &given_up)?;
        (searched.happened, searched.vanished, searched.open) = outcomes;
        (searched.lost, searched.lasted) = self.check_cuts()?;
        Ok(searched)
    }

    /// What happened to each sector.
    fn of_sectors(&self, sectors: u64) -> Vec<Vec<Event>> {
        let mut of_sector: Vec<Vec<Event>> = vec![vec![]; sectors as usize];
        for event in &self.events {
            match *event {
                Event::Begin(number) | Event::End(number, _) => {
                    let operation = &self.operations[number];
                    if operation.is_known {
                        let its = |sector: &u64| operation.value(*sector).is_some();
                        for sector in operation.sectors.clone().filter(its) {
                            of_sector[sector as usize].push(*event);
                        }
                    }
                }
                Event::Attached(_) | Event::Cut(_) => {
                    of_sector.iter_mut().for_each(|all| all.push(*event));
                }
            }
        }
        of_sector
    }

    /// Whether all operations did in a sector what they did in another: with the
    /// same events, its search comes to the same.
    fn saw_the_same(&self, sector: u64, other: u64, events: &[Event]) -> bool {
        events.iter().all(|event| match *event {
            Event::Begin(number) => {
                let operation = &self.operations[number];
                operation.value(sector) == operation.value(other)
            }
            Event::Cut(cut) => {
                let held = &self.cuts[cut];
                held.value(sector) == held.value(other)
            }
            _ => true,
        })
    }

    fn story(&self, sector: u64, events: &[Event], at: usize, search: &Search<'_>) -> String {
        let mut story = format!("sector {sector} is not what it should be:\n");
        story += &self.tale(sector, &events[..=at]);
        let values: BTreeSet<u64> = search.before.iter().map(|state| state.0).collect();
        let _ = write!(story, "  before that it was one of {values:?}");
        story
    }

    fn tale(&self, sector: u64, events: &[Event]) -> String {
        let mut story = String::new();
        for event in events {
            // Writing to a string does not fail.
            let _ = match *event {
                Event::Begin(number) => writeln!(story, "  begin {}", self.name(number)),
                Event::End(number, ending) => {
                    let operation = &self.operations[number];
                    let seen = match (&operation.kind, operation.value(sector)) {
                        (Kind::Read(_), Some(value)) => format!(" saw {value}"),
                        _ => String::new(),
                    };
                    writeln!(story, "  {ending:?} {}{seen}", self.name(number))
                }
                Event::Attached(attachment) => writeln!(story, "  attachment {attachment}"),
                Event::Cut(cut) => {
                    let held = self.cuts[cut].value(sector);
                    writeln!(story, "  a copy goes on that has {held:?}")
                }
            };
        }
        story
    }
}

/// A value, and a bit for each open operation that is in place.
type State = (u64, u64);

struct Open {
    number: usize,
    /// Nothing puts it into place any more.
    is_closed: bool,
    is_read: bool,
    value: u64,
    /// It is taken for granted that it happened.
    is_wanted: bool,
}

/// There is too much at once to be searched.
struct TooMuch;

/// What is taken for granted of transactions: whether they happened.
type Outcomes = BTreeMap<usize, bool>;

struct Search<'c> {
    checker: &'c Checker,
    sector: u64,
    outcomes: &'c Outcomes,
    states: BTreeSet<State>,
    before: BTreeSet<State>,
    open: Vec<Option<Open>>,
    states_max: usize,
}

impl<'c> Search<'c> {
    fn new(checker: &'c Checker, sector: u64, outcomes: &'c Outcomes) -> Search<'c> {
        Search {
            states_max: STATES_MAX,
            checker,
            sector,
            outcomes,
            states: BTreeSet::from([(0, 0)]),
            before: BTreeSet::new(),
            open: vec![],
        }
    }

    fn operation(&self, number: usize) -> &'c Operation {
        &self.checker.operations[number]
    }

    /// Goes through the events. False if there is too much at once; an error
    /// names the event after which no state is left.
    fn run(&mut self, events: &[Event]) -> Result<bool, usize> {
        for (at, event) in events.iter().enumerate() {
            self.before.clone_from(&self.states);
            let taken = match *event {
                Event::Begin(number) => self.begin(number),
                Event::End(number, ending) => self.end(number, ending),
                Event::Attached(attachment) => self.close(attachment),
                Event::Cut(cut) => {
                    self.restart(self.checker.cuts[cut].value(self.sector));
                    Ok(())
                }
            };
            if taken.is_err() {
                return Ok(false);
            }
            if self.states.is_empty() {
                return Err(at);
            }
        }
        // What has no answer by now may have happened, too.
        let wanted = self.wanted(|_| true);
        if wanted == 0 {
            return Ok(true);
        }
        let Ok(last) = self.closure() else {
            return Ok(false);
        };
        match last.iter().any(|(_, bits)| bits & wanted == wanted) {
            true => Ok(true),
            false => Err(events.len() - 1),
        }
    }

    /// Those open operations of a kind that must happen.
    fn wanted(&self, of: impl Fn(usize) -> bool) -> u64 {
        let open = self.open.iter().enumerate();
        let open = open.filter_map(|(bit, open)| Some((bit, open.as_ref()?)));
        let wanted = open.filter(|(_, open)| open.is_wanted && of(open.number));
        wanted.fold(0, |bits, (bit, _)| bits | 1 << bit)
    }

    fn begin(&mut self, number: usize) -> Result<(), TooMuch> {
        let outcome = self.outcomes.get(&number);
        let operation = self.operation(number);
        let is_read = matches!(operation.kind, Kind::Read(_));
        // What a superseded client changes is nowhere.
        if outcome == Some(&false) || operation.after_fence && !is_read {
            return Ok(());
        }
        let free = self.open.iter().position(Option::is_none);
        let bit = free.unwrap_or(self.open.len());
        if bit >= OPEN_MAX {
            return Err(TooMuch);
        }
        if bit == self.open.len() {
            self.open.push(None);
        }
        self.open[bit] = Some(Open {
            number,
            is_closed: false,
            is_read,
            value: (operation.value(self.sector)).expect("an operation of this sector"),
            is_wanted: outcome.is_some(),
        });
        if is_read {
            let states = std::mem::take(&mut self.states).into_iter();
            self.states = states.map(|state| self.with_reads(state)).collect();
        }
        Ok(())
    }

    /// What may come next, reads or writes: those that are not in place.
    fn pending(&self, bits: u64, reads: bool) -> impl Iterator<Item = (usize, &Open)> {
        let open = self.open.iter().enumerate();
        let open = open.filter_map(|(bit, open)| Some((bit, open.as_ref()?)));
        open.filter(move |(bit, open)| {
            bits & 1 << bit == 0 && !open.is_closed && open.is_read == reads
        })
    }

    /// Whether no write that its channel submitted before must come first.
    fn is_first(&self, bits: u64, of: &Open) -> bool {
        let channel = self.operation(of.number).channel;
        let mut earlier = (self.pending(bits, false)).filter(|(_, it)| it.number < of.number);
        !earlier.any(|(_, it)| {
            let write = self.operation(it.number);
            write.channel == channel && (!of.is_read || write.ending == Ending::Done)
        })
    }

    /// Puts into place what reads now.
    fn with_reads(&self, (value, bits): State) -> State {
        let reads = self.pending(bits, true);
        let now = reads.filter(|(_, it)| it.value == value && self.is_first(bits, it));
        (value, now.fold(bits, |bits, (bit, _)| bits | 1 << bit))
    }

    /// Everything that may have happened by now.
    fn closure(&self) -> Result<BTreeSet<State>, TooMuch> {
        let mut found = self.states.clone();
        let mut next: Vec<State> = found.iter().copied().collect();
        while let Some((_, bits)) = next.pop() {
            let writes = self.pending(bits, false);
            for (bit, write) in writes.filter(|(_, it)| self.is_first(bits, it)) {
                let state = self.with_reads((write.value, bits | 1 << bit));
                if found.insert(state) {
                    next.push(state);
                }
            }
            if found.len() > self.states_max {
                return Err(TooMuch);
            }
        }
        Ok(found)
    }

    fn end(&mut self, number: usize, ending: Ending) -> Result<(), TooMuch> {
        let is_it = |open: &Option<Open>| open.as_ref().is_some_and(|open| open.number == number);
        let Some(bit) = self.open.iter().position(is_it) else {
            return Ok(());
        };
        let mask = 1 << bit;
        let all_in_place = self.states.iter().all(|(_, bits)| bits & mask != 0);
        let states = match ending {
            Ending::Unknown => return Ok(()),
            Ending::Done if all_in_place => std::mem::take(&mut self.states),
            Ending::Done | Ending::Decided => self.closure()?,
        };
        let open = self.open[bit].take();
        let is_wanted = ending == Ending::Done || open.is_some_and(|open| open.is_wanted);
        self.states = states
            .into_iter()
            .filter(|(_, bits)| !is_wanted || bits & mask != 0)
            .map(|(value, bits)| (value, bits & !mask))
            .collect();
        Ok(())
    }

    /// Nothing of what was before counts any more.
    fn restart(&mut self, held: Option<u64>) {
        self.states = held.map(|value| (value, 0)).into_iter().collect();
        self.open.clear();
    }

    /// Operations of attachments before this one are in place by now or never.
    fn close(&mut self, attachment: u32) -> Result<(), TooMuch> {
        self.states = self.closure()?;
        let wanted = self.wanted(|number| self.operation(number).attachment < attachment);
        self.states.retain(|(_, bits)| bits & wanted == wanted);
        let mut over = 0;
        for (bit, place) in self.open.iter_mut().enumerate() {
            let Some(open) = place else {
                continue;
            };
            let operation = &self.checker.operations[open.number];
            if operation.attachment < attachment {
                open.is_closed = true;
                // No answer will ask whether it is in place.
                if operation.ending == Ending::Unknown {
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

/// What a write of this value puts into sectors.
pub(crate) fn fill(value: u64, sectors: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((sectors * SECTOR / 8) as usize)
}

pub(crate) fn value_of(sector: &[u8]) -> Result<u64, String> {
    let mut words = sector.as_chunks::<8>().0.iter();
    let first = words.next().ok_or("no sector")?;
    match words.find(|word| *word != first) {
        None => Ok(u64::from_le_bytes(*first)),
        Some(other) => Err(format!(
            "a torn sector: {} and {}",
            u64::from_le_bytes(*first),
            u64::from_le_bytes(*other)
        )),
    }
}
