//! The figures of exports.

use super::ExportWorkers;
use super::call_figures::CallFigures;
use super::processors;
use super::sizing::SizingReason;
use crate::counters::PROCEDURES;
use pagemesh_base::poison;
use std::sync::OnceLock;

/// The figures of one export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportFigures {
    /// The name; none for calls without an export.
    pub export: Option<String>,
    /// The sums of the procedures, as [`PROCEDURE_NAMES`](crate::PROCEDURE_NAMES) has them. A COMPOUND counts for the file system of the
    /// last file that it worked on.
    pub procedures: [CallFigures; PROCEDURES],
    /// Workers that exist now.
    pub workers: usize,
    /// The most workers so far.
    pub workers_most: usize,
    /// The most workers that are allowed.
    pub workers_max: usize,
    /// The reason for the last change of their number.
    pub last_change: Option<SizingReason>,
    /// Calls that run now.
    pub running: usize,
    /// Those among them that polling threads run.
    pub inline: usize,
    /// Workers in a call that sleep now: they wait for the volume or a lock.
    pub blocked: usize,
    /// Calls that wait for a worker now.
    pub queued: usize,
    /// The most calls that have waited at once.
    pub queued_most: usize,
    /// Connections that wait for room in the queue.
    pub waiting_connections: usize,
    /// Calls that got NFS3ERR_JUKEBOX, because the export was stalled.
    pub refused: u64,
    /// Whether calls run, and none has ended for a second.
    pub is_stalled: bool,
    /// Whether another host has the volume.
    pub is_fenced: bool,
}

/// The figures of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// The exports, and then the calls without one.
    pub exports: Vec<ExportFigures>,
    /// Connections that exist now.
    pub connections: usize,
    /// Those among them without a call so far.
    pub half_open: usize,
    /// Bytes of incomplete records, and of replies that clients have not taken.
    pub held_bytes: usize,
    /// Repetitions of calls that still ran, and got no reply because too many waited.
    pub dropped_repetitions: u64,
}

impl ExportWorkers {
    pub(crate) fn figures(&self, is_fenced: bool) -> ExportFigures {
        let mut procedures = [CallFigures::default(); PROCEDURES];
        let shared = std::iter::once(&self.shared_cells);
        for cells in self.cells.iter().chain(shared).filter_map(OnceLock::get) {
            cells.add_to(&mut procedures);
        }
        let now = std::time::Instant::now();
        let threads: Vec<u32> = poison::lock(&self.state).threads_in_calls().collect();
        let blocked = threads.iter().filter(|id| processors::is_blocked(**id));
        let blocked = blocked.count();
        let state = poison::lock(&self.state);
        ExportFigures {
            blocked,
            export: self.name.clone(),
            procedures,
            workers: state.sizing.workers(),
            workers_most: state.sizing.most(),
            workers_max: self.shares.workers_max,
            last_change: state.sizing.last_change(),
            running: state.running,
            inline: state.inline,
            queued: state.queue.queued(),
            queued_most: state.most_queued,
            waiting_connections: state.waiting.len() + state.parked.len(),
            refused: state.refused,
            is_stalled: state.is_stalled(now),
            is_fenced,
        }
    }
}
