//! What two pools may hold after guests wrote to them: each page what some order of the
//! writes makes of it that fits what was seen of their beginnings and ends.

use crate::defect::{self, Defect};
use crate::enumerate::model::{CheckFailure, RecoveredContents, fail};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::InFlightOp;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One write of a guest.
#[derive(Clone, Debug)]
pub(super) struct ClientWrite {
    pub(super) offset: usize,
    pub(super) data: Arc<[u8]>,
    began: u64,
    /// When it was acknowledged, if it was.
    ended: Option<u64>,
    /// Its guest died, and the owners of both pools have cleaned up: what begins later
    /// comes later.
    retired: Option<u64>,
}

/// The writes so far, and what was there before.
#[derive(Clone, Debug)]
pub(super) struct WriteOracle {
    clock: u64,
    base: Arc<[u8]>,
    writes: Vec<ClientWrite>,
    /// Which write has a number; none: it is the keeper's.
    writes_by_number: BTreeMap<u64, Option<usize>>,
}

/// What a page may hold: its checksum, and the write that came last.
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

    /// The number of a write that begins.
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

    /// A record of the write has this number; without one it is the keeper's.
    pub(super) fn assign_number(&mut self, write: Option<usize>, op: u64) {
        self.writes_by_number.insert(op, write);
    }

    /// The write with the greatest number, of those that this page may be of.
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

    /// What each page may hold.
    pub(super) fn all_allowed(&self) -> Vec<AllowedContents> {
        (0..self.pages())
            .map(|page| self.allowed_contents(page))
            .collect()
    }
}

/// Every order that goes on from these writes.
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

/// What one pool held: sums of pages, and operations that another may lack.
pub(super) struct RecoveredLeg {
    sums: Vec<u32>,
    listed: Vec<InFlightOp>,
}

impl RecoveredLeg {
    pub(super) fn new(mut found: RecoveredContents, slice: SliceId, pages: usize) -> RecoveredLeg {
        let thing = &found.objects[&slice];
        let zeroes = crc32c(&[0; PAGE_BYTES]);
        let sum = |page| *thing.pages.get(&(page as u64)).unwrap_or(&zeroes);
        let sums = (0..pages).map(sum).collect();
        let listed = found.in_flight.remove(&slice).flatten();
        RecoveredLeg {
            sums,
            listed: listed.expect("few enough to list"),
        }
    }

    /// The operations on a page that are listed, the newest first.
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

    /// The write with the greatest number came last, where it is listed.
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
                let detail = format!("page {page}: {listed:?} is not what came last");
                return fail("numbers are in the order of slots", detail);
            }
        }
        Ok(())
    }
}

/// Settles as a volume does (`keeper/settle.rs` there) and compares; how many pages
/// differed before.
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
