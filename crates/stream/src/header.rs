//! The header: the identity of the snapshots, and the place where the stream begins.

use crate::error::StreamError;
use crate::fields::{put, take, u32_at, u64_at};
use crate::{ContentSummary, PAGE_BYTES};
use std::fmt;
use uuid::Uuid;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 320;
/// Bytes of the longest name of a snapshot.
pub const NAME_BYTES_MAX: usize = 64;
/// The version that this release writes and reads.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"pmstream";
const CRC_AT: usize = 12;
/// The feature of a stream with a summary of its pages.
const PAGE_SUMMARY: u64 = 1;

/// The identity of a snapshot in all clusters: its volume, and its epoch among the epochs of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotIdentity {
    /// The volume.
    pub volume: Uuid,
    /// The epoch, from 1 on.
    pub epoch: u32,
}

impl fmt::Display for SnapshotIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.volume, self.epoch)
    }
}

/// The content of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamContent {
    /// Blocks.
    Blocks,
    /// A file system of pagemesh.
    Files,
}

/// The place where a stream begins: the start of the volume, or the last checkpoint of a stream that was cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamStart {
    /// The changes below this byte were received before.
    pub position: u64,
    /// The content summary of these changes.
    pub summary: ContentSummary,
    /// The volume that received them; zero at the start of the volume.
    pub target: Uuid,
    /// The epoch of the attachment that wrote them; zero at the start of the volume.
    pub target_epoch: u32,
}

/// The header of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// A random number of this stream.
    pub stream: Uuid,
    /// The snapshot.
    pub to: SnapshotIdentity,
    /// Its name.
    pub to_name: String,
    /// The epoch of the earlier snapshot of the same volume; none: a stream of all of it.
    pub from_epoch: Option<u32>,
    /// Its name.
    pub from_name: String,
    /// Whether the content summary sums the pages in the stream. Streams of changes have such a summary. Earlier builds wrote the difference
    /// between two snapshots.
    pub has_page_summary: bool,
    /// Bytes of the volume in the snapshot.
    pub size_bytes: u64,
    /// The size that users see: for files, the limit of all files together.
    pub limit_bytes: u64,
    /// The content of the volume.
    pub content: StreamContent,
    /// Milliseconds since 1970 at which the snapshot was made.
    pub created_unix_ms: u64,
    /// The place where the stream begins.
    pub start: StreamStart,
}

impl Header {
    /// The identity of the earlier snapshot.
    #[must_use]
    pub fn from(&self) -> Option<SnapshotIdentity> {
        let volume = self.to.volume;
        self.from_epoch
            .map(|epoch| SnapshotIdentity { volume, epoch })
    }

    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES as u64);
        let names = [&self.to_name, &self.from_name];
        if names
            .iter()
            .any(|it| it.len() > NAME_BYTES_MAX || it.contains('\0'))
        {
            return Err("a name of a snapshot beyond limits");
        }
        if self.to.epoch == 0
            || self
                .from_epoch
                .is_some_and(|it| it == 0 || it >= self.to.epoch)
        {
            return Err("epochs out of order");
        }
        if self.has_page_summary && self.from_epoch.is_none() {
            return Err("a summary of changes in a stream of all pages");
        }
        if !whole(self.size_bytes) || self.size_bytes > i64::MAX as u64 {
            return Err("a size beyond limits");
        }
        if !whole(self.start.position) || self.start.position > self.size_bytes {
            return Err("a start behind the end");
        }
        Ok(())
    }

    pub(crate) fn encode(&self) -> Result<[u8; HEADER_BYTES], StreamError> {
        self.check().map_err(StreamError::Unwritable)?;
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        let features = u64::from(self.has_page_summary) * PAGE_SUMMARY;
        put(&mut bytes, 16, &features.to_le_bytes());
        put(&mut bytes, 24, self.stream.as_bytes());
        put(&mut bytes, 40, self.to.volume.as_bytes());
        put(&mut bytes, 56, &self.from_epoch.unwrap_or(0).to_le_bytes());
        put(&mut bytes, 60, &self.to.epoch.to_le_bytes());
        put(&mut bytes, 64, &self.size_bytes.to_le_bytes());
        put(&mut bytes, 72, &self.limit_bytes.to_le_bytes());
        put(&mut bytes, 80, &self.created_unix_ms.to_le_bytes());
        put(&mut bytes, 88, &self.start.position.to_le_bytes());
        put(&mut bytes, 96, &self.start.summary.to_bytes());
        put(&mut bytes, 112, self.start.target.as_bytes());
        put(&mut bytes, 128, &self.start.target_epoch.to_le_bytes());
        put(
            &mut bytes,
            132,
            &u32::from(self.content == StreamContent::Files).to_le_bytes(),
        );
        put(&mut bytes, 136, self.to_name.as_bytes());
        put(&mut bytes, 200, self.from_name.as_bytes());
        let crc = checksum(&bytes);
        put(&mut bytes, CRC_AT, &crc.to_le_bytes());
        Ok(bytes)
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, StreamError> {
        let damaged = |what| StreamError::Damaged { number: 0, what };
        if &bytes[..8] != MAGIC {
            return Err(StreamError::NotAStream);
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            let found = format!("version {version}");
            return Err(StreamError::UnknownVersion { found });
        }
        if u32_at(bytes, CRC_AT) != checksum(bytes) {
            return Err(damaged("the checksum of the header is wrong"));
        }
        let features = u64_at(bytes, 16);
        if features & !PAGE_SUMMARY != 0 {
            let found = format!("features {features:#x}");
            return Err(StreamError::UnknownVersion { found });
        }
        if bytes[264..].iter().any(|byte| *byte != 0) {
            return Err(damaged("unused bytes of the header are not zero"));
        }
        let content = match u32_at(bytes, 132) {
            0 => StreamContent::Blocks,
            1 => StreamContent::Files,
            _ => return Err(damaged("the content is unknown")),
        };
        let header = Header {
            stream: Uuid::from_bytes(take(bytes, 24)),
            to: SnapshotIdentity {
                volume: Uuid::from_bytes(take(bytes, 40)),
                epoch: u32_at(bytes, 60),
            },
            to_name: name_at(bytes, 136)?,
            from_epoch: Some(u32_at(bytes, 56)).filter(|epoch| *epoch != 0),
            from_name: name_at(bytes, 200)?,
            has_page_summary: features & PAGE_SUMMARY != 0,
            size_bytes: u64_at(bytes, 64),
            limit_bytes: u64_at(bytes, 72),
            content,
            created_unix_ms: u64_at(bytes, 80),
            start: StreamStart {
                position: u64_at(bytes, 88),
                summary: ContentSummary::from_bytes(take(bytes, 96)),
                target: Uuid::from_bytes(take(bytes, 112)),
                target_epoch: u32_at(bytes, 128),
            },
        };
        header.check().map_err(damaged)?;
        Ok(header)
    }
}

/// The name in a field of 64 bytes, which zeroes fill up.
fn name_at(bytes: &[u8], at: usize) -> Result<String, StreamError> {
    let field = &bytes[at..at + NAME_BYTES_MAX];
    let end = field.iter().position(|byte| *byte == 0);
    let (name, rest) = field.split_at(end.unwrap_or(NAME_BYTES_MAX));
    let text = std::str::from_utf8(name).ok();
    let text = text.filter(|_| rest.iter().all(|byte| *byte == 0));
    text.map(str::to_owned).ok_or(StreamError::Damaged {
        number: 0,
        what: "a name of a snapshot is damaged",
    })
}

/// The checksum of the header, without its own field.
fn checksum(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let crc = crc32c::crc32c(&bytes[..CRC_AT]);
    crc32c::crc32c_append(crc, &bytes[CRC_AT + 4..])
}
