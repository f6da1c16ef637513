//! Chunks and manifests of backups arrive as they were written. Damaged ones are refused.

#![allow(clippy::unwrap_used)] // Tests.

use pagemesh_stream::backup::{
    BackupError, CHUNK_BYTES, ChunkId, ManifestEntry, ManifestReader, ManifestWriter, decode_chunk,
    encode_chunk,
};
use pagemesh_stream::{Header, SnapshotIdentity, StreamContent, StreamStart};
use proptest::prelude::*;
use std::collections::BTreeMap;
use uuid::Uuid;

const CHUNKS: u64 = 100;

fn header() -> Header {
    Header {
        stream: Uuid::from_u128(1),
        to: SnapshotIdentity {
            volume: Uuid::from_u128(2),
            epoch: 9,
        },
        to_name: "monday".into(),
        from_epoch: None,
        from_name: String::new(),
        has_page_summary: false,
        size_bytes: CHUNKS * CHUNK_BYTES as u64,
        limit_bytes: CHUNKS * CHUNK_BYTES as u64,
        content: StreamContent::Files,
        created_unix_ms: 1234,
        start: StreamStart::default(),
    }
}

fn manifest(chunks: &BTreeMap<u64, [u8; 32]>) -> Vec<u8> {
    let mut out = ManifestWriter::new(Vec::new(), &header()).unwrap();
    for (index, id) in chunks {
        let (index, id) = (*index, ChunkId(*id));
        out.push(ManifestEntry { index, id }).unwrap();
    }
    let (bytes, count) = out.end().unwrap();
    assert_eq!(count, chunks.len() as u64);
    bytes
}

/// The chunks of a manifest that is intact.
fn read(bytes: &[u8]) -> Result<BTreeMap<u64, [u8; 32]>, BackupError> {
    let mut reader = ManifestReader::new(bytes)?;
    assert_eq!(*reader.header(), header());
    let mut chunks = BTreeMap::new();
    while let Some(entry) = reader.next()? {
        chunks.insert(entry.index, entry.id.0);
    }
    Ok(chunks)
}

proptest! {
    #[test]
    fn manifest_is_read_as_written_or_refused(
        chunks in prop::collection::btree_map(0..CHUNKS, any::<[u8; 32]>(), 0..40),
        flipped in any::<prop::sample::Index>(), bit in 0..8, cut in any::<prop::sample::Index>()
    ) {
        let bytes = manifest(&chunks);
        prop_assert_eq!(read(&bytes).unwrap(), chunks);
        let mut damaged = bytes.clone();
        damaged[flipped.index(bytes.len())] ^= 1u8 << bit;
        prop_assert!(read(&damaged).is_err());
        prop_assert!(read(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(read(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn chunk_is_read_as_written_or_refused(
        data in prop::collection::vec(any::<u8>(), 1..5000), repeated in 1..50usize,
        flipped in any::<prop::sample::Index>(), bit in 0..8
    ) {
        let data = data.repeat(repeated);
        let id = ChunkId::of(&data);
        let file = encode_chunk(&data, 3).unwrap();
        prop_assert!(file.len() <= data.len() + 16);
        prop_assert_eq!(decode_chunk(id, &file).unwrap(), data.clone());
        prop_assert_eq!(id.to_string().parse::<ChunkId>().unwrap(), id);
        let mut damaged = file.clone();
        damaged[flipped.index(file.len())] ^= 1u8 << bit;
        // Bits of a zstd frame may have no meaning; the content is checked.
        let found = decode_chunk(id, &damaged);
        prop_assert!(found.is_err() || found.unwrap() == data);
        prop_assert!(decode_chunk(id, &file[..file.len() - 1]).is_err());
        prop_assert!(decode_chunk(ChunkId([7; 32]), &file).is_err());
    }
}

#[test]
fn chunks_out_of_order_are_not_written() {
    let mut out = ManifestWriter::new(Vec::new(), &header()).unwrap();
    let entry = |index| ManifestEntry {
        index,
        id: ChunkId([1; 32]),
    };
    out.push(entry(5)).unwrap();
    for bad in [5, 4, CHUNKS, u64::MAX] {
        assert!(out.push(entry(bad)).is_err(), "{bad}");
    }
    let changes = Header {
        from_epoch: Some(3),
        ..header()
    };
    assert!(ManifestWriter::new(Vec::new(), &changes).is_err());
    for bad in ["", "x", &"g".repeat(64), &"A".repeat(64), &"é".repeat(32)] {
        assert!(bad.parse::<ChunkId>().is_err(), "{bad}");
    }
}
