//! The pins of the files of one export that requests use now and soon: a read or write needs a pin,
//! and taking one for each request costs the lock of the file system.
//!
//! The drop of a pin may free a file, which waits for the volume and borrows a channel. So the cache
//! drops pins after its lock, and its callers hold no channel.

use crate::limits::{PIN_IDLE_LIMIT, PINS_MAX};
use pagemesh_base::poison;
use pagemesh_fs::{FileId, Fs, Pin, Result};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// See the module.
pub(crate) struct PinCache {
    fs: Arc<Fs>,
    pins: Mutex<PinTable>,
}

#[derive(Default)]
struct PinTable {
    by_file: HashMap<FileId, CachedPin>,
    /// The files by the number of their last use, the least recent first.
    by_use: BTreeMap<u64, FileId>,
    uses: u64,
    /// The server has stopped: no pin is kept any more.
    is_closed: bool,
}

struct CachedPin {
    pin: Arc<Pin>,
    last_use: u64,
    used_at: Instant,
}

impl PinTable {
    /// The pin of a file, if there is one; it counts as used now.
    fn find(&mut self, id: FileId, now: Instant) -> Option<Arc<Pin>> {
        let cached = self.by_file.get_mut(&id)?;
        self.by_use.remove(&cached.last_use);
        self.uses += 1;
        cached.last_use = self.uses;
        cached.used_at = now;
        self.by_use.insert(self.uses, id);
        Some(Arc::clone(&cached.pin))
    }

    fn insert(&mut self, id: FileId, pin: Arc<Pin>, now: Instant) {
        self.uses += 1;
        let last_use = self.uses;
        let cached = CachedPin {
            pin,
            last_use,
            used_at: now,
        };
        self.by_use.insert(last_use, id);
        self.by_file.insert(id, cached);
    }

    fn remove(&mut self, id: FileId) -> Option<Arc<Pin>> {
        let cached = self.by_file.remove(&id)?;
        self.by_use.remove(&cached.last_use);
        Some(cached.pin)
    }

    /// Removes the least recently used pins, while there are too many or they are idle.
    fn evict(&mut self, now: Instant) -> Vec<Arc<Pin>> {
        let mut evicted = Vec::new();
        while let Some((_, &id)) = self.by_use.first_key_value() {
            let is_idle = self.by_file.get(&id).is_none_or(|cached| {
                now.saturating_duration_since(cached.used_at) >= PIN_IDLE_LIMIT
            });
            if !is_idle && self.by_file.len() <= PINS_MAX {
                break;
            }
            evicted.extend(self.remove(id));
        }
        evicted
    }
}

impl PinCache {
    pub(crate) fn new(fs: Arc<Fs>) -> Self {
        Self {
            fs,
            pins: Mutex::default(),
        }
    }

    /// A pin of a file. Drop it after the channel of the call. The caller holds no channel.
    pub(crate) fn get(&self, id: FileId, now: Instant) -> Result<Arc<Pin>> {
        if let Some(pin) = poison::lock(&self.pins).find(id, now) {
            return Ok(pin);
        }
        let pin = Arc::new(self.fs.pin(id)?);
        let evicted = {
            let mut table = poison::lock(&self.pins);
            if table.is_closed {
                return Ok(pin);
            }
            if let Some(earlier) = table.find(id, now) {
                // The lock is released before the pin of this call is dropped.
                drop(table);
                return Ok(earlier);
            }
            table.insert(id, Arc::clone(&pin), now);
            table.evict(now)
        };
        drop(evicted);
        Ok(pin)
    }

    /// Drops the pin of a file that has lost a name. The caller holds no channel.
    pub(crate) fn forget(&self, id: FileId) {
        let pin = poison::lock(&self.pins).remove(id);
        drop(pin);
    }

    /// Whether a pin has not been used lately.
    pub(crate) fn has_idle(&self, now: Instant) -> bool {
        let table = poison::lock(&self.pins);
        let oldest = table.by_use.first_key_value();
        let oldest = oldest.and_then(|(_, id)| table.by_file.get(id));
        oldest.is_some_and(|pin| now.saturating_duration_since(pin.used_at) >= PIN_IDLE_LIMIT)
    }

    /// Drops the pins that no call has used lately. The caller holds no channel.
    pub(crate) fn drop_idle(&self, now: Instant) {
        let evicted = poison::lock(&self.pins).evict(now);
        drop(evicted);
    }

    /// Drops all pins, and keeps no more. The caller holds no channel.
    pub(crate) fn close(&self) {
        let table = {
            let mut table = poison::lock(&self.pins);
            let closed = PinTable {
                is_closed: true,
                ..PinTable::default()
            };
            std::mem::replace(&mut *table, closed)
        };
        drop(table);
    }
}

#[cfg(test)]
mod tests;
