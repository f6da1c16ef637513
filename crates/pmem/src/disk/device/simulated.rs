//! A device that a simulation plays.

use super::{Device, DeviceFacts, WriteCache};
use crate::disk::device_sim::{Generation, SimulatedDevice};
use crate::disk::watch::WatchedRequests;
use crate::map_error::MapError;
use crate::mapped_media::system;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A user's connection to a simulated device.
pub(super) struct SimulatedUser {
    device: Arc<SimulatedDevice>,
    user: Generation,
}

impl Device {
    /// A simulated device, with a volatile write cache. The requests of its earlier users have no effect any more.
    ///
    /// # Errors
    /// When the system is out of a resource.
    pub(in crate::disk) fn simulated(device: &Arc<SimulatedDevice>) -> Result<Device, MapError> {
        let file = File::open("/dev/null").map_err(system("open a file"))?;
        let user = device.connect();
        Ok(Device {
            file,
            name: "a simulated device".into(),
            facts: DeviceFacts {
                len: device.len_bytes(),
                write_cache: WriteCache::Volatile,
                needs_flush: true,
                has_no_barrier: false,
                is_direct: true,
            },
            watched: Arc::new(WatchedRequests::new()),
            first_byte: 0,
            has_warned: AtomicBool::new(false),
            log: None,
            plan: None,
            simulated: Some(SimulatedUser {
                device: device.clone(),
                user,
            }),
        })
    }

    fn simulated_user(&self) -> &SimulatedUser {
        self.simulated.as_ref().expect("a simulated device")
    }

    /// The simulated device and its user, if the device is simulated.
    pub(in crate::disk) fn simulation(&self) -> Option<(Arc<SimulatedDevice>, Generation)> {
        let SimulatedUser { device, user } = self.simulated.as_ref()?;
        Some((device.clone(), *user))
    }

    /// Whether a caller may write its group itself now.
    pub(in crate::disk) fn allows_inline(&self) -> bool {
        let simulated = self.simulated.as_ref();
        simulated.is_none_or(|user| user.device.allows_inline())
    }

    /// Starts a FLUSH. Returns its number.
    pub(in crate::disk) fn start_simulated_flush(&self) -> u64 {
        let SimulatedUser { device, user } = self.simulated_user();
        device.start_flush(*user)
    }

    /// The result of a FLUSH, once it has ended.
    pub(in crate::disk) fn simulated_flush_result(&self, number: u64) -> Option<io::Result<()>> {
        self.simulated_user().device.flush_result(number)
    }

    /// Ends the request that is due first. False: none is in flight.
    pub(in crate::disk) fn end_first_simulated(&self) -> bool {
        self.simulated_user().device.end_first()
    }

    /// Flushes, if the device is simulated.
    pub(super) fn flush_simulated(&self) -> Option<io::Result<()>> {
        let SimulatedUser { device, user } = self.simulated.as_ref()?;
        let number = device.start_flush(*user);
        loop {
            if let Some(result) = device.flush_result(number) {
                return Some(result);
            }
            device.end_first();
        }
    }

    /// Reads at once, if the device is simulated.
    pub(super) fn read_simulated(&self, bytes: &mut [u8], offset: u64) -> Option<io::Result<()>> {
        let simulated = self.simulated.as_ref()?;
        Some(simulated.device.read_now(bytes, offset))
    }
}
