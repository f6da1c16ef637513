//! The client's side of `GET /api/v1/watch`.
//!
//! Invariant: a stream ends by itself, at the latest after [`RENEWAL`], so that a connection that is
//! lost without a word is noticed. The caller opens the next one with the number of the last event;
//! the manager then continues after it, without a gap and without a repetition.

use crate::client::{ManagerClient, ManagerError};
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;
use ureq::Body;
use ureq::http::Response;

/// The life of a stream.
pub const RENEWAL: Duration = Duration::from_secs(60);
/// Bytes of the longest line. The summary of a volume has less than 1 KiB, an event less than 3 KiB.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// A message of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamMessage {
    /// Its kind: `hello`, `event`, `brick`, …
    pub kind: String,
    /// Its JSON.
    pub data: String,
}

/// A stream of the manager.
pub struct EventStream(BufReader<Box<dyn Read + Send>>);

impl std::fmt::Debug for EventStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventStream")
    }
}

impl EventStream {
    /// Waits for the next message; `None` at the end of the stream, for any reason.
    pub fn next_message(&mut self) -> Option<StreamMessage> {
        let (mut kind, mut data) = (String::new(), String::new());
        loop {
            let line = self.next_line()?;
            match line.split_once(": ") {
                Some(("event", value)) => value.clone_into(&mut kind),
                Some(("data", value)) => value.clone_into(&mut data),
                _ if line.is_empty() && !data.is_empty() => {
                    return Some(StreamMessage { kind, data });
                }
                // A comment, or a field that this version does not use.
                _ => {}
            }
        }
    }

    /// A whole line; a line that the end of the stream has cut is none.
    fn next_line(&mut self) -> Option<String> {
        let mut line = String::new();
        let mut limited = self.0.by_ref().take(LINE_BYTES_MAX);
        limited.read_line(&mut line).ok()?;
        let line = line.strip_suffix('\n')?;
        Some(line.trim_end_matches('\r').to_owned())
    }
}

impl From<Response<Body>> for EventStream {
    fn from(answer: Response<Body>) -> EventStream {
        EventStream(BufReader::new(Box::new(answer.into_body().into_reader())))
    }
}

impl ManagerClient {
    /// Opens a stream of changes that continues after the event of this number, or begins now.
    ///
    /// # Errors
    /// See [`ManagerError`].
    pub fn watch(&self, after: Option<u64>) -> Result<EventStream, ManagerError> {
        let id = after.map(|seq| ("last-event-id", seq.to_string()));
        let answer = self.open("watch", RENEWAL, id)?;
        Ok(self.check_status(answer)?.into())
    }
}
