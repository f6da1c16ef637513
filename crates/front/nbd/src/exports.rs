//! The registry of a server's exports, shared by any number of servers.
//!
//! An export's name is unique, not empty and free of control characters. A removed export takes no
//! new connection; its connections finish the requests in flight and end. The registry never opens
//! a space.

use crate::limits::{DESCRIPTION_BYTES_MAX, EXPORTS_MAX, NAME_BYTES_MAX};
use crate::stop_signal::{StopLevel, StopSignal};
use pagemesh_base::poison;
use pagemesh_base::space::Space;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// How a space is exported.
#[derive(Clone, Debug, Default)]
pub struct ExportOptions {
    /// Whether clients may only read.
    pub read_only: bool,
    /// The description in listings; may be empty.
    pub description: String,
}

/// Why an export cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The name is taken.
    #[error("an export named '{0}' exists already; remove it first or choose another name")]
    Exists(String),
    /// The name cannot be used.
    #[error("the export name '{name}' {cause}; choose 1 to {NAME_BYTES_MAX} printable bytes")]
    BadName {
        /// The name, escaped.
        name: String,
        /// The defect of the name.
        cause: &'static str,
    },
    /// The description is too long.
    #[error(
        "the description of export '{0}' is too long; use at most {DESCRIPTION_BYTES_MAX} bytes"
    )]
    DescriptionTooLong(String),
    /// The registry is full.
    #[error("there are {EXPORTS_MAX} exports already; remove one or start another server")]
    TooManyExports,
}

/// The registry; clones share it.
#[derive(Clone, Default)]
pub struct Exports {
    table: Arc<Mutex<BTreeMap<String, Arc<Export>>>>,
}

impl Exports {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Exports a space under a name; clients can connect at once.
    ///
    /// # Errors
    /// If the name is taken or unusable, or the registry is full.
    pub fn add(
        &self,
        name: &str,
        space: Arc<dyn Space>,
        options: ExportOptions,
    ) -> Result<(), ExportError> {
        check_name(name)?;
        if options.description.len() > DESCRIPTION_BYTES_MAX {
            return Err(ExportError::DescriptionTooLong(name.into()));
        }
        let mut table = lock(&self.table);
        if table.contains_key(name) {
            return Err(ExportError::Exists(name.into()));
        }
        if table.len() >= EXPORTS_MAX {
            return Err(ExportError::TooManyExports);
        }
        let export = Export {
            name: name.into(),
            space,
            options,
            connections: Mutex::new(ExportConnections::default()),
        };
        table.insert(name.into(), Arc::new(export));
        Ok(())
    }

    /// Removes an export and makes its connections finish. False if there is none of that name.
    pub fn remove(&self, name: &str) -> bool {
        let Some(export) = lock(&self.table).remove(name) else {
            return false;
        };
        let mut members = lock(&export.connections);
        members.is_removed = true;
        for signal in members.signals.values() {
            signal.raise(StopLevel::Drain);
        }
        true
    }

    /// Makes the connections of an export finish. Clients may still try to connect, and get the
    /// answer of its space. False if there is none of that name.
    pub fn disconnect(&self, name: &str) -> bool {
        let Some(export) = lock(&self.table).get(name).cloned() else {
            return false;
        };
        for signal in lock(&export.connections).signals.values() {
            signal.raise(StopLevel::Drain);
        }
        true
    }

    /// The names, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        lock(&self.table).keys().cloned().collect()
    }

    /// The number of an export's connections; none if there is no such export.
    #[must_use]
    pub fn connections(&self, name: &str) -> Option<usize> {
        let export = lock(&self.table).get(name).cloned()?;
        let members = lock(&export.connections);
        Some(members.signals.len())
    }

    /// The export with the name that a client chooses, or for an empty name the only export.
    pub(crate) fn find(&self, name: &[u8]) -> Option<Arc<Export>> {
        let table = lock(&self.table);
        if name.is_empty() && table.len() == 1 {
            return table.values().next().cloned();
        }
        table.get(std::str::from_utf8(name).ok()?).cloned()
    }

    /// All exports, by name.
    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        lock(&self.table).values().cloned().collect()
    }
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

fn check_name(name: &str) -> Result<(), ExportError> {
    let cause = if name.is_empty() {
        "is empty"
    } else if name.len() > NAME_BYTES_MAX {
        "is too long"
    } else if name.chars().any(char::is_control) {
        "contains a control character"
    } else {
        return Ok(());
    };
    Err(ExportError::BadName {
        name: name
            .chars()
            .take(NAME_BYTES_MAX)
            .flat_map(char::escape_default)
            .collect(),
        cause,
    })
}

/// One export.
pub struct Export {
    pub(crate) name: String,
    pub space: Arc<dyn Space>,
    pub(crate) options: ExportOptions,
    connections: Mutex<ExportConnections>,
}

#[derive(Default)]
struct ExportConnections {
    signals: HashMap<u64, Arc<StopSignal>>,
    is_removed: bool,
}

impl Export {
    /// Counts a connection until the membership is dropped.
    pub(crate) fn add_connection(
        self: &Arc<Self>,
        connection: u64,
        signal: &Arc<StopSignal>,
        connections_max: usize,
    ) -> Result<Membership, String> {
        let mut members = lock(&self.connections);
        if members.is_removed {
            return Err(format!("export '{}' was removed", self.name));
        }
        if members.signals.len() >= connections_max {
            return Err(format!(
                "export '{}' has {connections_max} connections already; close one first",
                self.name
            ));
        }
        members.signals.insert(connection, Arc::clone(signal));
        Ok(Membership {
            export: Arc::clone(self),
            connection,
        })
    }
}

/// The membership of a connection in its export.
pub struct Membership {
    export: Arc<Export>,
    connection: u64,
}

impl Drop for Membership {
    fn drop(&mut self) {
        lock(&self.export.connections)
            .signals
            .remove(&self.connection);
    }
}

/// Locks a mutex, also if a thread panicked while it held the lock: every change under these locks
/// is a single insertion or removal.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    poison::lock(mutex)
}
