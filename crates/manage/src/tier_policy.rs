//! The policy of a volume in pools with disks behind memory.

use pagemesh_base::layout::SliceId;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// Where a volume's pages lie, in pools with disks behind memory.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum TierPolicy {
    /// Pages in use are in memory, and cold ones on flash.
    #[default]
    Auto,
    /// Pages stay in memory, and return to it with their first use.
    Memory,
    /// Pages leave memory first, and only writes return them.
    Flash,
    /// A policy of a later version. It acts as `auto`, and no request may have it.
    #[serde(other)]
    Other,
}

impl TierPolicy {
    /// Its name in REST and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TierPolicy::Auto => "auto",
            TierPolicy::Memory => "memory",
            TierPolicy::Flash => "flash",
            TierPolicy::Other => "other",
        }
    }

    /// Whether it acts as the automatic one.
    pub(crate) fn is_auto(&self) -> bool {
        matches!(self, TierPolicy::Auto | TierPolicy::Other)
    }

    /// Whether a record leaves it out. One of a later version stays in it.
    pub(crate) fn is_default(&self) -> bool {
        *self == TierPolicy::Auto
    }

    /// Deserializes the policy of a request.
    pub(crate) fn known<'d, D: Deserializer<'d>>(from: D) -> Result<TierPolicy, D::Error> {
        match TierPolicy::deserialize(from)? {
            TierPolicy::Other => Err(D::Error::custom(
                "the policy of a tier is not known; use `auto`, `memory` or `flash`",
            )),
            known => Ok(known),
        }
    }
}

/// The digest of the policies of slices, in any order. Slices with the policy `auto` do not count. It has 48 bits, so that
/// every reader of JSON keeps it exactly.
#[must_use]
pub fn digest_policies(policies: impl IntoIterator<Item = (SliceId, TierPolicy)>) -> u64 {
    let chosen = policies.into_iter().filter(|(_, policy)| !policy.is_auto());
    let sum = chosen.fold(0_u64, |sum, (slice, policy)| {
        let (high, low) = slice.0.as_u64_pair();
        let word = mixed(mixed(high) ^ low) ^ policy as u64;
        sum.wrapping_add(mixed(word))
    });
    sum >> 16
}

/// The finalizer of SplitMix64.
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn digest_names_slices_and_policies_in_any_order() {
        let slice = |number| SliceId(Uuid::from_u128(number));
        let pinned = |number| (slice(number), TierPolicy::Memory);
        let of = |list: &[(SliceId, TierPolicy)]| digest_policies(list.iter().copied());
        assert_eq!(of(&[]), 0);
        let unknown = serde_json::from_str("\"of-later\"").expect("a policy");
        for automatic in [TierPolicy::Auto, unknown] {
            assert_eq!(of(&[(slice(1), automatic)]), 0);
        }
        assert_eq!(
            of(&[pinned(1), pinned(2)]),
            of(&[pinned(2), (slice(3), TierPolicy::Auto), pinned(1)])
        );
        assert_ne!(of(&[pinned(1)]), of(&[pinned(2)]));
        assert_ne!(of(&[pinned(1)]), of(&[(slice(1), TierPolicy::Flash)]));
        // Bricks and managers of different builds must agree.
        assert_eq!(of(&[pinned(1), (slice(7), TierPolicy::Flash)]), PINNED);
    }

    const PINNED: u64 = 224_149_806_281_261;
}
