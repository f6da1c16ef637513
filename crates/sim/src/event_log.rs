//! The events of a history, line by line: printed for people, and digested to compare two runs of
//! one seed.

use pagemesh_base::checksum::crc32c;
use std::fmt::{Arguments, Write};
use std::time::Duration;

/// A record of events.
#[derive(Default)]
pub(crate) struct EventLog {
    is_printed: bool,
    line: String,
    digest: u64,
    events: u64,
}

impl EventLog {
    pub(crate) fn new(is_printed: bool) -> EventLog {
        EventLog {
            is_printed,
            ..EventLog::default()
        }
    }

    pub(crate) fn record(&mut self, now: Duration, what: Arguments<'_>) {
        self.line.clear();
        // Writing to a string does not fail.
        let _ = write!(self.line, "{:>12.6} {what}", now.as_secs_f64());
        if self.is_printed {
            println!("{}", self.line);
        }
        let sum = u64::from(crc32c(self.line.as_bytes()));
        self.digest = self.digest.rotate_left(7) ^ sum;
        self.digest = self.digest.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.events += 1;
    }

    /// A digest that is equal for two runs only if all lines are equal.
    pub(crate) fn digest(&self) -> u64 {
        self.digest ^ self.events
    }
}
