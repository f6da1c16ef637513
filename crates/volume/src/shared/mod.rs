//! The state that the channels of a volume and its controller share.
//!
//! Invariants: a snapshot is replaced as a whole, and its generation changes under the same
//! lock. Calls block only for a look at a short list.

mod indeterminate;
mod lost_writes;
mod member;

use crate::direct_access::DirectAccess;
use crate::engine::locks::{CONTROLLER, LockHolder, RangeLocks};
use crate::limits::CHANNELS_MAX;
use crate::replication::queue::ReplicationQueue;
use crate::snapshot::LayoutSnapshot;
use crate::stamp_epoch::StampEpoch;
use crate::status::Tally;
use crate::steps;
pub use indeterminate::IndeterminateWrites;
use lost_writes::LostWrites;
pub use member::{LegLink, Member, MemberMessage};
use pagemesh_base::ids::Epoch;
use pagemesh_base::poison;
use pagemesh_telemetry::MeterSet;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Bounds the operation numbers that channels may take while direct access is being enabled.
const FIRST_OP_GAP: u64 = 1 << 16;

pub struct VolumeShared {
    snapshot: Mutex<Arc<LayoutSnapshot>>,
    generation: AtomicU64,
    held_epoch: AtomicU32,
    /// The epoch that names the attachment; zero before the attach.
    attachment: AtomicU32,
    last_op: AtomicU64,
    stamp_epoch: StampEpoch,
    /// The number of the last member.
    last_member: AtomicU32,
    pub locks: RangeLocks,
    pub lost_writes: LostWrites,
    pub indeterminate: IndeterminateWrites,
    pub replication: ReplicationQueue,
    /// The state shared with direct clients, once direct access is enabled. From then on
    /// operation numbers come from its segment.
    pub direct_access: OnceLock<DirectAccess>,
    pub members: Mutex<BTreeMap<u32, Arc<Member>>>,
    pub counters: Tally,
    /// Counts the requests of the channels.
    pub meters: Arc<MeterSet>,
}

impl VolumeShared {
    pub fn new(view: LayoutSnapshot, keeper: Arc<Member>) -> VolumeShared {
        VolumeShared {
            held_epoch: AtomicU32::new(view.epoch.0),
            snapshot: Mutex::new(Arc::new(view)),
            attachment: AtomicU32::new(0),
            generation: AtomicU64::new(0),
            last_op: AtomicU64::new(0),
            stamp_epoch: StampEpoch::default(),
            last_member: AtomicU32::new(CONTROLLER),
            locks: RangeLocks::default(),
            lost_writes: LostWrites::default(),
            indeterminate: IndeterminateWrites::default(),
            replication: ReplicationQueue::default(),
            direct_access: OnceLock::new(),
            members: Mutex::new(BTreeMap::from([(CONTROLLER, keeper)])),
            counters: Tally::default(),
            meters: Arc::default(),
        }
    }

    pub fn generation(&self) -> u64 {
        steps::step("view");
        self.generation.load(Ordering::Acquire)
    }

    pub fn snapshot(&self) -> (u64, Arc<LayoutSnapshot>) {
        steps::lock("view", &self.snapshot);
        let view = poison::lock(&self.snapshot);
        (self.generation(), Arc::clone(&view))
    }

    pub fn publish(&self, view: LayoutSnapshot) {
        self.publish_if(view, |_| true);
    }

    /// Publishes a snapshot if all members are ready for it. No member can join meanwhile.
    pub fn publish_if(
        &self,
        view: LayoutSnapshot,
        is_ready: impl Fn(&BTreeMap<u32, Arc<Member>>) -> bool,
    ) -> bool {
        let members = poison::lock(&self.members);
        if !is_ready(&members) {
            return false;
        }
        steps::lock("view", &self.snapshot);
        let mut present = poison::lock(&self.snapshot);
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        // A channel that sees the new generation waits for the snapshot lock, and so for these
        // updates.
        self.lost_writes
            .snapshot_changed(&present.columns, &view.columns, generation);
        self.indeterminate
            .snapshot_changed(&present.columns, &view.columns, generation);
        let (before, after) = (present.replica_serial(), view.replica_serial());
        *present = Arc::new(view);
        if let Some(guests) = self.direct_access.get() {
            guests.revoke_lease();
        }
        // No channel has the new snapshot yet, and no request under the old snapshot is
        // acknowledged any more.
        match after {
            _ if before == after => {}
            0 => self.replication.close(),
            serial => self.replication.open(serial),
        }
        drop(present);
        for member in members.values() {
            if !poison::lock(&member.links).is_empty() {
                member.set_served();
            }
            member.wake.raise();
        }
        true
    }

    /// See [`pagemesh_base::space::Space::has_write_cache`].
    pub fn has_write_cache(&self) -> bool {
        self.snapshot().1.buffers()
    }

    /// See [`pagemesh_base::space::Space::needs_flush`].
    pub fn needs_flush(&self) -> bool {
        // Read before the snapshot: a fence closes the queue behind its snapshot.
        let replicates = self.replication.last_number() != 0;
        let snapshot = self.snapshot().1;
        let is_unflushed = || self.lost_writes.may_be_unflushed(snapshot.columns.len());
        // The flush of a fenced client fails: the next one may lack its changes.
        replicates || snapshot.fenced || snapshot.buffers() && is_unflushed()
    }

    /// The epoch that the manager's answer to the attach named.
    pub fn attachment(&self) -> Epoch {
        Epoch(self.attachment.load(Ordering::Relaxed))
    }

    pub fn set_attachment(&self, epoch: Epoch) {
        self.attachment.store(epoch.0, Ordering::Relaxed);
    }

    pub fn held_epoch(&self) -> Epoch {
        Epoch(self.held_epoch.load(Ordering::Acquire))
    }

    /// Records an epoch before any leg hears of it. The refusals of an older epoch are then
    /// known to come from this client itself.
    pub fn hold_epoch(&self, epoch: Epoch) {
        self.held_epoch.fetch_max(epoch.0, Ordering::AcqRel);
    }

    /// Creates the state shared with direct clients, or returns it.
    pub fn enable_direct_access(&self) -> Result<&DirectAccess, pagemesh_pmem::MapError> {
        if let Some(guests) = self.direct_access.get() {
            return Ok(guests);
        }
        // A concurrent `next_op` may still take a number from the old counter. The gap keeps
        // that number below the numbers of the segment.
        let guests = DirectAccess::new(self.last_op() + FIRST_OP_GAP)?;
        let guests = self.direct_access.get_or_init(|| guests);
        self.replication.attach_segment(&guests.segment);
        Ok(guests)
    }

    /// The next operation number. The caller holds a range lock.
    pub fn next_op(&self) -> u64 {
        match self.direct_access.get() {
            None => self.last_op.fetch_add(1, Ordering::Relaxed) + 1,
            Some(guests) => guests.segment.next_op(),
        }
    }

    /// The epoch of a change under a layout of this epoch. The caller holds a range lock. None: a snapshot is held. The
    /// change waits until the member is woken after [`VolumeShared::release_cut`].
    pub fn stamp_epoch(&self, layout: Epoch) -> Option<Epoch> {
        steps::step("stamp epoch");
        self.stamp_epoch.of(layout)
    }

    /// The epoch of the newest snapshot under a layout of this epoch, also while it is held; without one, that of the
    /// layout. The controller's own copies have it: they acknowledge nothing to a client.
    pub fn newest_stamp(&self, layout: Epoch) -> Epoch {
        steps::step("stamp epoch");
        self.stamp_epoch.newest(layout)
    }

    /// Stamps the changes of channels and direct clients under this layout with a snapshot from now on.
    /// Only the controller calls it.
    pub fn cut(&self, layout: Epoch, snapshot: Epoch) {
        steps::step("stamp epoch");
        self.stamp_epoch.cut(layout, snapshot);
        self.pass_stamp_epoch();
    }

    /// Lets the changes of channels and direct clients under this layout wait from now on. After
    /// [`VolumeShared::release_cut`] they are stamped with the snapshot. Only the controller calls it.
    pub fn hold_cut(&self, layout: Epoch, snapshot: Epoch) {
        steps::step("stamp epoch");
        self.stamp_epoch.hold(layout, snapshot);
        self.pass_stamp_epoch();
    }

    /// Ends [`VolumeShared::hold_cut`], and wakes the waiting channels. True if no change has gone on before.
    pub fn release_cut(&self) -> bool {
        steps::step("stamp epoch");
        let was_held = self.stamp_epoch.release();
        let access = self.direct_access.get();
        let were_held = access.is_none_or(|access| access.segment.release_stamps());
        for member in poison::lock(&self.members).values() {
            member.wake.raise();
        }
        was_held && were_held
    }

    /// Tells the stamp epoch to direct clients. The controller does it before it grants them access.
    pub fn pass_stamp_epoch(&self) {
        if let Some(access) = self.direct_access.get() {
            access.segment.raise_stamp_word(self.stamp_epoch.word());
        }
    }

    /// The number of the last operation.
    pub fn last_op(&self) -> u64 {
        let shared = self
            .direct_access
            .get()
            .map(|guests| guests.segment.last_op());
        shared.unwrap_or(&self.last_op).load(Ordering::Relaxed)
    }

    /// Tells the members that hold their locks now. `mine` gets the keys of the member `own`.
    pub fn deliver_grants(&self, turns: &mut Vec<LockHolder>, own: u32, mine: &mut Vec<u32>) {
        if turns.is_empty() {
            return;
        }
        let members = poison::lock(&self.members);
        for turn in turns.drain(..) {
            if turn.member == own {
                mine.push(turn.key);
            } else if let Some(member) = members.get(&turn.member) {
                member.send(MemberMessage::LockGranted(turn.key));
            }
        }
    }

    pub fn wake_controller(&self) {
        if let Some(keeper) = poison::lock(&self.members).get(&CONTROLLER) {
            keeper.wake.raise();
        }
    }

    /// Adds a member, and returns its number; none if the volume is full. Numbers are never
    /// used again, so a late grant for a former member reaches no other one.
    pub fn join(&self, member: &Arc<Member>) -> Option<u32> {
        let mut members = poison::lock(&self.members);
        if members.len() > CHANNELS_MAX {
            return None;
        }
        let number = self
            .last_member
            .fetch_add(1, Ordering::Relaxed)
            .checked_add(1)?;
        members.insert(number, Arc::clone(member));
        Some(number)
    }

    pub fn leave(&self, number: u32) {
        poison::lock(&self.members).remove(&number);
        self.replication.remove_waiter(number);
    }
}
