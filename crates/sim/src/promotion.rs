//! A promotion: all bricks with an in-sync copy are dead or out of reach, and the manager promotes
//! the asynchronous replica.
//!
//! Faults are cleared first, until the replica is active, because that is rare among faults. They
//! return, and are cleared once more until a client has read the replica. Lost copies stay lost
//! until faults restore them, or the history ends.

use crate::brick_host::CrashKind;
use crate::client::VolumeClient;
use crate::cluster::tell;
use crate::final_check::STEPS_MAX;
use crate::manager_host::replica_leg;
use crate::network::Peer;
use crate::rng::SimRng;
use crate::scenario::Scenario;
use pagemesh_base::layout::{Layout, LegState};
use pagemesh_base::rng::SplitMix64;

/// Maximum of steps until a promotion begins.
const STEPS_BEFORE_MAX: u64 = 2500;
/// Maximum of steps until the replica is active and no in-sync copy is left.
const REPLICA_STEPS_MAX: u32 = 40_000;
/// Maximum of those steps in which changes keep it busy.
const BUSY_STEPS_MAX: u32 = 2000;
const PROMOTION_STEPS_MAX: u32 = 3000;
/// Odds that a step lets time pass, until the manager takes bricks for dead.
const TIME_STEP_ODDS: u64 = 40;
const TIME_STEP_US_MAX: u64 = 1_000_000;
/// Maximum of steps for which the replica may lag first.
const LAG_STEPS_MAX: u64 = 200;

/// The actor that promotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PromotionTrigger {
    /// An operator, once the other bricks are dead.
    Operator,
    /// An operator, by force.
    OperatorForced,
    /// The manager, for a client that asks again.
    Manager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum PromotionStage {
    /// Nothing has happened yet; this many steps to go.
    Waiting(u32),
    /// The replica may be slow, for this many more steps.
    Lagging(u32),
    /// No in-sync copy is left.
    CopiesLost,
    /// A client is to attach and to read all.
    Promoted,
    Finished,
}

/// See [`Scenario::step_promotion`].
pub(crate) struct PromotionFault {
    rng: SplitMix64,
    trigger: PromotionTrigger,
    stage: PromotionStage,
    steps: u32,
}

impl PromotionFault {
    pub(crate) fn new(mut rng: SplitMix64) -> PromotionFault {
        PromotionFault {
            trigger: [
                PromotionTrigger::Operator,
                PromotionTrigger::OperatorForced,
                PromotionTrigger::Manager,
                PromotionTrigger::Manager,
            ][rng.below(4) as usize],
            stage: PromotionStage::Waiting(rng.below(STEPS_BEFORE_MAX) as u32),
            rng,
            steps: 0,
        }
    }

    /// Whether the manager may promote the replica by itself.
    pub(crate) fn is_automatic(&self) -> bool {
        self.trigger == PromotionTrigger::Manager
    }

    fn set_stage(&mut self, stage: PromotionStage) {
        (self.stage, self.steps) = (stage, 0);
    }
}

impl Scenario {
    /// Whether a promotion is in progress, so that no other fault may happen.
    pub(crate) fn is_promotion_under_way(&self) -> bool {
        let stage = self.promotion.as_ref().map(|it| it.stage);
        matches!(
            stage,
            Some(PromotionStage::CopiesLost | PromotionStage::Promoted)
        )
    }

    /// Cuts the next client off from the unreachable bricks, too.
    pub(crate) fn partition_next_client(&mut self) {
        for host in &self.unreachable_bricks {
            let peer = Peer::Client(self.next_client);
            self.cluster.net().partition(peer, *host, true, true);
        }
    }

    /// A client has attached: it may be the first with a promoted replica.
    pub(crate) fn check_promotion(&mut self, attachment: u32) {
        let promoted = self.manager_host.promotion_epoch();
        if self.plan.has_files {
            return;
        }
        if self.checker.last_promotion_epoch() < promoted && promoted <= attachment {
            self.checker.record_promotion(promoted, self.sectors);
        }
    }

    /// The next step of a promotion, if its condition holds.
    pub(crate) fn step_promotion(&mut self) -> Result<(), String> {
        let Some(mut promotion) = self.promotion.take() else {
            return Ok(());
        };
        // The manager may already have promoted the replica; a second promotion is impossible.
        if promotion.stage < PromotionStage::Promoted && self.manager_host.promotion_epoch() > 0 {
            promotion.set_stage(PromotionStage::Promoted);
        }
        promotion.steps += 1;
        match promotion.stage {
            PromotionStage::Waiting(0) if self.takeover.is_none() && self.crash_trap.is_none() => {
                self.wait_for_replica(&mut promotion)?;
            }
            PromotionStage::Waiting(steps) => {
                promotion.stage = PromotionStage::Waiting(steps.saturating_sub(1))
            }
            PromotionStage::Lagging(0) => self.remove_in_sync_copies(&mut promotion),
            PromotionStage::Lagging(steps) => {
                self.submit()?;
                promotion.stage = PromotionStage::Lagging(steps - 1);
            }
            PromotionStage::CopiesLost if promotion.steps > PROMOTION_STEPS_MAX => {
                self.unreachable_bricks.clear();
                self.clear_faults();
                promotion.set_stage(PromotionStage::Finished);
            }
            PromotionStage::CopiesLost if promotion.rng.one_in(TIME_STEP_ODDS) => {
                let by = promotion.rng.micros_below(TIME_STEP_US_MAX);
                self.advance_time(by);
                self.request_promotion(&promotion);
            }
            PromotionStage::CopiesLost => {}
            PromotionStage::Promoted => self.read_promoted_copy(&mut promotion),
            PromotionStage::Finished => {}
        }
        self.promotion = Some(promotion);
        Ok(())
    }

    fn active_replica(&self) -> Option<(usize, Layout)> {
        let layout = self.manager_host.manager()?.show(&self.name).ok()?.layout;
        let (copy, leg) = replica_leg(&layout)?;
        (leg.state == LegState::AsyncReplica).then_some((copy, layout.clone()))
    }

    /// Clears all faults until the replica is active; the replica may be slow.
    fn wait_for_replica(&mut self, promotion: &mut PromotionFault) -> Result<(), String> {
        self.hot_page = None;
        self.clear_faults();
        let is_busy = promotion.rng.one_in(2);
        if promotion.rng.one_in(2) {
            // The replica was added last.
            let copies = self.plan.copies;
            let layout = self.layout()?;
            let host = self.hosts_of(&layout, |it| it == copies)[0];
            tell!(
                self.cluster,
                "brick {host}, which holds the replica, is slow"
            );
            self.cluster.net().set_slow(host, true);
        }
        for step in 0..REPLICA_STEPS_MAX {
            if self.active_replica().is_some() {
                let most = if is_busy { 4 } else { LAG_STEPS_MAX };
                let steps = promotion.rng.below(most) as u32;
                promotion.set_stage(PromotionStage::Lagging(steps));
                return Ok(());
            }
            if is_busy && step < BUSY_STEPS_MAX && promotion.rng.one_in(4) {
                self.submit()?;
            }
            self.step()?;
            self.end_fenced_client();
        }
        Err("a replica does not become active".into())
    }

    fn hosts_of(&self, layout: &Layout, is_meant: impl Fn(usize) -> bool) -> Vec<usize> {
        let legs = layout.columns().flat_map(|column| column.legs.iter());
        let legs = legs.enumerate().filter(|(copy, _)| is_meant(*copy));
        let hosts = legs.filter_map(|(_, leg)| self.cluster.host_of(leg.brick));
        hosts.collect()
    }

    /// Removes every in-sync copy: its brick dies, or is out of reach for all but the client that
    /// has the volume, which may continue.
    fn remove_in_sync_copies(&mut self, promotion: &mut PromotionFault) {
        let followed = self.active_replica();
        let Some((copy, layout)) = followed.filter(|_| self.takeover.is_none()) else {
            return promotion.set_stage(PromotionStage::Waiting(0));
        };
        self.crash_trap = None;
        self.hot_page = None;
        self.manager_host.clear_faults();
        if promotion.rng.one_in(2) {
            self.cluster.net().clear_faults();
        }
        let follower = self.hosts_of(&layout, |it| it == copy)[0];
        if let Some(running) = self.cluster.running_brick(follower) {
            running.medium.disarm_fuse();
        }
        self.cluster.start_brick(follower, None, false);
        self.manager_host.send_heartbeat(follower);
        let is_cut_off = promotion.rng.one_in(3);
        for host in self.hosts_of(&layout, |it| it != copy) {
            if is_cut_off {
                tell!(self.cluster, "brick {host} is out of reach for others");
                self.cluster
                    .net()
                    .partition(Peer::Manager, host, true, true);
                self.unreachable_bricks.push(host);
            } else if promotion.rng.one_in(2) {
                self.cluster.kill_brick(host, CrashKind::Process);
            } else {
                self.cluster.kill_brick(host, CrashKind::Power);
            }
        }
        if promotion.rng.one_in(2) {
            while !self.clients.is_empty() {
                self.crash_client(0);
            }
        }
        promotion.set_stage(PromotionStage::CopiesLost);
    }

    /// Requests the promotion of the replica.
    fn request_promotion(&mut self, promotion: &PromotionFault) {
        let Some((copy, _)) = self.active_replica() else {
            return;
        };
        match promotion.trigger {
            PromotionTrigger::Manager if self.clients.iter().all(|it| it.attachment > 0) => {
                self.start_client_with(true);
            }
            PromotionTrigger::Manager => {}
            way => {
                self.manager_host
                    .promote(&self.name, copy, way == PromotionTrigger::OperatorForced)
            }
        }
    }

    /// The next client attaches and reads all.
    fn read_promoted_copy(&mut self, promotion: &mut PromotionFault) {
        let promoted = self.manager_host.promotion_epoch();
        let is_next = |it: &VolumeClient| it.attachment == 0 || it.attachment >= promoted;
        if !self.clients.iter().any(is_next) {
            return self.start_client();
        }
        let is_known = match self.plan.has_files {
            true => self.has_read_files_since(promoted),
            false if self.checker.last_promotion_epoch() < promoted => return,
            false => !self.checker.awaits_reads(),
        };
        if is_known {
            tell!(self.cluster, "the contents of the replica are known");
            self.report.count(promotion.trigger.event_name(), 1);
            self.unreachable_bricks.clear();
            return promotion.set_stage(PromotionStage::Finished);
        }
        if self.plan.has_files {
            return;
        }
        let is_ready =
            |it: &VolumeClient| it.attachment >= promoted && it.is_idle() && !it.is_stopped();
        if let Some(at) = self.clients.iter().position(is_ready) {
            if self.clients[at].threads.is_empty() {
                return self.crash_client(at);
            }
            for part in self.parts() {
                self.read(at, 0, part);
            }
        }
    }

    /// Runs until a promotion that has begun is finished.
    pub(crate) fn run_until_promoted(&mut self) -> Result<(), String> {
        let stage = self.promotion.as_ref().map(|it| it.stage);
        if self.manager_host.promotion_epoch() == 0 || stage == Some(PromotionStage::Finished) {
            self.promotion = None;
            self.unreachable_bricks.clear();
            return Ok(());
        }
        for _ in 0..STEPS_MAX {
            self.step_promotion()?;
            if self
                .promotion
                .as_ref()
                .is_none_or(|it| it.stage == PromotionStage::Finished)
            {
                return Ok(());
            }
            self.step()?;
        }
        Err("no client attaches a promoted copy".into())
    }
}

impl PromotionTrigger {
    fn event_name(self) -> &'static str {
        match self {
            PromotionTrigger::Operator => "copy promoted by an operator",
            PromotionTrigger::OperatorForced => "copy promoted by force",
            PromotionTrigger::Manager => "copy promoted by the manager",
        }
    }
}
