//! Chunks: parts of a volume, each in a file named by the SHA-256 of its bytes.

use super::BackupError;
use crate::fields::{put, u32_at};
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

/// Bytes of a chunk; the last one of a volume may have less. A changed page costs a chunk of the backup, before compression.
pub const CHUNK_BYTES: usize = 256 << 10;

const HEADER_BYTES: usize = 16;
const MAGIC: &[u8; 7] = b"pmchunk";
const VERSION: u8 = 1;

/// The SHA-256 of the bytes of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId(pub [u8; 32]);

impl ChunkId {
    /// The name of these bytes.
    #[must_use]
    pub fn of(data: &[u8]) -> ChunkId {
        ChunkId(Sha256::digest(data).into())
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The text is no name of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no name of a chunk")]
pub struct BadChunkId;

impl FromStr for ChunkId {
    type Err = BadChunkId;

    fn from_str(text: &str) -> Result<ChunkId, BadChunkId> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 64 || !text.bytes().all(is_digit) {
            return Err(BadChunkId);
        }
        let mut id = [0; 32];
        for (at, byte) in id.iter_mut().enumerate() {
            let digits = &text[2 * at..2 * at + 2];
            *byte = u8::from_str_radix(digits, 16).map_err(|_| BadChunkId)?;
        }
        Ok(ChunkId(id))
    }
}

/// The file of a chunk. With a level of zstd its bytes are compressed, if that makes them shorter.
///
/// # Errors
/// When the compressor fails.
pub fn encode_chunk(data: &[u8], level: i32) -> Result<Vec<u8>, BackupError> {
    let packed = zstd::bulk::compress(data, level)?;
    let packed = Some(packed).filter(|it| it.len() < data.len());
    let mut file = vec![0; HEADER_BYTES];
    put(&mut file, 0, MAGIC);
    file[7] = VERSION;
    file[8] = u8::from(packed.is_some());
    put(&mut file, 12, &(data.len() as u32).to_le_bytes());
    file.extend_from_slice(packed.as_deref().unwrap_or(data));
    Ok(file)
}

/// The bytes of a chunk, after the check that they are those of its name.
///
/// # Errors
/// When the file is damaged, or of another version.
pub fn decode_chunk(id: ChunkId, file: &[u8]) -> Result<Vec<u8>, BackupError> {
    let damaged = |what| BackupError::DamagedChunk { id, what };
    if file.len() < HEADER_BYTES || &file[..7] != MAGIC {
        return Err(damaged("it does not begin as a chunk"));
    }
    if file[7] != VERSION {
        return Err(BackupError::UnknownVersion(u32::from(file[7])));
    }
    let (len, stored) = (u32_at(file, 12) as usize, &file[HEADER_BYTES..]);
    if file[8] > 1 || file[9..12].iter().any(|byte| *byte != 0) || len > CHUNK_BYTES {
        return Err(damaged("its header is wrong"));
    }
    let data = match file[8] {
        1 => {
            zstd::bulk::decompress(stored, len).map_err(|_| damaged("it cannot be decompressed"))?
        }
        _ => stored.to_vec(),
    };
    match data.len() == len && ChunkId::of(&data) == id {
        true => Ok(data),
        false => Err(damaged("its bytes are not those of its name")),
    }
}
