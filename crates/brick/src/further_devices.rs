//! The files and block devices of a pool behind its first device: how they are found when the pool is opened.
//!
//! The superblock lists the devices and where each was last found. The header of a device identifies it, so a path is only
//! a hint, and the operator may name others.
//!
//! Invariants: a device is locked before it is used, as the pool's file is, and identified under its lock, on the same open
//! file. Nothing but a plain file or a block device is opened.

use crate::block_device::claim;
use crate::device_file::{is_same_file, open_device};
use crate::file::{FileError, LOCK_LIMIT, LOCK_PAUSE, superblocks_of, system};
pub use crate::file_error::FindDeviceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, NewDevice, SoundDevice};
use pagemesh_store::devices::{Device, DeviceAge, DeviceIdentity, DeviceState};
use pagemesh_store::superblock::Superblock;
use rustix::fs::FlockOperation;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// An open file that has the header of a device.
struct IdentifiedFile {
    path: PathBuf,
    file: File,
}

type NamedDevices = HashMap<Uuid, IdentifiedFile>;

/// A device of a pool that was found and locked.
pub(crate) struct FoundDevice {
    pub(crate) device: Device,
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

impl FoundDevice {
    /// Makes it a part of a medium.
    pub(crate) fn attach(&self, media: &impl Media) -> Result<(), FileError> {
        let path = &self.path;
        let file = self.file.try_clone().map_err(system("open", path))?;
        let new = NewDevice {
            file,
            bytes: self.device.bytes(),
            head_len: self.device.head_len(),
            frame_table: self.device.frame_table_bytes(),
        };
        media.attach_device(new).map_err(|cause| FileError::Map {
            path: path.clone(),
            cause,
        })
    }
}

/// The further devices of a pool that have failed, by its superblocks, with those that the operator `named`. `paths` are
/// those of devices that the operator knows.
///
/// # Errors
/// When the pool's file cannot be read, or a named device is present and current, and no superblock calls it failed.
pub(crate) fn failed(
    pool: &Path,
    file: &File,
    named: &[Uuid],
    paths: &[PathBuf],
) -> Result<Vec<Uuid>, FileError> {
    let blocks = superblocks_of(pool, file)?;
    let has = |id: &Uuid| {
        let mut devices = blocks.iter().flat_map(|it| it.geometry.devices.iter());
        devices.any(|device| device.id == *id)
    };
    // The option may stay in a configuration after the device has left.
    for device in named.iter().filter(|id| !has(id)) {
        tracing::warn!(%device, "{} has no such further device, so it is not taken for failed", pool.display());
    }
    let known = blocks.iter().flat_map(|it| it.geometry.devices.failed());
    let mut failed: Vec<Uuid> = known.map(|device| device.id).collect();
    for &device in named.iter().filter(|id| has(id)) {
        let is_known = failed.contains(&device);
        if let (false, Some(path)) = (is_known, present_path(&blocks, device, paths)) {
            let pool = pool.to_owned();
            return Err(FindDeviceError::NotFailed { pool, device, path }.into());
        }
        failed.push(device);
    }
    failed.sort_unstable();
    failed.dedup();
    Ok(failed)
}

/// The further devices that have failed by the superblocks, with those that begin at `failed_bytes`. Adds the latter to
/// `retired`, and takes all of `retired` for failed.
pub(crate) fn retire(
    blocks: &[Superblock],
    failed_bytes: &[usize],
    retired: &mut Vec<Uuid>,
) -> Vec<Uuid> {
    let devices = || blocks.iter().flat_map(|it| it.geometry.devices.iter());
    let new = devices().filter(|it| failed_bytes.contains(&it.bytes().start));
    retired.extend(new.map(|it| it.id));
    let known = devices().filter(|it| it.state == DeviceState::Failed);
    let mut failed: Vec<Uuid> = known.map(|it| it.id).collect();
    failed.extend(&*retired);
    failed.sort_unstable();
    failed.dedup();
    failed
}

/// The further devices of a pool, of the `open` and locked ones of an earlier disk. `failed` ones are not needed. `known` has
/// the paths of devices.
///
/// # Errors
/// When the pool has another device, or the header of one is not its own.
pub(crate) fn take_over(
    pool: &Path,
    mut blocks: Vec<Superblock>,
    mut open: Vec<SoundDevice>,
    failed: &[Uuid],
    known: impl Fn(Uuid) -> Option<PathBuf>,
) -> Result<Vec<FoundDevice>, FileError> {
    // A recovery may begin with the older superblock, as at any opening.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.generation));
    let mut found = Vec::new();
    for (number, block) in blocks.iter().enumerate() {
        for &device in block.geometry.devices.iter() {
            if failed.contains(&device.id) {
                continue;
            }
            let path =
                known(device.id).or_else(|| block.device_paths.of(device.id).map(Into::into));
            let path = path.unwrap_or_else(|| device.id.to_string().into());
            let is_it = |it: &SoundDevice| it.first_byte == device.bytes().start;
            let place = open.iter().position(is_it);
            let checked = match place {
                Some(place) => {
                    let reader = buffered(&open[place].file, &path)?;
                    check_header(&path, &reader, block, device.id)
                }
                None => Err(format!("{} is not open", path.display()).into()),
            };
            match (checked, place) {
                (Ok(()), Some(place)) => {
                    let file = open.swap_remove(place).file;
                    found.push(FoundDevice { device, path, file });
                }
                (Err(cause), _) if number == 0 => return Err(cause.into_error(pool, device.id)),
                _ => {}
            }
        }
    }
    found.sort_by_key(|it| it.device.first_page);
    Ok(found)
}

/// A handle of a file that reads through the page cache, in any places.
pub(crate) fn buffered(file: &File, path: &Path) -> Result<File, FileError> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(system("open", path))
}

/// The path at which a device has a current header, of those that the superblock or the operator names.
fn present_path(blocks: &[Superblock], device: Uuid, paths: &[PathBuf]) -> Option<PathBuf> {
    let newest = blocks.iter().max_by_key(|block| block.generation)?;
    let known = newest.device_paths.of(device);
    let mut paths = known.into_iter().chain(paths.iter().map(PathBuf::as_path));
    let path = paths.find(|path| {
        let file = open_device(path);
        file.is_ok_and(|file| check_header(path, &file, newest, device).is_ok())
    });
    path.map(Path::to_owned)
}

/// Finds and locks the further devices of a pool with an open and locked file, by `named` paths and by the paths in its
/// superblock. `failed` ones are not needed. `patience` is the time that users of a device have to end.
///
/// # Errors
/// When one is missing or in use, or a named path is no device of the pool.
pub(crate) fn find(
    pool: &Path,
    file: &File,
    named: &[PathBuf],
    failed: &[Uuid],
    patience: Duration,
) -> Result<Vec<FoundDevice>, FileError> {
    let mut blocks = superblocks_of(pool, file)?;
    // A recovery may begin with the older superblock, which may name a device that has left since.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.generation));
    let Some(newest) = blocks.first() else {
        return Ok(Vec::new());
    };
    let mut named = identify_named(pool, newest, named)?;
    let mut found: Vec<FoundDevice> = Vec::new();
    for (number, block) in blocks.iter().enumerate() {
        for device in block.geometry.devices.iter() {
            let overlaps = |it: &FoundDevice| {
                it.device.first_page < device.end_page() && device.first_page < it.device.end_page()
            };
            if found.iter().any(overlaps) || failed.contains(&device.id) {
                continue;
            }
            match find_device(block, device.id, &mut named) {
                Ok(IdentifiedFile { path, file }) => {
                    let file = claim(&path, file, patience)?;
                    lock(&path, &file, patience)?;
                    let device = *device;
                    // It may have left the pool while this brick waited for its lock.
                    match check_header(&path, &file, block, device.id) {
                        Ok(()) => found.push(FoundDevice { device, path, file }),
                        Err(cause) if number == 0 => return Err(cause.into_error(pool, device.id)),
                        Err(_) => {}
                    }
                }
                Err(cause) if number == 0 => return Err(cause.into_error(pool, device.id)),
                Err(_) => {}
            }
        }
    }
    // A device that joined later may have the place of one that has left.
    found.sort_by_key(|it| it.device.first_page);
    warn_of_left(pool, &named);
    Ok(found)
}

/// Opens a device where the operator or the superblock says that it is.
fn find_device(
    block: &Superblock,
    device: Uuid,
    named: &mut NamedDevices,
) -> Result<IdentifiedFile, BadHeader> {
    if let Some(named) = named.remove(&device) {
        return Ok(named);
    }
    let path = block.device_paths.of(device);
    let path = path.ok_or_else(|| String::from("its last path is not known"))?;
    if !path.is_absolute() {
        return Err(format!("its last path {} is not absolute", path.display()).into());
    }
    let file = open_device(path).map_err(|cause| cause.to_string())?;
    check_header(path, &file, block, device)?;
    let path = path.to_owned();
    Ok(IdentifiedFile { path, file })
}

fn warn_of_left(pool: &Path, named: &NamedDevices) {
    for IdentifiedFile { path, .. } in named.values() {
        tracing::warn!(
            "{} has left the pool {}, and is not used",
            path.display(),
            pool.display()
        );
    }
}

/// The devices at the paths that the operator named.
fn identify_named(
    pool: &Path,
    block: &Superblock,
    named: &[PathBuf],
) -> Result<NamedDevices, FileError> {
    let mut devices = NamedDevices::new();
    for path in named {
        let file = open_device(path)?;
        match identify(&file) {
            Some(found) if found.pool == block.pool => {
                let device = found.device;
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                let named = IdentifiedFile { path, file };
                insert_named(&mut devices, device, named)?;
            }
            _ => {
                let (path, pool) = (path.clone(), pool.to_owned());
                return Err(FindDeviceError::NotOfPool { path, pool }.into());
            }
        }
    }
    Ok(devices)
}

/// Adds a named device. A second path of the same file changes nothing.
fn insert_named(
    devices: &mut NamedDevices,
    device: Uuid,
    named: IdentifiedFile,
) -> Result<(), FileError> {
    match devices.get(&device) {
        Some(known) if !is_same_file(&known.path, &named.path) => {
            let (one, other) = (known.path.clone(), named.path);
            return Err(FindDeviceError::NamedTwice { one, other, device }.into());
        }
        Some(_) => {}
        None => drop(devices.insert(device, named)),
    }
    Ok(())
}

/// Checks that an open file is a device of a pool by the ids of both, and no old copy.
fn check_header(
    path: &Path,
    file: &File,
    block: &Superblock,
    device: Uuid,
) -> Result<(), BadHeader> {
    let shown = path.display();
    let refused = |cause: String| Err(BadHeader::Missing(cause));
    let Some(found) = identify(file) else {
        return refused(format!("{shown} has no header of a device"));
    };
    if (found.pool, found.device) != (block.pool, device) {
        return refused(format!("{shown} is another device now"));
    }
    let (path, age) = (path.to_owned(), found.age(block.incarnation));
    match age {
        DeviceAge::Current => Ok(()),
        DeviceAge::Stale => Err(BadHeader::Stale(path)),
        DeviceAge::Newer => Err(BadHeader::Newer(path)),
    }
}

/// Why a file is not the device that was searched.
enum BadHeader {
    Missing(String),
    /// An old copy of the device.
    Stale(PathBuf),
    /// The pool's file is an old copy.
    Newer(PathBuf),
}

impl From<String> for BadHeader {
    fn from(cause: String) -> BadHeader {
        BadHeader::Missing(cause)
    }
}

impl BadHeader {
    fn into_error(self, pool: &Path, device: Uuid) -> FileError {
        let pool = pool.to_owned();
        match self {
            BadHeader::Missing(cause) => FindDeviceError::Missing {
                pool,
                device,
                cause,
            },
            BadHeader::Stale(path) => FindDeviceError::Stale { pool, device, path },
            BadHeader::Newer(path) => FindDeviceError::StalePool { pool, device, path },
        }
        .into()
    }
}

/// The identity in a header and its copy.
pub(crate) fn identify(file: &File) -> Option<DeviceIdentity> {
    let mut copies = [[0; PAGE_BYTES]; 2];
    for (page, at) in copies.iter_mut().zip([0, PAGE_BYTES as u64]) {
        // A copy that cannot be read is no sound one.
        if file.read_exact_at(page, at).is_err() {
            page.fill(0);
        }
    }
    let [one, other] = &copies;
    DeviceIdentity::of_copies([one, other])
}

/// Takes the lock that keeps other bricks and checks away.
fn lock(path: &Path, file: &File, patience: Duration) -> Result<(), FileError> {
    let began = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(cause) => return Err(system("lock", path)(cause.into())),
        }
        if began.elapsed() >= patience {
            return Err(FileError::InUse(path.into()));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// The time that a brick waits for the users of a device.
pub(crate) const BRICK_PATIENCE: Duration = LOCK_LIMIT;
