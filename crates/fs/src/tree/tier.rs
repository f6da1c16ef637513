//! The tier of a file's data: an extended attribute that the flags of the inode hold.
//!
//! A new file or directory inherits the attribute of its directory ([`super::new_inode`]). Requests for data of the file carry it as a hint.

use crate::error::Result;
use crate::format::inode::{Inode, InodeKind, TIER, TIER_FLASH, TIER_MEMORY};
use pagemesh_base::tier_hint::TierHint;
use rustix::io::Errno;

/// The name of the attribute.
pub const TIER_ATTRIBUTE: &[u8] = b"user.pagemesh.tier";

impl Inode {
    /// The hint of requests for its data.
    pub(crate) fn tier_hint(&self) -> TierHint {
        match self.flags & TIER {
            TIER_MEMORY => TierHint::Memory,
            TIER_FLASH => TierHint::Flash,
            _ => TierHint::Automatic,
        }
    }

    /// The value of the attribute. None: it does not exist.
    pub(crate) fn tier_value(&self) -> Option<&'static [u8]> {
        match self.tier_hint() {
            TierHint::Memory => Some(b"memory"),
            TierHint::Flash => Some(b"flash"),
            TierHint::None | TierHint::Automatic => None,
        }
    }

    /// Sets the attribute, or removes it.
    ///
    /// # Errors
    /// `EINVAL` for another value. `EPERM` unless it is a file or directory.
    pub(crate) fn set_tier_value(&mut self, value: Option<&[u8]>) -> Result<()> {
        if !matches!(self.kind(), InodeKind::File | InodeKind::Directory) {
            return Err(Errno::PERM.into());
        }
        let flag = match value {
            None => 0,
            Some(b"memory") => TIER_MEMORY,
            Some(b"flash") => TIER_FLASH,
            Some(_) => return Err(Errno::INVAL.into()),
        };
        self.flags = self.flags & !TIER | flag;
        Ok(())
    }
}
