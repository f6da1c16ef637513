use super::*;
use proptest::prelude::*;

/// Bytes of the model. The last one stands for all bytes to the end of the file.
const BYTES: usize = 24;
const OWNERS: usize = 3;
const UNBOUNDED: LockTableLimits = LockTableLimits {
    ranges_per_owner_max: usize::MAX,
    ranges_max: usize::MAX,
};

/// The kind of lock of each byte, for each owner.
type Model = [[Option<LockKind>; BYTES]; OWNERS];

#[derive(Clone, Copy, Debug)]
struct Step {
    owner: usize,
    first: usize,
    last: usize,
    kind: Option<LockKind>,
}

impl Step {
    fn range(&self) -> LockRange {
        let last = match self.last {
            last if last == BYTES - 1 => u64::MAX,
            last => last as u64,
        };
        LockRange::new(self.first as u64, last).expect("the first byte is not after the last")
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = prop_oneof![
        Just(None),
        Just(Some(LockKind::Read)),
        Just(Some(LockKind::Write))
    ];
    let step = (0..OWNERS, 0..BYTES, 0..BYTES, kind).prop_map(|(owner, a, b, kind)| Step {
        owner,
        first: a.min(b),
        last: a.max(b),
        kind,
    });
    prop::collection::vec(step, 1..60)
}

fn conflicts(model: &Model, step: &Step, kind: LockKind) -> bool {
    let others = (0..OWNERS).filter(|it| *it != step.owner);
    others
        .flat_map(|it| &model[it][step.first..=step.last])
        .any(|it| it.is_some_and(|it| kind.conflicts(it)))
}

/// The longest runs of equal kinds of an owner.
fn runs(bytes: &[Option<LockKind>; BYTES]) -> Vec<(u64, u64, LockKind)> {
    let mut runs: Vec<(u64, u64, LockKind)> = Vec::new();
    for (at, kind) in bytes.iter().enumerate() {
        let Some(kind) = *kind else { continue };
        match runs.last_mut() {
            Some(run) if run.1 + 1 == at as u64 && run.2 == kind => run.1 += 1,
            _ => runs.push((at as u64, at as u64, kind)),
        }
    }
    for run in &mut runs {
        if run.1 == BYTES as u64 - 1 {
            run.1 = u64::MAX;
        }
    }
    runs
}

fn check_equal(table: &LockTable<usize>, model: &Model) {
    let expected = model.iter().enumerate().flat_map(|(owner, bytes)| {
        let locks = runs(bytes).into_iter();
        locks.map(move |(first, last, kind)| (owner, first, last, kind))
    });
    let expected: Vec<_> = expected.collect();
    let locks = table.iter();
    let locks: Vec<_> = locks
        .map(|it| (it.owner, it.range.first, it.range.last, it.kind))
        .collect();
    assert_eq!(locks, expected);
    assert_eq!(table.len(), expected.len());
    assert!(table.owners.values().all(|it| !it.is_empty()));
}

proptest! {
    #[test]
    fn table_equals_an_array_of_bytes(steps in steps()) {
        let mut table = LockTable::default();
        let mut model: Model = [[None; BYTES]; OWNERS];
        for step in steps {
            let Step { owner, kind, .. } = step;
            let range = step.range();
            let is_granted = match kind {
                None => {
                    table.unlock(owner, range, UNBOUNDED).expect("no bounds");
                    true
                }
                Some(kind) => {
                    let refusal = table.lock(Lock { owner, range, kind }, UNBOUNDED);
                    if let Err(LockRefusal::Conflict(found)) = refusal {
                        prop_assert!(found.range.overlaps(range) && found.owner != owner);
                        prop_assert!(table.iter().any(|it| it == found));
                    }
                    prop_assert_eq!(refusal.is_err(), conflicts(&model, &step, kind));
                    refusal.is_ok()
                }
            };
            if is_granted {
                model[owner][step.first..=step.last].fill(kind);
            }
            check_equal(&table, &model);
        }
        for owner in 0..OWNERS {
            prop_assert_eq!(table.release(owner), model[owner].iter().any(Option::is_some));
            model[owner] = [None; BYTES];
            check_equal(&table, &model);
        }
        prop_assert!(table.is_empty());
    }

    #[test]
    fn bounds_hold_and_refusals_change_nothing(steps in steps()) {
        let limits = LockTableLimits { ranges_per_owner_max: 3, ranges_max: 5 };
        let mut table = LockTable::default();
        for step in steps {
            let before: Vec<_> = table.iter().collect();
            let Step { owner, kind, .. } = step;
            let range = step.range();
            let is_granted = match kind {
                None => table.unlock(owner, range, limits).is_ok(),
                Some(kind) => table.lock(Lock { owner, range, kind }, limits).is_ok(),
            };
            prop_assert!(table.len() <= limits.ranges_max);
            prop_assert!(table.owner_ranges(owner) <= limits.ranges_per_owner_max);
            if !is_granted {
                prop_assert_eq!(table.iter().collect::<Vec<_>>(), before);
            }
        }
    }

    #[test]
    fn wire_ranges_survive(offset: u64, length: u64) {
        match LockRange::from_wire(offset, length) {
            Some(range) => prop_assert_eq!(range.to_wire(), (offset, length)),
            None => prop_assert!(length == 0 || offset.checked_add(length).is_none()),
        }
    }
}

#[test]
fn wire_range_ends_at_the_last_byte() {
    let check = |offset, length, expected: Option<(u64, u64)>| {
        let range = LockRange::from_wire(offset, length);
        assert_eq!(range.map(|it| (it.first, it.last)), expected);
    };
    check(0, 0, None);
    check(0, 1, Some((0, 0)));
    check(0, u64::MAX, Some((0, u64::MAX)));
    check(7, u64::MAX, Some((7, u64::MAX)));
    check(u64::MAX, u64::MAX, Some((u64::MAX, u64::MAX)));
    check(1, u64::MAX - 1, Some((1, u64::MAX - 1)));
    check(2, u64::MAX - 1, None);
    check(u64::MAX, 1, None);
    check(u64::MAX - 1, 1, Some((u64::MAX - 1, u64::MAX - 1)));
}

/// A table at its limit still gives whole ranges back.
#[test]
fn full_table_unlocks_whole_ranges() {
    let limits = LockTableLimits {
        ranges_per_owner_max: 2,
        ranges_max: 2,
    };
    let range = |first, last| LockRange::new(first, last).expect("not empty");
    let lock = |first, last| Lock {
        owner: 1,
        range: range(first, last),
        kind: LockKind::Write,
    };
    let mut table = LockTable::default();
    assert_eq!(table.lock(lock(0, 9), limits), Ok(()));
    assert_eq!(table.lock(lock(20, 29), limits), Ok(()));
    assert_eq!(table.lock(lock(40, 49), limits), Err(LockRefusal::Full));
    assert_eq!(table.unlock(1, range(5, 5), limits), Err(TableFull));
    assert_eq!(table.lock(lock(10, 19), limits), Ok(()));
    assert_eq!(table.len(), 1);
    assert_eq!(table.unlock(1, range(5, 5), limits), Ok(()));
    assert_eq!(table.unlock(1, range(0, u64::MAX), limits), Ok(()));
    assert!(table.is_empty());
}
