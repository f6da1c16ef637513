//! What the members of one operation do together: enter their windows, lock,
//! fence and leave.
//!
//! Invariants: all members are inside or none; locks are taken pool by pool in
//! the order of their UUIDs, and words in ascending order within a pool; nobody
//! waits for the owner of a pool inside a window.

use crate::object::Gate;
use crate::session::{Failure, Member, Session};
use crate::view::StoreError;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_pmem::{Media, Unfenced};

/// What an operation needs of every member before it enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// Granted frames.
    pub(crate) frames: u64,
    /// Lines of the longest entry that it may append.
    pub(crate) entry_lines: usize,
}

/// Prepares every member, enters the windows and has `find` look for slots. A
/// page that it returns lacks its leaf: all leave, the leaf is linked, and they
/// begin anew.
pub(crate) fn enter<M: Media>(
    members: &mut [Member<'_, M>],
    needs: Needs,
    epoch: Epoch,
    mut find: impl FnMut(usize, &mut Member<'_, M>, Gate) -> Result<Option<PageNo>, StoreError>,
) -> Result<(), Failure> {
    assert!(
        (1..=3).contains(&members.len()),
        "{} members",
        members.len()
    );
    'again: loop {
        for (index, member) in members.iter_mut().enumerate() {
            let prepared = member.session.prepare(needs.frames, needs.entry_lines);
            prepared.map_err(|cause| Failure {
                member: index,
                cause,
            })?;
        }
        for index in 0..members.len() {
            let member = &mut members[index];
            let entered = member
                .session
                .enter(&member.handle, epoch)
                .and_then(|gate| {
                    let found = find(index, member, gate);
                    if found.is_err() {
                        member.session.leave();
                    }
                    found
                });
            match entered {
                Ok(None) => {}
                Ok(Some(page)) => {
                    members[..=index].iter_mut().for_each(|m| m.session.leave());
                    let member = &mut members[index];
                    let linked = member.session.link(&member.handle, page, epoch);
                    linked.map_err(|cause| Failure {
                        member: index,
                        cause,
                    })?;
                    continue 'again;
                }
                Err(cause) => {
                    members[..index].iter_mut().for_each(|m| m.session.leave());
                    // Grants were taken back in between: look again.
                    if cause == StoreError::Stalled {
                        continue 'again;
                    }
                    return Err(Failure {
                        member: index,
                        cause,
                    });
                }
            }
        }
        return Ok(());
    }
}

/// Takes each member's words, or none.
pub(crate) fn lock<'m, M: Media>(
    members: &'m [Member<'_, M>],
    words: impl Fn(usize, &'m Session<M>) -> &'m [u16],
) -> Result<(), Failure> {
    let mut order = [0, 1, 2];
    let order = &mut order[..members.len()];
    if order.len() > 1 {
        order.sort_unstable_by_key(|&index| members[index].session.view.pool);
    }
    for (done, &index) in order.iter().enumerate() {
        let session = &*members[index].session;
        let locked = session
            .view
            .control
            .lock(words(index, session), session.number);
        if locked.is_err() {
            for &index in &order[..done] {
                let session = &*members[index].session;
                session.view.control.unlock(words(index, session));
            }
            return Err(Failure {
                member: index,
                cause: StoreError::Stalled,
            });
        }
    }
    Ok(())
}

/// Fences the members' pools once.
pub(crate) fn fence<M: Media>(members: &[Member<'_, M>], stores: Unfenced) {
    let media = |index: usize| &*members[index.min(members.len() - 1)].session.view.data;
    let all = [media(0), media(1), media(2)];
    let _committed = M::fence_each(&all[..members.len()], stores);
}
