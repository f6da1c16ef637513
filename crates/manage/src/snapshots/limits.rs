//! Limits of snapshots, and the times of cuts.

use std::time::Duration;

/// Attempts to cut a volume whose layout changes meanwhile.
pub const CUT_ATTEMPTS_MAX: u32 = 3;
/// Attempts to cut several volumes at one moment. A busy machine may let changes of one volume wait for too long.
pub const GROUP_ATTEMPTS_MAX: u32 = 5;
/// Maximum of volumes of one call: the changes of each wait for the client of the slowest one.
pub const GROUP_MAX: usize = 16;
/// Maximum of holds of one snapshot.
pub const HOLDS_MAX: usize = 16;

/// The times of cuts that clients carry out.
#[derive(Clone, Copy, Debug)]
pub struct CutTimes {
    /// A client that polls gets an answer after this long at the latest.
    pub poll: Duration,
    /// A client that does not fetch an order within this time has ended, or knows no snapshots. It is longer than the
    /// pause of a client that has lost its connection.
    pub fetch: Duration,
    /// Limit of all attempts of one call, shorter than the limit of a request, so that the call gets the reason.
    pub call: Duration,
}

impl Default for CutTimes {
    fn default() -> CutTimes {
        CutTimes {
            poll: Duration::from_secs(60),
            fetch: Duration::from_secs(10),
            call: Duration::from_secs(25),
        }
    }
}
