//! The policies of slices: where their pages lie.

use crate::brick::Brick;
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_pmem::Media;
use pagemesh_store::object::TierPolicy;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::recovery::PoolError;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;

/// Slices that change in one call, since each syncs the pool's medium. The caller's digest differs until all are done.
pub const POLICY_CHANGES_MAX: usize = 64;
/// Missing slices that one message names.
const NAMED_MAX: usize = 8;

/// The policies as the pool reports them.
#[derive(Default)]
pub(super) struct ReportedPolicies {
    /// None after slices were created or deleted.
    list: Option<Vec<(SliceId, TierPolicy)>>,
    /// The slices with a wanted policy that the pool lacked last, so that each is logged once.
    missing: BTreeSet<SliceId>,
}

impl<M: Media> Brick<M> {
    /// The slices with a policy other than the automatic one. Those of the last [`Brick::set_tier_policies`] that the
    /// pool lacks are among them until a slice is created or deleted.
    #[must_use]
    pub fn tier_policies(&self) -> Vec<(SliceId, TierPolicy)> {
        let mut reported = lock(&self.tier().reported);
        let list = &mut reported.list;
        list.get_or_insert_with(|| self.list_policies()).clone()
    }

    fn list_policies(&self) -> Vec<(SliceId, TierPolicy)> {
        let pool = self.pool();
        let chosen = pool.list().filter(|it| it.tier != TierPolicy::Automatic);
        chosen.map(|it| (it.slice, it.tier)).collect()
    }

    /// The pool has other slices now. The next report has no missing ones, so that they get their policies once they exist.
    pub(crate) fn reset_reported_policies(&self) {
        lock(&self.tier().reported).list = None;
    }

    /// Sets the policies of the pool's slices, at most [`POLICY_CHANGES_MAX`] in one call. Slices that are not named get
    /// the automatic one.
    ///
    /// # Errors
    /// When the pool fails.
    pub fn set_tier_policies(
        &self,
        wanted: &HashMap<SliceId, TierPolicy>,
    ) -> Result<(), ObjectError> {
        self.note_policy_change();
        let set = self.set_policies(wanted);
        // The thread may have listed the objects meanwhile.
        self.note_policy_change();
        self.report_policies(wanted);
        set
    }

    fn note_policy_change(&self) {
        let changed = &self.tier().policies_changed;
        changed.store(true, Ordering::Release);
        self.wake_tier();
    }

    /// Reports the policies of the pool, and the wanted ones of slices that it lacks.
    fn report_policies(&self, wanted: &HashMap<SliceId, TierPolicy>) {
        let mut reported = lock(&self.tier().reported);
        let (present, mut list) = {
            let pool = self.pool();
            let all = pool.list().map(|it| (it.slice, it.tier));
            let present: HashMap<SliceId, TierPolicy> = all.collect();
            let chosen = present.iter().filter(|it| *it.1 != TierPolicy::Automatic);
            let list: Vec<_> = chosen.map(|(slice, tier)| (*slice, *tier)).collect();
            (present, list)
        };
        let chosen = wanted.iter().map(|(slice, tier)| (*slice, *tier));
        let chosen = chosen.filter(|(_, tier)| *tier != TierPolicy::Automatic);
        let missing = chosen.filter(|(slice, _)| !present.contains_key(slice));
        let missing: Vec<(SliceId, TierPolicy)> = missing.collect();
        let names: BTreeSet<SliceId> = missing.iter().map(|(slice, _)| *slice).collect();
        let new = names.difference(&reported.missing);
        let new: Vec<String> = new.map(ToString::to_string).collect();
        if !new.is_empty() {
            let first = &new[..new.len().min(NAMED_MAX)];
            tracing::warn!(
                count = new.len(),
                slices = first.join(" "),
                "the manager has policies for slices that the pool lacks"
            );
        }
        list.extend(missing);
        *reported = ReportedPolicies {
            list: Some(list),
            missing: names,
        };
    }

    fn set_policies(&self, wanted: &HashMap<SliceId, TierPolicy>) -> Result<(), ObjectError> {
        let policy_of = |slice: &SliceId| wanted.get(slice).copied().unwrap_or_default();
        let changed: Vec<SliceId> = {
            let pool = self.pool();
            let others = pool.list().filter(|it| it.tier != policy_of(&it.slice));
            others.map(|it| it.slice).take(POLICY_CHANGES_MAX).collect()
        };
        for slice in changed {
            match self.retry_while_stuck(|pool| pool.set_tier(slice, policy_of(&slice))) {
                // It was deleted meanwhile, or a damaged entry may be its own.
                Ok(()) | Err(ObjectError::Unknown(_) | ObjectError::Lost { .. }) => {}
                Err(cause) => {
                    if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = &cause {
                        self.fail(&cause);
                    }
                    return Err(cause);
                }
            }
        }
        Ok(())
    }
}
