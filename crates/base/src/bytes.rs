//! Little-endian fields at fixed places of fixed-size blocks. Offsets are
//! constants of the formats, so a bad one is a defect, not bad input.

/// A number of four bytes.
///
/// # Panics
/// When it does not lie in the block.
#[must_use]
#[inline]
pub fn get_u32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(block, at))
}

/// A number of eight bytes.
///
/// # Panics
/// When it does not lie in the block.
#[must_use]
#[inline]
pub fn get_u64(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(block, at))
}

/// Stores bytes.
///
/// # Panics
/// When it does not lie in the block.
#[inline]
pub fn put<const N: usize>(block: &mut [u8], at: usize, bytes: [u8; N]) {
    block[at..at + N].copy_from_slice(&bytes);
}

/// The bytes of a field.
///
/// # Panics
/// When it does not lie in the block.
#[must_use]
#[inline]
pub fn field<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}
