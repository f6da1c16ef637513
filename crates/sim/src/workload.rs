//! What clients ask of the volume, and what becomes of it.

use crate::checker::{Ending, Kind, SECTOR, fill};
use crate::client::{Asked, Client};
use crate::cluster::tell;
use crate::faults::Crowd;
use crate::life::Life;
use bytes::Bytes;
use pagemesh_base::layout::STRIPE_BYTES;
use pagemesh_base::slice::Part;
use pagemesh_base::space::{Reply, Request, SpaceError, Token};

/// Sectors of a page.
pub(crate) const PAGE_SECTORS: u64 = 8;
/// Requests in flight on one channel.
const IN_FLIGHT_MAX: usize = 4;
/// Sectors of most requests.
const SHORT: u64 = 20;

/// Parts of a transaction, at most, and pages of one of them.
const PARTS_MAX: u64 = 6;
const PART_PAGES_MAX: u64 = 4;
/// One request in so many is a transaction, where a history has any.
const TRANSACTED: u64 = 4;
const STRIPE_SECTORS: u64 = STRIPE_BYTES / SECTOR;

/// The name of a flush among the operations.
const FLUSH: usize = usize::MAX;

impl Life {
    /// A random request of a random channel.
    pub(crate) fn submit(&mut self) -> Result<(), String> {
        if self.plan.files {
            return self.operate();
        }
        self.submit_request();
        Ok(())
    }

    fn submit_request(&mut self) {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get(at) else {
            return;
        };
        if client.threads.is_empty() || client.is_stopped() || self.checker.awaits_reads() {
            return;
        }
        let thread = self.dice.roll(client.threads.len() as u64) as usize;
        if client.threads[thread].pending.len() >= IN_FLIGHT_MAX {
            return;
        }
        if self.crowd.is_some() {
            return self.join_crowd(at, thread);
        }
        if self.plan.transacts && self.transacting.one_in(TRANSACTED) {
            return self.transact(at, thread);
        }
        let long = if self.plan.is_tight { 1200 } else { 200 };
        let len = match self.dice.one_in(6) {
            true => SHORT + self.dice.roll(long),
            false => 1 + self.dice.roll(SHORT),
        };
        let mut start = self.dice.roll(self.sectors.min(self.plan.hot_sectors));
        let mut end = (start + len).min(self.sectors);
        if self.dice.one_in(3) {
            // Whole pages take other ways than parts of them.
            (start, end) = (
                start / PAGE_SECTORS * PAGE_SECTORS,
                end.next_multiple_of(PAGE_SECTORS).min(self.sectors),
            );
        }
        let is_durable = self.dice.one_in(8);
        match self.dice.roll(10) {
            0..=3 => self.write(at, thread, start..end, is_durable),
            4 => self.zero(at, thread, start..end, is_durable),
            5 if self.dice.one_in(2) => self.flush(at, thread),
            _ => self.read(at, thread, start..end),
        }
    }

    /// The first thread writes, the others read: who reads on the channel that
    /// writes waits for it.
    fn join_crowd(&mut self, at: usize, thread: usize) {
        let Some(crowd) = self.crowd.take() else {
            return;
        };
        let sectors = crowd.sectors.clone();
        let left = crowd.left - 1;
        self.crowd = (left > 0).then_some(Crowd { left, ..crowd });
        match thread {
            0 => self.write(at, thread, sectors, false),
            _ => self.read(at, thread, sectors),
        }
    }

    fn send(&mut self, at: usize, thread: usize, operation: usize, request: Request) {
        self.next_value += 1;
        let token = self.next_value;
        let from = match &request {
            Request::Read { offset, .. } => *offset,
            _ => 0,
        };
        let asked = Asked {
            operation,
            from,
            is_certain: self.is_well,
            begun: self.clients[at].witness.begin(),
            began: self.checker.now(),
        };
        if is_durable(&request) && operation != FLUSH {
            self.checker.is_to_last(operation);
        }
        let thread = &mut self.clients[at].threads[thread];
        thread.pending.insert(token, asked);
        thread.channel.submit(Token(token), request);
    }

    fn begin(
        &mut self,
        at: usize,
        thread: usize,
        sectors: &std::ops::Range<u64>,
        kind: Kind,
    ) -> usize {
        let client = &self.clients[at];
        let channel = client.threads[thread].number;
        let number = self
            .checker
            .begin(client.attachment, channel, sectors.clone(), kind.clone());
        tell!(
            self.cluster,
            "client {} channel {channel} submits #{number}: {kind:?} {sectors:?}",
            client.number
        );
        number
    }

    pub(crate) fn write(
        &mut self,
        at: usize,
        thread: usize,
        sectors: std::ops::Range<u64>,
        durable: bool,
    ) {
        self.next_value += 1;
        let value = self.next_value;
        let operation = self.begin(at, thread, &sectors, Kind::Write(value));
        let request = Request::Write {
            offset: sectors.start * SECTOR,
            data: Bytes::from(fill(value, sectors.end - sectors.start)),
            durable,
        };
        self.send(at, thread, operation, request);
    }

    /// Changes pages here and there in one column, some of them where others
    /// write most.
    pub(crate) fn transact(&mut self, at: usize, thread: usize) {
        let mut sectors: Vec<std::ops::Range<u64>> = self.places();
        sectors.sort_unstable_by_key(|part| part.start);
        sectors.dedup_by(|later, part| later.start < part.end);
        let dice = &mut self.transacting;
        for from in (1..sectors.len()).rev() {
            sectors.swap(from, dice.roll(from as u64 + 1) as usize);
        }
        let (mut parts, mut values) = (vec![], vec![]);
        for sectors in sectors {
            let offset = sectors.start * SECTOR;
            let count = sectors.end - sectors.start;
            let len = count * SECTOR;
            let value = match self.transacting.one_in(4) {
                true => 0,
                false => {
                    self.next_value += 1;
                    self.next_value
                }
            };
            parts.push(match value {
                0 => Part::Clear { offset, len },
                _ => Part::Write {
                    offset,
                    data: Bytes::from(fill(value, count)),
                },
            });
            values.push((sectors, value));
        }
        let first = values.iter().map(|part| part.0.start).min();
        let last = values.iter().map(|part| part.0.end).max();
        let (Some(first), Some(last)) = (first, last) else {
            return;
        };
        let operation = self.begin(at, thread, &(first..last), Kind::Transact(values));
        let durable = self.transacting.one_in(8);
        self.send(at, thread, operation, Request::Transact { parts, durable });
    }

    /// Runs of whole pages of one column; some may overlap.
    fn places(&mut self) -> Vec<std::ops::Range<u64>> {
        let hot = self.sectors.min(self.plan.hot_sectors);
        let (mut column, mut places) = (None, vec![]);
        let dice = &mut self.transacting;
        for _ in 0..2 + dice.roll(PARTS_MAX - 1) {
            let sides = if dice.one_in(2) { hot } else { self.sectors };
            let start = dice.roll(sides) / PAGE_SECTORS * PAGE_SECTORS;
            let stripe_end = (start + 1).next_multiple_of(STRIPE_SECTORS);
            let pages = 1 + dice.roll(PART_PAGES_MAX);
            let end = (start + pages * PAGE_SECTORS).min(stripe_end);
            let mut extents = (self.layout).map(start * SECTOR, (end - start) * SECTOR);
            extents.dedup_by_key(|extent| (extent.segment, extent.column));
            let [place] = extents[..] else {
                continue;
            };
            let its = (place.segment, place.column);
            if *column.get_or_insert(its) == its {
                places.push(start..end);
            }
        }
        places
    }

    fn zero(&mut self, at: usize, thread: usize, sectors: std::ops::Range<u64>, durable: bool) {
        let operation = self.begin(at, thread, &sectors, Kind::Write(0));
        let (offset, len) = (
            sectors.start * SECTOR,
            (sectors.end - sectors.start) * SECTOR,
        );
        let request = match self.dice.one_in(2) {
            true => Request::Discard { offset, len },
            false => Request::WriteZeroes {
                offset,
                len,
                durable,
            },
        };
        self.send(at, thread, operation, request);
    }

    pub(crate) fn discard(&mut self, at: usize, thread: usize, sectors: std::ops::Range<u64>) {
        let operation = self.begin(at, thread, &sectors, Kind::Write(0));
        let request = Request::Discard {
            offset: sectors.start * SECTOR,
            len: (sectors.end - sectors.start) * SECTOR,
        };
        self.send(at, thread, operation, request);
    }

    pub(crate) fn read(&mut self, at: usize, thread: usize, sectors: std::ops::Range<u64>) {
        let operation = self.begin(at, thread, &sectors, Kind::Read(vec![]));
        let request = Request::Read {
            offset: sectors.start * SECTOR,
            len: ((sectors.end - sectors.start) * SECTOR) as u32,
        };
        self.send(at, thread, operation, request);
    }

    pub(crate) fn flush(&mut self, at: usize, thread: usize) {
        self.send(at, thread, FLUSH, Request::Flush);
    }

    /// Takes what has ended on all channels of a client.
    pub(crate) fn reap(&mut self, at: usize) -> Result<bool, String> {
        let mut acted = false;
        let mut completions = vec![];
        let now = self.cluster.now();
        let is_mild = self.plan.damaged.is_some();
        let Client {
            threads,
            witness,
            attachment,
            ..
        } = &mut self.clients[at];
        let is_superseded = self.desk.is_superseded(*attachment);
        let pending = threads.iter().flat_map(|thread| thread.pending.values());
        witness.forget(pending.map(|asked| asked.begun).min().unwrap_or(u64::MAX));
        for thread in threads.iter_mut().filter(|it| it.stopped_until <= now) {
            thread.channel.reap(&mut completions);
            for completion in completions.drain(..) {
                acted = true;
                let token = completion.token.0;
                let asked = thread.pending.remove(&token);
                let Asked {
                    operation,
                    from,
                    is_certain,
                    begun,
                    began,
                } = asked
                    .ok_or_else(|| format!("token {token} was answered, but not asked for"))?;
                let is_done = completion.result.is_ok();
                thread.is_turned_away |= matches!(completion.result, Err(SpaceError::Busy(_)));
                self.outcome.acknowledged += u64::from(is_done);
                self.outcome.failed += u64::from(!is_done);
                if let Err(cause) = &completion.result {
                    let why = match cause {
                        _ if is_certain => "though all was well",
                        SpaceError::Fenced if !is_superseded => "though nobody took the volume",
                        SpaceError::Unavailable(_) if is_mild && !is_superseded => {
                            "though only one copy went wrong"
                        }
                        _ => "",
                    };
                    if !why.is_empty() {
                        return Err(format!("#{operation} failed {why}: {cause}"));
                    }
                }
                if operation == FLUSH {
                    if is_done {
                        self.checker.flushed(*attachment, began);
                    }
                    continue;
                }
                let word = match &completion.result {
                    Ok(_) => "done".to_owned(),
                    Err(cause) => cause.to_string(),
                };
                tell!(self.cluster, "#{operation}: {word}");
                if is_done && self.checker.is_transaction(operation) {
                    self.outcome.count("transaction acknowledged", 1);
                }
                match completion.result {
                    Ok(Reply::Data(data)) => {
                        witness.check(begun, from, &data)?;
                        self.checker.read(operation, &data)?;
                    }
                    Ok(_) => self.checker.end(operation, Ending::Done)?,
                    Err(SpaceError::NoSpace(_)) => {
                        if !self.plan.is_tight {
                            return Err(format!("#{operation} was refused for want of space"));
                        }
                        self.outcome.count("requests without room", 1);
                        self.checker.end(operation, Ending::Decided)?;
                    }
                    Err(SpaceError::Unavailable(_) | SpaceError::Fenced) => {
                        self.checker.end(operation, Ending::Unknown)?;
                    }
                    // It has never been connected.
                    Err(SpaceError::Busy(_)) => {
                        self.outcome.count("requests of who was turned away", 1);
                        self.checker.end(operation, Ending::Decided)?;
                    }
                    Err(cause) => return Err(format!("#{operation} failed: {cause}")),
                }
            }
        }
        threads.retain(|thread| !thread.is_turned_away || !thread.pending.is_empty());
        Ok(acted)
    }
}

fn is_durable(request: &Request) -> bool {
    matches!(
        request,
        Request::Write { durable: true, .. }
            | Request::WriteZeroes { durable: true, .. }
            | Request::Transact { durable: true, .. }
    )
}
