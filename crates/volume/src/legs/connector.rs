//! The interface to the transports.

use pagemesh_base::authority::BrickAddress;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{Leg, SliceError};

/// Makes connections to slices.
pub trait Connector: Send + Sync {
    /// Connects to one slice. Blocks for a bounded time. Threads that run blocking calls of the
    /// controller call it; requests never do.
    ///
    /// # Errors
    /// When the brick is not reachable or has no such slice.
    fn connect(
        &self,
        brick: BrickId,
        address: &BrickAddress,
        slice: SliceId,
        epoch: Epoch,
    ) -> Result<Box<dyn Leg>, SliceError>;
}
