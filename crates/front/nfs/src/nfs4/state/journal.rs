//! The stable list of clients: which clients may reclaim state after a restart.

use super::ids::{Instance, Principal};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A record of the stable list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalRecord {
    /// The server starts a run with this number.
    Started(Instance),
    /// The client has completed its reclaims in this run, and may hold state from now on.
    Active {
        /// The client's owner.
        owner: Arc<[u8]>,
        /// The principal that made its record.
        principal: Principal,
    },
    /// The client holds no state any more.
    Removed {
        /// The client's owner.
        owner: Arc<[u8]>,
    },
    /// The grace period of the run is over: clients of earlier runs may not reclaim.
    GraceEnded,
}

/// The clients of the stable list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownClients {
    instance: u32,
    clients: BTreeMap<Arc<[u8]>, (Principal, Instance)>,
}

impl KnownClients {
    /// The number of the next run.
    #[must_use]
    pub fn next_instance(&self) -> Instance {
        Instance(self.instance.wrapping_add(1).max(1))
    }
}
