//! A file to which direct clients append. Each append is present whole and once, or not at all, in
//! an order that fits the observed beginnings and ends. Data that was read once stays.
//!
//! An append consists of whole sectors, each filled with the append's unique number.

use crate::checker::{SECTOR, value_of};
use std::collections::BTreeMap;

/// Sectors of the longest append: more than a page.
pub(crate) const APPEND_SECTORS_MAX: u64 = 12;
/// Approximate maximum size of the file.
pub(crate) const LOG_BYTES: u64 = 96 << 10;

struct AppendRecord {
    sectors: u64,
    began_at: u64,
    /// When the append was acknowledged.
    acknowledged_at: Option<u64>,
    /// The append is not in the file, and never will be.
    is_void: bool,
    /// The client died, and its row is cleared: the next read decides.
    is_client_dead: bool,
    /// The mount makes the append, and may leave a part of it when it dies.
    may_be_partial: bool,
}

/// The expected contents of the file.
#[derive(Default)]
pub(crate) struct AppendLog {
    appends: BTreeMap<u64, AppendRecord>,
    clock: u64,
    /// The values that were read, in file order.
    values_read: Vec<u64>,
}

impl AppendLog {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The time of a read that begins now.
    pub(crate) fn now(&mut self) -> u64 {
        self.tick()
    }

    pub(crate) fn begin(&mut self, value: u64, sectors: u64, is_gradual: bool) {
        let append = AppendRecord {
            sectors,
            began_at: self.tick(),
            acknowledged_at: None,
            is_void: false,
            is_client_dead: false,
            may_be_partial: is_gradual,
        };
        self.appends.insert(value, append);
    }

    fn append(&mut self, value: u64) -> &mut AppendRecord {
        self.appends.get_mut(&value).expect("it was begun")
    }

    pub(crate) fn acknowledge(&mut self, value: u64) {
        let now = self.tick();
        self.append(value).acknowledged_at = Some(now);
    }

    /// The kernel has to make the append.
    pub(crate) fn record_refusal(&mut self, value: u64) {
        self.append(value).is_void = true;
    }

    /// The client that made the append is dead, and its row is cleared.
    pub(crate) fn record_client_death(&mut self, value: u64) {
        self.append(value).is_client_dead = true;
    }

    /// Checks a read of the file that began at this time.
    pub(crate) fn read(&mut self, began: u64, data: &[u8]) -> Result<(), String> {
        let values: Result<Vec<u64>, String> = data.chunks(SECTOR as usize).map(value_of).collect();
        let values = values.map_err(|why| format!("{APPEND_ERROR}{why}"))?;
        self.check(began, &values)
            .map_err(|why| format!("{APPEND_ERROR}{why}, in {values:?}"))
    }

    fn check(&mut self, began: u64, values: &[u64]) -> Result<(), String> {
        let common = self.values_read.len().min(values.len());
        let may_be_cut = self.appends.values().any(|it| it.may_be_partial);
        if self.values_read[..common] != values[..common] {
            return Err(format!("it was {:?}", self.values_read));
        }
        let mut met: Vec<u64> = Vec::new();
        for run in values.chunk_by(|one, other| one == other) {
            let Some(append) = self.appends.get(&run[0]) else {
                if run[0] == 0 && may_be_cut {
                    continue;
                }
                return Err(format!("no client has appended {}", run[0]));
            };
            let is_whole = run.len() as u64 == append.sectors;
            if append.is_void || met.contains(&run[0]) || !is_whole && !append.may_be_partial {
                return Err(format!("{} sectors of {}", run.len(), run[0]));
            }
            let is_early = |before: &u64| {
                let before = &self.appends[before];
                append
                    .acknowledged_at
                    .is_some_and(|ended| ended < before.began_at)
            };
            if let Some(before) = met.iter().find(|before| is_early(before)) {
                return Err(format!("{} is behind {before}", run[0]));
            }
            met.push(run[0]);
        }
        for (value, append) in &mut self.appends {
            if met.contains(value) {
                continue;
            }
            if append.acknowledged_at.is_some_and(|ended| ended < began) {
                return Err(format!("{value} is missing"));
            }
            append.is_void |= append.is_client_dead && append.acknowledged_at.is_none();
        }
        if values.len() > self.values_read.len() {
            self.values_read = values.to_vec();
        }
        Ok(())
    }
}

/// The prefix of an error of this check.
const APPEND_ERROR: &str = "the appends are wrong: ";
