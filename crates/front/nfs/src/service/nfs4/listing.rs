//! READDIR. The directories `.` and `..` are no entries (RFC 8881, section 18.23), and the cookies 0, 1
//! and 2 are none of an entry: the file system gives the latter to these directories.

use super::handles::CurrentFile;
use super::{Compound, Done, Fault};
use crate::acl4::{Ace, aces_of};
use crate::limits::LISTING_BYTES_MAX;
use crate::nfs3::listing::CookieVerifier;
use crate::nfs4::arguments::ReadDirectory;
use crate::nfs4::attributes::{SharedAttributes, check_readable, encode_attributes};
use crate::nfs4::bitmap::{Bitmap, attribute};
use crate::nfs4::status::Status;
use crate::pseudo_fs::PseudoNo;
use crate::service::Target;
use crate::service::snapshots::{DOT_DOT_COOKIE, SHOWN_COOKIE, View};
use crate::xdr::{UNIT_BYTES, Writer};
use pagemesh_fs::{Acls, Attr, DirEntry, InodeKind, SNAPSHOT_DIR};
use std::sync::Arc;

/// Bytes of a result without entries: the status, the verifier, the end of the list and its mark.
const FIXED_BYTES: usize = 8 + 3 * UNIT_BYTES;
/// Bytes of an entry without its name and attributes: its mark and its cookie.
const ENTRY_BYTES_MIN: usize = 8 + 4 * UNIT_BYTES;
/// The cookie of the first entry above the exports.
const FIRST_COOKIE: u64 = 3;

/// Entries, encoded one after the other until a limit is reached.
struct Entries<'w> {
    out: &'w mut Writer,
    /// The first byte.
    start: usize,
    bytes_max: usize,
    name_bytes_left: usize,
    count: usize,
    /// An entry did not fit.
    is_full: bool,
    /// Why the listing ends with an error.
    error: Option<Status>,
}

impl<'w> Entries<'w> {
    fn new(it: &ReadDirectory, room: usize, out: &'w mut Writer) -> Self {
        let limit = it.result_bytes.min(LISTING_BYTES_MAX) as usize;
        Self {
            start: out.len(),
            out,
            bytes_max: limit.min(room).saturating_sub(FIXED_BYTES),
            // A hint: 0 says nothing.
            name_bytes_left: match it.name_bytes {
                0 => usize::MAX,
                bytes => bytes as usize,
            },
            count: 0,
            is_full: false,
            error: None,
        }
    }

    /// Adds an entry with attributes by `encode`, which may fail the whole listing. Returns whether another one may be added.
    fn add(
        &mut self,
        cookie: u64,
        name: &[u8],
        encode: impl FnOnce(&mut Writer) -> Result<(), Status>,
    ) -> bool {
        let before = self.out.len();
        let name_bytes = 12 + name.len().next_multiple_of(UNIT_BYTES);
        self.out.bool(true);
        self.out.u64(cookie);
        self.out.opaque(name);
        // The other entries are encoded all the same: the names of their owners are looked up meanwhile.
        self.error = encode(self.out).err().or(self.error);
        let is_long = self.out.len() - self.start > self.bytes_max;
        let is_beyond_hint = self.count > 0 && name_bytes > self.name_bytes_left;
        if is_long || is_beyond_hint {
            self.out.truncate(before);
            self.is_full = true;
            return false;
        }
        self.name_bytes_left = self.name_bytes_left.saturating_sub(name_bytes);
        self.count += 1;
        true
    }

    /// Adds an entry that the caller may list, and has no right to look up.
    fn add_failed(&mut self, cookie: u64, name: &[u8], wanted: Bitmap) -> bool {
        if wanted.is_empty() {
            return self.add(cookie, name, encode_nothing);
        }
        if wanted.contains(attribute::RDATTR_ERROR) {
            return self.add(cookie, name, |out| encode_error(Status::Access, out));
        }
        self.error = Some(Status::Access);
        false
    }

    /// Ends the list.
    fn finish(self, is_end: bool) -> Done {
        if let Some(status) = self.error {
            return Err(status.into());
        }
        if self.is_full && self.count == 0 {
            return Err(Status::TooSmall.into());
        }
        self.out.bool(false);
        self.out.bool(is_end && !self.is_full);
        Ok(())
    }
}

/// The attributes of an entry without known attributes: only the reason, if the client asks for it.
fn encode_error(status: Status, out: &mut Writer) -> Result<(), Status> {
    out.value(&Bitmap::of(&[attribute::RDATTR_ERROR]));
    out.length(UNIT_BYTES);
    out.value(&status);
    Ok(())
}

/// The attributes of a listed snapshot that need no opened one.
const OF_LISTED_SNAPSHOT: Bitmap = Bitmap::of(&[
    attribute::TYPE,
    attribute::FSID,
    attribute::RDATTR_ERROR,
    attribute::FILEID,
    attribute::MOUNTED_ON_FILEID,
]);

impl Compound<'_> {
    pub(super) fn read_directory(&self, it: &ReadDirectory, out: &mut Writer) -> Done {
        let place = self.place()?;
        check_readable(it.attributes)?;
        if matches!(it.cookie, 1 | 2) {
            return Err(Status::BadCookie.into());
        }
        let room = self.reply_room(out);
        match place {
            CurrentFile::Pseudo(at) => {
                // The cookies are places in a table of exports.
                let verifier = self.peer.table.pseudo.change().to_be_bytes();
                check_verifier(it, verifier)?;
                out.fixed(&verifier);
                self.list_pseudo(*at, it, Entries::new(it, room, out))
            }
            CurrentFile::File(target) => {
                // Cookies of a volume never expire.
                let verifier = target.export.cookie_verifier();
                check_verifier(it, verifier.0)?;
                out.value(&verifier);
                let entries = Entries::new(it, room, out);
                match target.view {
                    View::Directory => self.list_snapshots(target, it, entries),
                    View::Live | View::Snapshot(_) => self.list_files(target, it, entries),
                }
            }
        }
    }

    /// Lists a directory above the exports. An export that fails stops no other one: its entry has the error if the client asks for it, and
    /// is left out if the client wants attributes without it.
    fn list_pseudo(&self, at: PseudoNo, it: &ReadDirectory, mut entries: Entries<'_>) -> Done {
        let wanted = it.attributes;
        for (cookie, child) in (FIRST_COOKIE..).zip(self.visible_children(at)) {
            if cookie <= it.cookie {
                continue;
            }
            let name = self.peer.table.pseudo.name(child).as_bytes();
            let is_added = match self.listed_child(child, wanted) {
                Ok(encoded) => entries.add(cookie, name, |out| {
                    out.fixed(encoded.written(0));
                    Ok(())
                }),
                Err(_) if wanted.is_empty() => entries.add(cookie, name, encode_nothing),
                Err(status) if wanted.contains(attribute::RDATTR_ERROR) => {
                    entries.add(cookie, name, |out| encode_error(status, out))
                }
                Err(_) => true,
            };
            if !is_added {
                break;
            }
        }
        entries.finish(true)
    }

    /// The attributes of a directory above the exports, or of the root of the export there.
    fn listed_child(&self, child: PseudoNo, wanted: Bitmap) -> Result<Writer, Status> {
        let mut out = Writer::new();
        match self.encode_child(child, wanted, &mut out) {
            Ok(()) => Ok(out),
            Err(Fault::Status(status)) => Err(status),
            Err(Fault::Fenced) => Err(Status::Delay),
        }
    }

    fn encode_child(&self, child: PseudoNo, wanted: Bitmap, out: &mut Writer) -> Done {
        match self.entered(child)? {
            CurrentFile::Pseudo(at) => {
                let shared = self.service.shared_attributes(wanted, None);
                let mut file = self.pseudo_attributes(at);
                let aces = match wanted.contains(attribute::ACL) {
                    true => aces_of(&Acls::default(), file.mode as u16, true),
                    false => Vec::new(),
                };
                file.acl = &aces;
                encode_attributes(wanted, &file, &shared, out)?;
            }
            CurrentFile::File(root) => {
                let (attr, aces) = root.attr_and_acl(wanted)?;
                let shared = self.service.shared_attributes(wanted, Some(&root));
                self.encode_entry(&root, wanted, (&attr, &aces), &shared, out)?;
            }
        }
        Ok(())
    }

    /// Appends the attributes of an entry. A directory that is the root of another export has the ones of that export.
    fn encode_entry(
        &self,
        target: &Target<'_>,
        wanted: Bitmap,
        (attr, acl): (&Attr, &[Ace]),
        shared: &SharedAttributes<'_>,
        out: &mut Writer,
    ) -> Result<(), Status> {
        let mut entry = target.with(attr);
        if attr.kind == InodeKind::Directory
            && let Some(export) = self.crossed(&entry)
        {
            entry.export = Arc::clone(export);
        }
        let handle = entry.handle(entry.id);
        let mounted_on = self.mounted_on(&entry);
        let mut file = entry.file_attributes(attr, mounted_on, handle.bytes());
        file.acl = acl;
        encode_attributes(wanted, &file, shared, out)
    }

    fn list_files(
        &self,
        target: &Target<'_>,
        it: &ReadDirectory,
        mut entries: Entries<'_>,
    ) -> Done {
        if it.cookie == SHOWN_COOKIE && target.shows_views() {
            return entries.finish(true);
        }
        let wanted = it.attributes;
        if wanted.contains(attribute::ACL) {
            return self.list_files_with_acls(target, it, entries);
        }
        let shared = self.service.shared_attributes(wanted, Some(target));
        let visit = |entry: &DirEntry, attr: Option<&Attr>| {
            if matches!(entry.name.as_slice(), b"." | b"..") {
                return true;
            }
            let Some(attr) = attr else {
                return entries.add_failed(entry.cookie, &entry.name, wanted);
            };
            entries.add(entry.cookie, &entry.name, |out| {
                self.encode_entry(target, wanted, (attr, &[]), &shared, out)
            })
        };
        let fs = &target.fs;
        let reply = fs.list_with_attributes(target.id, it.cookie, &target.caller, visit);
        let is_end = reply
            .result
            .map_err(|error| Fault::from(target.report(&error)))?;
        if is_end && !entries.is_full && target.shows_views() {
            self.list_views(target, it, &mut entries)?;
        }
        entries.finish(is_end)
    }

    /// Lists files with their ACLs, which are read after the listing: a listing holds the lock of the file system.
    fn list_files_with_acls(
        &self,
        target: &Target<'_>,
        it: &ReadDirectory,
        mut entries: Entries<'_>,
    ) -> Done {
        let wanted = it.attributes;
        let shared = self.service.shared_attributes(wanted, Some(target));
        let mut bytes_left = entries.bytes_max;
        let mut listed = Vec::new();
        let visit = |entry: &DirEntry, attr: Option<&Attr>| {
            if matches!(entry.name.as_slice(), b"." | b"..") {
                return true;
            }
            bytes_left = bytes_left.saturating_sub(ENTRY_BYTES_MIN + entry.name.len());
            listed.push((entry.clone(), attr.map(Attr::file_id)));
            bytes_left > 0
        };
        let fs = &target.fs;
        let reply = fs.list_with_attributes(target.id, it.cookie, &target.caller, visit);
        let is_end = reply
            .result
            .map_err(|error| Fault::from(target.report(&error)))?;
        for (entry, id) in &listed {
            let found = id.and_then(|id| target.with_id(id).attr_and_acl(wanted).ok());
            let is_added = match &found {
                None => entries.add_failed(entry.cookie, &entry.name, wanted),
                Some((attr, acl)) => entries.add(entry.cookie, &entry.name, |out| {
                    self.encode_entry(target, wanted, (attr, acl), &shared, out)
                }),
            };
            if !is_added {
                break;
            }
        }
        if is_end && !entries.is_full && target.shows_views() {
            self.list_views(target, it, &mut entries)?;
        }
        entries.finish(is_end)
    }

    /// Adds `.snapshot` behind the other names, unless a real entry has the name.
    fn list_views(
        &self,
        target: &Target<'_>,
        it: &ReadDirectory,
        entries: &mut Entries<'_>,
    ) -> Done {
        let views = match target.child(SNAPSHOT_DIR) {
            Ok((views, _)) => views,
            // A caller that may not search the directory lists its names all the same.
            Err(Fault::Status(Status::Access)) => return Ok(()),
            Err(fault) => return Err(fault),
        };
        if views.view != View::Directory {
            return Ok(());
        }
        let own = views.snapshot_directory()?;
        let handle = views.handle(views.id);
        let shared = self.service.shared_attributes(it.attributes, Some(target));
        let file = views.views_attributes(&own, handle.bytes());
        let wanted = it.attributes.without_one(attribute::ACL);
        entries.add(SHOWN_COOKIE, SNAPSHOT_DIR, |out| {
            encode_attributes(wanted, &file, &shared, out)
        });
        Ok(())
    }

    /// Lists the snapshots of `.snapshot`, by their epochs. A listing opens none, so that entries have the attributes that need none; a LOOKUP
    /// returns the others.
    fn list_snapshots(
        &self,
        target: &Target<'_>,
        it: &ReadDirectory,
        mut entries: Entries<'_>,
    ) -> Done {
        let listed = target.listed_snapshots()?;
        let wanted = it.attributes.and(OF_LISTED_SNAPSHOT);
        let own = target.snapshot_directory()?;
        let shared = self.service.shared_attributes(wanted, None);
        for snapshot in &listed {
            let cookie = DOT_DOT_COOKIE + u64::from(snapshot.id);
            if cookie <= it.cookie {
                continue;
            }
            let inode = View::Snapshot(snapshot.id).file_number(target.id.ino);
            let mut file = target.views_attributes(&own, &[]);
            (file.inode, file.mounted_on) = (inode, inode);
            let is_added = entries.add(cookie, snapshot.name.as_bytes(), |out| {
                encode_attributes(wanted, &file, &shared, out)
            });
            if !is_added {
                break;
            }
        }
        entries.finish(true)
    }
}

/// Checks the verifier of a listing that goes on. Some clients send none.
fn check_verifier(it: &ReadDirectory, verifier: [u8; 8]) -> Done {
    let is_known = it.verifier == verifier || it.verifier == CookieVerifier::default().0;
    match it.cookie == 0 || is_known {
        true => Ok(()),
        false => Err(Status::NotSame.into()),
    }
}

/// No attributes.
fn encode_nothing(out: &mut Writer) -> Result<(), Status> {
    out.value(&Bitmap::default());
    out.length(0);
    Ok(())
}
