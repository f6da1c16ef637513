//! What serves the requests of a mount.

use crate::abi;
use crate::batching::AsyncWriter;
use crate::reply::FuseReply;
use crate::request::Request;

/// Bytes of what is written or read at once, at most.
pub(crate) const DATA_BYTES_MAX: u32 = 1 << 20;

/// What serves requests, on several threads.
pub(crate) trait RequestHandler: Send + Sync {
    /// What a request that has no answer gives is left out.
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply;

    /// For a thread that may serve several requests at once; none: there is nothing to
    /// wait for.
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        None
    }
}
