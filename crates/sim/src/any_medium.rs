//! A brick's medium: memory, or a view of a disk.

use crate::disk_medium::DiskMedium;
use crate::medium::MemoryMedium;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{
    AsyncIo, DiskFigures, FenceProof, MapError, Media, ResidentCheck, UnfencedStores,
};

/// See the module.
pub(crate) enum SimMedium {
    Memory(MemoryMedium),
    Disk(DiskMedium),
}

/// Calls the same of either kind.
macro_rules! either {
    ($medium:expr, $inner:ident => $act:expr) => {
        match $medium {
            SimMedium::Memory($inner) => $act,
            SimMedium::Disk($inner) => $act,
        }
    };
}

impl SimMedium {
    /// The memory, if it is one.
    pub(crate) fn memory(&self) -> Option<&MemoryMedium> {
        match self {
            SimMedium::Memory(memory) => Some(memory),
            SimMedium::Disk(_) => None,
        }
    }

    /// The view of a disk, if it is one.
    pub(crate) fn disk(&self) -> Option<&DiskMedium> {
        match self {
            SimMedium::Memory(_) => None,
            SimMedium::Disk(disk) => Some(disk),
        }
    }

    /// Makes the brick die after this many changing accesses.
    pub(crate) fn arm_fuse(&self, accesses: u32) {
        either!(self, it => it.arm_fuse(accesses));
    }

    pub(crate) fn disarm_fuse(&self) {
        either!(self, it => it.disarm_fuse());
    }

    pub(crate) fn is_fuse_armed(&self) -> bool {
        either!(self, it => it.is_fuse_armed())
    }
}

impl Media for SimMedium {
    fn len_bytes(&self) -> usize {
        either!(self, it => it.len_bytes())
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        either!(self, it => it.read(offset, into));
    }

    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        either!(self, it => it.read_page(offset, into))
    }

    fn load(&self, offset: usize) -> u64 {
        either!(self, it => it.load(offset))
    }

    fn store(&self, offset: usize, word: u64) {
        either!(self, it => it.store(offset, word));
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        either!(self, it => it.write(offset, bytes));
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        either!(self, it => it.compare_exchange(offset, old, new))
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        either!(self, it => it.stream_line(offset, line))
    }

    /// All targets are of one kind.
    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        let memory = targets
            .iter()
            .filter_map(|(it, at)| Some((it.memory()?, *at)));
        let memory: Vec<_> = memory.collect();
        if memory.len() == targets.len() {
            return MemoryMedium::stream_page(&memory, page);
        }
        let disk = targets
            .iter()
            .filter_map(|(it, at)| Some((it.disk()?, *at)));
        let disk: Vec<_> = disk.collect();
        assert_eq!(disk.len(), targets.len(), "media of two kinds");
        DiskMedium::stream_page(&disk, page)
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        either!(self, it => it.flush(offset, len))
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        either!(self, it => it.fence(stores))
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        either!(self, it => it.is_unreadable(offset))
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        either!(self, it => it.unreadable_pages())
    }

    fn is_cached(&self, offset: usize) -> bool {
        either!(self, it => it.is_cached(offset))
    }

    fn is_on_disk(&self, offset: usize) -> bool {
        either!(self, it => it.is_on_disk(offset))
    }

    fn has_room(&self) -> bool {
        either!(self, it => it.has_room())
    }

    fn disk_figures(&self) -> Option<DiskFigures> {
        either!(self, it => it.disk_figures())
    }

    fn compare_resident(&self, from: usize) -> ResidentCheck {
        either!(self, it => it.compare_resident(from))
    }

    fn async_io(&self) -> Result<Option<Box<dyn AsyncIo>>, MapError> {
        either!(self, it => it.async_io())
    }

    fn sync(&self) -> Result<(), MapError> {
        either!(self, it => it.sync())
    }
}
