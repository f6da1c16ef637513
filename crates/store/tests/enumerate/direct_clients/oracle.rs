//! The contents that two pools may hold after direct clients wrote to them. Each page holds the
//! result of some order of the writes; the order fits their observed beginnings and ends.

use super::super::model::{CheckFailure, RecoveredContents, fail};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::InFlightOp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_store::frame_word::FrameWord;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One write of a direct client.
#[derive(Clone, Debug)]
pub(super) struct ClientWrite {
    pub(super) offset: usize,
    pub(super) data: Arc<[u8]>,
    began: u64,
    /// When the write was acknowledged; none: it was not.
    ended: Option<u64>,
    /// When the owners of both pools had retired the dead client. Writes that begin later come
    /// later in the order.
    retired: Option<u64>,
}

/// The writes so far, and the bytes before them.
#[derive(Clone, Debug)]
pub(super) struct WriteOracle {
    clock: u64,
    base: Arc<[u8]>,
    writes: Vec<ClientWrite>,
    /// The write of each operation number; none: the number belongs to the controller.
    writes_by_number: BTreeMap<u64, Option<usize>>,
}

/// Allowed contents of a page: its checksum, and the last write in the order.
pub(super) type AllowedContents = BTreeSet<(u32, Option<usize>)>;

impl WriteOracle {
    pub(super) fn new(base: Arc<[u8]>) -> WriteOracle {
        WriteOracle {
            clock: 0,
            base,
            writes: Vec::new(),
            writes_by_number: BTreeMap::new(),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Registers a beginning write and returns its index.
    pub(super) fn begin_write(&mut self, offset: usize, data: Arc<[u8]>) -> usize {
        let began = self.tick();
        self.writes.push(ClientWrite {
            offset,
            data,
            began,
            ended: None,
            retired: None,
        });
        self.writes.len() - 1
    }

    /// Assigns an operation number to a write; without a write it belongs to the controller.
    pub(super) fn assign_number(&mut self, write: Option<usize>, op: u64) {
        self.writes_by_number.insert(op, write);
    }

    /// The write with the greatest operation number that touches the page; none if the controller's
    /// number is greater.
    fn newest(&self, page: usize) -> Option<usize> {
        let mut newest = self.writes_by_number.values().rev();
        *newest.find(|write| write.is_none_or(|write| self.writes[write].is_on(page)))?
    }

    pub(super) fn end_write(&mut self, write: usize) {
        self.writes[write].ended = Some(self.tick());
    }

    pub(super) fn retire_write(&mut self, write: usize) {
        self.writes[write].retired = Some(self.tick());
    }

    pub(super) fn pages(&self) -> usize {
        self.base.len() / PAGE_BYTES
    }

    fn allowed_contents(&self, page: usize) -> AllowedContents {
        let bytes = &self.base[page * PAGE_BYTES..][..PAGE_BYTES];
        let writes = self.writes.iter().enumerate();
        let writes: Vec<_> = writes.filter(|(_, write)| write.is_on(page)).collect();
        let mut found = AllowedContents::new();
        extend_orders(&writes, page, &mut Vec::new(), bytes.to_vec(), &mut found);
        found
    }

    /// The allowed contents of each page.
    pub(super) fn all_allowed(&self) -> Vec<AllowedContents> {
        (0..self.pages())
            .map(|page| self.allowed_contents(page))
            .collect()
    }
}

/// Adds the results of every order that continues `done`.
fn extend_orders(
    writes: &[(usize, &ClientWrite)],
    page: usize,
    done: &mut Vec<usize>,
    bytes: Vec<u8>,
    found: &mut AllowedContents,
) {
    let missing = |at: &usize| writes[*at].1.ended.is_some() && !done.contains(at);
    let missing: Vec<usize> = (0..writes.len()).filter(missing).collect();
    if missing.is_empty() {
        found.insert((crc32c(&bytes), done.last().map(|&last| writes[last].0)));
    }
    for (at, (_, write)) in writes.iter().enumerate() {
        let is_later = missing
            .iter()
            .any(|&other| writes[other].1.ended < Some(write.began) && other != at);
        let is_over = done
            .iter()
            .any(|&other| write.retired.is_some_and(|end| end < writes[other].1.began));
        if done.contains(&at) || is_later || is_over {
            continue;
        }
        done.push(at);
        extend_orders(writes, page, done, write.applied(page, &bytes), found);
        done.pop();
    }
}

impl ClientWrite {
    fn is_on(&self, page: usize) -> bool {
        let (first, end) = (self.offset, self.offset + self.data.len());
        first < (page + 1) * PAGE_BYTES && end > page * PAGE_BYTES
    }

    fn applied(&self, page: usize, bytes: &[u8]) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let start = page * PAGE_BYTES;
        let (first, end) = (self.offset.max(start), self.offset + self.data.len());
        let end = end.min(start + PAGE_BYTES);
        bytes[first - start..end - start]
            .copy_from_slice(&self.data[first - self.offset..end - self.offset]);
        bytes
    }
}

/// The contents of one pool: checksums of its pages, and the operations that another leg may lack.
pub(super) struct RecoveredLeg {
    sums: Vec<u32>,
    listed: Vec<InFlightOp>,
}

impl RecoveredLeg {
    pub(super) fn new(mut found: RecoveredContents, slice: SliceId, pages: usize) -> RecoveredLeg {
        let thing = &found.objects[&slice];
        let zeroes = crc32c(&[0; PAGE_BYTES]);
        let word = |page| thing.pages.get(&(page as u64));
        let crc = |word: &u64| FrameWord::from_bits(*word).crc();
        let sum = |page| word(page).map_or(zeroes, crc);
        let sums = (0..pages).map(sum).collect();
        let listed = found.in_flight.remove(&slice).flatten();
        RecoveredLeg {
            sums,
            listed: listed.expect("few enough to list"),
        }
    }

    /// The listed operations on a page, newest first.
    fn listed(&self, page: usize) -> Vec<(u32, u64)> {
        let is_on = |entry: &&InFlightOp| {
            let pages = entry.page.0..entry.page.0 + u64::from(entry.count);
            pages.contains(&(page as u64))
        };
        let listed = self.listed.iter().filter(is_on);
        let mut listed: Vec<_> = listed.map(|entry| (entry.epoch.0, entry.op)).collect();
        listed.sort_unstable_by(|a, b| b.cmp(a));
        listed.dedup();
        listed
    }

    /// If the write with the greatest number is listed on a page, the page must hold it as the last
    /// one.
    pub(super) fn check_numbers(
        &self,
        oracle: &WriteOracle,
        allowed: &[AllowedContents],
    ) -> Result<(), CheckFailure> {
        for (page, allowed) in allowed.iter().enumerate() {
            let listed = self.listed(page).first().map(|&(_, op)| op);
            let write = listed.and_then(|op| oracle.writes_by_number.get(&op).copied().flatten());
            let is_newest = write.is_some() && write == oracle.newest(page);
            if is_newest && !allowed.contains(&(self.sums[page], write)) {
                let detail = format!("page {page}: {listed:?} is not the last write");
                return fail("numbers are in the order of slots", detail);
            }
        }
        Ok(())
    }
}

/// Reconciles the legs as a volume does (`controller/recover_in_flight.rs` there) and compares.
/// Returns the number of pages that differed before.
pub(super) fn reconcile_and_check(
    legs: [&RecoveredLeg; 2],
    allowed: &[AllowedContents],
) -> Result<u64, CheckFailure> {
    let mut differing = 0;
    for (page, allowed) in allowed.iter().enumerate() {
        let [one, other] = legs.map(|leg| leg.listed(page));
        let order = match defect::is(Defect::RecoveredByNewest) {
            true => one.first().cmp(&other.first()),
            false => one.cmp(&other),
        };
        let sums = legs.map(|leg| leg.sums[page]);
        differing += u64::from(sums[0] != sums[1]);
        let sum = match order {
            std::cmp::Ordering::Less => sums[1],
            std::cmp::Ordering::Greater => sums[0],
            std::cmp::Ordering::Equal if sums[0] == sums[1] => sums[0],
            std::cmp::Ordering::Equal => {
                let detail = format!("page {page}: {one:?} and {other:?}");
                return fail("legs are equal", detail);
            }
        };
        if !allowed.iter().any(|(allowed, _)| *allowed == sum) {
            let detail = format!("page {page}, by {one:?} and {other:?}");
            return fail("one order of writes", detail);
        }
    }
    Ok(differing)
}
