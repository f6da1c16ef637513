//! The rows of the segment, and the clients that have them.
//!
//! Invariants: a row belongs to one connection, and another connection gets it only when the row is
//! not active. A row that its client left active is cleared only when its bytes are equal on all
//! legs.

use super::ServerShared;
use super::connection::{ClientConnection, is_thread_of_any};
use crate::shared::rows;
use pagemesh_base::poison::lock;
use pagemesh_base::proc_maps::has_mapped;
use pagemesh_fs::Ino;
use pagemesh_volume::direct_access::{DirectSegment, TornOp};
use rustix::process::Pid;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long the mount waits for the end of a process that it killed.
const KILL_WAIT_MAX: Duration = Duration::from_secs(2);

impl ServerShared {
    pub(super) fn assign_row(&self, connection: &Arc<ClientConnection>) -> Option<usize> {
        let mut rows = lock(&self.rows);
        let number = rows.iter().position(Option::is_none)?;
        rows[number] = Some(Arc::clone(connection));
        Some(number)
    }

    pub(super) fn connection(&self, row: usize) -> Option<Arc<ClientConnection>> {
        lock(&self.rows)[row].clone()
    }

    /// Records that a thread opens a file, and not through the preload library. If the thread
    /// belongs to a direct client, a descriptor number may lead to that file before the mount
    /// learns that the number was closed.
    pub(super) fn record_untracked_open(&self, thread: u32) {
        if self.connections.load(Ordering::Acquire) == 0 {
            return;
        }
        let rows = lock(&self.rows);
        let mut clients: Vec<Pid> = rows
            .iter()
            .flatten()
            .map(|connection| connection.pid)
            .collect();
        drop(rows);
        clients.dedup();
        if is_thread_of_any(&clients, thread)
            && let Some(segment) = self.segment()
        {
            segment.record_untracked_open();
        }
    }

    /// Whether nothing of a client is left that could use its row: its process has ended, or
    /// executed another program.
    pub(super) fn is_detached(&self, connection: &ClientConnection) -> bool {
        let maps = || {
            let found = self.segment()?.file().metadata().ok()?;
            let pid = connection.pid.as_raw_pid().cast_unsigned();
            has_mapped(pid, found.dev(), found.ino())
        };
        connection.exits_within(Duration::ZERO) || maps() == Some(false)
    }

    /// Frees the row of a client's connection that has ended.
    pub(super) fn clean_up(&self, number: usize, connection: &ClientConnection) {
        let Some(segment) = self.segment() else {
            return;
        };
        let row = segment.row(number);
        if row.active_range().is_some() {
            // The client may have closed the connection by accident, and go on.
            if !self.is_detached(connection) {
                self.await_row(segment, number);
            }
            if let Some(place) = row.active_range() {
                if !self.is_detached(connection) {
                    connection.kill("it was in an operation when its connection ended");
                    connection.exits_within(KILL_WAIT_MAX);
                }
                self.reconcile(segment, number, connection);
                let file_map = lock(&self.file_maps).get(&Ino(place.file)).cloned();
                let file_map = file_map.and_then(|file_map| file_map.upgrade());
                rows::clear_row(
                    segment,
                    number,
                    file_map.as_ref().map(|file_map| file_map.file_map()),
                );
            }
        }
        lock(&self.rows)[number] = None;
    }

    /// Reconciles the legs where a client died in an operation.
    fn reconcile(&self, segment: &DirectSegment, number: usize, connection: &ClientConnection) {
        let Some(torn_op) = TornOp::of_row(segment.row(number)) else {
            return;
        };
        tracing::info!(
            pid = connection.pid.as_raw_pid(),
            ?torn_op,
            "a direct client died in an operation; reconciling the copies there"
        );
        self.volume.reconcile(number, torn_op);
    }
}
