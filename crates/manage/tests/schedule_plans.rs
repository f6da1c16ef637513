//! The planner of schedules against a simple model, over years of simulated time: with downtimes, and clocks that step back and forth.

use pagemesh_manage::schedules::{
    CLASSES, ClassSet, Plan, Retention, ScheduledSnapshot, SnapshotClass, plan,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;
/// 2024-01-01.
const START: u64 = 1_704_067_200;

fn set(classes: &[SnapshotClass]) -> ClassSet {
    let mut set = ClassSet::default();
    classes.iter().for_each(|class| set.insert(*class));
    set
}

fn snapshot(epoch: u32, unix_s: u64, classes: ClassSet) -> ScheduledSnapshot {
    ScheduledSnapshot {
        name: format!("s{epoch}").parse().expect("a name"),
        epoch,
        unix_s,
        classes,
        is_needed: false,
    }
}

/// A period of a class, as its start and its end, computed from lengths of days alone.
fn days_period(class: SnapshotClass, unix_s: u64) -> u64 {
    let day = unix_s / DAY;
    match class {
        SnapshotClass::Frequent => unix_s / (15 * 60),
        SnapshotClass::Hourly => unix_s / HOUR,
        SnapshotClass::Daily => day,
        // 2024-01-01 is a Monday.
        SnapshotClass::Weekly => (day + 7 * 10_000 - START / DAY) / 7,
        SnapshotClass::Monthly | SnapshotClass::Yearly => {
            let (mut year, mut left) = (1970, day);
            let is_leap = |year: u64| {
                year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
            };
            while left >= 365 + u64::from(is_leap(year)) {
                left -= 365 + u64::from(is_leap(year));
                year += 1;
            }
            if class == SnapshotClass::Yearly {
                return year;
            }
            let february = 28 + u64::from(is_leap(year));
            let mut month = 0;
            for days in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
                if left < days {
                    break;
                }
                left -= days;
                month += 1;
            }
            year * 12 + month
        }
    }
}

/// A volume with a schedule.
struct Model {
    retention: Retention,
    now: u64,
    next_epoch: u32,
    snapshots: Vec<ScheduledSnapshot>,
    /// The periods in which a snapshot of a class was made.
    made: BTreeSet<(SnapshotClass, u64)>,
    /// The clock went back so far that a snapshot did not count as made. From then on, a period may get two.
    went_far_back: bool,
}

impl Model {
    fn plan(&self) -> Plan {
        plan(&self.retention, 15, &self.snapshots, self.now)
    }

    /// Carries the plan out after checks of it.
    fn run(&mut self) {
        let plan = self.plan();
        self.check_create(&plan);
        self.check_prune(&plan);
        self.snapshots.retain(|it| !plan.prune.contains(&it.name));
        if !plan.create.is_empty() {
            let new = snapshot(self.next_epoch, self.now, plan.create);
            self.snapshots.push(new);
            self.next_epoch += 1;
        }
    }

    fn check_create(&mut self, plan: &Plan) {
        for class in CLASSES {
            let period = days_period(class, self.now);
            let mut of_class = self.snapshots.iter().filter(|it| it.classes.has(class));
            let latest = self.now + 7 * DAY;
            let is_served = of_class
                .clone()
                .any(|it| days_period(class, it.unix_s) >= period && it.unix_s <= latest);
            self.went_far_back |= of_class.any(|it| it.unix_s > latest);
            let wanted = self.retention.of(class) > 0 && !is_served;
            assert_eq!(plan.create.has(class), wanted, "{class:?} at {}", self.now);
            if wanted {
                assert!(
                    self.made.insert((class, period)) || self.went_far_back,
                    "{class:?} twice in {period}"
                );
            }
        }
    }

    fn check_prune(&self, plan: &Plan) {
        for victim in &self.snapshots {
            let is_wanted = CLASSES.iter().any(|class| self.wants(*class, victim));
            let is_pruned = plan.prune.contains(&victim.name);
            let waits = self
                .snapshots
                .iter()
                .any(|it| it.unix_s > self.now + 7 * DAY);
            assert_eq!(plan.far_ahead.is_some(), waits);
            let is_spent = !is_wanted && !victim.is_needed && !waits;
            assert_eq!(is_pruned, is_spent, "{victim:?}");
            let is_listed = plan.needed.contains(&victim.name);
            assert_eq!(is_listed, !is_wanted && victim.is_needed, "{victim:?}");
        }
    }

    /// Whether a class keeps a snapshot: by number, or by age.
    fn wants(&self, class: SnapshotClass, snapshot: &ScheduledSnapshot) -> bool {
        if !snapshot.classes.has(class) {
            return false;
        }
        let count = u64::from(self.retention.of(class));
        let later = self.snapshots.iter();
        let later = later.filter(|it| it.classes.has(class) && it.epoch > snapshot.epoch);
        let is_recent = (later.count() as u64) < count;
        let period = days_period(class, snapshot.unix_s);
        is_recent || period + count > days_period(class, self.now)
    }
}

fn retention() -> impl Strategy<Value = Retention> {
    (0..5u32, 0..30u32, 0..10u32, 0..5u32, 0..5u32, 0..3u32).prop_map(
        |(frequent, hourly, daily, weekly, monthly, yearly)| Retention {
            frequent,
            hourly,
            daily,
            weekly,
            monthly,
            yearly,
        },
    )
}

/// A step of the clock, and whether a person holds or releases a snapshot after it.
fn step() -> impl Strategy<Value = (i64, Option<prop::sample::Index>)> {
    let time = prop_oneof![
        8 => 1..1200i64,
        8 => 1..(6 * HOUR as i64),
        2 => 1..(40 * DAY as i64),
        1 => -(3 * DAY as i64)..0,
    ];
    (
        time,
        prop::option::weighted(0.1, any::<prop::sample::Index>()),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// No class gets two snapshots in a period unless the clock goes far back, none that is due is left out, and none goes that a class, a hold or a target keeps.
    #[test]
    fn plans_follow_the_model(retention in retention(), steps in prop::collection::vec(step(), 1..400)) {
        let mut model = Model {
            retention,
            now: START,
            next_epoch: 2,
            snapshots: vec![],
            made: BTreeSet::new(),
            went_far_back: false,
        };
        for (seconds, held) in steps {
            model.now = model.now.saturating_add_signed(seconds).max(START);
            model.run();
            // A second look at the same time makes none, and deletes at most those that the new one replaces.
            prop_assert!(model.plan().create.is_empty());
            if let (Some(index), false) = (held, model.snapshots.is_empty()) {
                let held = index.get(&model.snapshots).epoch;
                let held = model.snapshots.iter_mut().find(|it| it.epoch == held);
                held.into_iter().for_each(|it| it.is_needed = !it.is_needed);
            }
        }
    }
}

/// Runs a schedule each ten minutes, and returns the numbers of snapshots by class at the end.
fn run_for(retention: Retention, seconds: u64) -> (Vec<usize>, usize) {
    let mut model = Model {
        retention,
        now: START,
        next_epoch: 2,
        snapshots: vec![],
        made: BTreeSet::new(),
        went_far_back: false,
    };
    let end = START + seconds;
    while model.now < end {
        model.run();
        model.now += 10 * 60;
    }
    model.run();
    let count = |class| {
        model
            .snapshots
            .iter()
            .filter(|it| it.classes.has(class))
            .count()
    };
    (CLASSES.map(count).to_vec(), model.snapshots.len())
}

#[test]
fn three_years_leave_as_many_as_the_retention_says() {
    let retention = Retention {
        frequent: 0,
        hourly: 24,
        daily: 7,
        weekly: 4,
        monthly: 6,
        yearly: 2,
    };
    let (by_class, total) = run_for(retention, 3 * 365 * DAY);
    // A snapshot of a coarse class is of the finer ones, too.
    assert!(total <= 24 + 7 + 4 + 6 + 2 + 1, "{total}");
    for (class, found) in CLASSES.iter().zip(by_class) {
        assert!(found >= retention.of(*class) as usize, "{class:?}: {found}");
    }
}

#[test]
fn downtime_is_caught_up_with_one_snapshot() {
    let retention = Retention {
        hourly: 3,
        daily: 3,
        ..Retention::default()
    };
    let both = set(&[SnapshotClass::Hourly, SnapshotClass::Daily]);
    let hourly = set(&[SnapshotClass::Hourly]);
    let before = [
        snapshot(2, START, both),
        snapshot(3, START + HOUR, hourly),
        snapshot(4, START + 2 * HOUR, hourly),
    ];
    let plan = plan(&retention, 15, &before, START + 40 * DAY + 7);
    assert_eq!((plan.create, plan.prune), (both, vec![]));
}

#[test]
fn clock_that_goes_back_makes_and_deletes_nothing() {
    let retention = Retention {
        hourly: 2,
        ..Retention::default()
    };
    let hourly = set(&[SnapshotClass::Hourly]);
    let all: Vec<_> = (0..4)
        .map(|at| snapshot(2 + at, START + u64::from(at) * HOUR, hourly))
        .collect();
    let at = |now| plan(&retention, 15, &all, now);
    assert_eq!(at(START + HOUR), Plan::default());
    let later = at(START + 4 * HOUR);
    assert_eq!(later.create, hourly);
    assert_eq!(later.prune, [all[0].name.clone(), all[1].name.clone()]);
    // A clock that is years ahead deletes none of the newest.
    assert_eq!(at(START + 9999 * DAY).prune.len(), 2);
}

#[test]
fn snapshot_of_far_future_serves_no_period() {
    let retention = Retention {
        hourly: 2,
        ..Retention::default()
    };
    let hourly = set(&[SnapshotClass::Hourly]);
    let wrong = START + 9999 * DAY;
    let mut all: Vec<_> = (0..3)
        .map(|at| snapshot(2 + at, wrong + u64::from(at) * HOUR, hourly))
        .collect();
    let first = plan(&retention, 15, &all, START);
    assert_eq!((first.create, &first.prune), (hourly, &vec![]));
    assert_eq!(first.far_ahead, Some(all[2].name.clone()));
    for at in 0..2 {
        all.push(snapshot(5 + at, START + u64::from(at) * HOUR, hourly));
    }
    let later = plan(&retention, 15, &all, START + HOUR);
    assert!(later.create.is_empty() && later.prune.is_empty());
    // Once the clock is right again, the schedule goes on.
    let right = plan(&retention, 15, &all, wrong + 3 * HOUR);
    let before: Vec<_> = all[..3].iter().map(|it| it.name.clone()).collect();
    assert_eq!((right.create, right.far_ahead), (hourly, None));
    assert_eq!(right.prune, before[..2]);
}

#[test]
fn needed_snapshot_is_listed_and_kept() {
    let retention = Retention {
        daily: 1,
        ..Retention::default()
    };
    let daily = set(&[SnapshotClass::Daily]);
    let mut old = snapshot(2, START, daily);
    old.is_needed = true;
    let all = [old.clone(), snapshot(3, START + 5 * DAY, daily)];
    let plan = plan(&retention, 15, &all, START + 5 * DAY);
    assert_eq!((plan.prune, plan.needed), (vec![], vec![old.name]));
}
