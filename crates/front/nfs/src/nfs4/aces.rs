//! ACLs of NFSv4 on the wire (`nfsace4`, RFC 8881, section 6.2.1).

use super::identity::{Identities, decode_owner, encode_owner};
use super::status::Status;
use crate::acl4::{Ace, AceKind, AcePrincipal, flag};
use crate::limits::{ACES_MAX, OWNER_NAME_BYTES_MAX};
use crate::xdr::{Reader, Writer};

const OWNER: &[u8] = b"OWNER@";
const GROUP: &[u8] = b"GROUP@";
const EVERYONE: &[u8] = b"EVERYONE@";

/// Appends the entries of an ACL.
///
/// # Errors
/// [`Status::Delay`] while the name of a principal is looked up.
pub(super) fn encode_aces(
    aces: &[Ace],
    identities: &dyn Identities,
    writer: &mut Writer,
) -> Result<(), Status> {
    writer.length(aces.len());
    for ace in aces {
        writer.u32(ace.kind as u32);
        writer.u32(ace.flags);
        writer.u32(ace.mask);
        match ace.principal {
            AcePrincipal::Owner => writer.opaque(OWNER),
            AcePrincipal::Group => writer.opaque(GROUP),
            AcePrincipal::Everyone => writer.opaque(EVERYONE),
            AcePrincipal::User(uid) => encode_owner(uid, identities.user_name(uid), writer)?,
            AcePrincipal::NamedGroup(gid) => {
                encode_owner(gid, identities.group_name(gid), writer)?;
            }
        }
    }
    Ok(())
}

/// Takes the entries of an ACL of a client.
///
/// # Errors
/// [`Status::AttributeNotSupported`] for entries that neither allow nor deny and for special
/// principals without a counterpart, [`Status::BadOwner`], [`Status::Delay`], [`Status::BadXdr`].
pub(super) fn decode_aces(
    reader: &mut Reader<'_>,
    identities: &dyn Identities,
) -> Result<Vec<Ace>, Status> {
    let count = reader.length("entries of an ACL", ACES_MAX)?;
    let mut aces = Vec::new();
    for _ in 0..count {
        let kind = match reader.u32()? {
            0 => AceKind::Allow,
            1 => AceKind::Deny,
            _ => return Err(Status::AttributeNotSupported),
        };
        let (flags, mask) = (reader.u32()?, reader.u32()?);
        let name = reader.opaque("principal of an ACL", OWNER_NAME_BYTES_MAX)?;
        let principal = match name {
            OWNER => AcePrincipal::Owner,
            GROUP => AcePrincipal::Group,
            EVERYONE => AcePrincipal::Everyone,
            name if name.ends_with(b"@") => return Err(Status::AttributeNotSupported),
            name if flags & flag::IDENTIFIER_GROUP != 0 => {
                AcePrincipal::NamedGroup(decode_owner(name, |name| identities.group_id(name))?)
            }
            name => AcePrincipal::User(decode_owner(name, |name| identities.user_id(name))?),
        };
        aces.push(Ace {
            kind,
            flags,
            mask,
            principal,
        });
    }
    Ok(aces)
}
