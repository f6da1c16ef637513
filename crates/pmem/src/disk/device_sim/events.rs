//! What befalls a simulated device.

use std::time::Duration;

/// What a process or a machine leaves when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceEnd {
    /// The process ends; the machine goes on.
    Process,
    /// The machine loses its power.
    Power,
}

/// How often something happened to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedCounts {
    /// Requests that ended, also those for which a caller waited.
    pub ended: u64,
    /// Reads among them.
    pub loads: u64,
    /// Writes in flight that a death met.
    pub torn_writes: u64,
    /// Sectors that a power loss put back.
    pub sectors_lost: u64,
    /// Requests with an error.
    pub errors: u64,
    /// FLUSHes that ended.
    pub flushes: u64,
    /// Requests that ended before older ones.
    pub overtaken: u64,
}

/// A fault of the next request of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedFault {
    /// The next write fails with this error number; a part of its sectors is written.
    FailWrite(i32),
    /// The next FLUSH fails with this error number.
    FailFlush(i32),
    /// The next request takes this long.
    Hang(Duration),
}
