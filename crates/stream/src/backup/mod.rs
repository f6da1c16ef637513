//! The bytes of backups: chunks named by their content, and manifests that list the chunks of a snapshot.
//!
//! `docs/formats.md` has the bytes. Nothing here touches a directory. A reader returns a chunk only if it has the content of its name, and the
//! end of a manifest only if all of it is intact.

mod chunk;
mod manifest;

pub use chunk::{BadChunkId, CHUNK_BYTES, ChunkId, decode_chunk, encode_chunk};
pub use manifest::{BackupError, ManifestEntry, ManifestReader, ManifestWriter};
