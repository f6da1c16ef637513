//! File handles.
//!
//! | field | bytes | at |
//! |---|---|---|
//! | version | 1 | 0 |
//! | volume | 16 | 1 |
//! | snapshot epoch, 0 for the live file system | 4 | 17 |
//! | inode | 8 | 21 |
//! | generation | 4 | 29 |
//! | fold of the birth time | 4 | 33 |
//! | checksum of all before | 8 | 37 |
//!
//! Numbers are big endian. The checksum is SipHash-2-4 with a key of the file system: a client
//! cannot make the handle of an inode that no lookup gave to it. RFD 031 has the reason of each
//! field.
//!
//! Checksums are compared as 64-bit numbers, by one instruction. Its time does not depend on the
//! number of equal bytes, so a comparison in constant time would add nothing.

use crate::limits::HANDLE_BYTES_MAX;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError};
use siphasher::sip::SipHasher24;
use std::fmt;
use std::hash::Hasher;

/// Bytes of an encoded handle.
pub const HANDLE_BYTES: usize = CHECKED_BYTES + 8;
/// The first byte after the volume.
const NUMBERS_AT: usize = 17;
/// Bytes that the checksum covers.
const CHECKED_BYTES: usize = 37;
/// The version of the layout.
const VERSION: u8 = 1;

const _: () = assert!(HANDLE_BYTES <= HANDLE_BYTES_MAX);

/// The handle has a wrong length, version or checksum: NFS3ERR_BADHANDLE. All have one error, so
/// that a forger learns nothing from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a file handle was not made by this server, or not with its present key")]
pub struct BadHandle;

/// The bytes of a client that should be a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandleBytes<'a>(pub &'a [u8]);

impl HandleBytes<'_> {
    /// The volume that the handle claims, to find the key that checks the claim; none if it is no
    /// handle of this server.
    #[must_use]
    pub fn claimed_volume(self) -> Option<[u8; 16]> {
        let bytes: &[u8; HANDLE_BYTES] = self.0.try_into().ok()?;
        let (version, rest) = bytes.split_first()?;
        let volume = rest.first_chunk()?;
        (*version == VERSION).then_some(*volume)
    }
}

impl<'a> Decode<'a> for HandleBytes<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        reader.opaque("file handle", HANDLE_BYTES_MAX).map(Self)
    }
}

/// A handle as clients get it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EncodedHandle([u8; HANDLE_BYTES]);

impl EncodedHandle {
    /// The bytes on the wire.
    #[must_use]
    pub fn bytes(&self) -> &[u8; HANDLE_BYTES] {
        &self.0
    }
}

impl fmt::Debug for EncodedHandle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EncodedHandle({:02x?})", self.0)
    }
}

impl Encode for EncodedHandle {
    fn encode(&self, writer: &mut Writer) {
        writer.opaque(&self.0);
    }
}

/// The file that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileHandle {
    /// The id of the volume, by the manager.
    pub volume: [u8; 16],
    /// The epoch of a snapshot; 0 is the live file system.
    pub snapshot_epoch: u32,
    /// The number of the inode.
    pub inode: u64,
    /// The inode's generation.
    pub generation: u32,
    /// A fold of the inode's birth time.
    pub birth_fold: u32,
}

/// The key that makes and checks the handles of one file system.
#[derive(Clone)]
pub struct HandleKey([u8; 16]);

impl fmt::Debug for HandleKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HandleKey(secret)")
    }
}

impl HandleKey {
    /// A key of these secret bytes.
    #[must_use]
    pub fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    fn checksum(&self, checked: &[u8]) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(checked);
        hasher.finish()
    }

    /// The handle that a client gets for this file.
    #[must_use]
    pub fn encode(&self, handle: &FileHandle) -> EncodedHandle {
        let mut bytes = [0; HANDLE_BYTES];
        let (checked, checksum) = bytes.split_at_mut(CHECKED_BYTES);
        let fields: [&[u8]; 6] = [
            &[VERSION],
            &handle.volume,
            &handle.snapshot_epoch.to_be_bytes(),
            &handle.inode.to_be_bytes(),
            &handle.generation.to_be_bytes(),
            &handle.birth_fold.to_be_bytes(),
        ];
        let mut rest = &mut *checked;
        for field in fields {
            let (place, after) = rest.split_at_mut(field.len());
            place.copy_from_slice(field);
            rest = after;
        }
        checksum.copy_from_slice(&self.checksum(checked).to_be_bytes());
        EncodedHandle(bytes)
    }

    /// The file that the bytes of a client name.
    ///
    /// # Errors
    /// If this key did not make them.
    pub fn decode(&self, bytes: HandleBytes<'_>) -> Result<FileHandle, BadHandle> {
        let volume = bytes.claimed_volume().ok_or(BadHandle)?;
        let (checked, checksum) = bytes.0.split_at_checked(CHECKED_BYTES).ok_or(BadHandle)?;
        let claimed = checksum.first_chunk().ok_or(BadHandle)?;
        if u64::from_be_bytes(*claimed) != self.checksum(checked) {
            return Err(BadHandle);
        }
        let numbers = checked.get(NUMBERS_AT..).ok_or(BadHandle)?;
        Self::numbers(volume, &mut Reader::new(numbers)).map_err(|_| BadHandle)
    }

    /// The fields after the volume.
    fn numbers(volume: [u8; 16], numbers: &mut Reader<'_>) -> Result<FileHandle, XdrError> {
        Ok(FileHandle {
            volume,
            snapshot_epoch: numbers.u32()?,
            inode: numbers.u64()?,
            generation: numbers.u32()?,
            birth_fold: numbers.u32()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The key of the test vectors of SipHash.
    const KEY: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

    fn example() -> FileHandle {
        FileHandle {
            volume: *b"0123456789abcdef",
            snapshot_epoch: 2,
            inode: 0x0102_0304_0506_0708,
            generation: 9,
            birth_fold: 0xdead_beef,
        }
    }

    #[test]
    fn layout_is_stable() {
        let encoded = HandleKey::new(KEY).encode(&example());
        let fields = b"\x010123456789abcdef\0\0\0\x02\
            \x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x09\xde\xad\xbe\xef";
        assert_eq!(encoded.bytes()[..CHECKED_BYTES], fields[..]);
        let mut writer = Writer::new();
        writer.value(&encoded);
        let wire = writer.into_bytes();
        assert_eq!(wire.len(), 4 + 48);
        assert_eq!(wire[..4], [0, 0, 0, 45]);
        assert_eq!(wire[49..], [0; 3]);
    }

    /// The vector in the paper of SipHash, and the first one of its reference implementation.
    #[test]
    fn checksum_is_sip_hash() {
        let key = HandleKey::new(KEY);
        assert_eq!(key.checksum(&KEY[..15]), 0xa129_ca61_49be_45e5);
        assert_eq!(key.checksum(&[]), 0x726f_db47_dd0e_0e31);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let key = HandleKey::new(KEY);
        let encoded = key.encode(&example());
        assert_eq!(key.decode(HandleBytes(encoded.bytes())), Ok(example()));
        for bit in 0..8 * HANDLE_BYTES {
            let mut bytes = *encoded.bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(key.decode(HandleBytes(&bytes)), Err(BadHandle), "{bit}");
        }
    }

    #[test]
    fn other_lengths_and_keys_are_refused() {
        let key = HandleKey::new(KEY);
        let bytes = *key.encode(&example()).bytes();
        let long = [&bytes[..], &[0; 19]].concat();
        for len in (0..=64).filter(|len| *len != HANDLE_BYTES) {
            let handle = HandleBytes(&long[..len]);
            assert_eq!(key.decode(handle), Err(BadHandle), "{len}");
            assert_eq!(handle.claimed_volume(), None);
        }
        let other = HandleKey::new([7; 16]);
        let handle = HandleBytes(&bytes);
        assert_eq!(other.decode(handle), Err(BadHandle));
        assert_eq!(handle.claimed_volume(), Some(example().volume));
    }

    /// A valid checksum of an unknown version.
    #[test]
    fn other_version_is_refused() {
        let key = HandleKey::new(KEY);
        let mut bytes = *key.encode(&example()).bytes();
        bytes[0] = 2;
        let checksum = key.checksum(&bytes[..CHECKED_BYTES]).to_be_bytes();
        bytes[CHECKED_BYTES..].copy_from_slice(&checksum);
        assert_eq!(key.decode(HandleBytes(&bytes)), Err(BadHandle));
    }

    #[test]
    fn key_is_not_printed() {
        assert_eq!(
            format!("{:?}", HandleKey::new([77; 16])),
            "HandleKey(secret)"
        );
    }

    proptest! {
        #[test]
        fn handles_survive_the_wire(
            key: [u8; 16],
            volume: [u8; 16],
            snapshot_epoch: u32,
            inode: u64,
            generation: u32,
            birth_fold: u32,
        ) {
            let key = HandleKey::new(key);
            let handle = FileHandle { volume, snapshot_epoch, inode, generation, birth_fold };
            let encoded = key.encode(&handle);
            prop_assert_eq!(key.decode(HandleBytes(encoded.bytes())), Ok(handle));
        }
    }
}
