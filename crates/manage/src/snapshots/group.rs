//! The order of steps in which several volumes are cut at one moment.
//!
//! Pure: the caller carries each action out, and says for each volume whether it worked. Then it asks for the next action.
//!
//! ```text
//!  prepare (clients) ── prepare the legs of unattached volumes ── raise (clients) ── check ── finish (clients) ── check ── commit
//!       └───────────────────────────┴─ a failure ──┴────────────────┴─────────┴── abandon (clients) ── give up
//! ```
//!
//! Invariants:
//! - No client gets the order to finish before all of them have said that their changes wait, and before the check has found
//!   each volume attached as at the beginning. So there is a moment at which no volume takes changes.
//! - The group is committed only if each client had its changes wait until the order to finish.
//! - Each client that may hold changes back gets the order to finish or to abandon. If that does not reach it, its own limit
//!   ends the wait.

use super::orders::CutStep;

/// The next action for a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GroupAction {
    /// Order this step from the clients of these volumes, and wait for all answers.
    Order(CutStep, Vec<usize>),
    /// Prepare the legs of these volumes, which no client has attached.
    PrepareLegs(Vec<usize>),
    /// Check that no volume was attached, detached or got another layout since the beginning.
    Check,
    /// Commit the snapshots of all volumes.
    Commit,
    /// Make none of the snapshots.
    GiveUp,
}

/// The last action that was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum GroupPhase {
    New,
    Prepare,
    PrepareLegs,
    Raise,
    RaiseCheck,
    Finish,
    FinishCheck,
    Ended,
}

/// A group of volumes that is being cut.
#[derive(Clone, Debug)]
pub(crate) struct GroupCut {
    /// By volume: whether a client has attached it.
    clients: Vec<bool>,
    phase: GroupPhase,
    has_failed: bool,
}

impl GroupCut {
    /// A group of volumes; each says whether a client has attached it.
    pub(crate) fn new(clients: impl Iterator<Item = bool>) -> GroupCut {
        GroupCut {
            clients: clients.collect(),
            phase: GroupPhase::New,
            has_failed: false,
        }
    }

    /// Notes that the last action failed for a volume.
    pub(crate) fn fail(&mut self) {
        self.has_failed = true;
    }

    /// The next action. The caller has carried the one before out.
    pub(crate) fn next(&mut self) -> GroupAction {
        if self.has_failed && self.phase < GroupPhase::Ended {
            let may_wait = self.phase >= GroupPhase::Prepare;
            self.phase = GroupPhase::Ended;
            if may_wait && self.clients.contains(&true) {
                return GroupAction::Order(CutStep::Abandon, self.volumes(true));
            }
        }
        let (phase, action) = match self.phase {
            GroupPhase::New => (GroupPhase::Prepare, self.order(CutStep::Prepare)),
            GroupPhase::Prepare => (
                GroupPhase::PrepareLegs,
                GroupAction::PrepareLegs(self.volumes(false)),
            ),
            GroupPhase::PrepareLegs => (GroupPhase::Raise, self.order(CutStep::Raise)),
            GroupPhase::Raise => (GroupPhase::RaiseCheck, GroupAction::Check),
            GroupPhase::RaiseCheck => (GroupPhase::Finish, self.order(CutStep::Finish)),
            GroupPhase::Finish => (GroupPhase::FinishCheck, GroupAction::Check),
            GroupPhase::FinishCheck => (GroupPhase::Ended, GroupAction::Commit),
            GroupPhase::Ended => (GroupPhase::Ended, GroupAction::GiveUp),
        };
        self.phase = phase;
        action
    }

    fn order(&self, step: CutStep) -> GroupAction {
        GroupAction::Order(step, self.volumes(true))
    }

    /// The volumes with a client, or those without.
    fn volumes(&self, have_client: bool) -> Vec<usize> {
        let volumes = self.clients.iter().enumerate();
        let chosen = volumes.filter(|(_, has_client)| **has_client == have_client);
        chosen.map(|(number, _)| number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The changes of one volume, as its client handles them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    enum Changes {
        #[default]
        GoOn,
        Prepared,
        Wait,
        /// They got the stamp of the snapshot.
        Stamped,
        /// The client is dead, or its limit has ended the wait.
        Lost,
    }

    struct GroupScenario {
        group: GroupCut,
        clients: Vec<bool>,
        changes: Vec<Changes>,
        /// The action, counted from 0, that fails for this volume.
        fault: Option<(usize, usize)>,
        is_over: bool,
    }

    impl GroupScenario {
        fn new(clients: &[bool], fault: Option<(usize, usize)>) -> GroupScenario {
            GroupScenario {
                group: GroupCut::new(clients.iter().copied()),
                clients: clients.to_vec(),
                changes: vec![Changes::default(); clients.len()],
                fault,
                is_over: false,
            }
        }

        /// Carries one action out. Returns whether the snapshots are committed, at the end.
        fn step(&mut self, number: usize) -> Option<bool> {
            let failing = self.fault.filter(|(at, _)| *at == number).map(|it| it.1);
            match self.group.next() {
                GroupAction::Order(step, volumes) => {
                    self.is_over |= step == CutStep::Finish && !self.is_one_moment();
                    for volume in volumes {
                        assert!(self.clients[volume], "only clients get orders");
                        self.take(step, volume, failing == Some(volume));
                    }
                }
                GroupAction::PrepareLegs(volumes) => {
                    assert!(volumes.iter().all(|&volume| !self.clients[volume]));
                    if failing.is_some_and(|it| volumes.contains(&it)) {
                        self.group.fail();
                    }
                }
                GroupAction::Check if failing.is_some() => self.group.fail(),
                GroupAction::Check => {}
                GroupAction::Commit => return Some(true),
                GroupAction::GiveUp => return Some(false),
            }
            None
        }

        fn take(&mut self, step: CutStep, volume: usize, fails: bool) {
            let wanted = match step {
                CutStep::Prepare => Changes::Prepared,
                CutStep::Raise => Changes::Wait,
                CutStep::Finish => Changes::Stamped,
                CutStep::Abandon => Changes::GoOn,
                CutStep::Whole => panic!("a group goes in steps"),
            };
            self.changes[volume] = match (fails, self.changes[volume]) {
                (_, Changes::Lost) => Changes::Lost,
                (true, _) => Changes::Lost,
                (false, _) => wanted,
            };
            if fails {
                self.group.fail();
            }
        }

        /// Whether no change has got a new stamp before the changes of all volumes waited.
        fn is_one_moment(&self) -> bool {
            let is_held = |it: &Changes| matches!(it, Changes::Wait | Changes::Stamped);
            let volumes = self.clients.iter().zip(&self.changes);
            volumes
                .filter(|(has_client, _)| **has_client)
                .all(|(_, it)| is_held(it))
        }
    }

    fn run(clients: &[bool], fault: Option<(usize, usize)>) -> (bool, GroupScenario) {
        let mut world = GroupScenario::new(clients, fault);
        for number in 0..20 {
            if let Some(is_committed) = world.step(number) {
                return (is_committed, world);
            }
        }
        panic!("it has no end");
    }

    /// The commit, counted from 0.
    const LAST_ACTION: usize = 6;

    const GROUPS: [&[bool]; 4] = [
        &[true, true],
        &[true, false, true],
        &[false, false],
        &[true],
    ];

    #[test]
    fn group_without_losses_is_one_moment() {
        for clients in GROUPS {
            let (is_committed, world) = run(clients, None);
            assert!(is_committed && !world.is_over, "{clients:?}");
        }
    }

    /// A client dies or is too late, a leg is lost, a volume changes: at each action, for each volume.
    #[test]
    fn each_loss_fails_the_group_and_ends_all_waits() {
        for clients in GROUPS {
            for at in 0..=LAST_ACTION {
                for volume in 0..clients.len() {
                    let (is_committed, world) = run(clients, Some((at, volume)));
                    assert!(!world.is_over, "{clients:?} {at} {volume}");
                    let is_waiting = world.changes.contains(&Changes::Wait);
                    assert!(
                        !is_waiting,
                        "{clients:?} {at} {volume}: {:?}",
                        world.changes
                    );
                    let has_lost = world.changes.contains(&Changes::Lost);
                    assert!(!(is_committed && has_lost), "{clients:?} {at} {volume}");
                }
            }
        }
    }

    /// A manager that dies has committed nothing, and the clients' own limits end their waits.
    #[test]
    fn nothing_is_committed_before_the_last_action() {
        for clients in GROUPS {
            let mut world = GroupScenario::new(clients, None);
            let ends = (0..20).find(|&number| world.step(number).is_some());
            assert_eq!(ends, Some(LAST_ACTION), "{clients:?}");
        }
    }
}
