//! The parameters of a history, from its seed.

#[cfg(doc)]
use super::Scenario;
use crate::brick_host::PoolKind;
use crate::files::VOLUME_BYTES;
use crate::rng::SimRng;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::rng::SplitMix64;
use pagemesh_manage::LayoutKind;
use std::time::Duration;

/// The parameters of a history.
#[derive(Clone, Debug)]
pub(crate) struct ScenarioPlan {
    pub(crate) kind: LayoutKind,
    pub(crate) copies: usize,
    pub(crate) columns: usize,
    pub(crate) pool_bytes: Vec<usize>,
    /// The kinds of the pools.
    pub(crate) pool_kinds: Vec<PoolKind>,
    pub(crate) volume_bytes: u64,
    pub(crate) channels_max: u64,
    /// The volume is larger than the pools.
    pub(crate) is_undersized: bool,
    /// The brick with a damaged medium. All other faults then spare the other bricks: two failed
    /// copies are one too many.
    pub(crate) damaged_brick: Option<usize>,
    /// Two clients may want the volume.
    pub(crate) is_contested: bool,
    /// Odds that a step is a fault.
    pub(crate) fault_odds: u64,
    /// Requests begin in this many of the first sectors.
    pub(crate) hot_sectors: u64,
    /// Interval at which clients scrub the volume and bricks their pools.
    pub(crate) scrub_every: Option<Duration>,
    /// Connections are severed, see [`Scenario::sever_connection`].
    pub(crate) severs_connections: bool,
    /// Some requests are transactions.
    pub(crate) has_transactions: bool,
    /// Crash traps are set, see [`Scenario::step_crash_trap`].
    pub(crate) sets_crash_traps: bool,
    /// On a damaged medium slots of page tables flip, too.
    pub(crate) flips_slots: bool,
    /// On a damaged medium data pages become unreadable, too.
    pub(crate) has_unreadable_pages: bool,
    /// The volume has an asynchronous replica.
    pub(crate) has_replica: bool,
    /// The replica is promoted, see [`Scenario::step_promotion`].
    pub(crate) promotes_replica: bool,
    /// The volume holds a file system.
    pub(crate) has_files: bool,
    /// The mount has direct clients: bricks, mount and direct clients are one machine.
    pub(crate) has_direct_clients: bool,
}

impl ScenarioPlan {
    pub(super) fn random(rng: &mut SplitMix64) -> ScenarioPlan {
        let mut lots = rng.derive();
        let scrub_every = (lots.one_in(4)).then(|| Duration::from_secs(1 + lots.below(20)));
        let is_tight = rng.one_in(6);
        let copies = [1, 2, 2, 2, 2, 3][rng.below(6) as usize];
        let columns = if is_tight || rng.one_in(2) { 1 } else { 2 };
        let kind = match (columns, copies) {
            (1, 1) => LayoutKind::Concat,
            (1, _) => LayoutKind::Mirror,
            (_, 1) => LayoutKind::Stripe,
            _ => LayoutKind::StripeMirror,
        };
        let hosts = copies.max(columns) + rng.below(2) as usize;
        let bytes = if is_tight { 2 << 20 } else { 64 << 20 };
        let volume_bytes = match is_tight {
            true => 4 << 20,
            false => columns as u64 * (64 << 10) * (1 + rng.below(3)),
        };
        let damaged = copies > 1 && !is_tight && rng.one_in(4);
        let damaged = damaged.then(|| rng.below(hosts as u64) as usize);
        let is_contested = !is_tight && rng.one_in(2);
        // Two clients with many channels may need all sessions of a pool. A leg that is lost for
        // want of sessions would be the second failed copy.
        let channels_max = match is_tight || damaged.is_some() && is_contested {
            true => 1,
            false => 3,
        };
        ScenarioPlan {
            kind,
            copies,
            columns,
            pool_bytes: vec![bytes; hosts],
            pool_kinds: vec![PoolKind::Memory; hosts],
            volume_bytes,
            channels_max,
            is_undersized: is_tight,
            damaged_brick: damaged,
            is_contested,
            fault_odds: 25 + rng.below(200),
            hot_sectors: if rng.one_in(3) { 32 } else { u64::MAX },
            scrub_every,
            severs_connections: false,
            has_transactions: false,
            sets_crash_traps: false,
            flips_slots: false,
            has_unreadable_pages: false,
            has_replica: false,
            promotes_replica: false,
            has_files: false,
            has_direct_clients: false,
        }
    }

    /// Puts the pools on disks. A pool that no copy needs may stay in memory: the copies of a volume are of one class.
    pub(super) fn set_disks(&mut self, rng: &mut SplitMix64) {
        self.pool_kinds.fill(PoolKind::Disk);
        let needed = self.copies.max(self.columns);
        let is_mixed = self.pool_kinds.len() > needed && rng.one_in(2);
        if let (true, Some(spare)) = (is_mixed, self.pool_kinds.last_mut()) {
            *spare = PoolKind::Memory;
        }
    }

    /// Whether a pool is on a disk.
    pub(crate) fn has_disks(&self) -> bool {
        self.pool_kinds.contains(&PoolKind::Disk)
    }

    /// Whether there are pools of both kinds.
    pub(super) fn is_mixed(&self) -> bool {
        self.has_disks() && self.pool_kinds.contains(&PoolKind::Memory)
    }

    /// The sizes and kinds of the pools.
    pub(super) fn pools(&self) -> Vec<(usize, PoolKind)> {
        let kinds = self.pool_kinds.iter().copied();
        let kinds = kinds.chain(std::iter::repeat(PoolKind::Memory));
        self.pool_bytes.iter().copied().zip(kinds).collect()
    }

    /// Makes the volume hold a file system: it has one column, and large enough pools.
    pub(super) fn set_files(&mut self) {
        self.kind = if self.copies == 1 {
            LayoutKind::Concat
        } else {
            LayoutKind::Mirror
        };
        (self.columns, self.is_undersized, self.has_files) = (1, false, true);
        self.pool_bytes.fill(64 << 20);
        self.volume_bytes = VOLUME_BYTES;
    }

    /// Gives the mount direct clients: they write a mirror, and one machine has power or not.
    pub(super) fn set_direct_clients(&mut self) {
        (self.has_direct_clients, self.damaged_brick) = (true, None);
        if self.copies == 1 {
            (self.copies, self.kind) = (2, LayoutKind::Mirror);
            let pool = self.pool_bytes[0];
            self.pool_bytes.resize(self.pool_bytes.len().max(2), pool);
        }
        // Space for the replica.
        let pool = self.pool_bytes[0];
        let wanted = (self.copies + 1).min(LEGS_MAX);
        self.pool_bytes
            .resize(self.pool_bytes.len().max(wanted), pool);
    }
}
