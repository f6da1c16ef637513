//! Multi-pool operations: an operation begins on all its legs, locks, fences and ends on them
//! together.
//!
//! Invariants: the operation is in progress on all legs or on none. Locks are taken pool by pool in
//! the order of the pools' UUIDs, and in ascending order within a pool. No operation in progress
//! waits for the owner of a pool.

use crate::format::object::Gate;
use crate::session::{LegFailure, LegSession, Session};
use crate::shared::error::StoreError;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_pmem::{Media, UnfencedStores};

/// The resources that an operation needs on every leg before it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpRequirements {
    /// Granted frames.
    pub(crate) frames: u64,
    /// Lines of the longest entry that it may append.
    pub(crate) entry_lines: usize,
}

/// Reserves the resources on every leg, begins the operation and calls `find` for each leg. If
/// `find` returns a page, that page lacks its leaf: the operation ends on all legs, the leaf is
/// linked, and everything begins anew.
pub(crate) fn begin_all<M: Media>(
    members: &mut [LegSession<'_, M>],
    needs: OpRequirements,
    epoch: Epoch,
    mut find: impl FnMut(usize, &mut LegSession<'_, M>, Gate) -> Result<Option<PageNo>, StoreError>,
) -> Result<(), LegFailure> {
    assert!(
        (1..=3).contains(&members.len()),
        "{} members",
        members.len()
    );
    'again: loop {
        for (index, member) in members.iter_mut().enumerate() {
            let prepared = member
                .session
                .ensure_resources(needs.frames, needs.entry_lines);
            prepared.map_err(|cause| LegFailure { leg: index, cause })?;
        }
        for index in 0..members.len() {
            let member = &mut members[index];
            let entered = member
                .session
                .begin_op(&member.handle, epoch)
                .and_then(|gate| {
                    let found = find(index, member, gate);
                    if found.is_err() {
                        member.session.end_op();
                    }
                    found
                });
            match entered {
                Ok(None) => {}
                Ok(Some(page)) => {
                    members[..=index]
                        .iter_mut()
                        .for_each(|m| m.session.end_op());
                    let member = &mut members[index];
                    let linked = member.session.link_leaf(&member.handle, page, epoch);
                    linked.map_err(|cause| LegFailure { leg: index, cause })?;
                    continue 'again;
                }
                Err(cause) => {
                    members[..index].iter_mut().for_each(|m| m.session.end_op());
                    // The owner recalled the grants in between: begin again.
                    if cause == StoreError::TimedOut {
                        continue 'again;
                    }
                    return Err(LegFailure { leg: index, cause });
                }
            }
        }
        return Ok(());
    }
}

/// Takes the lock words of every leg, or none.
pub(crate) fn lock_all<'m, M: Media>(
    members: &'m [LegSession<'_, M>],
    words: impl Fn(usize, &'m Session<M>) -> &'m [u16],
) -> Result<(), LegFailure> {
    let mut order = [0, 1, 2];
    let order = &mut order[..members.len()];
    if order.len() > 1 {
        order.sort_unstable_by_key(|&index| members[index].session.mapping.pool);
    }
    for (done, &index) in order.iter().enumerate() {
        let session = &*members[index].session;
        let locked = session
            .mapping
            .control
            .lock(words(index, session), session.number);
        if locked.is_err() {
            for &index in &order[..done] {
                let session = &*members[index].session;
                session.mapping.control.unlock(words(index, session));
            }
            return Err(LegFailure {
                leg: index,
                cause: StoreError::TimedOut,
            });
        }
    }
    Ok(())
}

/// Fences the pools of all legs once.
pub(crate) fn fence_all<M: Media>(members: &[LegSession<'_, M>], stores: UnfencedStores) {
    let media = |index: usize| &*members[index.min(members.len() - 1)].session.mapping.data;
    let all = [media(0), media(1), media(2)];
    let _committed = M::fence_each(&all[..members.len()], stores);
}
