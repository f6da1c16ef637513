//! The lease by which direct clients work, and the rows of those that died.
//!
//! Invariants: the lease is set before the segment's generation that grants access, and revoked
//! after it.

use super::segment::DirectSegment;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::poison;
use pagemesh_pmem::MapError;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// A leg that a direct client maps, and the source of its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseLeg {
    /// The brick that owns the pool.
    pub brick: BrickId,
    /// The slice in the pool.
    pub slice: SliceId,
    /// The brick's `map` socket.
    pub socket: PathBuf,
}

/// The lease by which direct clients work. It names all written legs, each in-sync and mapped.
/// Direct clients read the last leg: they write in leg order, so a dead client's record on the
/// last leg is on all legs (`pagemesh_store::session::write_numbered`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutLease {
    /// The lease is valid while the segment holds this generation.
    pub generation: u64,
    /// The epoch of direct operations.
    pub epoch: Epoch,
    /// The legs.
    pub legs: Vec<LeaseLeg>,
}

/// The segment, and the present lease.
pub struct DirectAccess {
    pub segment: Arc<DirectSegment>,
    lease: Mutex<Option<LayoutLease>>,
    /// Rows of direct clients that died during an operation, until they are reconciled.
    dead_rows: Mutex<BTreeSet<usize>>,
}

impl DirectAccess {
    pub fn new(last_op: u64) -> Result<DirectAccess, MapError> {
        Ok(DirectAccess {
            segment: Arc::new(DirectSegment::create(last_op)?),
            lease: Mutex::default(),
            dead_rows: Mutex::default(),
        })
    }

    /// Revokes the lease, because a new snapshot is published.
    pub fn revoke_lease(&self) {
        let mut picture = poison::lock(&self.lease);
        self.segment.set_generation(0);
        *picture = None;
    }

    /// Grants this lease. `followed`: a replica gets the changes of direct clients.
    pub fn grant_lease(&self, offered: LayoutLease, followed: bool) {
        let mut picture = poison::lock(&self.lease);
        // These come before the generation, which grants access.
        self.segment.set_disabled_reason(None);
        self.segment.ring().set_has_replica(followed);
        self.segment.set_generation(offered.generation);
        *picture = Some(offered);
    }

    pub fn lease(&self) -> Option<LayoutLease> {
        poison::lock(&self.lease).clone()
    }

    pub fn record_dead_row(&self, row: usize) {
        poison::lock(&self.dead_rows).insert(row);
    }

    /// Forgets the row after its operation is reconciled.
    pub fn clear_dead_row(&self, row: usize) {
        poison::lock(&self.dead_rows).remove(&row);
    }

    pub fn is_dead_row(&self, row: usize) -> bool {
        poison::lock(&self.dead_rows).contains(&row)
    }

    /// Whether no live direct client has an operation in progress on one of these files.
    pub fn are_files_idle(&self, is_meant: impl Fn(u64) -> bool) -> bool {
        let mut active = self.segment.active_ops();
        let is_dead = |row| self.is_dead_row(row) && !defect::is(Defect::RecoveryAwaitsReconcile);
        !active.any(|(number, place)| is_meant(place.file) && !is_dead(number))
    }
}
