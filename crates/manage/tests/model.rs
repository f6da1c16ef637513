//! The manager against a small model: random histories of a few volumes on a few bricks, with
//! crashes in between.

use crate::cluster;
use cluster::{Cluster, MIB, create_request, legs, name, registration};
use pagemesh_base::layout::{EpochNumber, LegState, VolumeName};
use pagemesh_manage::LayoutKind;
use pagemesh_manage::Manager;
use pagemesh_manage::wire::{
    AttachReplica, AttachVolume, ChangeLegs, CreateVolume, DetachVolume, GrowVolume, LegChange,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

const NAMES: [&str; 3] = ["a", "b", "c"];
const BRICKS: usize = 4;
const DECADES_S: i64 = 20 * 365 * 86_400;

#[derive(Clone, Debug)]
enum ModelOp {
    Create {
        name: usize,
        kind: LayoutKind,
        pages: u64,
        copies: Option<usize>,
    },
    Grow {
        name: usize,
        pages: u64,
    },
    Delete {
        name: usize,
        force: bool,
    },
    Copy {
        name: usize,
        asynchronous: bool,
    },
    Attach {
        name: usize,
    },
    Detach {
        name: usize,
        back: u32,
    },
    Legs {
        name: usize,
        lag: u32,
        back: Option<u32>,
        turns: Vec<(usize, usize, usize, LegState)>,
    },
    BrickBehavior {
        brick: usize,
        mood: cluster::BrickBehavior,
    },
    Silence {
        brick: usize,
    },
    Sweep,
    Crash,
    /// The wall clock jumps; it must have no effect.
    Jump {
        by_s: i64,
    },
}

fn state() -> impl Strategy<Value = LegState> {
    use LegState::{AsyncReplica, InSync, Stale, Syncing};
    prop::sample::select(vec![InSync, Stale, Syncing, AsyncReplica])
}

fn model_op() -> impl Strategy<Value = ModelOp> {
    let name = || 0..NAMES.len();
    let kinds = vec![
        LayoutKind::Concat,
        LayoutKind::Stripe,
        LayoutKind::Mirror,
        LayoutKind::StripeMirror,
    ];
    let moods = {
        use cluster::BrickBehavior::{
            FailsAfterCreate, Full, Healthy, LosesAnswers, RefusesDelete, Unreachable,
        };
        vec![
            Healthy,
            Healthy,
            Healthy,
            Unreachable,
            Full,
            LosesAnswers,
            FailsAfterCreate,
            RefusesDelete,
        ]
    };
    let turn = (0..2usize, 0..2usize, 0..3usize, state());
    prop_oneof![
        3 => (name(), prop::sample::select(kinds), 0..80u64, prop::option::of(1..4usize))
            .prop_map(|(name, kind, pages, copies)| ModelOp::Create { name, kind, pages, copies }),
        2 => (name(), 0..200u64).prop_map(|(name, pages)| ModelOp::Grow { name, pages }),
        1 => (name(), any::<bool>()).prop_map(|(name, force)| ModelOp::Delete { name, force }),
        2 => (name(), any::<bool>())
            .prop_map(|(name, asynchronous)| ModelOp::Copy { name, asynchronous }),
        2 => name().prop_map(|name| ModelOp::Attach { name }),
        1 => (name(), 0..3u32).prop_map(|(name, back)| ModelOp::Detach { name, back }),
        8 => (name(), 0..2u32, prop::option::of(0..2u32), prop::collection::vec(turn, 1..3))
            .prop_map(|(name, lag, back, turns)| ModelOp::Legs { name, lag, back, turns }),
        1 => (0..BRICKS, prop::sample::select(moods)).prop_map(|(brick, mood)| ModelOp::BrickBehavior { brick, mood }),
        1 => (0..BRICKS).prop_map(|brick| ModelOp::Silence { brick }),
        1 => Just(ModelOp::Sweep),
        1 => Just(ModelOp::Crash),
        1 => (-DECADES_S..DECADES_S).prop_map(|by_s| ModelOp::Jump { by_s }),
    ]
}

/// An operation on a volume that may have an asynchronous copy.
fn replica_op() -> impl Strategy<Value = ModelOp> {
    prop_oneof![
        20 => (0..3usize, state()).prop_map(|(leg, to)| ModelOp::Legs {
            name: 0,
            lag: 0,
            back: None,
            turns: vec![(0, 0, leg, to)],
        }),
        2 => any::<bool>().prop_map(|asynchronous| ModelOp::Copy { name: 0, asynchronous }),
        2 => Just(ModelOp::Attach { name: 0 }),
        1 => (0..200u64).prop_map(|pages| ModelOp::Grow { name: 0, pages }),
        1 => Just(ModelOp::Crash),
    ]
}

/// The expected state of a volume.
#[derive(Clone, Debug)]
struct VolumeModel {
    epoch: u32,
    bytes: u64,
    attached: Option<u32>,
    /// By segment, column and leg, with the epoch of the column's oldest loss.
    legs: Vec<Vec<(Vec<LegState>, u32)>>,
    /// The number of the asynchronous copy.
    asynchronous: Option<usize>,
}

/// Sets the epoch of a column's oldest loss after a change to `epoch`; returns false if it has no
/// in-sync leg.
fn update_loss((legs, lost_since): &mut (Vec<LegState>, u32), epoch: u32) -> bool {
    let is_whole = |leg: &LegState| matches!(leg, LegState::InSync | LegState::AsyncReplica);
    if legs.iter().all(is_whole) {
        *lost_since = 0;
    } else if *lost_since == 0 {
        *lost_since = epoch;
    }
    legs.contains(&LegState::InSync)
}

impl VolumeModel {
    /// Makes the transitions if they are legal; returns whether they are.
    fn apply_transitions(&mut self, turns: &[(usize, usize, usize, LegState)]) -> bool {
        let mut next = self.legs.clone();
        let distinct: BTreeSet<_> = turns.iter().map(|t| (t.0, t.1, t.2)).collect();
        if distinct.len() < turns.len() {
            return false;
        }
        for &(segment, column, leg, to) in turns {
            use LegState::{AsyncReplica, InSync, Stale, Syncing};
            let columns = next.get_mut(segment);
            let Some((legs, _)) = columns.and_then(|columns| columns.get_mut(column)) else {
                return false;
            };
            let Some(state) = legs.get_mut(leg) else {
                return false;
            };
            let allowed: &[_] = match self.asynchronous == Some(leg) {
                true => &[(Stale, AsyncReplica), (AsyncReplica, Stale), (Stale, Stale)],
                false => &[
                    (InSync, Stale),
                    (Syncing, Stale),
                    (Stale, Syncing),
                    (Syncing, InSync),
                ],
            };
            if !allowed.contains(&(*state, to)) {
                return false;
            }
            *state = to;
        }
        let epoch = self.epoch + 1;
        let mut columns = next.iter_mut().flatten();
        if !columns.all(|column| update_loss(column, epoch)) {
            return false;
        }
        self.legs = next;
        self.epoch += 1;
        true
    }
}

struct ModelRun {
    cluster: Cluster,
    manager: Manager,
    model: BTreeMap<VolumeName, VolumeModel>,
    silent: BTreeSet<usize>,
    store: PathBuf,
    crashes: usize,
}

impl ModelRun {
    fn new() -> ModelRun {
        let cluster = Cluster::new(BRICKS);
        let manager = cluster.manager_with_bricks_alive();
        ModelRun {
            store: cluster.store(),
            crashes: 0,
            cluster,
            manager,
            model: BTreeMap::new(),
            silent: BTreeSet::new(),
        }
    }

    fn send_heartbeats(&self) {
        for number in (0..BRICKS).filter(|number| !self.silent.contains(number)) {
            self.manager
                .heartbeat(registration(number))
                .expect("welcome");
        }
    }

    fn apply(&mut self, act: &ModelOp) {
        let manager = &self.manager;
        match act {
            ModelOp::Create {
                name: at,
                kind,
                pages,
                copies,
            } => {
                let request = CreateVolume {
                    copies: *copies,
                    ..create_request(NAMES[*at], *kind, pages * 4096)
                };
                if let Ok(made) = manager.create(&request) {
                    assert!(*pages > 0 && !self.model.contains_key(&request.name));
                    assert!(made.volume.info.size_bytes >= pages * 4096);
                    let segments = made.volume.layout.segments.iter();
                    let columns = |segment: &pagemesh_base::layout::Segment| {
                        let columns = segment.columns.iter();
                        columns
                            .map(|column| (vec![LegState::InSync; column.legs.len()], 0))
                            .collect()
                    };
                    let model = VolumeModel {
                        epoch: 1,
                        bytes: made.volume.info.size_bytes,
                        attached: None,
                        legs: segments.map(columns).collect(),
                        asynchronous: None,
                    };
                    self.model.insert(request.name, model);
                }
            }
            ModelOp::Grow { name: at, pages } => {
                let size_bytes = pages * 4096;
                let grown = manager.grow(&name(NAMES[*at]), GrowVolume { size_bytes });
                if let Ok(grown) = grown {
                    let model = self.model.get_mut(&name(NAMES[*at])).expect("known");
                    assert!(size_bytes > model.bytes && model.asynchronous.is_none());
                    assert!(grown.volume.info.size_bytes >= size_bytes);
                    model.bytes = grown.volume.info.size_bytes;
                    model.epoch += 1;
                    for segment in &grown.volume.layout.segments[model.legs.len()..] {
                        let columns = segment.columns.iter();
                        let fresh = |column: &pagemesh_base::layout::Column| {
                            (vec![LegState::InSync; column.legs.len()], 0)
                        };
                        model.legs.push(columns.map(fresh).collect());
                    }
                }
            }
            ModelOp::Delete { name: at, force } => {
                let known = self.model.get(&name(NAMES[*at]));
                let allowed = known.is_some_and(|model| *force || model.attached.is_none());
                let deleted = manager.delete(&name(NAMES[*at]), *force);
                assert_eq!(deleted.is_ok(), allowed, "{deleted:?}");
                if allowed {
                    self.model.remove(&name(NAMES[*at]));
                }
            }
            ModelOp::Copy {
                name: at,
                asynchronous,
            } => {
                let asynchronous = *asynchronous;
                let request = AttachReplica {
                    asynchronous,
                    ..AttachReplica::default()
                };
                if manager.attach_replica(&name(NAMES[*at]), request).is_ok() {
                    let model = self.model.get_mut(&name(NAMES[*at])).expect("known");
                    let mut columns: Vec<_> = model.legs.iter_mut().flatten().collect();
                    let number = columns[0].0.len();
                    assert!(number < 3);
                    if asynchronous {
                        assert!(columns.len() == 1 && model.asynchronous.is_none());
                        model.asynchronous = Some(number);
                    }
                    model.epoch += 1;
                    for column in &mut columns {
                        column.0.push(LegState::Stale);
                        assert!(update_loss(column, model.epoch));
                    }
                }
            }
            ModelOp::Attach { name: at } => {
                let client = "c".to_owned();
                let attached = manager.attach(
                    &name(NAMES[*at]),
                    &AttachVolume {
                        client,
                        unreachable: false,
                        process: None,
                        replaces: None,
                        receive: false,
                    },
                );
                let known = self.model.get_mut(&name(NAMES[*at]));
                assert_eq!(attached.is_ok(), known.is_some());
                if let Some(model) = known {
                    model.epoch += 1;
                    model.attached = Some(model.epoch);
                }
            }
            ModelOp::Detach { name: at, back } => {
                let known = self.model.get_mut(&name(NAMES[*at]));
                let epoch = known
                    .as_ref()
                    .map_or(0, |model| model.epoch.saturating_sub(*back));
                let attachment = Some(EpochNumber(epoch));
                let detached = manager.detach(&name(NAMES[*at]), DetachVolume { attachment });
                assert_eq!(detached.is_ok(), known.is_some());
                if let Some(model) = known {
                    let ends = model.attached == Some(epoch);
                    assert_eq!(detached.expect("answered").detached, ends);
                    if ends {
                        model.attached = None;
                    }
                }
            }
            ModelOp::Legs {
                name: at,
                lag,
                back,
                turns,
            } => self.change_legs(*at, *lag, *back, turns),
            ModelOp::BrickBehavior { brick, mood } => self.cluster.fakes[*brick].set(*mood),
            ModelOp::Silence { brick } => {
                if !self.silent.remove(brick) {
                    self.silent.insert(*brick);
                }
                self.cluster.clock.advance(Duration::from_secs(8));
                self.send_heartbeats();
            }
            ModelOp::Jump { by_s } => self.cluster.clock.jump_wall_clock(*by_s),
            ModelOp::Sweep => manager.sweep(),
            ModelOp::Crash => {
                let image = self.cluster.dir.path().join(self.crashes.to_string());
                std::fs::copy(&self.store, &image).expect("a copy");
                self.manager = self.cluster.manager_on(&image);
                self.store = image;
                self.crashes += 1;
                self.send_heartbeats();
            }
        }
    }

    fn change_legs(
        &mut self,
        at: usize,
        lag: u32,
        back: Option<u32>,
        turns: &[(usize, usize, usize, LegState)],
    ) {
        let known = self.model.get_mut(&name(NAMES[at]));
        let epoch = known.as_ref().map_or(1, |model| model.epoch);
        let attached = known.as_ref().and_then(|model| model.attached);
        let asks = back.map(|back| attached.unwrap_or(epoch).saturating_sub(back));
        let change = |&(segment, column, leg, to): &(usize, usize, usize, LegState)| LegChange {
            segment,
            column,
            leg,
            to,
            note: None,
        };
        let request = ChangeLegs {
            expected: EpochNumber(epoch.saturating_sub(lag)),
            attachment: asks.map(EpochNumber),
            changes: turns.iter().map(change).collect(),
        };
        let changed = self.manager.change_legs(&name(NAMES[at]), &request);
        let allowed = known.is_some_and(|model| {
            lag == 0
                && asks.is_none_or(|asks| attached == Some(asks))
                && model.apply_transitions(turns)
        });
        assert_eq!(changed.is_ok(), allowed, "{request:?}: {changed:?}");
    }

    fn check(&self) {
        let listed: Vec<_> = self
            .manager
            .volumes()
            .into_iter()
            .map(|info| info.name)
            .collect();
        assert_eq!(listed, self.model.keys().cloned().collect::<Vec<_>>());
        for (name, model) in &self.model {
            let volume = self.manager.show(name).expect("shown");
            assert_eq!(volume.layout.epoch.0, model.epoch);
            assert_eq!(volume.layout.size_bytes(), model.bytes);
            assert_eq!(
                volume.info.attached.map(|attached| attached.epoch.0),
                model.attached
            );
            let found: Vec<Vec<_>> = volume
                .layout
                .segments
                .iter()
                .map(|segment| {
                    let states = |column: &pagemesh_base::layout::Column| -> Vec<_> {
                        column.legs.iter().map(|leg| leg.state).collect()
                    };
                    segment
                        .columns
                        .iter()
                        .map(|column| (states(column), column.lost_since.0))
                        .collect()
                })
                .collect();
            let wanted: Vec<Vec<_>> = model
                .legs
                .iter()
                .map(|columns| {
                    columns
                        .iter()
                        .map(|(legs, lost_since)| (legs.clone(), *lost_since))
                        .collect()
                })
                .collect();
            assert_eq!(found, wanted);
            // Each brick is its own failure domain.
            for column in volume.layout.segments.iter().flat_map(|s| &s.columns) {
                let bricks: BTreeSet<_> = column.legs.iter().map(|leg| leg.brick).collect();
                assert_eq!(bricks.len(), column.legs.len());
            }
            // Every slice of a volume exists, because no fake brick loses slices.
            for leg in legs(&volume.layout) {
                assert!(self.cluster.slices().contains(&(leg.brick, leg.slice)));
            }
        }
    }

    fn finish(mut self) {
        self.silent.clear();
        self.cluster.reset_bricks();
        self.cluster.sweep_until_certain(&self.manager);
        self.check();
        self.cluster.assert_no_orphans(&self.manager);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 24,
        rng_seed: RngSeed::Fixed(2),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_match_model(acts in prop::collection::vec(model_op(), 1..40)) {
        let mut life = ModelRun::new();
        for act in &acts {
            life.apply(act);
            life.check();
        }
        life.finish();
    }

    #[test]
    fn async_replica_operations_match_model(
        comes_first in any::<bool>(),
        acts in prop::collection::vec(replica_op(), 1..40),
    ) {
        let mut life = ModelRun::new();
        life.apply(&ModelOp::Create {
            name: 0,
            kind: LayoutKind::Concat,
            pages: MIB / 4096,
            copies: None,
        });
        for asynchronous in [comes_first, !comes_first] {
            life.apply(&ModelOp::Copy { name: 0, asynchronous });
        }
        for act in &acts {
            life.apply(act);
            life.check();
        }
        life.finish();
    }
}

/// Liveness of bricks and permission to attach depend on a clock that does not jump.
#[test]
fn wall_clock_jump_changes_nothing() {
    let mut life = ModelRun::new();
    life.apply(&ModelOp::Create {
        name: 0,
        kind: LayoutKind::Mirror,
        pages: MIB / 4096,
        copies: None,
    });
    let alive = |life: &ModelRun| life.manager.status().bricks_alive;
    // Forwards, backwards, and to before 1970.
    for by_s in [DECADES_S, -DECADES_S, -4 * DECADES_S] {
        life.cluster.clock.jump_wall_clock(by_s);
        assert_eq!(alive(&life), BRICKS, "{by_s}");
        life.apply(&ModelOp::Attach { name: 0 });
        life.check();
        life.apply(&ModelOp::Legs {
            name: 0,
            lag: 0,
            back: Some(0),
            turns: vec![(0, 0, 0, LegState::Stale)],
        });
        life.check();
        life.apply(&ModelOp::Crash);
        life.check();
        life.apply(&ModelOp::Legs {
            name: 0,
            lag: 0,
            back: None,
            turns: vec![(0, 0, 0, LegState::Syncing)],
        });
        life.apply(&ModelOp::Legs {
            name: 0,
            lag: 0,
            back: None,
            turns: vec![(0, 0, 0, LegState::InSync)],
        });
        life.check();
        // Missing heartbeats count, independent of the wall clock.
        life.cluster.clock.advance(Duration::from_secs(8));
        assert_eq!(alive(&life), 0, "{by_s}");
        life.send_heartbeats();
        assert_eq!(alive(&life), BRICKS, "{by_s}");
    }
    life.finish();
}

/// A slot had four bits for the number of a loss.
#[test]
fn losses_are_not_limited() {
    let mut life = ModelRun::new();
    life.apply(&ModelOp::Create {
        name: 0,
        kind: LayoutKind::Mirror,
        pages: MIB / 4096,
        copies: None,
    });
    use LegState::{InSync, Stale, Syncing};
    for turn in 0..40 {
        for to in [Stale, Syncing, InSync] {
            life.change_legs(0, 0, None, &[(0, 0, turn % 2, to)]);
            life.check();
        }
        let lost_since = life.model[&name("a")].legs[0][0].1;
        assert_eq!(lost_since, 0, "turn {turn}");
    }
}
