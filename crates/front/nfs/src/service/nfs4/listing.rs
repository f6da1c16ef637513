//! READDIR. The directories `.` and `..` are no entries (RFC 8881, section 18.23), and the cookies 0, 1
//! and 2 are none of an entry: the file system gives the latter to these directories.

use super::handles::CurrentFile;
use super::{Compound, Done, Fault};
use crate::limits::LISTING_BYTES_MAX;
use crate::nfs3::listing::CookieVerifier;
use crate::nfs4::arguments::ReadDirectory;
use crate::nfs4::attributes::{SharedAttributes, check_readable, encode_attributes};
use crate::nfs4::bitmap::{Bitmap, attribute};
use crate::nfs4::status::Status;
use crate::service::Target;
use crate::xdr::{UNIT_BYTES, Writer};
use pagemesh_fs::Attr;

/// Bytes of a result without entries: the status, the verifier, the end of the list and its mark.
const FIXED_BYTES: usize = 8 + 3 * UNIT_BYTES;
/// The cookie of the first export.
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

    /// Adds an entry with attributes by `encode`. Returns whether another one may be added.
    fn add(&mut self, cookie: u64, name: &[u8], encode: impl FnOnce(&mut Writer)) -> bool {
        let before = self.out.len();
        let name_bytes = 12 + name.len().next_multiple_of(UNIT_BYTES);
        self.out.bool(true);
        self.out.u64(cookie);
        self.out.opaque(name);
        encode(self.out);
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
fn encode_error(status: Status, out: &mut Writer) {
    out.value(&Bitmap::of(&[attribute::RDATTR_ERROR]));
    out.length(UNIT_BYTES);
    out.value(&status);
}

impl Compound<'_> {
    pub(super) fn read_directory(&self, it: &ReadDirectory, out: &mut Writer) -> Done {
        let place = self.place()?;
        check_readable(it.attributes)?;
        if matches!(it.cookie, 1 | 2) {
            return Err(Status::BadCookie.into());
        }
        let room = self.reply_room(out);
        match place {
            CurrentFile::Root => self.list_exports(it, room, out),
            CurrentFile::File(target) => {
                let shared = self.service.shared_attributes(it.attributes, Some(target));
                target.list_entries(it, &shared, room, out)
            }
        }
    }

    fn list_exports(&self, it: &ReadDirectory, room: usize, out: &mut Writer) -> Done {
        out.fixed(&it.verifier);
        let mut entries = Entries::new(it, room, out);
        for (cookie, export) in (FIRST_COOKIE..).zip(self.exports()) {
            if cookie <= it.cookie {
                continue;
            }
            let found = self.root_of(export);
            let root = match &found {
                Ok(CurrentFile::File(root)) => root,
                // A fenced export stays in the list of names, without attributes.
                Ok(CurrentFile::Root) | Err(_) => {
                    let is_added = entries.add(cookie, export.path.file_system.as_bytes(), |out| {
                        encode_error(Status::Delay, out);
                    });
                    match is_added {
                        true => continue,
                        false => break,
                    }
                }
            };
            let attr = root.attr()?;
            let shared = self.service.shared_attributes(it.attributes, Some(root));
            let is_added = entries.add(cookie, export.path.file_system.as_bytes(), |out| {
                root.encode_entry(it.attributes, &attr, &shared, out);
            });
            if !is_added {
                break;
            }
        }
        entries.finish(true)
    }
}

impl Target<'_> {
    fn encode_entry(
        &self,
        wanted: Bitmap,
        attr: &Attr,
        shared: &SharedAttributes<'_>,
        out: &mut Writer,
    ) {
        let handle = self.handle(attr.file_id());
        let file = self.file_attributes(attr, handle.bytes());
        encode_attributes(wanted, &file, shared, out);
    }

    fn list_entries(
        &self,
        it: &ReadDirectory,
        shared: &SharedAttributes<'_>,
        room: usize,
        out: &mut Writer,
    ) -> Done {
        let verifier = self.export.cookie_verifier();
        // Some clients send no verifier. Cookies of this volume never expire.
        let is_known = it.verifier == verifier.0 || it.verifier == CookieVerifier::default().0;
        if it.cookie != 0 && !is_known {
            return Err(Status::NotSame.into());
        }
        out.value(&verifier);
        let mut entries = Entries::new(it, room, out);
        let wanted = it.attributes;
        let visit = |entry: &pagemesh_fs::DirEntry, attr: Option<&Attr>| {
            if matches!(entry.name.as_slice(), b"." | b"..") {
                return true;
            }
            match attr {
                Some(attr) => entries.add(entry.cookie, &entry.name, |out| {
                    self.encode_entry(wanted, attr, shared, out);
                }),
                None if wanted.contains(attribute::RDATTR_ERROR) || wanted.is_empty() => entries
                    .add(entry.cookie, &entry.name, |out| match wanted.is_empty() {
                        true => encode_nothing(out),
                        false => encode_error(Status::Access, out),
                    }),
                None => {
                    entries.error = Some(Status::Access);
                    false
                }
            }
        };
        let fs = &self.export.fs;
        let reply = fs.list_with_attributes(self.id, it.cookie, &self.caller, visit);
        let is_end = reply
            .result
            .map_err(|error| Fault::from(self.report(&error)))?;
        entries.finish(is_end)
    }
}

/// No attributes.
fn encode_nothing(out: &mut Writer) {
    out.value(&Bitmap::default());
    out.length(0);
}
