//! The clients' requests to the volume, and their results.

use crate::checker::{OpKind, OpOutcome, SECTOR, fill};
use crate::client::{PendingRequest, VolumeClient};
use crate::cluster::tell;
use crate::faults::HotPage;
use crate::scenario::Scenario;
use bytes::Bytes;
use pagemesh_base::layout::STRIPE_BYTES;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Reply, Request, SpaceError, Token};

/// Sectors of a page.
pub(crate) const PAGE_SECTORS: u64 = 8;
/// Requests in flight on one channel.
const IN_FLIGHT_MAX: usize = 4;
/// Sectors of most requests.
const SHORT_SECTORS: u64 = 20;

/// Maximum of parts in a transaction, and of pages in a part.
const PARTS_MAX: u64 = 6;
const PART_PAGES_MAX: u64 = 4;
/// Odds that a request is a transaction, where a history has any.
const TRANSACTION_ODDS: u64 = 4;
const STRIPE_SECTORS: u64 = STRIPE_BYTES / SECTOR;

/// The number of a flush among the operations.
const FLUSH_OPERATION: usize = usize::MAX;

impl Scenario {
    /// Submits a random request on a random channel.
    pub(crate) fn submit(&mut self) -> Result<(), String> {
        if self.plan.has_files {
            return self.submit_file_op();
        }
        self.submit_request();
        Ok(())
    }

    fn submit_request(&mut self) {
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get(at) else {
            return;
        };
        if client.threads.is_empty() || client.is_stopped() || self.checker.awaits_reads() {
            return;
        }
        let thread = self.rng.below(client.threads.len() as u64) as usize;
        if client.threads[thread].pending.len() >= IN_FLIGHT_MAX {
            return;
        }
        if self.hot_page.is_some() {
            return self.submit_to_hot_page(at, thread);
        }
        if self.plan.has_transactions && self.transaction_rng.one_in(TRANSACTION_ODDS) {
            return self.transact(at, thread);
        }
        let long = if self.plan.is_undersized { 1200 } else { 200 };
        let len = match self.rng.one_in(6) {
            true => SHORT_SECTORS + self.rng.below(long),
            false => 1 + self.rng.below(SHORT_SECTORS),
        };
        let mut start = self.rng.below(self.sectors.min(self.plan.hot_sectors));
        let mut end = (start + len).min(self.sectors);
        if self.rng.one_in(3) {
            // Whole pages take other code paths than parts of them.
            (start, end) = (
                start / PAGE_SECTORS * PAGE_SECTORS,
                end.next_multiple_of(PAGE_SECTORS).min(self.sectors),
            );
        }
        let is_durable = self.rng.one_in(8);
        match self.rng.below(10) {
            0..=3 => self.write(at, thread, start..end, is_durable),
            4 => self.zero(at, thread, start..end, is_durable),
            5 if self.rng.one_in(2) => self.flush(at, thread),
            _ => self.read(at, thread, start..end),
        }
    }

    /// The first thread writes and the others read: a read on the writing channel would wait for
    /// the write.
    fn submit_to_hot_page(&mut self, at: usize, thread: usize) {
        let Some(hot_page) = self.hot_page.take() else {
            return;
        };
        let sectors = hot_page.sectors.clone();
        let left = hot_page.requests_left - 1;
        self.hot_page = (left > 0).then_some(HotPage {
            requests_left: left,
            ..hot_page
        });
        match thread {
            0 => self.write(at, thread, sectors, false),
            _ => self.read(at, thread, sectors),
        }
    }

    fn submit_to_channel(&mut self, at: usize, thread: usize, operation: usize, request: Request) {
        self.next_value += 1;
        let token = self.next_value;
        let from = match &request {
            Request::Read { offset, .. } => *offset,
            _ => 0,
        };
        let asked = PendingRequest {
            operation,
            offset: from,
            must_succeed: self.is_fault_free,
            oracle_time: self.clients[at].oracle.begin_read(),
            checker_time: self.checker.event_count(),
        };
        if is_durable(&request) && operation != FLUSH_OPERATION {
            self.checker.mark_durable(operation);
        }
        let thread = &mut self.clients[at].threads[thread];
        thread.pending.insert(token, asked);
        thread.channel.submit(Token(token), request);
    }

    fn begin_operation(
        &mut self,
        at: usize,
        thread: usize,
        sectors: &std::ops::Range<u64>,
        kind: OpKind,
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
        let operation = self.begin_operation(at, thread, &sectors, OpKind::Write(value));
        let request = Request::Write {
            offset: sectors.start * SECTOR,
            data: Bytes::from(fill(value, sectors.end - sectors.start)),
            durable,
        };
        self.submit_to_channel(at, thread, operation, request);
    }

    /// Submits a transaction on scattered pages of one column; some are in the range that other
    /// requests write most.
    pub(crate) fn transact(&mut self, at: usize, thread: usize) {
        let mut sectors: Vec<std::ops::Range<u64>> = self.random_parts();
        sectors.sort_unstable_by_key(|part| part.start);
        sectors.dedup_by(|later, part| later.start < part.end);
        let rng = &mut self.transaction_rng;
        for from in (1..sectors.len()).rev() {
            sectors.swap(from, rng.below(from as u64 + 1) as usize);
        }
        let (mut parts, mut values) = (vec![], vec![]);
        for sectors in sectors {
            let offset = sectors.start * SECTOR;
            let count = sectors.end - sectors.start;
            let len = count * SECTOR;
            let value = match self.transaction_rng.one_in(4) {
                true => 0,
                false => {
                    self.next_value += 1;
                    self.next_value
                }
            };
            parts.push(match value {
                0 => TransactionPart::Clear { offset, len },
                _ => TransactionPart::Write {
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
        let operation = self.begin_operation(at, thread, &(first..last), OpKind::Transact(values));
        let durable = self.transaction_rng.one_in(8);
        self.submit_to_channel(at, thread, operation, Request::Transact { parts, durable });
    }

    /// Runs of whole pages of one column; some may overlap.
    fn random_parts(&mut self) -> Vec<std::ops::Range<u64>> {
        let hot = self.sectors.min(self.plan.hot_sectors);
        let (mut column, mut places) = (None, vec![]);
        let rng = &mut self.transaction_rng;
        for _ in 0..2 + rng.below(PARTS_MAX - 1) {
            let sides = if rng.one_in(2) { hot } else { self.sectors };
            let start = rng.below(sides) / PAGE_SECTORS * PAGE_SECTORS;
            let stripe_end = (start + 1).next_multiple_of(STRIPE_SECTORS);
            let pages = 1 + rng.below(PART_PAGES_MAX);
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
        let operation = self.begin_operation(at, thread, &sectors, OpKind::Write(0));
        let (offset, len) = (
            sectors.start * SECTOR,
            (sectors.end - sectors.start) * SECTOR,
        );
        let request = match self.rng.one_in(2) {
            true => Request::Discard { offset, len },
            false => Request::WriteZeroes {
                offset,
                len,
                durable,
            },
        };
        self.submit_to_channel(at, thread, operation, request);
    }

    pub(crate) fn discard(&mut self, at: usize, thread: usize, sectors: std::ops::Range<u64>) {
        let operation = self.begin_operation(at, thread, &sectors, OpKind::Write(0));
        let request = Request::Discard {
            offset: sectors.start * SECTOR,
            len: (sectors.end - sectors.start) * SECTOR,
        };
        self.submit_to_channel(at, thread, operation, request);
    }

    pub(crate) fn read(&mut self, at: usize, thread: usize, sectors: std::ops::Range<u64>) {
        let operation = self.begin_operation(at, thread, &sectors, OpKind::Read(vec![]));
        let request = Request::Read {
            offset: sectors.start * SECTOR,
            len: ((sectors.end - sectors.start) * SECTOR) as u32,
        };
        self.submit_to_channel(at, thread, operation, request);
    }

    pub(crate) fn flush(&mut self, at: usize, thread: usize) {
        self.submit_to_channel(at, thread, FLUSH_OPERATION, Request::Flush);
    }

    /// Takes the completions of all channels of a client.
    pub(crate) fn reap_completions(&mut self, at: usize) -> Result<bool, String> {
        let mut acted = false;
        let (mut completions, mut flushed) = (vec![], vec![]);
        let now = self.cluster.now();
        let is_mild = self.plan.damaged_brick.is_some();
        let VolumeClient {
            threads,
            oracle: witness,
            attachment,
            ..
        } = &mut self.clients[at];
        let is_superseded = self.manager_host.is_superseded(*attachment);
        let pending = threads.iter().flat_map(|thread| thread.pending.values());
        witness.discard_before(
            pending
                .map(|asked| asked.oracle_time)
                .min()
                .unwrap_or(u64::MAX),
        );
        for thread in threads.iter_mut().filter(|it| it.stalled_until <= now) {
            thread.channel.reap(&mut completions);
            for completion in completions.drain(..) {
                acted = true;
                let token = completion.token.0;
                let asked = thread.pending.remove(&token);
                let PendingRequest {
                    operation,
                    offset: from,
                    must_succeed: is_certain,
                    oracle_time: begun,
                    checker_time: began,
                } = asked
                    .ok_or_else(|| format!("token {token} was answered, but not asked for"))?;
                let is_done = completion.result.is_ok();
                thread.is_refused |= matches!(completion.result, Err(SpaceError::Busy(_)));
                self.report.acknowledged += u64::from(is_done);
                self.report.failed += u64::from(!is_done);
                if let Err(cause) = &completion.result {
                    let why = match cause {
                        _ if is_certain => "though there was no fault",
                        SpaceError::Fenced if !is_superseded => {
                            "though no other client took the volume"
                        }
                        SpaceError::Unavailable(_) if is_mild && !is_superseded => {
                            "though only one copy was damaged"
                        }
                        _ => "",
                    };
                    if !why.is_empty() {
                        return Err(format!("#{operation} failed {why}: {cause}"));
                    }
                }
                if operation == FLUSH_OPERATION {
                    if is_done {
                        self.checker.record_flush(*attachment, began);
                        flushed.push(began);
                    } else if completion.result.is_err_and(|cause| is_loss(&cause)) {
                        self.checker.record_loss_report(*attachment);
                    }
                    continue;
                }
                let word = match &completion.result {
                    Ok(_) => "done".to_owned(),
                    Err(cause) => cause.to_string(),
                };
                tell!(self.cluster, "#{operation}: {word}");
                if is_done && self.checker.is_transaction(operation) {
                    self.report.count("transaction acknowledged", 1);
                }
                match completion.result {
                    Ok(Reply::Data(data)) => {
                        witness.check_read(begun, from, &data)?;
                        self.checker.read(operation, &data)?;
                    }
                    Ok(_) => self.checker.end(operation, OpOutcome::Done)?,
                    Err(SpaceError::NoSpace(_)) => {
                        if !self.plan.is_undersized {
                            return Err(format!("#{operation} was refused for lack of space"));
                        }
                        self.report.count("requests without room", 1);
                        self.checker.end(operation, OpOutcome::Decided)?;
                    }
                    Err(SpaceError::Unavailable(_) | SpaceError::Fenced) => {
                        self.checker.end(operation, OpOutcome::Unknown)?;
                    }
                    // The thread was never connected.
                    Err(SpaceError::Busy(_)) => {
                        self.report.count("requests of a refused channel", 1);
                        self.checker.end(operation, OpOutcome::Decided)?;
                    }
                    Err(cause) => return Err(format!("#{operation} failed: {cause}")),
                }
            }
        }
        threads.retain(|thread| !thread.is_refused || !thread.pending.is_empty());
        for began in flushed {
            self.record_flush_of_disks(began);
        }
        Ok(acted)
    }
}

/// Whether a flush says that earlier changes may be lost.
fn is_loss(cause: &SpaceError) -> bool {
    matches!(cause, SpaceError::Unavailable(why) if why.contains("every copy was gone"))
}

fn is_durable(request: &Request) -> bool {
    matches!(
        request,
        Request::Write { durable: true, .. }
            | Request::WriteZeroes { durable: true, .. }
            | Request::Transact { durable: true, .. }
    )
}
