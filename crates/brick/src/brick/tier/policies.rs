//! The policies of slices: where their pages lie.

use crate::brick::Brick;
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_pmem::Media;
use pagemesh_store::object::TierPolicy;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::recovery::PoolError;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

impl<M: Media> Brick<M> {
    /// The slices with a policy other than the automatic one, as of the last [`Brick::set_tier_policies`] or of the first
    /// call. Slices that were deleted since may be among them.
    #[must_use]
    pub fn tier_policies(&self) -> Vec<(SliceId, TierPolicy)> {
        let mut chosen = lock(&self.tier().chosen);
        chosen.get_or_insert_with(|| self.list_policies()).clone()
    }

    fn list_policies(&self) -> Vec<(SliceId, TierPolicy)> {
        let pool = self.pool();
        let chosen = pool.list().filter(|it| it.tier != TierPolicy::Automatic);
        chosen.map(|it| (it.slice, it.tier)).collect()
    }

    /// Sets the policies of all slices of the pool. Slices that are not named get the automatic one, and names of
    /// slices that the pool does not have are ignored.
    ///
    /// # Errors
    /// When the pool fails.
    pub fn set_tier_policies(
        &self,
        wanted: &HashMap<SliceId, TierPolicy>,
    ) -> Result<(), ObjectError> {
        let set = self.set_policies(wanted);
        let list = self.list_policies();
        *lock(&self.tier().chosen) = Some(list);
        set
    }

    fn set_policies(&self, wanted: &HashMap<SliceId, TierPolicy>) -> Result<(), ObjectError> {
        let policy_of = |slice: &SliceId| wanted.get(slice).copied().unwrap_or_default();
        let changed: Vec<SliceId> = {
            let pool = self.pool();
            let others = pool.list().filter(|it| it.tier != policy_of(&it.slice));
            others.map(|it| it.slice).collect()
        };
        if changed.is_empty() {
            return Ok(());
        }
        for slice in changed {
            match self.retry_while_stuck(|pool| pool.set_tier(slice, policy_of(&slice))) {
                // It was deleted meanwhile.
                Ok(()) | Err(ObjectError::Unknown(_)) => {}
                Err(cause) => {
                    if let ObjectError::Pool(PoolError::System(_) | PoolError::Failed) = &cause {
                        self.fail(&cause);
                    }
                    return Err(cause);
                }
            }
        }
        self.tier().policies_changed.store(true, Ordering::Release);
        self.wake_tier();
        Ok(())
    }
}
