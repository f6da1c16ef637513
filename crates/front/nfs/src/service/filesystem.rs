//! FSSTAT, FSINFO and PATHCONF.

use super::{Outcome, Service, Target};
use crate::handle::HandleBytes;
use crate::limits::{LISTING_BYTES_MAX, TRANSFER_BYTES_MAX};
use crate::nfs3::attributes::{Attributes, Time};
use crate::nfs3::filesystem::{NameRules, ServerLimits, SpaceUsage, TransferSizes, property};
use crate::peer::PeerCredential;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{FILE_BYTES_MAX, LINKS_MAX, NAME_MAX};

impl Target<'_> {
    /// The free space is that of the limit or of the pools, as `statfs` of a mount tells it. A new
    /// file takes at least a page.
    pub(super) fn space_with(&self, attributes: Option<Attributes>) -> SpaceUsage {
        let usage = self.export.fs.usage();
        let within_limit = match usage.limit_bytes {
            0 => None,
            limit => Some(limit.saturating_sub(usage.used_bytes)),
        };
        let in_pools = (self.export.free_space)();
        let free = [within_limit, in_pools].into_iter().flatten().min();
        let free_bytes = free.unwrap_or(0);
        let free_files = free_bytes / PAGE_BYTES as u64;
        SpaceUsage {
            attributes,
            total_bytes: usage.used_bytes.saturating_add(free_bytes),
            free_bytes,
            available_bytes: free_bytes,
            total_files: usage.inodes.saturating_add(free_files),
            free_files,
            available_files: free_files,
            unchanged_seconds: 0,
        }
    }
}

impl Service {
    pub(super) fn space_usage(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<SpaceUsage, Option<Attributes>> {
        let target = self.target(peer, file)?;
        let attributes = target.own_attributes()?;
        Ok(target.space_with(Some(attributes)))
    }

    pub(super) fn server_limits(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<ServerLimits, Option<Attributes>> {
        let target = self.target(peer, file)?;
        let attributes = target.own_attributes()?;
        let sizes = TransferSizes {
            max_bytes: TRANSFER_BYTES_MAX,
            preferred_bytes: TRANSFER_BYTES_MAX,
            multiple_bytes: PAGE_BYTES as u32,
        };
        Ok(ServerLimits {
            attributes: Some(attributes),
            read: sizes,
            write: sizes,
            listing_bytes: LISTING_BYTES_MAX,
            file_bytes_max: FILE_BYTES_MAX,
            time_delta: Time {
                seconds: 0,
                nanoseconds: 1,
            },
            properties: property::LINK
                | property::SYMLINK
                | property::HOMOGENEOUS
                | property::CAN_SET_TIME,
        })
    }

    pub(super) fn name_rules(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Outcome<NameRules, Option<Attributes>> {
        let target = self.target(peer, file)?;
        let attributes = target.own_attributes()?;
        Ok(NameRules {
            attributes: Some(attributes),
            links_max: LINKS_MAX,
            name_bytes_max: NAME_MAX as u32,
            refuses_long_names: true,
            restricts_chown: true,
            ignores_case: false,
            preserves_case: true,
        })
    }
}
