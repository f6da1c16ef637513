//! Keeping idle processors from sleeping.
//!
//! Waking a processor that sleeps takes from 2 µs to more than 100, by machine
//! and depth of sleep, and tens in virtual machines, whose host sleeps with
//! them. Linux lets a process bound that time for all processors: a signed 32-bit
//! number of microseconds in `/dev/cpu_dma_latency` holds for as long as the
//! descriptor is open (kernel documentation, "PM Quality Of Service
//! Interface"), so that it ends with the process at the latest. At zero, idle
//! processors poll. Only root may open it by default.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

/// Where the kernel takes it.
pub const DEVICE: &str = "/dev/cpu_dma_latency";

/// Requests without a pause after which a client is busy, and idle processors are kept
/// awake for it.
pub const BUSY_MIN: u32 = 64;
/// The pause: how long they are kept awake for a client that asks for nothing.
pub const LINGER: Duration = Duration::from_millis(1);

/// Idle processors do not sleep while this exists.
#[derive(Debug)]
pub struct Awake {
    _descriptor: File,
}

impl Awake {
    /// Opens the device, [`DEVICE`] but in tests.
    ///
    /// # Errors
    /// When the system has no such device, or this process has no right to it.
    pub fn hold(device: &Path) -> io::Result<Awake> {
        let mut descriptor = OpenOptions::new().write(true).open(device)?;
        descriptor.write_all(&0i32.to_ne_bytes())?;
        Ok(Awake {
            _descriptor: descriptor,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_asks_for_no_latency_and_says_where_that_cannot_be() {
        let dir = tempfile::tempdir().expect("a directory");
        let device = dir.path().join("device");
        assert!(Awake::hold(&device).is_err());
        std::fs::write(&device, b"").expect("written");
        Awake::hold(&device).expect("held");
        assert_eq!(std::fs::read(&device).expect("read"), [0; 4]);
    }
}
