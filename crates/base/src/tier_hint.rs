//! The hint of a request about the tier of its pages, as the access hints of NVMe's dataset management are.
//!
//! A hint costs a move at most, and never data: each part of the way may drop it.

/// Where the pages of a request should lie, in a pool of memory with disks behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum TierHint {
    /// The requester does not know. Marks of earlier hints stay.
    #[default]
    None = 0,
    /// In memory: pages are pinned, and promoted at once.
    Memory = 1,
    /// On flash: pages are demoted first, and not promoted.
    Flash = 2,
    /// By their use. Marks of earlier hints end.
    Automatic = 3,
}

impl TierHint {
    /// Its two bits.
    #[must_use]
    pub fn bits(self) -> u8 {
        self as u8
    }

    /// The hint of the two lowest bits.
    #[must_use]
    pub fn from_bits(bits: u8) -> TierHint {
        match bits & 3 {
            0 => TierHint::None,
            1 => TierHint::Memory,
            2 => TierHint::Flash,
            _ => TierHint::Automatic,
        }
    }
}
