//! Manifests: the chunks of one snapshot, in order.

use super::{CHUNK_BYTES, ChunkId};
use crate::fields::{put, take, u32_at, u64_at};
use crate::header::{HEADER_BYTES, Header};
use crate::{PAGE_BYTES, StreamError};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};

const MAGIC: &[u8; 8] = b"pmbackup";
const VERSION: u32 = 1;
/// Bytes before the header of the snapshot.
const PREFIX_BYTES: usize = 16;
const ENTRY_BYTES: usize = 40;
/// The index in the entry that ends a manifest.
const END: u64 = u64::MAX;

/// Why a backup cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// The file failed.
    #[error("a file of the backup cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// The manifest's header.
    #[error("the manifest of the backup is damaged: {0}")]
    Header(#[from] StreamError),
    /// The manifest.
    #[error("the manifest of the backup is damaged: {0}; delete it, and make the backup again")]
    DamagedManifest(&'static str),
    /// A chunk.
    #[error(
        "the chunk {id} is damaged: {what}; delete it, and make a full backup, which stores it again"
    )]
    DamagedChunk {
        /// Its name.
        id: ChunkId,
        /// The problem.
        what: &'static str,
    },
    /// Another version of the format.
    #[error(
        "the backup has version {0}, and this release reads version 1; use a release that knows it"
    )]
    UnknownVersion(u32),
    /// The caller writes something that a manifest cannot hold.
    #[error("a manifest cannot hold this: {0}")]
    Unwritable(&'static str),
}

/// A chunk at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The chunk begins at this number of [`CHUNK_BYTES`] in the volume.
    pub index: u64,
    /// Its name.
    pub id: ChunkId,
}

/// A manifest that is written. Parts of the volume without an entry are zeroes.
pub struct ManifestWriter<W: Write> {
    out: W,
    hash: Sha256,
    chunks: u64,
    next: u64,
    end: u64,
}

impl<W: Write> ManifestWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// When the output fails, or the header is of changes or beyond limits.
    pub fn new(out: W, header: &Header) -> Result<ManifestWriter<W>, BackupError> {
        if header.from_epoch.is_some() || header.start.position > 0 {
            return Err(BackupError::Unwritable(
                "changes, in place of a whole snapshot",
            ));
        }
        let mut prefix = [0; PREFIX_BYTES];
        put(&mut prefix, 0, MAGIC);
        put(&mut prefix, 8, &VERSION.to_le_bytes());
        put(&mut prefix, 12, &(CHUNK_BYTES as u32).to_le_bytes());
        let mut writer = ManifestWriter {
            out,
            hash: Sha256::new(),
            chunks: 0,
            next: 0,
            end: header.size_bytes.div_ceil(CHUNK_BYTES as u64),
        };
        writer.write(&prefix)?;
        writer.write(&header.encode()?)?;
        Ok(writer)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), BackupError> {
        self.hash.update(bytes);
        Ok(self.out.write_all(bytes)?)
    }

    /// Adds the next chunk.
    ///
    /// # Errors
    /// When the output fails, or the chunk is out of order or behind the end.
    pub fn push(&mut self, entry: ManifestEntry) -> Result<(), BackupError> {
        if entry.index < self.next || entry.index >= self.end {
            return Err(BackupError::Unwritable(
                "a chunk out of order or behind the end",
            ));
        }
        self.next = entry.index + 1;
        self.chunks += 1;
        self.write(&entry.index.to_le_bytes())?;
        self.write(&entry.id.0)
    }

    /// Writes the end, and flushes the output. Returns it with the number of chunks.
    ///
    /// # Errors
    /// When the output fails.
    pub fn end(mut self) -> Result<(W, u64), BackupError> {
        self.write(&END.to_le_bytes())?;
        let chunks = self.chunks;
        self.write(&chunks.to_le_bytes())?;
        let hash = self.hash.finalize();
        self.out.write_all(&hash)?;
        self.out.flush()?;
        Ok((self.out, chunks))
    }
}

/// A manifest that is read.
pub struct ManifestReader<R: Read> {
    input: R,
    header: Header,
    hash: Sha256,
    chunks: u64,
    next: u64,
    is_over: bool,
}

impl<R: Read> ManifestReader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// When the input fails, or does not begin with an intact header of a known version.
    pub fn new(mut input: R) -> Result<ManifestReader<R>, BackupError> {
        let cut = |_| BackupError::DamagedManifest("it is cut");
        let mut prefix = [0; PREFIX_BYTES];
        input.read_exact(&mut prefix).map_err(cut)?;
        if &prefix[..8] != MAGIC {
            return Err(BackupError::DamagedManifest(
                "it does not begin as a manifest",
            ));
        }
        let version = u32_at(&prefix, 8);
        if version != VERSION {
            return Err(BackupError::UnknownVersion(version));
        }
        if u32_at(&prefix, 12) as usize != CHUNK_BYTES {
            return Err(BackupError::DamagedManifest("its chunks have another size"));
        }
        let mut bytes = [0; HEADER_BYTES];
        input.read_exact(&mut bytes).map_err(cut)?;
        let header = Header::decode(&bytes)?;
        if header.from_epoch.is_some() || !header.size_bytes.is_multiple_of(PAGE_BYTES as u64) {
            return Err(BackupError::DamagedManifest(
                "it is not of a whole snapshot",
            ));
        }
        let mut hash = Sha256::new();
        hash.update(prefix);
        hash.update(bytes);
        Ok(ManifestReader {
            input,
            header,
            hash,
            chunks: 0,
            next: 0,
            is_over: false,
        })
    }

    /// The snapshot.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The chunks so far.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// The next chunk; none at the end, if the whole manifest is intact.
    ///
    /// # Errors
    /// When the input fails, or the manifest is cut or damaged. A chunk that was returned before may then be wrong.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<ManifestEntry>, BackupError> {
        if self.is_over {
            return Ok(None);
        }
        let cut = |_| BackupError::DamagedManifest("it is cut");
        let mut index = [0; 8];
        self.input.read_exact(&mut index).map_err(cut)?;
        self.hash.update(index);
        let index = u64::from_le_bytes(index);
        if index == END {
            self.is_over = true;
            self.read_end()?;
            return Ok(None);
        }
        let mut id = [0; ENTRY_BYTES - 8];
        self.input.read_exact(&mut id).map_err(cut)?;
        self.hash.update(id);
        if index < self.next || index >= self.header.size_bytes.div_ceil(CHUNK_BYTES as u64) {
            return Err(BackupError::DamagedManifest(
                "a chunk is out of order or behind the end",
            ));
        }
        self.next = index + 1;
        self.chunks += 1;
        let id = ChunkId(id);
        Ok(Some(ManifestEntry { index, id }))
    }

    fn read_end(&mut self) -> Result<(), BackupError> {
        let mut end = [0; 40];
        let cut = |_| BackupError::DamagedManifest("it is cut");
        self.input.read_exact(&mut end).map_err(cut)?;
        self.hash.update(&end[..8]);
        let hash: [u8; 32] = self.hash.clone().finalize().into();
        let mut more = [0];
        if u64_at(&end, 0) != self.chunks || take::<32>(&end, 8) != hash {
            return Err(BackupError::DamagedManifest("its checksum is wrong"));
        }
        match self.input.read(&mut more)? {
            0 => Ok(()),
            _ => Err(BackupError::DamagedManifest("bytes follow its end")),
        }
    }
}
