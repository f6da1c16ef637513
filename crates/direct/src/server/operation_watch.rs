//! Waits for clients in operations, and ends operations that last too long.
//!
//! Invariants: a client that a signal stopped runs until it has left its operation; it is not
//! killed for that. A client that does not leave is killed, since the volume, the asynchronous
//! replica and other clients wait for it.

use super::ServerShared;
use crate::shared::rows;
use pagemesh_base::resume::{self, StopReason};
use pagemesh_fs::Ino;
use pagemesh_volume::direct_access::DirectSegment;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Polls of a client in an operation before the thread yields its processor: operations take a
/// microsecond or two.
const SPINS: u32 = 200;
/// Delay between later polls.
pub(super) const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// How long a client that a signal stopped may stay in an operation that another process waits for.
/// Then the mount lets it run until it has left the operation.
const RESUME_AFTER: Duration = Duration::from_millis(100);
/// How long a client that runs, or that a debugger stopped, may stay in an operation; then the
/// mount kills it. It is longer than a client waits for a brick, or for the lock of a stopped
/// client, before it gives up.
const OPERATION_TIME_MAX: Duration = Duration::from_secs(15);
/// Delay between two checks for clients that the volume or the replication ring waits for.
pub(super) const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Resumes or kills clients that do not leave an operation, while the volume controller or the
/// asynchronous replica waits for them.
pub(super) fn watch_operations(shared: &ServerShared, ended: &Receiver<()>) {
    let mut inside: HashMap<usize, (u64, Instant)> = HashMap::new();
    while ended.recv_timeout(WATCH_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(segment) = shared.segment() else {
            return;
        };
        let active: Vec<usize> = segment.active_ops().map(|(number, _)| number).collect();
        inside.retain(|number, _| active.contains(number));
        let is_awaited = segment.is_closed() || segment.ring().next_unfilled().is_some();
        for number in active {
            let now = (segment.row(number).op_sequence(), Instant::now());
            let since = inside.entry(number).or_insert(now);
            if since.0 != now.0 || !is_awaited {
                *since = now;
            }
            let waited = since.1.elapsed();
            if waited >= OPERATION_TIME_MAX {
                shared.kill(number, "it did not leave an operation");
            } else if waited >= RESUME_AFTER {
                shared.resume(segment, number);
            }
        }
    }
}

impl ServerShared {
    /// Waits until no client is in an operation on a file.
    pub(super) fn drain_file(&self, ino: Ino) {
        let Some(segment) = self.segment() else {
            return;
        };
        let (mut spins, mut last_look) = (0, None);
        rows::drain_file(segment, ino, |number| {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
                return true;
            }
            let since = *last_look.get_or_insert_with(Instant::now);
            self.await_row(segment, number);
            // The thread that cleans up after a dead client waits for the others, too.
            if since.elapsed() >= RESUME_AFTER {
                last_look = Some(Instant::now());
                self.resume_stopped(segment);
            }
            !self.is_stopping.load(Ordering::Acquire)
        });
    }

    /// Waits until a client has left its operation or is gone. It lets a stopped client run until
    /// it has left. The thread of its connection cleans up after a client that is gone.
    pub(super) fn await_row(&self, segment: &DirectSegment, number: usize) {
        let row = segment.row(number);
        let inside = row.op_sequence();
        let began = Instant::now();
        let mut last_look = Duration::ZERO;
        while row.op_sequence() == inside && inside % 2 == 1 {
            let waited = began.elapsed();
            if self.is_stopping.load(Ordering::Acquire) {
                return;
            }
            let connection = self.connection(number);
            if connection.is_none_or(|connection| connection.has_ended()) {
                return std::thread::sleep(POLL_INTERVAL);
            }
            if waited >= OPERATION_TIME_MAX {
                self.kill(number, "it did not leave an operation");
                return std::thread::sleep(POLL_INTERVAL);
            }
            // The client may only wait for the lock of another client, which is stopped.
            if waited >= last_look + RESUME_AFTER {
                last_look = waited;
                self.resume_stopped(segment);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets clients that a signal stopped in an operation run until they have left it.
    fn resume_stopped(&self, segment: &DirectSegment) {
        segment
            .active_ops()
            .for_each(|(number, _)| self.resume(segment, number));
    }

    fn resume(&self, segment: &DirectSegment, number: usize) {
        let Some(connection) = self.connection(number) else {
            return;
        };
        let pid = connection.pid.as_raw_pid().cast_unsigned();
        if resume::stop_reason(pid) != Some(StopReason::Signal) {
            return;
        }
        let is_outside = || segment.row(number).active_range().is_none();
        let is_out = resume::run_until_outside(pid, &is_outside);
        let name = connection.record.name();
        tracing::info!(
            pid,
            name,
            is_out,
            "a stopped client ran until it left its operation"
        );
    }

    fn kill(&self, row: usize, why: &str) {
        if let Some(connection) = self.connection(row) {
            connection.kill(why);
        }
    }
}
