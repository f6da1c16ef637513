//! Keeping idle processors from sleeping.
//!
//! Waking a sleeping processor takes from 2 µs to more than 100, by machine and depth of sleep,
//! and tens of µs in virtual machines, because their host sleeps too. Linux lets a process bound
//! that time for all processors: a signed 32-bit number of microseconds in `/dev/cpu_dma_latency`
//! applies while the descriptor is open (kernel documentation, "PM Quality Of Service Interface"),
//! so it ends with the process at the latest. At zero, idle processors poll. Only root may open the
//! device by default.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

/// The kernel's device for the latency limit.
pub const CPU_DMA_LATENCY_DEVICE: &str = "/dev/cpu_dma_latency";

/// Requests without a pause after which a client counts as busy, and idle processors are kept awake
/// for it.
pub const BUSY_REQUESTS_MIN: u32 = 64;
/// How long idle processors are kept awake for a client without requests.
pub const IDLE_GRACE: Duration = Duration::from_millis(1);

/// A latency request. Idle processors do not sleep while it exists.
#[derive(Debug)]
pub struct CpuLatencyRequest {
    _descriptor: File,
}

impl CpuLatencyRequest {
    /// Opens the device, [`CPU_DMA_LATENCY_DEVICE`] but in tests.
    ///
    /// # Errors
    /// When the system has no such device, or this process has no right to it.
    pub fn open(device: &Path) -> io::Result<CpuLatencyRequest> {
        let mut descriptor = OpenOptions::new().write(true).open(device)?;
        descriptor.write_all(&0i32.to_ne_bytes())?;
        Ok(CpuLatencyRequest {
            _descriptor: descriptor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_request_writes_zero_and_fails_without_device() {
        let dir = tempfile::tempdir().expect("a directory");
        let device = dir.path().join("device");
        assert!(CpuLatencyRequest::open(&device).is_err());
        std::fs::write(&device, b"").expect("written");
        CpuLatencyRequest::open(&device).expect("held");
        assert_eq!(std::fs::read(&device).expect("read"), [0; 4]);
    }
}
