//! The interface that serves the requests of a mount.

use crate::abi;
use crate::batching::AsyncWriter;
use crate::reply::FuseReply;
use crate::request::Request;

/// Most bytes that are written or read at once.
pub(crate) const DATA_BYTES_MAX: u32 = 1 << 20;

/// Serves requests, on several threads.
pub(crate) trait RequestHandler: Send + Sync {
    /// The caller drops the answer if the request has none.
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply;

    /// A writer for a thread that may serve several requests at once; none: requests never wait.
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        None
    }
}
