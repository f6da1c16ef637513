//! The manager's disk. Writes survive the process; unsynced writes may be lost when the machine
//! loses its power.

use crate::brick_host::CrashKind;
use pagemesh_base::poison::lock;
use pagemesh_base::rng::SplitMix64;
use redb::StorageBackend;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// The unit that the medium writes atomically.
const SECTOR: usize = 512;

#[derive(Debug, Default)]
struct DiskState {
    bytes: Vec<u8>,
    /// Sectors written since the last sync, with their bytes before.
    unsynced: BTreeMap<usize, Vec<u8>>,
    synced_len: usize,
    /// Writes until the disk fails.
    writes_left: Option<u32>,
}

impl DiskState {
    fn save_unsynced(&mut self, offset: usize, len: usize) {
        for sector in offset / SECTOR..(offset + len).div_ceil(SECTOR) {
            let bytes = &self.bytes;
            let start = (sector * SECTOR).min(bytes.len());
            let end = (start + SECTOR).min(bytes.len());
            let old = || bytes[start..end].to_vec();
            self.unsynced.entry(sector).or_insert_with(old);
        }
    }

    /// Restores any of the unsynced sectors to their old bytes, and possibly the old length.
    fn lose_power(&mut self, rng: &mut SplitMix64) {
        let len = self.bytes.len();
        if rng.one_in(2) {
            self.bytes.resize(self.synced_len, 0);
        }
        for (sector, old) in std::mem::take(&mut self.unsynced) {
            let was_cut_off = (sector + 1) * SECTOR > len;
            if rng.one_in(2) || was_cut_off {
                let place = self.bytes.iter_mut().skip(sector * SECTOR);
                place.zip(old).for_each(|(byte, old)| *byte = old);
            }
        }
        self.synced_len = self.bytes.len();
    }
}

/// The manager's disk; it keeps the writes before it failed.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimDisk(Arc<Mutex<DiskState>>);

impl SimDisk {
    /// Moves the disk's contents to the next manager; the previous one cannot write any more.
    pub(crate) fn take_surviving_state(&self, death: CrashKind, rng: &mut SplitMix64) -> SimDisk {
        let mut gone = lock(&self.0);
        let mut sectors = std::mem::take(&mut *gone);
        gone.writes_left = Some(0);
        sectors.writes_left = None;
        if death == CrashKind::Power {
            sectors.lose_power(rng);
        }
        SimDisk(Arc::new(Mutex::new(sectors)))
    }

    /// Makes the disk fail after this many writes, or never.
    pub(crate) fn fail_after(&self, writes: Option<u32>) {
        lock(&self.0).writes_left = writes;
    }

    fn change(&self, change: impl FnOnce(&mut DiskState)) -> io::Result<()> {
        let mut sectors = lock(&self.0);
        match &mut sectors.writes_left {
            Some(0) => return Err(io::Error::other("the disk is gone")),
            Some(left) => *left -= 1,
            None => {}
        }
        change(&mut sectors);
        Ok(())
    }

    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.0).writes_left == Some(0)
    }
}

impl StorageBackend for SimDisk {
    fn len(&self) -> io::Result<u64> {
        Ok(lock(&self.0).bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let sectors = lock(&self.0);
        let range = offset as usize..offset as usize + out.len();
        let found = sectors.bytes.get(range);
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(|sectors| {
            let (old, new) = (sectors.bytes.len(), len as usize);
            // A truncation counts as a write: the truncated bytes may come back.
            sectors.save_unsynced(new.min(old), old.saturating_sub(new));
            sectors.bytes.resize(new, 0);
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change(|sectors| {
            sectors.unsynced.clear();
            sectors.synced_len = sectors.bytes.len();
        })
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(|sectors| {
            let offset = offset as usize;
            sectors.save_unsynced(offset, data.len());
            sectors.bytes[offset..][..data.len()].copy_from_slice(data);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a disk after its machine lost its power.
    fn bytes_after_power_loss(disk: &SimDisk, seed: u64) -> Vec<u8> {
        let left = disk.take_surviving_state(CrashKind::Power, &mut SplitMix64::new(seed));
        let bytes = lock(&left.0).bytes.clone();
        let again = lock(&left.0).unsynced.is_empty();
        assert!(again, "the surviving bytes are durable");
        bytes
    }

    #[test]
    fn unsynced_sectors_may_be_lost_one_by_one() {
        let mut found = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let disk = SimDisk::default();
            disk.set_len(1024).expect("a length");
            disk.write(0, &[1; 1024]).expect("a write");
            disk.sync_data().expect("a sync");
            disk.write(256, &[2; 512]).expect("a write");
            disk.set_len(1536).expect("a length");
            let bytes = bytes_after_power_loss(&disk, seed);
            let whole = (bytes[0], bytes[1023]) == (1, 1);
            assert!(whole, "synced bytes survive");
            found.insert((bytes.len(), bytes[256], bytes[767]));
        }
        assert_eq!(found.len(), 8, "{found:?}");
    }

    #[test]
    fn process_death_keeps_all_writes() {
        let disk = SimDisk::default();
        disk.set_len(1024).expect("a length");
        disk.write(100, &[7; 700]).expect("a write");
        let next = disk.take_surviving_state(CrashKind::Process, &mut SplitMix64::new(0));
        assert_eq!(lock(&next.0).bytes[100..800], [7; 700]);
        assert!(disk.write(0, &[1]).is_err(), "the dead write nothing");
        assert!(!next.has_failed());
    }
}
