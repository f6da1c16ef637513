//! READDIR and READDIRPLUS.

use super::snapshots::View;
use super::{Failed, Failure, Outcome, Service, Target};
use crate::nfs3::attributes::Attributes;
use crate::nfs3::listing::{
    CookieVerifier, Entry, EntryFile, ListArguments, ListPlusArguments, ListedEntries, Listing,
    Room,
};
use crate::nfs3::status::Status;
use crate::peer::PeerCredential;
use pagemesh_fs::{Attr, DirEntry};

/// The result of a listing.
type Listed = Outcome<ListedEntries, Option<Attributes>>;

/// The parts of entries that a listing has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Names,
    /// The inode of each entry is read.
    Attributes,
}

impl Service {
    pub(super) fn list(&self, peer: PeerCredential<'_>, it: &ListArguments<'_>) -> Listed {
        let target = self.target(peer, it.directory)?;
        target.list(it, Wanted::Names, |listing, entry, _| listing.add(entry))
    }

    pub(super) fn list_plus(&self, peer: PeerCredential<'_>, it: &ListPlusArguments<'_>) -> Listed {
        let target = self.target(peer, it.0.directory)?;
        target.list(&it.0, Wanted::Attributes, |listing, entry, attr| {
            let file = EntryFile {
                attributes: attr.map(|attr| target.attributes(attr)),
                handle: attr.map(|attr| target.handle(attr.file_id())),
            };
            listing.add_plus(entry, &file)
        })
    }
}

impl Target<'_> {
    /// Lists with `add`, which encodes an entry.
    fn list(
        &self,
        it: &ListArguments<'_>,
        wanted: Wanted,
        add: impl Fn(&mut Listing, &Entry<'_>, Option<&Attr>) -> Room,
    ) -> Listed {
        let verifier = self.export.cookie_verifier();
        // Some clients send no verifier. Cookies of this volume never expire.
        let is_known = it.verifier == verifier || it.verifier == CookieVerifier::default();
        if it.cookie != 0 && !is_known {
            return Err(Status::BadCookie.into());
        }
        let mut listing = Listing::new(it.budget);
        if self.view == View::Directory {
            let directory = self.snapshot_directory()?;
            let is_end = self.list_snapshots(it, &mut listing, &add)?;
            let listed = listing.finish(Some(directory), verifier, is_end);
            return listed.map_err(Failed::from);
        }
        if self.is_behind_views(it) {
            let listed = listing.finish(Some(self.own_attributes()?), verifier, true);
            return listed.map_err(Failed::from);
        }
        let mut visit = |entry: &DirEntry, attr: Option<&Attr>| {
            // No attributes or handle leads out of the export of a directory.
            let root = self.export.directory.filter(|_| entry.name == b"..");
            let ino = match root == Some(self.id) {
                true => self.id.ino,
                false => entry.ino,
            };
            let encoded = Entry {
                inode: self.view.file_number(ino),
                name: &entry.name,
                cookie: entry.cookie,
            };
            let attr = attr.filter(|_| root.is_none());
            add(&mut listing, &encoded, attr) == Room::Left
        };
        let fs = &self.fs;
        let (id, after, caller) = (self.id, it.cookie, &self.caller);
        let reply = match wanted {
            Wanted::Names => fs.list_at(id, after, caller, |entry| visit(entry, None)),
            Wanted::Attributes => fs.list_with_attributes(id, after, caller, visit),
        };
        let directory = self.after(&reply.wcc);
        let failed = |failure| Failed::new(failure, directory);
        let is_end = match reply.result {
            Ok(is_end) => is_end,
            Err(error) => return Err(failed(self.report(&error))),
        };
        if is_end {
            self.list_views(&mut listing, &add);
        }
        let listed = listing.finish(directory, verifier, is_end);
        listed.map_err(|status| failed(Failure::Status(status)))
    }
}
