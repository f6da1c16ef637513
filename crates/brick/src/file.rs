//! The file or device that holds a pool.
//!
//! Invariants: every process that has the pool mapped shares an open file description that is
//! locked, so a brick never recovers a pool that a client still maps. A brick holds a second lock,
//! an [`OwnerLock`], that distinguishes it from its clients. Plain files are fully allocated before
//! they become a pool, and before one is opened.

use crate::block_device::open_claimed;
pub use crate::file_error::FileError;
pub(crate) use crate::file_error::system;
use crate::new_file::{NewFile, dir_of};
use crate::{process, resource_limits};
use pagemesh_base::proc_maps::has_mapped;
use pagemesh_pmem::{Durability, MappedMedia, Media, StatedClass};
use pagemesh_store::pool::{self, FormatOptions};
use pagemesh_store::recovery::PoolError;
use pagemesh_store::superblock::Superblock;
use rustix::fs::{Advice, FallocateFlags, FlockOperation};
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long clients of a dead brick have to unmap its pool. They notice the brick's end at once; a
/// later one is stopped, and is killed.
const UNMAP_LIMIT: Duration = Duration::from_secs(2);
/// How long to wait for a pool in all.
pub(crate) const LOCK_LIMIT: Duration = Duration::from_secs(4);
/// How long the owner lock of an ended brick may persist: a forked child of its process has a copy
/// of each descriptor between fork and exec.
const OWNER_LOCK_LIMIT: Duration = Duration::from_millis(200);
/// The interval of the checks whether the pool is free.
pub(crate) const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// The unit of `st_blocks`, independent of the file system's block size.
const STAT_BLOCK_BYTES: u64 = 512;

/// Bytes of zeros written at once to a new file.
const ZEROS_BYTES: usize = 32 << 20;

/// Bytes mapped of a DAX device to read its superblocks: its alignment.
const DAX_MAP_BYTES: u64 = 2 << 20;

/// Makes a file of `size_bytes`, or a device of that size, a new pool of its medium's class.
///
/// # Errors
/// When the file exists, the size is impossible, or the system refuses. A file that could not be
/// finished is removed.
pub fn create(path: &Path, size_bytes: u64) -> Result<Uuid, FileError> {
    Ok(create_with(path, NewPool::of_size(size_bytes), &mut |_, _| {})?.0)
}

/// The properties of a new pool.
#[derive(Clone, Copy, Debug)]
pub struct NewPool {
    /// Its bytes.
    pub size_bytes: u64,
    /// The sessions that it can serve. None: by its size.
    pub sessions: Option<u32>,
    /// The durability class that its creator states. None: the medium's own.
    pub stated: Option<StatedClass>,
    /// How the blocks of a new plain file are allocated.
    pub preallocation: Preallocation,
}

/// The allocation of a new plain file, as in `qemu-img create -o preallocation`. A device has its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// The file system allocates the blocks and notes that they are unwritten. The first write to each block is slower: it
    /// changes this note, and the next flush commits the change.
    #[default]
    Falloc,
    /// All blocks are written with zeros, too.
    Full,
}

impl NewPool {
    /// A pool with the defaults for its size.
    #[must_use]
    pub fn of_size(size_bytes: u64) -> NewPool {
        NewPool {
            size_bytes,
            sessions: None,
            stated: None,
            preallocation: Preallocation::Falloc,
        }
    }

    /// Its journals: the owner has one, too.
    fn journals(&self) -> Option<u32> {
        self.sessions.map(|sessions| sessions.saturating_add(1))
    }
}

/// The same with other properties. Returns the class of the pool. While it populates memory or writes zeros it
/// reports the bytes done and their total.
///
/// # Errors
/// As [`create`], and when the medium cannot have the class or the sessions.
pub fn create_with(
    path: &Path,
    new: NewPool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Uuid, Durability), FileError> {
    create_allocated(path, new, Allocation::Allocated, progress)
}

/// The same without allocating, for measurements only: a full file system ends every process that
/// uses such a pool.
///
/// # Errors
/// As [`create`].
pub fn create_sparse(path: &Path, size_bytes: u64) -> Result<Uuid, FileError> {
    let new = NewPool::of_size(size_bytes);
    Ok(create_allocated(path, new, Allocation::Sparse, &mut |_, _| {})?.0)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allocation {
    /// All of it when the pool is made: a later shortage would be a SIGBUS.
    Allocated,
    Sparse,
}

fn create_allocated(
    path: &Path,
    new: NewPool,
    space: Allocation,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Uuid, Durability), FileError> {
    let is_device = path
        .metadata()
        .is_ok_and(|m| m.file_type().is_char_device() || m.file_type().is_block_device());
    let bad = |cause: pagemesh_store::geometry::BadSize| FileError::Pool {
        path: path.into(),
        cause: cause.into(),
    };
    let size_bytes = new.size_bytes;
    pagemesh_store::geometry::Geometry::plan_with(size_bytes, new.journals()).map_err(bad)?;
    if is_device {
        let (file, _claim) = open_locked(path)?;
        if read_superblock_of(path, &file).is_ok() {
            return Err(FileError::HoldsPool(path.into()));
        }
        let _exclusive = open_claimed(path, Duration::ZERO)?;
        check_length(path, &file, size_bytes)?;
        return make_pool(path, file, new, Allocation::Sparse, progress);
    }
    let fresh = NewFile::create(path)?;
    if space == Allocation::Allocated {
        resource_limits::check_file(dir_of(path), size_bytes).map_err(|cause| {
            FileError::NoRoom {
                path: path.into(),
                cause,
            }
        })?;
    }
    let sized = match space {
        Allocation::Allocated => {
            rustix::fs::fallocate(&fresh.file, FallocateFlags::empty(), 0, size_bytes)
                .map_err(|cause| system("allocate", path)(cause.into()))
        }
        Allocation::Sparse => fresh.file.set_len(size_bytes).map_err(system("size", path)),
    };
    sized?;
    if space == Allocation::Allocated && new.preallocation == Preallocation::Full {
        write_zeros(&fresh.file, size_bytes, progress).map_err(system("write", path))?;
    }
    let file = fresh.file.try_clone().map_err(system("open", path))?;
    let made = make_pool(path, file, new, space, progress)?;
    fresh.persist()?;
    Ok(made)
}

/// Writes zeros to all of a new file, and makes them durable. Drops them from the page cache step by step, so that a
/// large file does not displace the cache of the machine.
fn write_zeros(file: &File, size_bytes: u64, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES];
    for at in (0..size_bytes).step_by(ZEROS_BYTES) {
        let len = (size_bytes - at).min(ZEROS_BYTES as u64);
        file.write_all_at(&zeros[..len as usize], at)?;
        file.sync_data()?;
        rustix::fs::fadvise(file, at, NonZeroU64::new(len), Advice::DontNeed)?;
        progress(at + len, size_bytes);
    }
    file.sync_all()
}

/// Refuses a medium shorter than the pool: every access beyond its end would be a SIGBUS.
fn check_length(path: &Path, file: &File, wanted: u64) -> Result<(), FileError> {
    match length(path, file)? {
        Some(found) if found < wanted => Err(FileError::Pool {
            path: path.into(),
            cause: PoolError::Truncated { wanted, found },
        }),
        _ => Ok(()),
    }
}

/// Bytes of a file or block device; none for a character device, which only a mapping measures.
pub(crate) fn length(path: &Path, mut file: &File) -> Result<Option<u64>, FileError> {
    use std::io::{Seek, SeekFrom};
    let found = file.metadata().map_err(system("look at", path))?;
    if found.file_type().is_block_device() {
        let end = file.seek(SeekFrom::End(0));
        return end.map(Some).map_err(system("measure", path));
    }
    Ok(found.is_file().then_some(found.len()))
}

fn make_pool(
    path: &Path,
    file: File,
    new: NewPool,
    space: Allocation,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(Uuid, Durability), FileError> {
    let id = Uuid::new_v4();
    let stated = new.stated;
    let media = map(path, file, new.size_bytes)?;
    let outlives_boot = media.durability() == Durability::FileSync;
    if media.durability() == Durability::Process && space == Allocation::Allocated {
        // The kernel clears memory at the first touch, 2 MiB at a time. Populating does that now,
        // so that no write has to.
        media.populate(progress).map_err(|cause| FileError::Map {
            path: path.into(),
            cause,
        })?;
    }
    let media = apply_stated_class(path, media, stated)?;
    let durability = media.durability();
    let boot = match outlives_boot && durability == Durability::Process {
        true => Some(boot_id()?),
        false => None,
    };
    let bad = |cause| FileError::Pool {
        path: path.into(),
        cause,
    };
    let options = FormatOptions {
        journals: new.journals(),
        stated,
        boot,
        ..FormatOptions::of(&media)
    };
    pool::format_as(&media, id, options).map_err(bad)?;
    Ok((id, durability))
}

fn map(path: &Path, file: File, size_bytes: u64) -> Result<MappedMedia, FileError> {
    let len = usize::try_from(size_bytes).unwrap_or(usize::MAX);
    MappedMedia::new(file, len).map_err(|cause| FileError::Map {
        path: path.into(),
        cause,
    })
}

fn apply_stated_class(
    path: &Path,
    media: MappedMedia,
    stated: Option<StatedClass>,
) -> Result<MappedMedia, FileError> {
    let Some(stated) = stated else {
        return Ok(media);
    };
    media
        .with_stated_class(stated)
        .map_err(|cause| FileError::Class {
            path: path.into(),
            class: stated.class,
            cause,
        })
}

/// The kernel's id of the current boot.
fn boot_id() -> Result<Uuid, FileError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(path).map_err(system("read", path))?;
    let parsed = Uuid::parse_str(text.trim());
    parsed.map_err(|cause| system("understand", path)(io::Error::other(cause)))
}

/// The lock of a running brick, which clients never have. It lies on an open file description of
/// its own: a lock of the process would end when the process closes any other descriptor of the
/// pool.
#[derive(Debug)]
pub struct OwnerLock {
    file: File,
    /// The claim of a block device, for as long as the brick runs.
    exclusive: Option<File>,
}

impl OwnerLock {
    /// Another handle of the same lock and claim.
    pub(crate) fn share(&self, path: &Path) -> Result<OwnerLock, FileError> {
        let share = |file: &File| file.try_clone().map_err(system("share the lock of", path));
        Ok(OwnerLock {
            file: share(&self.file)?,
            exclusive: self.exclusive.as_ref().map(share).transpose()?,
        })
    }

    /// Whether a process no longer maps the pool. False if that is unknown.
    pub(crate) fn is_unmapped_by(&self, pid: u32) -> bool {
        let found = self.file.metadata();
        found.is_ok_and(|found| has_mapped(pid, found.dev(), found.ino()) == Some(false))
    }
}

pub(crate) fn open_file(path: &Path) -> Result<File, FileError> {
    let file = OpenOptions::new().read(true).write(true).open(path);
    file.map_err(system("open", path))
}

pub(crate) fn open_locked(path: &Path) -> Result<(File, OwnerLock), FileError> {
    let claim = take_owner_lock(path)?;
    Ok((lock_for_clients(path)?, claim))
}

/// Opens a file with the lock that its mappings share, as soon as no client maps it.
fn lock_for_clients(path: &Path) -> Result<File, FileError> {
    let file = open_file(path)?;
    let began = Instant::now();
    let mut ended = false;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(cause) => return Err(system("lock", path)(cause.into())),
        }
        if began.elapsed() > UNMAP_LIMIT && !ended {
            end_stalled_clients(path);
            ended = true;
        }
        if began.elapsed() > LOCK_LIMIT {
            return Err(FileError::InUse(path.into()));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

pub(crate) fn take_owner_lock(path: &Path) -> Result<OwnerLock, FileError> {
    let file = open_file(path)?;
    // The whole file, even if its length changes.
    let whole = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as i16,
        l_whence: nix::libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let began = Instant::now();
    loop {
        match nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_OFD_SETLK(&whole)) {
            Ok(_) => {
                return Ok(OwnerLock {
                    file,
                    exclusive: None,
                });
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => {}
            Err(cause) => return Err(system("lock", path)(cause.into())),
        }
        if began.elapsed() > OWNER_LOCK_LIMIT {
            return Err(FileError::InUse(path.into()));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Kills clients of a dead brick that have not released its pool: they are stopped.
fn end_stalled_clients(path: &Path) {
    for (pid, started) in process::holders(path) {
        tracing::warn!(pid, path = %path.display(), "killing a client that does not release the pool of a dead brick");
        if let Err(cause) = process::kill(pid, started) {
            tracing::error!(pid, %cause, "cannot kill a client");
        }
    }
}

/// Locks and maps an existing pool, without recovering it.
///
/// # Errors
/// When the file is no pool, in use, shorter than its superblock says, on a medium that does not
/// keep the promise of its class, or the system refuses.
pub fn open(path: &Path) -> Result<(MappedMedia, OwnerLock), FileError> {
    open_with(path, Allocation::Allocated)
}

pub(crate) fn open_with(
    path: &Path,
    space: Allocation,
) -> Result<(MappedMedia, OwnerLock), FileError> {
    let mut claim = take_owner_lock(path)?;
    let file = lock_for_clients(path)?;
    // A brick that has just ended may still have its claim.
    claim.exclusive = Some(open_claimed(path, OWNER_LOCK_LIMIT)?);
    Ok((map_locked(path, file, space)?, claim))
}

/// Opens a pool again after its brick has ended. The process has kept the claim.
pub(crate) fn open_claimed_again(
    path: &Path,
    space: Allocation,
    claim: OwnerLock,
) -> Result<(MappedMedia, OwnerLock), FileError> {
    let file = lock_for_clients(path)?;
    Ok((map_locked(path, file, space)?, claim))
}

fn map_locked(path: &Path, file: File, space: Allocation) -> Result<MappedMedia, FileError> {
    let block = read_superblock_of(path, &file)?;
    if space == Allocation::Allocated {
        fill_holes(path, &file, block.geometry.pool_bytes)?;
    }
    let media = map_pool(path, file, &block)?;
    match block.boot {
        Some(boot) if boot != boot_id()? => Err(FileError::Restarted(path.into())),
        _ => Ok(media),
    }
}

/// Allocates the holes of a plain file, as left by a copy that skips zeroes.
pub(crate) fn fill_holes(path: &Path, file: &File, size_bytes: u64) -> Result<(), FileError> {
    let found = file.metadata().map_err(system("look at", path))?;
    // An estimate: file systems count blocks of their own among the file's.
    let missing_bytes = size_bytes.saturating_sub(found.blocks() * STAT_BLOCK_BYTES);
    // A file that is too short is refused later, with an error of its own.
    if !found.is_file() || found.len() < size_bytes {
        return Ok(());
    }
    let holes = |cause: rustix::io::Errno| FileError::Holes {
        path: path.into(),
        missing_bytes,
        cause: cause.into(),
    };
    // Some file systems keep the part that they could allocate.
    let room = rustix::fs::fstatvfs(file).map_err(holes)?;
    if room.f_bavail.saturating_mul(room.f_frsize) < missing_bytes {
        return Err(holes(rustix::io::Errno::NOSPC));
    }
    resource_limits::check_holes(file, missing_bytes).map_err(|cause| FileError::NoRoom {
        path: path.into(),
        cause,
    })?;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size_bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) if missing_bytes == 0 => Ok(()),
        allocated => allocated.map_err(holes),
    }
}

/// Maps a pool with the class in its superblock.
pub(crate) fn map_pool(
    path: &Path,
    file: File,
    block: &Superblock,
) -> Result<MappedMedia, FileError> {
    let size_bytes = block.geometry.pool_bytes;
    check_length(path, &file, size_bytes)?;
    let media = map(path, file, size_bytes)?;
    apply_stated_class(path, media, block.stated)
}

/// The superblock of a file, whether or not a brick runs on it.
///
/// # Errors
/// When the file is no pool.
pub fn read_superblock(path: &Path) -> Result<Superblock, FileError> {
    let is_char = |m: std::fs::Metadata| m.file_type().is_char_device();
    let file = match path.metadata().is_ok_and(is_char) {
        // A character device can only be mapped, and mapping needs write access.
        true => open_file(path)?,
        false => File::open(path).map_err(system("open", path))?,
    };
    read_superblock_of(path, &file)
}

pub(crate) fn read_superblock_of(path: &Path, file: &File) -> Result<Superblock, FileError> {
    let pages = superblock_pages(path, file)?;
    let [first, second] = &pages;
    Superblock::choose([first, second]).map_err(|cause| FileError::Pool {
        path: path.into(),
        cause: cause.into(),
    })
}

/// The superblocks that are valid by their own pages.
pub(crate) fn superblocks_of(path: &Path, file: &File) -> Result<Vec<Superblock>, FileError> {
    let pages = superblock_pages(path, file)?;
    Ok(pages
        .iter()
        .filter_map(|page| Superblock::decode(page).ok())
        .collect())
}

fn superblock_pages(path: &Path, file: &File) -> Result<[[u8; 4096]; 2], FileError> {
    use std::os::unix::fs::FileExt;
    let mut pages = [[0; 4096]; 2];
    let found = file.metadata().map_err(system("look at", path))?;
    if found.file_type().is_char_device() {
        // A DAX device has no `read`; its mappings are of whole huge pages.
        let file = file.try_clone().map_err(system("open", path))?;
        let media = map(path, file, DAX_MAP_BYTES)?;
        media.read(0, &mut pages[0]);
        media.read(4096, &mut pages[1]);
        return Ok(pages);
    }
    for (page, at) in pages.iter_mut().zip([0, 4096]) {
        match file.read_exact_at(page, at) {
            Ok(()) => {}
            // Too short for a pool: decoding reports it.
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {}
            Err(cause) => return Err(system("read", path)(cause)),
        }
    }
    Ok(pages)
}

/// Whether durability on this class needs `fdatasync` besides a fence.
#[must_use]
pub fn needs_sync(durability: Durability) -> bool {
    durability == Durability::FileSync
}
