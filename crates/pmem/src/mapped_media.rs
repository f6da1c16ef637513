//! A mapped file or device: the fast implementation of [`Media`].

use crate::copy;
use crate::cpu::{FlushInstruction, cpu};
use crate::durability::{Durability, StatedClass};
use crate::map_error::MapError;
use crate::media::{FenceProof, Media, UnfencedStores, check_range};
use crate::unreadable::FaultGuard;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::{lock, recover};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::arch::asm;
use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
use std::fs::{File, FileType};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

/// Bytes populated at once: a tenth of a second of work, of whole huge pages.
const POPULATE_BYTES: usize = 64 << 20;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// A file or device mapped shared and writable.
///
/// The mapping is not inherited by fork: a child must map for itself.
pub struct MappedMedia {
    fault_guard: FaultGuard,
    base: NonNull<u8>,
    len: usize,
    file: File,
    durability: Durability,
    is_private: bool,
    group_sync: GroupSync,
}

/// Group commit: a caller needs one fdatasync that starts after its call; all callers that wait
/// share the next one.
#[derive(Default)]
struct GroupSync {
    state: Mutex<GroupSyncState>,
    ended: Condvar,
}

#[derive(Default)]
struct GroupSyncState {
    started: u64,
    ended: u64,
    failed: bool,
}

impl GroupSync {
    fn commit(&self, fdatasync: impl FnOnce() -> Result<(), MapError>) -> Result<(), MapError> {
        let mut state = lock(&self.state);
        // A running one may have missed our stores.
        let needed = state.started + 1;
        while state.ended < needed && state.started != state.ended && !state.failed {
            state = recover(self.ended.wait(state));
        }
        if state.failed {
            return Err(MapError::SyncFailed);
        }
        if state.ended >= needed {
            return Ok(());
        }
        state.started += 1;
        drop(state);
        let result = fdatasync();
        let mut state = lock(&self.state);
        state.ended += 1;
        state.failed |= result.is_err();
        self.ended.notify_all();
        result
    }
}

// SAFETY: the mapping is plain shared memory. Words are accessed atomically;
// bytes are copied by instructions that tolerate concurrent stores, and every
// reader verifies its copy (the contract of `Media::read`).
unsafe impl Send for MappedMedia {}
// SAFETY: as above.
unsafe impl Sync for MappedMedia {}

impl MappedMedia {
    /// Makes the kernel allocate all memory of the mapping that was not touched yet; no byte
    /// changes. No effect before Linux 5.14. Reports the bytes done and their total from time to
    /// time.
    ///
    /// # Errors
    /// When there is not enough memory, or the medium fails.
    pub fn populate(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), MapError> {
        for at in (0..self.len).step_by(POPULATE_BYTES) {
            let len = POPULATE_BYTES.min(self.len - at);
            // SAFETY: a part of our own mapping, whole pages; populating does not change its bytes.
            let done = unsafe {
                let base = self.base.as_ptr().add(at).cast();
                libc::madvise(base, len, libc::MADV_POPULATE_WRITE)
            };
            if done != 0 {
                return match io::Error::last_os_error() {
                    unknown if unknown.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                    cause => Err(system("populate the mapping")(cause)),
                };
            }
            progress((at + len) as u64, self.len as u64);
        }
        Ok(())
    }

    /// Maps the first `len` bytes of `file`.
    ///
    /// # Errors
    /// When the length is not whole pages, the file is shorter, or the system
    /// refuses.
    pub fn new(file: File, len: usize) -> Result<MappedMedia, MapError> {
        if len == 0 || !len.is_multiple_of(PAGE_BYTES) {
            return Err(MapError::BadLength(len));
        }
        let status = file.metadata().map_err(system("read the file's size"))?;
        if status.is_file() && status.len() < len as u64 {
            let found = status.len();
            return Err(MapError::TooShort {
                wanted: len as u64,
                found,
            });
        }
        let medium = classify(&file, status.file_type())?;
        let (base, synchronous) = map_file(&file, len)?;
        let durability = match synchronous {
            true => Durability::Pmem,
            false => medium,
        };
        advise(base, len);
        MappedMedia::from_mapping(base, len, file, durability, false)
    }

    /// Wraps a mapping.
    fn from_mapping(
        base: NonNull<u8>,
        len: usize,
        file: File,
        durability: Durability,
        is_private: bool,
    ) -> Result<MappedMedia, MapError> {
        let watched = FaultGuard::new(base.addr().get(), len, &file, is_private);
        Ok(MappedMedia {
            // SAFETY: our own mapping, to which no reference exists yet.
            fault_guard: watched.inspect_err(|_| unsafe { unmap(base, len) })?,
            base,
            len,
            file,
            durability,
            is_private,
            group_sync: GroupSync::default(),
        })
    }

    /// Replaces the medium's own class by the class that the pool's maker stated.
    ///
    /// # Errors
    /// When the medium cannot have it, or is not known to keep its promise and the maker did not
    /// vouch for it.
    pub fn with_stated_class(mut self, stated: StatedClass) -> Result<MappedMedia, MapError> {
        let status = self.file.metadata().map_err(system("look at the file"))?;
        let is_character_device = status.file_type().is_char_device();
        self.durability = stated.check_medium(self.durability, is_character_device)?;
        Ok(self)
    }

    /// The durability class of this medium.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// A second mapping of the same file with private stores: the volatile overlay of `file-sync`
    /// pools. Pages that were never stored to show the content of the shared mapping.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn overlay(&self) -> Result<MappedMedia, MapError> {
        let file = self.file.try_clone().map_err(system("share the file"))?;
        let base = map_with_flags(&file, self.len, libc::MAP_PRIVATE | libc::MAP_NORESERVE)
            .ok_or_else(|| system("map the overlay")(io::Error::last_os_error()))?;
        advise(base, self.len);
        MappedMedia::from_mapping(base, self.len, file, Durability::Process, true)
    }

    /// The file behind the mapping.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        check_range(self.len, offset, 8, 8);
        // SAFETY: in range and aligned; the mapping lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for MappedMedia {
    fn drop(&mut self) {
        self.fault_guard.end();
        // SAFETY: our own mapping, and no reference into it outlives `self`.
        unsafe { unmap(self.base, self.len) };
    }
}

/// # Safety
/// The mapping is ours, and no reference into it is left.
pub(crate) unsafe fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: as the caller promised.
    unsafe { libc::munmap(base.as_ptr().cast(), len) };
}

impl Media for MappedMedia {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        check_range(self.len, offset, into.len(), 1);
        // SAFETY: in range, and `into` is memory of our own process. Bytes stored meanwhile may be
        // torn, as the trait says.
        unsafe {
            let from = self.base.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        check_range(self.len, offset, bytes.len(), 1);
        // SAFETY: in range, and `bytes` are of our own process. A concurrent reader verifies its
        // copy.
        unsafe {
            let to = self.base.as_ptr().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    fn read_page(&self, offset: usize, into: &mut [u8; PAGE_BYTES]) -> u32 {
        check_range(self.len, offset, PAGE_BYTES, 1);
        // SAFETY: in range, and `into` is memory of our own process.
        unsafe { copy::read_page(self.base.as_ptr().add(offset), into) }
    }

    fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    fn store(&self, offset: usize, word: u64) {
        self.word(offset).store(word, Ordering::Release);
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.word(offset)
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        check_range(self.len, offset, LINE_BYTES, LINE_BYTES);
        // Word by word: lines are streamed right after they were composed, and wider loads would
        // wait for those stores.
        for (i, word) in line.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: in range and aligned; SSE2 is part of x86-64.
            unsafe {
                let to = self.base.as_ptr().add(offset + i * 8);
                _mm_stream_si64(to.cast(), i64::from_le_bytes(*word));
            }
        }
        UnfencedStores(())
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        assert!(
            (1..=copy::TARGETS_MAX).contains(&targets.len()),
            "1 to 3 targets, not {}",
            targets.len()
        );
        let mut pointers = [std::ptr::null_mut(); copy::TARGETS_MAX];
        for (pointer, (media, offset)) in pointers.iter_mut().zip(targets) {
            check_range(media.len, *offset, PAGE_BYTES, PAGE_BYTES);
            // SAFETY: in range.
            *pointer = unsafe { media.base.as_ptr().add(*offset) };
        }
        // SAFETY: in range and page-aligned; `page` borrows no mapping.
        let sums = unsafe { copy::stream_page(&pointers[..targets.len()], page) };
        (sums, UnfencedStores(()))
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        check_range(self.len, offset, len, 1);
        if self.durability == Durability::Eadr {
            // Stores that the fence orders into the caches are persistent there.
            return UnfencedStores(());
        }
        let mut line = offset / LINE_BYTES * LINE_BYTES;
        while line < offset + len {
            // SAFETY: the line holds a byte in range, and mappings are pages.
            unsafe { flush_line(self.base.as_ptr().add(line)) };
            line += LINE_BYTES;
        }
        UnfencedStores(())
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        let UnfencedStores(()) = stores;
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() };
        FenceProof(())
    }

    fn fence_each(media: &[&Self], stores: UnfencedStores) -> FenceProof {
        media[0].fence(stores)
    }

    fn prefetch(&self, offset: usize) {
        check_range(self.len, offset, 1, 1);
        // SAFETY: in range.
        copy::prefetch(unsafe { self.base.as_ptr().add(offset) });
    }

    fn prefetch_load(&self, offset: usize) {
        check_range(self.len, offset, 1, 1);
        // SAFETY: in range.
        copy::prefetch_load(unsafe { self.base.as_ptr().add(offset) });
    }

    fn prefetch_all(&self, offset: usize, len: usize) {
        check_range(self.len, offset, len, 1);
        // SAFETY: in range.
        copy::prefetch_all(unsafe { self.base.as_ptr().add(offset) }, len);
    }

    fn prepare_stores(&self, offset: usize, len: usize) {
        check_range(self.len, offset, len, PAGE_BYTES);
        // A private mapping would copy each page.
        if !self.is_private {
            // SAFETY: in range. Without an effect, each first store faults.
            unsafe {
                let base = self.base.as_ptr().add(offset).cast();
                libc::madvise(base, len, libc::MADV_POPULATE_WRITE);
            }
        }
    }

    fn tolerate_unreadable(&self, from: usize) {
        check_range(self.len, from, 0, PAGE_BYTES);
        self.fault_guard.tolerate_unreadable(from);
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        self.fault_guard.is_unreadable(offset)
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        self.fault_guard.unreadable_pages()
    }

    fn sync(&self) -> Result<(), MapError> {
        if self.durability != Durability::FileSync {
            return Ok(());
        }
        self.group_sync.commit(|| {
            // SAFETY: the descriptor is open as long as `self.file` lives.
            if unsafe { libc::fdatasync(self.file.as_raw_fd()) } == 0 {
                return Ok(());
            }
            let cause = io::Error::last_os_error();
            Err(system("make the file durable (fdatasync)")(cause))
        })
    }
}

pub(crate) fn system(action: &'static str) -> impl Fn(io::Error) -> MapError {
    move |cause| MapError::System { action, cause }
}

/// Maps with MAP_SYNC where the medium has it, else plainly shared.
fn map_file(file: &File, len: usize) -> Result<(NonNull<u8>, bool), MapError> {
    if let Some(base) = map_with_flags(file, len, libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC) {
        return Ok((base, true));
    }
    map_shared(file, len, READ_WRITE)
        .map(|base| (base, false))
        .ok_or_else(|| system("map the file")(io::Error::last_os_error()))
}

fn map_with_flags(file: &File, len: usize, flags: libc::c_int) -> Option<NonNull<u8>> {
    mmap_file(file, len, READ_WRITE, flags)
}

pub(crate) fn map_shared(file: &File, len: usize, access: libc::c_int) -> Option<NonNull<u8>> {
    mmap_file(file, len, access, libc::MAP_SHARED)
}

fn mmap_file(
    file: &File,
    len: usize,
    access: libc::c_int,
    flags: libc::c_int,
) -> Option<NonNull<u8>> {
    // SAFETY: a new mapping at an address the kernel chooses.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            access,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return None;
    }
    exclude_from_core_dumps(base, len);
    NonNull::new(base.cast())
}

/// Excludes shared memory from core files: it is larger than the rest of the process, and holds
/// data of others.
pub(crate) fn exclude_from_core_dumps(base: *mut libc::c_void, len: usize) {
    // SAFETY: a mapping of ours; the advice changes no bytes. A kernel without it dumps more.
    unsafe { libc::madvise(base, len, libc::MADV_DONTDUMP) };
}

/// The class of a medium without MAP_SYNC. A medium that is not known to be memory counts as a
/// file, the class that promises more work.
fn classify(file: &File, kind: FileType) -> Result<Durability, MapError> {
    // statfs on a device reports the file system of its name, a tmpfs.
    if kind.is_block_device() {
        return Ok(Durability::FileSync);
    }
    if kind.is_char_device() {
        return Ok(Durability::Process);
    }
    // SAFETY: all zeroes is a valid `statfs`.
    let mut status: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor and a buffer of the right type.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &mut status) } != 0 {
        return Err(system("ask for the file system's kind")(
            io::Error::last_os_error(),
        ));
    }
    Ok(match status.f_type {
        libc::TMPFS_MAGIC | libc::HUGETLBFS_MAGIC => Durability::Process,
        _ => Durability::FileSync,
    })
}

/// Asks for huge pages and no inheritance. Both are advice: a kernel without huge pages maps small
/// ones, and a forked child of ours never uses the mapping.
pub(crate) fn advise(base: NonNull<u8>, len: usize) {
    for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
        // SAFETY: our own mapping; neither advice changes its bytes.
        unsafe { libc::madvise(base.as_ptr().cast(), len, advice) };
    }
}

/// # Safety
/// `line` points into a mapping, and `cpu` reports an instruction of this processor.
unsafe fn flush_line(line: *mut u8) {
    // SAFETY: the instruction exists (CPUID) and changes no bytes. `asm!`
    // without `nomem` orders it after earlier stores of the program.
    unsafe {
        match cpu().flush {
            FlushInstruction::Clwb => {
                asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags))
            }
            FlushInstruction::Clflushopt => {
                asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
            }
            FlushInstruction::Clflush => {
                asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags));
            }
        }
    }
}
