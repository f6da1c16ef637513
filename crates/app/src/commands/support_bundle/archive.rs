//! The archive: a tar file, compressed with gzip.
//!
//! Invariants: no name and no text enters it without the mask. It has mode 0600, holds at most
//! `ARCHIVE_BYTES_MAX` of text, and appears under its name only when it is whole.

use super::mask::Mask;
use super::unwritable;
use anyhow::bail;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};
use tempfile::NamedTempFile;

/// Bytes of all texts: many times a usual bundle, and small enough for a ticket when compressed.
const ARCHIVE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of one text; a source reads no more.
pub const ITEM_BYTES_MAX: usize = 8 << 20;
/// Bytes dropped at the end of a text that is cut, so that no part of a secret is left there.
const CUT_BYTES: usize = 512;
/// The start of the note of a missing part.
const MISSING: &str = "missing: ";

/// One line of the list of contents.
#[derive(Clone, Debug, Serialize)]
pub struct Item {
    pub name: String,
    pub bytes: u64,
    /// Why it is missing or cut.
    pub note: Option<String>,
}

/// An archive that is being written.
pub struct Archive {
    path: PathBuf,
    mask: Mask,
    tar: Builder<GzEncoder<NamedTempFile>>,
    now_unix_s: u64,
    bytes: u64,
    pub masked: u64,
    pub items: Vec<Item>,
}

impl Archive {
    /// Begins an archive beside its final place.
    ///
    /// # Errors
    /// When the file exists, or its directory cannot be written.
    pub fn create(path: &Path, mask: Mask, now_unix_s: u64) -> anyhow::Result<Archive> {
        if path.symlink_metadata().is_ok() {
            bail!("{} exists; name another file with --file", path.display());
        }
        let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        // Its mode is 0600.
        let file = tempfile::Builder::new()
            .prefix(".pagemesh-support-")
            .tempfile_in(parent);
        let file = unwritable(file, path)?;
        Ok(Archive {
            path: path.to_owned(),
            mask,
            tar: Builder::new(GzEncoder::new(file, Compression::default())),
            now_unix_s,
            bytes: 0,
            masked: 0,
            items: vec![],
        })
    }

    /// Adds a text under a name, both masked.
    pub fn add(&mut self, name: &str, text: &str) -> anyhow::Result<()> {
        let is_long = text.len() > ITEM_BYTES_MAX;
        let text = if is_long { cut(text) } else { text };
        let (name, in_name) = self.mask.apply(name);
        let (text, in_text) = self.mask.apply(text);
        self.masked += in_name + in_text;
        if self.bytes + text.len() as u64 > ARCHIVE_BYTES_MAX {
            let limit = ARCHIVE_BYTES_MAX >> 20;
            self.missing(&name, &format!("the limit of {limit} MiB was reached"));
            return Ok(());
        }
        self.bytes += text.len() as u64;
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.now_unix_s);
        let entry = format!("pagemesh-support/{name}");
        let added = self.tar.append_data(&mut header, entry, text.as_bytes());
        unwritable(added, &self.path)?;
        let note = is_long.then(|| format!("cut after {} MiB", ITEM_BYTES_MAX >> 20));
        self.items.push(Item {
            name,
            bytes: text.len() as u64,
            note,
        });
        Ok(())
    }

    /// Adds a text, or the reason why there is none.
    pub fn add_or_missing(
        &mut self,
        name: &str,
        text: Result<String, String>,
    ) -> anyhow::Result<()> {
        match text {
            Ok(text) => self.add(name, &text),
            Err(reason) => {
                self.missing(name, &reason);
                Ok(())
            }
        }
    }

    /// Says why a part is missing.
    pub fn missing(&mut self, name: &str, reason: &str) {
        let (name, _) = self.mask.apply(name);
        let (reason, masked) = self.mask.apply(reason);
        self.masked += masked;
        self.items.push(Item {
            name,
            bytes: 0,
            note: Some(format!("{MISSING}{reason}")),
        });
    }

    /// The reason why a part is missing.
    pub fn missing_reason(&self, name: &str) -> Option<&str> {
        let item = self.items.iter().find(|item| item.name == name)?;
        item.note.as_deref()?.strip_prefix(MISSING)
    }

    /// Writes the end of the archive, and gives it its name; returns its contents.
    pub fn finish(self) -> anyhow::Result<Vec<Item>> {
        let gzip = unwritable(self.tar.into_inner(), &self.path)?;
        let mut file = unwritable(gzip.finish(), &self.path)?;
        unwritable(file.flush(), &self.path)?;
        unwritable(file.as_file().sync_all(), &self.path)?;
        let named = file.persist_noclobber(&self.path).map_err(|it| it.error);
        unwritable(named, &self.path)?;
        Ok(self.items)
    }
}

/// The beginning of a long text.
fn cut(text: &str) -> &str {
    let mut end = ITEM_BYTES_MAX - CUT_BYTES;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
