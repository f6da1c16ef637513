//! A brick's disk: the real cache, writer and requests of `pmem` over a simulated device. A fuse ends the brick at some
//! access, as in memory.
//!
//! A dying brick goes on with its memory while its stack unwinds. Its device has ended with the process, so its requests have
//! no effect.

use crate::brick_host::CrashKind;
use crate::medium::FuseBlown;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{
    AsyncIo, DeviceEnd, Disk, DiskFigures, DiskMedia, DiskOptions, FenceProof, MapError, Media,
    RequestLimits, ResidentCheck, SimulatedDevice, UnfencedStores,
};
use pagemesh_store::geometry::Geometry;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Fewest pages of a disk's cache, and how many more the seed may add.
const CACHE_PAGES_MIN: usize = 16;
const CACHE_PAGES_MORE: u64 = 80;

/// The changing accesses that a process has left.
struct Fuse {
    accesses: AtomicI64,
    device: Arc<SimulatedDevice>,
}

/// A view of a brick's disk.
pub(crate) struct DiskMedium {
    view: DiskMedia,
    fuse: Arc<Fuse>,
}

impl DiskMedium {
    /// The data view and the overlay of a new process.
    pub(crate) fn open(device: &Arc<SimulatedDevice>, choice: u64) -> [DiskMedium; 2] {
        let cache_pages = CACHE_PAGES_MIN + (choice % CACHE_PAGES_MORE) as usize;
        let plan = Geometry::plan(device.len_bytes()).expect("the size of a pool");
        let head_len = plan.frames.start as usize;
        let options = DiskOptions {
            cache_bytes: cache_pages * PAGE_BYTES,
            limits: RequestLimits::default(),
        };
        let table = plan.frame_table.bytes();
        let disk =
            Disk::simulated(device, head_len, table, options).expect("memory and descriptors");
        let disk = Arc::new(disk);
        let fuse = Arc::new(Fuse {
            accesses: AtomicI64::new(-1),
            device: device.clone(),
        });
        [disk.data(), disk.overlay()].map(|view| DiskMedium {
            view,
            fuse: fuse.clone(),
        })
    }

    pub(crate) fn disk(&self) -> &Arc<Disk> {
        self.view.disk()
    }

    pub(crate) fn device(&self) -> &Arc<SimulatedDevice> {
        &self.fuse.device
    }

    pub(crate) fn arm_fuse(&self, accesses: u32) {
        let accesses = i64::from(accesses);
        self.fuse.accesses.store(accesses, Ordering::Relaxed);
    }

    pub(crate) fn disarm_fuse(&self) {
        self.fuse.accesses.store(-1, Ordering::Relaxed);
    }

    pub(crate) fn is_fuse_armed(&self) -> bool {
        self.fuse.accesses.load(Ordering::Relaxed) >= 0
    }

    fn count_access(&self) {
        let left = self.fuse.accesses.load(Ordering::Relaxed);
        if left < 0 {
            return;
        }
        self.fuse.accesses.store(left - 1, Ordering::Relaxed);
        if left == 0 {
            end_user(&self.fuse.device, CrashKind::Process);
            resume_unwind(Box::new(FuseBlown));
        }
    }
}

/// Ends the process that uses a device, or its machine.
pub(crate) fn end_user(device: &SimulatedDevice, death: CrashKind) {
    device.end_user(match death {
        CrashKind::Process => DeviceEnd::Process,
        CrashKind::Power => DeviceEnd::Power,
    });
}

impl Media for DiskMedium {
    fn len_bytes(&self) -> usize {
        self.view.len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.view.read(offset, into);
    }

    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        self.view.read_page(offset, into)
    }

    fn load(&self, offset: usize) -> u64 {
        self.view.load(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.count_access();
        self.view.store(offset, word);
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        self.count_access();
        self.view.write(offset, bytes);
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.count_access();
        self.view.compare_exchange(offset, old, new)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        self.count_access();
        self.view.stream_line(offset, line)
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        targets.iter().for_each(|(medium, _)| medium.count_access());
        let targets = targets
            .iter()
            .map(|(medium, offset)| (&medium.view, *offset));
        DiskMedia::stream_page(&targets.collect::<Vec<_>>(), page)
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        self.view.flush(offset, len)
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.count_access();
        self.view.fence(stores)
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        self.view.is_unreadable(offset)
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        self.view.unreadable_pages()
    }

    fn is_cached(&self, offset: usize) -> bool {
        self.view.is_cached(offset)
    }

    fn is_on_disk(&self, offset: usize) -> bool {
        self.view.is_on_disk(offset)
    }

    fn has_room(&self) -> bool {
        self.view.has_room()
    }

    fn disk_figures(&self) -> Option<DiskFigures> {
        self.view.disk_figures()
    }

    fn compare_resident(&self, from: usize) -> ResidentCheck {
        self.view.compare_resident(from)
    }

    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        self.view.async_io()
    }

    fn sync(&self) -> Result<(), MapError> {
        self.count_access();
        self.view.sync()
    }
}
