//! The manager's disk: what was written is there for its next process; what was
//! not synced may be gone when the machine loses its power.

use crate::cluster::guard;
use crate::dice::Dice;
use crate::house::Death;
use redb::StorageBackend;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// What the medium writes whole, or not at all.
const SECTOR: usize = 512;

#[derive(Debug, Default)]
struct Sectors {
    bytes: Vec<u8>,
    /// Those that were written since the last sync, as they were before.
    before: BTreeMap<usize, Vec<u8>>,
    synced_len: usize,
    /// Writes until it takes no more.
    left: Option<u32>,
}

impl Sectors {
    fn remember(&mut self, offset: usize, len: usize) {
        for sector in offset / SECTOR..(offset + len).div_ceil(SECTOR) {
            let bytes = &self.bytes;
            let start = (sector * SECTOR).min(bytes.len());
            let end = (start + SECTOR).min(bytes.len());
            let old = || bytes[start..end].to_vec();
            self.before.entry(sector).or_insert_with(old);
        }
    }

    /// Any of the sectors that were not synced are as they were before, and the
    /// length may be.
    fn lose_power(&mut self, dice: &mut Dice) {
        let len = self.bytes.len();
        if dice.one_in(2) {
            self.bytes.resize(self.synced_len, 0);
        }
        for (sector, old) in std::mem::take(&mut self.before) {
            let was_cut_off = (sector + 1) * SECTOR > len;
            if dice.one_in(2) || was_cut_off {
                let place = self.bytes.iter_mut().skip(sector * SECTOR);
                place.zip(old).for_each(|(byte, old)| *byte = old);
            }
        }
        self.synced_len = self.bytes.len();
    }
}

/// The manager's disk; it keeps what was written before it failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk(Arc<Mutex<Sectors>>);

impl Disk {
    /// What is on it, for the next manager: the one before reaches it no more.
    pub(crate) fn leave(&self, death: Death, dice: &mut Dice) -> Disk {
        let mut gone = guard(&self.0);
        let mut sectors = std::mem::take(&mut *gone);
        gone.left = Some(0);
        sectors.left = None;
        if death == Death::Power {
            sectors.lose_power(dice);
        }
        Disk(Arc::new(Mutex::new(sectors)))
    }

    /// It fails after so many writes, or never.
    pub(crate) fn light(&self, writes: Option<u32>) {
        guard(&self.0).left = writes;
    }

    fn change(&self, change: impl FnOnce(&mut Sectors)) -> io::Result<()> {
        let mut sectors = guard(&self.0);
        match &mut sectors.left {
            Some(0) => return Err(io::Error::other("the disk is gone")),
            Some(left) => *left -= 1,
            None => {}
        }
        change(&mut sectors);
        Ok(())
    }

    pub(crate) fn has_failed(&self) -> bool {
        guard(&self.0).left == Some(0)
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(guard(&self.0).bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let sectors = guard(&self.0);
        let range = offset as usize..offset as usize + out.len();
        let found = sectors.bytes.get(range);
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(|sectors| {
            let (old, new) = (sectors.bytes.len(), len as usize);
            // What is cut off is written, in a way: it may come back.
            sectors.remember(new.min(old), old.saturating_sub(new));
            sectors.bytes.resize(new, 0);
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change(|sectors| {
            sectors.before.clear();
            sectors.synced_len = sectors.bytes.len();
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(|sectors| {
            let offset = offset as usize;
            sectors.remember(offset, data.len());
            sectors.bytes[offset..][..data.len()].copy_from_slice(data);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that a disk holds after its machine lost its power.
    fn after(disk: &Disk, seed: u64) -> Vec<u8> {
        let left = disk.leave(Death::Power, &mut Dice::new(seed));
        let bytes = guard(&left.0).bytes.clone();
        let again = guard(&left.0).before.is_empty();
        assert!(again, "what is there is durable");
        bytes
    }

    #[test]
    fn what_was_not_synced_may_be_gone_sector_by_sector() {
        let mut found = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let disk = Disk::default();
            disk.set_len(1024).expect("a length");
            disk.write(0, &[1; 1024]).expect("a write");
            disk.sync_data().expect("a sync");
            disk.write(256, &[2; 512]).expect("a write");
            disk.set_len(1536).expect("a length");
            let bytes = after(&disk, seed);
            let whole = (bytes[0], bytes[1023]) == (1, 1);
            assert!(whole, "what was synced is there");
            found.insert((bytes.len(), bytes[256], bytes[767]));
        }
        assert_eq!(found.len(), 8, "{found:?}");
    }

    #[test]
    fn a_process_that_dies_loses_nothing_that_was_written() {
        let disk = Disk::default();
        disk.set_len(1024).expect("a length");
        disk.write(100, &[7; 700]).expect("a write");
        let next = disk.leave(Death::Process, &mut Dice::new(0));
        assert_eq!(guard(&next.0).bytes[100..800], [7; 700]);
        assert!(disk.write(0, &[1]).is_err(), "the dead write nothing");
        assert!(!next.has_failed());
    }
}
