//! The values that a read may return. The unit is a sector: each write fills its sectors with a
//! unique number.

use std::collections::BTreeSet;

pub(crate) const SECTOR: u64 = 512;
/// Sectors of a page.
pub(crate) const PAGE_SECTORS: u64 = 4096 / SECTOR;

#[derive(Clone, Copy, Debug)]
struct CandidateValue {
    value: u64,
    completed: u64,
    channel: usize,
    order: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct ActiveChange {
    pub sectors: std::ops::Range<u64>,
    pub value: u64,
    pub channel: usize,
    order: u64,
}

/// A transaction without an answer.
struct ActiveTransaction {
    /// The orders of its parts.
    orders: Vec<u64>,
    value: u64,
    /// The sectors that it writes and no concurrent change writes. After a crash either all of
    /// them hold its value, or none does.
    exclusive_sectors: BTreeSet<u64>,
}

/// Sectors of which either all hold a value, or none does.
pub(crate) struct AtomicSectors {
    pub value: u64,
    pub sectors: BTreeSet<u64>,
}

pub(crate) struct ReadOracle {
    sectors: Vec<Vec<CandidateValue>>,
    transactions: Vec<ActiveTransaction>,
    active: Vec<ActiveChange>,
    /// The sectors of changes that ended without an answer. They may still be made.
    indeterminate: Vec<std::ops::Range<u64>>,
    /// Reads in progress: the values that each of their sectors may return.
    reads: Vec<(u64, u64, Vec<BTreeSet<u64>>)>,
    clock: u64,
}

impl ReadOracle {
    pub(crate) fn new(sectors: u64) -> ReadOracle {
        let zero = CandidateValue {
            value: 0,
            completed: 0,
            channel: usize::MAX,
            order: 0,
        };
        ReadOracle {
            sectors: vec![vec![zero]; sectors as usize],
            transactions: vec![],
            active: vec![],
            indeterminate: vec![],
            reads: vec![],
            clock: 1,
        }
    }

    pub(crate) fn begin(
        &mut self,
        channel: usize,
        sectors: std::ops::Range<u64>,
        value: u64,
    ) -> u64 {
        self.clock += 1;
        for (_, start, allowed) in &mut self.reads {
            for sector in sectors.clone() {
                if let Some(at) = sector.checked_sub(*start)
                    && let Some(set) = allowed.get_mut(at as usize)
                {
                    set.insert(value);
                }
            }
        }
        for other in &mut self.transactions {
            other
                .exclusive_sectors
                .retain(|sector| !sectors.contains(sector));
        }
        self.active.push(ActiveChange {
            sectors,
            value,
            channel,
            order: self.clock,
        });
        self.clock
    }

    /// Begins a transaction. The parts have this value; those with zero are cleared.
    pub(crate) fn begin_transaction(
        &mut self,
        channel: usize,
        parts: &[(std::ops::Range<u64>, u64)],
        value: u64,
    ) -> Vec<u64> {
        let written = parts.iter().filter(|(_, written)| *written == value);
        let mut alone: BTreeSet<u64> = written.flat_map(|(sectors, _)| sectors.clone()).collect();
        let active = self.active.iter().map(|change| &change.sectors);
        for beside in active.chain(&self.indeterminate) {
            alone.retain(|sector| !beside.contains(sector));
        }
        let begin = |(sectors, value): &(std::ops::Range<u64>, u64)| {
            self.begin(channel, sectors.clone(), *value)
        };
        let orders: Vec<u64> = parts.iter().map(begin).collect();
        self.transactions.push(ActiveTransaction {
            orders: orders.clone(),
            value,
            exclusive_sectors: alone,
        });
        orders
    }

    /// Ends a change that was refused before it was sent.
    pub(crate) fn cancel(&mut self, order: u64) {
        self.remove_active(order);
    }

    /// Ends a change that was acknowledged.
    pub(crate) fn complete(&mut self, order: u64) {
        self.clock += 1;
        let change = self.remove_active(order);
        for sector in change.sectors.clone() {
            let own = CandidateValue {
                value: change.value,
                completed: self.clock,
                channel: change.channel,
                order,
            };
            let sector = &mut self.sectors[sector as usize];
            // Overwrites the values of changes that ended before this one began, or that came
            // before it on the same channel.
            sector.retain(|c| {
                c.completed >= order && !(c.channel == change.channel && c.order < order)
            });
            let later = sector
                .iter()
                .any(|c| c.channel == change.channel && c.order > order);
            if !later {
                sector.push(own);
            }
        }
    }

    /// Ends a change that may have been made or not.
    pub(crate) fn mark_indeterminate(&mut self, order: u64) {
        self.clock += 1;
        let change = self.remove_active(order);
        self.indeterminate.push(change.sectors.clone());
        for sector in change.sectors.clone() {
            self.sectors[sector as usize].push(CandidateValue {
                value: change.value,
                completed: u64::MAX,
                channel: usize::MAX,
                order,
            });
        }
    }

    /// Ends all changes of a client that is gone. Each may have been made or not; a transaction
    /// only as a whole.
    pub(crate) fn crash(&mut self) -> Vec<AtomicSectors> {
        let whole = self
            .transactions
            .drain(..)
            .map(|transaction| AtomicSectors {
                value: transaction.value,
                sectors: transaction.exclusive_sectors,
            });
        let whole = whole.collect();
        for order in self.active.iter().map(|c| c.order).collect::<Vec<_>>() {
            self.mark_indeterminate(order);
        }
        self.reads.clear();
        self.indeterminate.clear();
        // From now on each sector has one value, though an unknown one. The next write
        // overwrites it.
        for candidate in self.sectors.iter_mut().flatten() {
            candidate.completed = candidate.completed.min(self.clock);
            candidate.channel = usize::MAX;
        }
        whole
    }

    fn remove_active(&mut self, order: u64) -> ActiveChange {
        let at = self
            .active
            .iter()
            .position(|c| c.order == order)
            .expect("active");
        self.transactions.retain(|it| !it.orders.contains(&order));
        self.active.swap_remove(at)
    }

    pub(crate) fn allowed_values(&self, sector: u64) -> BTreeSet<u64> {
        let held = self.sectors[sector as usize].iter().map(|c| c.value);
        let active = self.active.iter().filter(|c| c.sectors.contains(&sector));
        held.chain(active.map(|c| c.value)).collect()
    }

    pub(crate) fn begin_read(&mut self, sectors: std::ops::Range<u64>) -> u64 {
        self.clock += 1;
        let allowed = sectors
            .clone()
            .map(|sector| self.allowed_values(sector))
            .collect();
        self.reads.push((self.clock, sectors.start, allowed));
        self.clock
    }

    pub(crate) fn end_read(&mut self, number: u64, data: Option<&[u8]>) -> Result<(), String> {
        let at = self
            .reads
            .iter()
            .position(|r| r.0 == number)
            .expect("a read");
        let (_, start, allowed) = self.reads.swap_remove(at);
        for (at, sector) in data.unwrap_or_default().chunks(SECTOR as usize).enumerate() {
            let value = value_of(sector)?;
            if !allowed[at].contains(&value) {
                return Err(format!(
                    "sector {} read as {value}, allowed {:?}",
                    start + at as u64,
                    allowed[at]
                ));
            }
            self.observe(start + at as u64, value, number);
        }
        Ok(())
    }

    /// Records the value that a read returned. The read began at `since`. Values that were
    /// complete when the read began, or when the change of its value began, are overwritten.
    fn observe(&mut self, sector: u64, value: u64, since: u64) {
        // The change that wrote zeroes is unknown.
        if value == 0 {
            return;
        }
        let held = &mut self.sectors[sector as usize];
        let known = held.iter().find(|it| it.value == value).map(|it| it.order);
        let mut active = self.active.iter();
        let active = active.find(|it| it.value == value && it.sectors.contains(&sector));
        if let Some(order) = known.or(active.map(|it| it.order)) {
            held.retain(|it| it.value == value || it.completed >= since.max(order));
        }
    }
}

pub(crate) fn fill(value: u64, sectors: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((sectors * SECTOR / 8) as usize)
}

pub(crate) fn value_of(sector: &[u8]) -> Result<u64, String> {
    let mut words = sector
        .chunks_exact(8)
        .map(|w| u64::from_le_bytes(w.try_into().expect("8")));
    let first = words.next().expect("a sector");
    match words.find(|word| *word != first) {
        None => Ok(first),
        Some(other) => Err(format!("a torn sector: {first} and {other}")),
    }
}
