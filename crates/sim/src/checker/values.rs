//! The bytes of sectors with a value.

use super::SECTOR;

/// The bytes of a write of this value to `sectors` sectors.
pub(crate) fn fill(value: u64, sectors: u64) -> Vec<u8> {
    value.to_le_bytes().repeat((sectors * SECTOR / 8) as usize)
}

pub(crate) fn value_of(sector: &[u8]) -> Result<u64, String> {
    let mut words = sector.as_chunks::<8>().0.iter();
    let first = words.next().ok_or("no sector")?;
    match words.find(|word| *word != first) {
        None => Ok(u64::from_le_bytes(*first)),
        Some(other) => Err(format!(
            "a torn sector: {} and {}",
            u64::from_le_bytes(*first),
            u64::from_le_bytes(*other)
        )),
    }
}
