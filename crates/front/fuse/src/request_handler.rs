//! The interface that serves the requests of a mount.

use crate::abi;
use crate::reply::FuseReply;
use crate::request::Request;
use std::os::fd::RawFd;

/// Serves requests, on several threads.
pub(crate) trait RequestHandler: Send + Sync {
    /// The caller drops the answer if the request has none.
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply;

    /// A writer for a thread that may serve several requests at once; none: requests never wait.
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        None
    }
}

/// The outcome of an attempt to begin a request.
pub(crate) enum BeginResult {
    /// It is reported when it has ended.
    Pending,
    /// It has ended already.
    Complete(FuseReply),
    /// It cannot run concurrently with others; nothing has happened.
    NotStarted,
}

/// The requests that a thread has begun.
pub(crate) trait AsyncWriter {
    fn begin(&mut self, header: &abi::InHeader, request: &Request<'_>) -> BeginResult;

    /// Makes progress without blocking, and reports the answers of requests that have ended.
    fn reap(&mut self, tell: &mut dyn FnMut(u64, FuseReply));

    /// Requests in flight.
    fn len(&self) -> usize;

    /// Sleeps until there may be requests to reap, or `other` is readable.
    fn wait(&mut self, other: Option<RawFd>);
}
