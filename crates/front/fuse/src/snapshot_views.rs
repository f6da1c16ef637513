//! `.snapshot/NAME/…` in each directory of a mount: read-only views of the file systems in snapshots.
//!
//! A directory in a view is the same inode as the live one, at the time of the snapshot. Listings show `.snapshot` only if the
//! mount asks for it, behind all other names, and not inside of views. A real entry of this name wins, and hides the views of its
//! directory.
//!
//! Node numbers, which are also the inode numbers that programs see:
//!
//! | node | bits |
//! |---|---|
//! | `.snapshot` of the live directory D | 63, 62, and D |
//! | inode I in a snapshot | 63, the slot of the snapshot from bit 47 on, and I |
//!
//! Invariants:
//! - A slot belongs to one snapshot as long as the mount lasts, so a node never changes its meaning.
//! - Snapshots are opened, and closed when they are idle, by [`OpenSnapshots`].
//! - No lock is held over I/O.
//! - Nothing in a view is changed, and no node of a view reaches the live file system.

use crate::abi;
use crate::attr::{CacheTimeout, dirent_type};
use crate::direct_io::{self, LIMITS_IOCTL};
use crate::names;
use crate::reply::{self, FuseReply, Listing};
use crate::request::{ReadRange, Request};
use crate::request_handler::{AsyncWriter, RequestHandler};
use crate::serve::{FsHandler, xattr};
use pagemesh_base::poison;
use pagemesh_fs::{
    Attr, DirEntry, Fs, FsError, Ino, InodeKind, OpenSnapshots, Result, SNAPSHOT_DIR, SeekTarget,
    Time,
};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The wait for calls of other threads that list or open snapshots.
const WAIT: Option<Duration> = Some(Duration::from_secs(30));
/// How long the kernel may use the name of a snapshot without asking again: it may be deleted.
const NAME_TIMEOUT_S: u64 = 1;

const VIEW: u64 = 1 << 63;
const DIRECTORY: u64 = 1 << 62;
const SLOT_SHIFT: u32 = 47;
const SLOTS_MAX: usize = 1 << (62 - SLOT_SHIFT);
const INO_MASK: u64 = (1 << SLOT_SHIFT) - 1;
/// The cookie of `.snapshot` in a listing that shows it: behind all cookies of names, which have 63 bits.
const SHOWN_COOKIE: u64 = u64::MAX >> 1;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// The views of a mount.
pub(crate) struct SnapshotViews {
    snapshots: Arc<OpenSnapshots>,
    slots: Mutex<SlotTable>,
}

/// The snapshots that programs have named.
#[derive(Default)]
struct SlotTable {
    ids: Vec<u32>,
    by_id: HashMap<u32, usize>,
}

/// A node of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViewNode {
    Directory(Ino),
    Inode { slot: usize, ino: Ino },
}

fn view_node(node: u64) -> Option<ViewNode> {
    if node & VIEW == 0 {
        return None;
    }
    Some(match node & DIRECTORY {
        0 => ViewNode::Inode {
            slot: ((node & !VIEW) >> SLOT_SHIFT) as usize,
            ino: Ino(node & INO_MASK),
        },
        _ => ViewNode::Directory(Ino(node & !(VIEW | DIRECTORY))),
    })
}

fn inode_node(slot: usize, ino: Ino) -> Result<u64> {
    match ino.0 & !INO_MASK {
        0 => Ok(VIEW | (slot as u64) << SLOT_SHIFT | ino.0),
        _ => Err(Errno::OVERFLOW.into()),
    }
}

/// Attributes under the node of a view.
fn with_node(mut attr: Attr, node: u64) -> Attr {
    attr.ino = Ino(node);
    attr
}

/// The attributes of the directory `.snapshot` of a live directory.
fn directory_attr(directory: Ino) -> Attr {
    let time = Time::default();
    Attr {
        ino: Ino(VIEW | DIRECTORY | directory.0),
        generation: 0,
        kind: InodeKind::Directory,
        mode: 0o555,
        links: 2,
        uid: 0,
        gid: 0,
        size: 0,
        pages: 0,
        atime: time,
        mtime: time,
        ctime: time,
        btime: time,
        device: 0,
        has_volatile_size: false,
    }
}

impl SnapshotViews {
    pub(crate) fn new(snapshots: Arc<OpenSnapshots>) -> SnapshotViews {
        let slots = Mutex::default();
        SnapshotViews { snapshots, slots }
    }

    /// The slot of a snapshot.
    fn slot(&self, id: u32) -> Result<usize> {
        let mut table = poison::lock(&self.slots);
        if let Some(slot) = table.by_id.get(&id) {
            return Ok(*slot);
        }
        let slot = table.ids.len();
        if slot >= SLOTS_MAX {
            return Err(Errno::NFILE.into());
        }
        table.ids.push(id);
        table.by_id.insert(id, slot);
        Ok(slot)
    }

    /// The file system of a slot, opened if it is not.
    fn fs(&self, slot: usize) -> Result<Arc<Fs>> {
        let id = poison::lock(&self.slots).ids.get(slot).copied();
        Ok(self.snapshots.fs(id.ok_or(Errno::STALE)?, WAIT)?)
    }

    /// Answers a request about a node of a view.
    fn handle(&self, node: ViewNode, live: &Fs, request: Request<'_>) -> Result<FuseReply> {
        match (node, request) {
            (
                _,
                Request::Forget(_)
                | Request::Release { .. }
                | Request::Flush
                | Request::Fsync { .. },
            ) => Ok(FuseReply::DONE),
            (_, Request::OpenDir) => Ok(FuseReply::new(&abi::OpenOut::default())),
            // The kernel copies by reads and writes.
            (_, Request::Copy { .. }) => Err(Errno::OPNOTSUPP.into()),
            (ViewNode::Directory(_), Request::Ioctl { .. }) => Err(Errno::NOSYS.into()),
            (ViewNode::Directory(directory), request) => {
                self.handle_directory(directory, live, request)
            }
            (ViewNode::Inode { slot, ino }, request) => {
                handle_inode(&*self.fs(slot)?, slot, ino, request)
            }
        }
    }

    /// Answers a request about the `.snapshot` of a live directory.
    fn handle_directory(
        &self,
        directory: Ino,
        live: &Fs,
        request: Request<'_>,
    ) -> Result<FuseReply> {
        let own = directory_attr(directory);
        match request {
            Request::GetAttr => Ok(FuseReply::new(&reply::attr(&own, CacheTimeout::LONG))),
            Request::Statx => Ok(reply::statx(&own, CacheTimeout::LONG)),
            Request::Lookup(b".") => Ok(FuseReply::new(&reply::entry(&own, CacheTimeout::LONG))),
            Request::Lookup(name) => self.lookup_snapshot(directory, live, name),
            Request::ReadDir(span) => self.list_snapshots(&own, directory, span, false),
            Request::ReadDirPlus(span) => self.list_snapshots(&own, directory, span, true),
            Request::GetXattr { .. } => Err(Errno::NODATA.into()),
            Request::ListXattr { size } => xattr(vec![], size),
            _ => Err(Errno::ROFS.into()),
        }
    }

    /// The live directory as it was in a snapshot.
    fn lookup_snapshot(&self, directory: Ino, live: &Fs, name: &[u8]) -> Result<FuseReply> {
        let name = std::str::from_utf8(name).map_err(|_| Errno::NOENT)?;
        let slot = self.slot(self.snapshots.find(name, WAIT)?)?;
        let fs = self.fs(slot)?;
        let generation = live.attr(directory)?.generation;
        // It may be younger than the snapshot.
        let attr = match fs.attr(directory) {
            Err(FsError::Posix(_)) => return Err(Errno::NOENT.into()),
            attr => attr?,
        };
        let is_same = attr.kind == InodeKind::Directory && attr.generation == generation;
        if !is_same || attr.links == 0 {
            return Err(Errno::NOENT.into());
        }
        let entry = abi::EntryOut {
            entry_s: NAME_TIMEOUT_S,
            ..reply::entry(
                &with_node(attr, inode_node(slot, directory)?),
                CacheTimeout::LONG,
            )
        };
        Ok(FuseReply::new(&entry))
    }

    fn list_snapshots(
        &self,
        own: &Attr,
        directory: Ino,
        span: ReadRange,
        has_attributes: bool,
    ) -> Result<FuseReply> {
        let found = self.snapshots.list(WAIT)?;
        let dots = [(b".".to_vec(), own.ino.0), (b"..".to_vec(), directory.0)];
        // A name gets its number when it is looked up.
        let names = found
            .iter()
            .map(|it| (it.name.clone().into_bytes(), u64::MAX));
        let kind = dirent_type(InodeKind::Directory);
        let mut listing = Listing::new(span.size);
        for (cookie, (name, node)) in (1..).zip(dots.into_iter().chain(names)) {
            let told = has_attributes.then(abi::EntryOut::default);
            if cookie > span.offset && !listing.add(told.as_ref(), (node, cookie, kind), &name) {
                break;
            }
        }
        Ok(listing.finish())
    }
}

fn look_up(fs: &Fs, slot: usize, ino: Ino, name: &[u8]) -> Result<FuseReply> {
    let found = match name {
        // It refuses inodes that no name leads to.
        b"." => fs.lookup_ino(ino)?,
        _ => fs.lookup(ino, name)?,
    };
    // Nothing in a snapshot is freed, so nothing has to be counted.
    fs.forget(found.ino, 1);
    let node = inode_node(slot, found.ino)?;
    Ok(FuseReply::new(&reply::entry(
        &with_node(found, node),
        CacheTimeout::LONG,
    )))
}

/// Answers a request about an inode of a snapshot.
fn handle_inode(fs: &Fs, slot: usize, ino: Ino, request: Request<'_>) -> Result<FuseReply> {
    let attr = || -> Result<Attr> { Ok(with_node(fs.attr(ino)?, inode_node(slot, ino)?)) };
    match request {
        Request::GetAttr => Ok(FuseReply::new(&reply::attr(&attr()?, CacheTimeout::LONG))),
        Request::Statx => Ok(reply::statx(&attr()?, CacheTimeout::LONG)),
        Request::Lookup(name) => look_up(fs, slot, ino, name),
        Request::Open { flags } => {
            let access = OFlags::from_bits_retain(flags) & OFlags::ACCMODE;
            match access == OFlags::RDONLY {
                true => attr().map(|_| FuseReply::new(&abi::OpenOut::default())),
                false => Err(Errno::ROFS.into()),
            }
        }
        Request::Read { span, .. } => {
            let bytes = fs.read(&mut *fs.borrow_channel()?, ino, span.offset, span.size)?;
            Ok(FuseReply::Data(bytes))
        }
        Request::ReadDir(span) => list(fs, slot, ino, span, false),
        Request::ReadDirPlus(span) => list(fs, slot, ino, span, true),
        Request::ReadLink => Ok(FuseReply::Data(fs.read_link(ino)?)),
        Request::GetXattr { name, size } => {
            let value = fs.xattr(ino, name);
            xattr(
                value.map_err(|error| names::missing_xattr_error(name, error))?,
                size,
            )
        }
        Request::ListXattr { size } => {
            let ended = fs.xattr_names(ino)?.into_iter().flat_map(|mut name| {
                name.push(0);
                name
            });
            xattr(ended.collect(), size)
        }
        Request::Ioctl {
            command: LIMITS_IOCTL,
            ..
        } => direct_io::limits_reply(fs.attr(ino)?.kind),
        Request::Ioctl { .. } => Err(Errno::NOSYS.into()),
        Request::Seek { offset, whence } => {
            let what = match whence {
                SEEK_DATA => SeekTarget::Data,
                SEEK_HOLE => SeekTarget::Hole,
                _ => return Err(Errno::INVAL.into()),
            };
            let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
            let found = fs.seek(&mut *fs.borrow_channel()?, ino, offset, what)?;
            Ok(FuseReply::new(&abi::LseekOut {
                offset: found.cast_signed(),
            }))
        }
        _ => Err(Errno::ROFS.into()),
    }
}

fn list(
    fs: &Fs,
    slot: usize,
    ino: Ino,
    span: ReadRange,
    has_attributes: bool,
) -> Result<FuseReply> {
    let mut listing = Listing::new(span.size);
    let told = has_attributes.then(abi::EntryOut::default);
    fs.list(ino, span.offset, |listed: &DirEntry| {
        let Ok(node) = inode_node(slot, listed.ino) else {
            return false;
        };
        let entry = (node, listed.cookie, dirent_type(listed.kind));
        // The kernel looks names up when it needs them.
        listing.add(told.as_ref(), entry, &listed.name)
    })?;
    Ok(listing.finish())
}

/// The requests of a mount with views.
pub(crate) struct ViewHandler {
    pub(crate) live: FsHandler,
    pub(crate) views: SnapshotViews,
    /// Whether listings of live directories show `.snapshot`.
    pub(crate) shows_views: bool,
}

impl ViewHandler {
    /// Lists a live directory, with `.snapshot` at the end.
    fn list_live(
        &self,
        header: &abi::InHeader,
        span: ReadRange,
        has_attributes: bool,
    ) -> FuseReply {
        let mut listing = Listing::new(span.size);
        if span.offset == SHOWN_COOKIE {
            return listing.finish();
        }
        let request = match has_attributes {
            true => Request::ReadDirPlus(span),
            false => Request::ReadDir(span),
        };
        let listed = self.live.handle(header, request);
        let is_end = listed.error() == 0 && listed.bytes().is_empty();
        let directory = Ino(header.node);
        if !is_end || self.has_entry(directory) {
            return listed;
        }
        let told = has_attributes.then(abi::EntryOut::default);
        let kind = dirent_type(InodeKind::Directory);
        let entry = (directory_attr(directory).ino.0, SHOWN_COOKIE, kind);
        listing.add(told.as_ref(), entry, SNAPSHOT_DIR);
        listing.finish()
    }

    /// Whether a live directory has a real entry of the name.
    fn has_entry(&self, directory: Ino) -> bool {
        let fs = self.live.fs();
        match fs.lookup(directory, SNAPSHOT_DIR) {
            Ok(found) => {
                fs.forget(found.ino, 1);
                true
            }
            Err(_) => false,
        }
    }
}

impl RequestHandler for ViewHandler {
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        self.live.async_writer()
    }

    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply {
        if matches!(request, Request::Statfs) {
            // A view takes its space from the live file system.
            return self.live.handle(header, request);
        }
        if let Some(node) = view_node(header.node) {
            let answer = self.views.handle(node, self.live.fs(), request);
            return answer.unwrap_or_else(|error| {
                if !matches!(error, FsError::Posix(_) | FsError::Snapshot) {
                    tracing::error!(%error, "a read of a snapshot failed");
                }
                FuseReply::Error(error.errno())
            });
        }
        match request {
            Request::Lookup(SNAPSHOT_DIR) => {
                let found = self.live.handle(header, Request::Lookup(SNAPSHOT_DIR));
                match found {
                    FuseReply::Error(Errno::NOENT) => {
                        let own = directory_attr(Ino(header.node));
                        FuseReply::new(&reply::entry(&own, CacheTimeout::LONG))
                    }
                    found => found,
                }
            }
            Request::ReadDir(span) if self.shows_views => self.list_live(header, span, false),
            Request::ReadDirPlus(span) if self.shows_views => self.list_live(header, span, true),
            Request::ForgetAll(mut all) => {
                all.retain(|one| view_node(one.node).is_none());
                self.live.handle(header, Request::ForgetAll(all))
            }
            // A link of a file in a view, and a copy to one, are refused; so is a rename to a view.
            Request::Link { node, .. } if view_node(node).is_some() => {
                FuseReply::Error(Errno::ROFS)
            }
            Request::Rename { to, .. } if view_node(to).is_some() => FuseReply::Error(Errno::ROFS),
            // It would hide the views.
            Request::Rename { new, .. } if new == SNAPSHOT_DIR => FuseReply::Error(Errno::EXIST),
            Request::Copy { to_node, .. } if view_node(to_node).is_some() => {
                FuseReply::Error(Errno::ROFS)
            }
            request => self.live.handle(header, request),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_views_name_one_inode() {
        for (slot, ino) in [(0, 1), (1, 7), (SLOTS_MAX - 1, INO_MASK)] {
            let node = inode_node(slot, Ino(ino)).expect("a number");
            let expected = ViewNode::Inode {
                slot,
                ino: Ino(ino),
            };
            assert_eq!(view_node(node), Some(expected));
        }
        assert!(inode_node(0, Ino(INO_MASK + 1)).is_err());
        let own = directory_attr(Ino(9)).ino.0;
        assert_eq!(view_node(own), Some(ViewNode::Directory(Ino(9))));
        assert_eq!(view_node(INO_MASK), None);
    }
}
