//! What a thread that serves has of a transport, and what it does with it.

use crate::abi;
use crate::answer::Answer;
use crate::collect::Hand;
use crate::request::{Incoming, Request};
use std::io;

/// Bytes of what is written or read at once, at most.
pub(crate) const DATA_BYTES_MAX: u32 = 1 << 20;

/// A thread's way to the kernel and back, one request at a time.
pub(crate) trait Line {
    /// Waits for the next request; None: the mount is no more. What came before must
    /// be answered, or have none.
    fn receive(&mut self) -> io::Result<Option<Incoming>>;

    /// Answers the request that was received last.
    fn answer(&mut self, unique: u64, answer: &Answer) -> io::Result<()>;
}

/// What serves requests, on several threads.
pub(crate) trait Files: Send + Sync {
    /// What a request that has no answer gives is left out.
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> Answer;

    /// For a thread that may serve several requests at once; none: there is nothing to
    /// wait for.
    fn hand(&self) -> Option<Box<dyn Hand + '_>> {
        None
    }
}

/// Serves until the mount is no more.
pub(crate) fn serve(line: &mut dyn Line, files: &dyn Files) -> io::Result<()> {
    while let Some(incoming) = line.receive()? {
        let header = incoming.header;
        let answer = match incoming.decode() {
            Ok(request) => files.handle(&header, request),
            Err(errno) => Answer::Error(errno),
        };
        if incoming.is_one_way() {
            continue;
        }
        // With it goes what holds the line's memory.
        drop(incoming);
        line.answer(header.unique, &answer)?;
    }
    Ok(())
}
