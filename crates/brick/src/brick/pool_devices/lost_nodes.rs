//! Puts new page-table nodes in the place of those on failed devices, from the opening of a pool on: until then a page
//! below such a node can be neither written nor repaired.

use super::RETRY_PAUSE;
use crate::brick::Brick;
use pagemesh_pmem::Media;
use pagemesh_store::devices::DeviceState;
use pagemesh_store::drain::NodeCursor;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::pool_mapping::StoreError;
use std::time::Duration;

/// The longest pause before another attempt in a pool without room. The pauses double up to it.
const PAUSE_MAX: Duration = Duration::from_mins(1);

/// A walk over all page tables of a pool.
#[derive(Default)]
pub(super) struct LostNodes {
    at: NodeCursor,
    is_over: bool,
    last_pause: Option<Duration>,
}

impl LostNodes {
    /// The pause before the next attempt.
    fn next_pause(&mut self) -> Duration {
        let doubled = self.last_pause.map(|it| (it * 2).min(PAUSE_MAX));
        *self.last_pause.insert(doubled.unwrap_or(RETRY_PAUSE))
    }
}

impl<M: Media + Send + Sync + 'static> Brick<M> {
    /// Does a step of the walk. Returns the pause before the next; none after its end.
    pub(super) fn replace_lost_nodes(&self, lost: &mut LostNodes) -> Option<Duration> {
        let devices = self.mapping().geometry().devices;
        // No device of an open pool becomes a failed one.
        if lost.is_over || !devices.iter().any(|it| it.state == DeviceState::Failed) {
            return None;
        }
        let from = lost.at;
        match self.retry_while_stuck(|pool| pool.replace_lost_nodes(from)) {
            Ok(next) => {
                lost.last_pause = None;
                self.pool_devices.work().nodes_problem = None;
                lost.is_over = next.is_none();
                lost.at = next?;
                Some(Duration::ZERO)
            }
            Err(cause) => {
                let problem = problem_of(&cause);
                let mut work = self.pool_devices.work();
                if work.nodes_problem.as_ref() != Some(&problem) {
                    tracing::warn!(%problem, "pages below lost page-table nodes cannot be written");
                }
                work.nodes_problem = Some(problem);
                drop(work);
                self.device_error(cause);
                Some(lost.next_pause())
            }
        }
    }
}

fn problem_of(cause: &ObjectError) -> String {
    match cause {
        ObjectError::Store(StoreError::NoSpace) => {
            "page-table nodes were on it, and the pool has no room for new ones: add a device, or delete something".into()
        }
        cause => format!("page-table nodes were on it, and new ones cannot be made: {cause}"),
    }
}
