//! `.snapshot/NAME/…` in each directory of an export: read-only views of the file systems in snapshots.
//!
//! A directory in a view is the same inode as the live one, at the time of the snapshot. Listings show `.snapshot` only if the export
//! asks for it, behind all other names, and not inside of views. A real entry of this name wins, and hides the views of its directory.
//!
//! The snapshot in a file handle is its epoch, so handles survive restarts and takeovers; [`DIRECTORY_EPOCH`] marks the
//! directory `.snapshot` itself. A handle of a deleted snapshot is stale. The numbers that clients see:
//!
//! | file number | bits |
//! |---|---|
//! | `.snapshot` of the live directory D | 63, 62, and D |
//! | inode I in a snapshot | 63, the low 28 bits of the epoch from bit 35 on, and the low 35 bits of I |
//!
//! Invariant: nothing in a view is changed, and no handle of a view reaches the live file system.

use super::{Failed, Failure, Outcome, Target, convert};
use crate::limits::SNAPSHOT_WAIT;
use crate::nfs3::attributes::{Attributes, FileType, Time};
use crate::nfs3::listing::{Entry, ListArguments, Listing, Room};
use crate::nfs3::status::Status;
use pagemesh_fs::{Attr, FileId, FsError, Ino, InodeKind, SNAPSHOT_DIR, SnapshotEntry};
use rustix::io::Errno;
use std::time::Duration;

/// The epoch in handles of the live file system.
const LIVE_EPOCH: u32 = 0;
/// The epoch in handles of a directory `.snapshot`. No volume has so many epochs.
const DIRECTORY_EPOCH: u32 = u32::MAX;
const VIEW: u64 = 1 << 63;
const DIRECTORY: u64 = 1 << 62;
const EPOCH_SHIFT: u32 = 35;
const EPOCH_BITS: u32 = 28;
/// The cookie of `.snapshot` in a listing that shows it: behind all cookies of names, which have 63 bits.
pub(super) const SHOWN_COOKIE: u64 = u64::MAX >> 1;
/// Cookies in a listing of snapshots: these two, and the epochs of snapshots behind them. So a cookie survives changes.
const DOT_COOKIE: u64 = 1;
pub(super) const DOT_DOT_COOKIE: u64 = 2;
const NANOSECONDS: u64 = 1_000_000_000;
/// The wait for another call that lists or opens snapshots.
const LIMIT: Option<Duration> = Some(SNAPSHOT_WAIT);

/// The file system that a handle is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    /// The live one.
    Live,
    /// The directory `.snapshot` of a live directory.
    Directory,
    /// The snapshot of this epoch.
    Snapshot(u32),
}

impl View {
    pub(super) fn of_epoch(epoch: u32) -> View {
        match epoch {
            LIVE_EPOCH => View::Live,
            DIRECTORY_EPOCH => View::Directory,
            epoch => View::Snapshot(epoch),
        }
    }

    pub(super) fn epoch(self) -> u32 {
        match self {
            View::Live => LIVE_EPOCH,
            View::Directory => DIRECTORY_EPOCH,
            View::Snapshot(epoch) => epoch,
        }
    }

    /// The number of a file that clients see.
    pub(super) fn file_number(self, ino: Ino) -> u64 {
        let low = |number: u64, bits: u32| number & ((1 << bits) - 1);
        match self {
            View::Live => ino.0,
            View::Directory => VIEW | DIRECTORY | ino.0,
            View::Snapshot(epoch) => {
                VIEW | low(epoch.into(), EPOCH_BITS) << EPOCH_SHIFT | low(ino.0, EPOCH_SHIFT)
            }
        }
    }
}

/// A file that a lookup has found.
pub(super) struct FoundFile {
    pub(super) view: View,
    pub(super) id: FileId,
    pub(super) attributes: Attributes,
}

fn failure(errno: Errno) -> Failure {
    Failure::Status(convert::status(&errno.into()))
}

impl<'a> Target<'a> {
    /// The same file in another view, or a failure if the snapshot is gone.
    pub(super) fn in_view(mut self, view: View) -> Result<Target<'a>, Failure> {
        if view != View::Live {
            let snapshots = self.export.snapshots().ok_or(Status::Stale)?;
            if let View::Snapshot(epoch) = view {
                self.fs = snapshots.open.fs(epoch, LIMIT).map_err(failure)?;
            }
        }
        self.view = view;
        Ok(self)
    }
}

impl Target<'_> {
    /// Fails unless the file is live.
    pub(super) fn check_live(&self) -> Result<(), Status> {
        match self.view {
            View::Live => Ok(()),
            View::Directory | View::Snapshot(_) => Err(Status::ReadOnly),
        }
    }

    /// Fails for the name of the views, which a new entry would hide.
    pub(super) fn check_new_name(&self, name: &[u8]) -> Result<(), Status> {
        match name == SNAPSHOT_DIR && self.export.snapshots().is_some() {
            true => Err(Status::Exists),
            false => Ok(()),
        }
    }

    /// The failure of a call in a snapshot, which may be deleted by now.
    pub(super) fn snapshot_failure(&self, epoch: u32, error: &FsError) -> Failure {
        if let FsError::Posix(errno) = error {
            return failure(*errno);
        }
        let snapshots = self.export.snapshots();
        if snapshots.is_none_or(|it| it.open.close_deleted(epoch, LIMIT)) {
            return Status::Stale.into();
        }
        tracing::warn!(export = self.export.name.as_str(), epoch, %error, "a read of a snapshot failed");
        convert::status(error).into()
    }

    /// Looks a name up, also `.snapshot` and the names of snapshots.
    pub(super) fn look_up(&self, name: &[u8]) -> (Outcome<FoundFile, ()>, Option<Attributes>) {
        if self.view == View::Directory {
            let own = self.snapshot_directory();
            let found = self.look_snapshot_up(name);
            return (found.map_err(Failed::from), own.ok());
        }
        let reply = self.find(name);
        let directory = self.after(&reply.wcc);
        let is_missing = matches!(reply.result, Err(FsError::Posix(Errno::NOENT)));
        let is_views = self.view == View::Live && name == SNAPSHOT_DIR;
        if is_missing && is_views && self.export.snapshots().is_some() {
            let own = self.snapshot_directory();
            return (
                own.map(|it| self.views(it)).map_err(Failed::from),
                directory,
            );
        }
        let found = match reply.result {
            Ok(attr) => Ok(self.found(self.view, &attr)),
            Err(error) => Err(self.report(&error).into()),
        };
        (found, directory)
    }

    fn found(&self, view: View, attr: &Attr) -> FoundFile {
        FoundFile {
            view,
            id: attr.file_id(),
            attributes: self.attributes_in(view, attr),
        }
    }

    /// The directory `.snapshot` of this directory.
    fn views(&self, attributes: Attributes) -> FoundFile {
        FoundFile {
            view: View::Directory,
            id: self.id,
            attributes,
        }
    }

    /// The snapshots of now, by their epochs.
    pub(super) fn listed_snapshots(&self) -> Result<Vec<SnapshotEntry>, Failure> {
        let snapshots = self.export.snapshots().ok_or(Status::Stale)?;
        let mut listed = snapshots.open.list(LIMIT).map_err(failure)?.to_vec();
        listed.sort_unstable_by_key(|it| it.id);
        Ok(listed)
    }

    /// Attributes of the `.snapshot` of this live directory. Its times follow from the snapshots: clients then notice each change of the list,
    /// and after a restart or takeover they are the same.
    pub(super) fn snapshot_directory(&self) -> Result<Attributes, Failure> {
        let live = self.export.fs.attr_of(self.id);
        let live = live.map_err(|error| self.report(&error))?;
        let snapshots = self.export.snapshots().ok_or(Status::Stale)?;
        let listed = snapshots.open.recent_list(LIMIT).unwrap_or_default();
        let newest = listed.iter().map(|it| it.id).max().unwrap_or(0);
        let fold = listed.iter().fold(listed.len() as u64, |fold, it| {
            fold.wrapping_mul(31).wrapping_add(it.id.into())
        });
        let changed = Time {
            seconds: newest,
            nanoseconds: (fold % NANOSECONDS) as u32,
        };
        Ok(Attributes {
            kind: FileType::Directory,
            mode: 0o555,
            links: 2,
            uid: 0,
            gid: 0,
            size_bytes: 0,
            used_bytes: 0,
            inode: View::Directory.file_number(self.id.ino),
            accessed: Time::default(),
            modified: changed,
            changed,
            ..self.attributes_in(View::Live, &live)
        })
    }

    /// Looks a name in `.snapshot` up: the live directory as it was in a snapshot.
    pub(super) fn look_snapshot_up(&self, name: &[u8]) -> Result<FoundFile, Failure> {
        match name {
            b"." => return Ok(self.views(self.snapshot_directory()?)),
            b".." => {
                let live = self.export.fs.attr_of(self.id);
                let live = live.map_err(|error| self.report(&error))?;
                return Ok(self.found(View::Live, &live));
            }
            _ => {}
        }
        let snapshots = self.export.snapshots().ok_or(Status::Stale)?;
        let name = std::str::from_utf8(name).map_err(|_| Status::NoEntry)?;
        let epoch = snapshots.open.find(name, LIMIT).map_err(failure)?;
        let fs = snapshots.open.fs(epoch, LIMIT).map_err(failure)?;
        match fs.attr_of(self.id) {
            Ok(attr) if attr.kind == InodeKind::Directory => {
                Ok(self.found(View::Snapshot(epoch), &attr))
            }
            // It is younger than the snapshot.
            Ok(_) | Err(FsError::Posix(_)) => Err(Status::NoEntry.into()),
            Err(error) => Err(self.snapshot_failure(epoch, &error)),
        }
    }

    /// Lists the snapshots, by their epochs. Returns whether all were added.
    pub(super) fn list_snapshots(
        &self,
        it: &ListArguments<'_>,
        listing: &mut Listing,
        add: &impl Fn(&mut Listing, &Entry<'_>, Option<&Attr>) -> Room,
    ) -> Result<bool, Failure> {
        let listed = self.listed_snapshots()?;
        let number = |view: View| view.file_number(self.id.ino);
        let dots = [
            (DOT_COOKIE, number(View::Directory), &b"."[..]),
            (DOT_DOT_COOKIE, number(View::Live), &b".."[..]),
        ];
        let names = listed.iter().map(|it| {
            let cookie = DOT_DOT_COOKIE + u64::from(it.id);
            (cookie, number(View::Snapshot(it.id)), it.name.as_bytes())
        });
        for (cookie, inode, name) in dots.into_iter().chain(names) {
            let entry = Entry {
                inode,
                name,
                cookie,
            };
            if cookie > it.cookie && add(listing, &entry, None) == Room::Full {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a listing goes on behind `.snapshot`, where nothing is left.
    pub(super) fn is_behind_views(&self, it: &ListArguments<'_>) -> bool {
        self.shows_views() && it.cookie == SHOWN_COOKIE
    }

    /// Adds `.snapshot` to the end of the listing of a live directory, if the export shows it and no real entry has the name.
    pub(super) fn list_views(
        &self,
        listing: &mut Listing,
        add: &impl Fn(&mut Listing, &Entry<'_>, Option<&Attr>) -> Room,
    ) {
        let has_entry = || {
            let reply = self
                .export
                .fs
                .lookup_at(self.id, SNAPSHOT_DIR, &self.caller);
            reply.result.is_ok()
        };
        if self.shows_views() && !has_entry() {
            let entry = Entry {
                inode: View::Directory.file_number(self.id.ino),
                name: SNAPSHOT_DIR,
                cookie: SHOWN_COOKIE,
            };
            add(listing, &entry, None);
        }
    }

    pub(super) fn shows_views(&self) -> bool {
        let snapshots = self.export.snapshots();
        self.view == View::Live && snapshots.is_some_and(|it| it.are_listed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_have_epochs_and_numbers_of_their_own() {
        for view in [View::Live, View::Directory, View::Snapshot(7)] {
            assert_eq!(View::of_epoch(view.epoch()), view);
        }
        let numbers = [
            View::Live.file_number(Ino(9)),
            View::Directory.file_number(Ino(9)),
            View::Snapshot(1).file_number(Ino(9)),
            View::Snapshot(2).file_number(Ino(9)),
            View::Snapshot(2).file_number(Ino(10)),
        ];
        for (at, number) in numbers.iter().enumerate() {
            assert!(!numbers[..at].contains(number), "{number:x}");
        }
    }
}
