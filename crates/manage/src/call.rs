//! The request for which a handle of the manager acts.

use crate::access::Identity;
use std::sync::Arc;

/// The request for which a handle of the manager acts.
#[derive(Clone, Debug)]
pub struct CallContext {
    /// The cause of the changes that it makes, as events name it.
    pub actor: Arc<str>,
}

impl Default for CallContext {
    fn default() -> CallContext {
        CallContext {
            actor: Identity::cluster_key().name,
        }
    }
}
