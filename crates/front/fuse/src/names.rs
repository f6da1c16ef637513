//! The allowed names of extended attributes, xattr(7).
//!
//! The kernel checks the right to set them, and that `user` attributes belong to files and
//! directories. Of `system` there are the ACLs, which the file system stores with the mode.

use pagemesh_fs::{AclKind, FsError, Result};
use rustix::io::Errno;

const NAMESPACES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// Refuses a name of another name space, as ext4 does.
pub(crate) fn check_xattr_name(name: &[u8]) -> Result<()> {
    if AclKind::of_attribute(name).is_some() {
        return Ok(());
    }
    let rest = NAMESPACES
        .iter()
        .find_map(|space| name.strip_prefix(*space));
    match rest {
        None => Err(Errno::OPNOTSUPP.into()),
        Some([]) => Err(Errno::INVAL.into()),
        Some(_) => Ok(()),
    }
}

/// The error for a missing attribute: `EOPNOTSUPP` or `EINVAL` for a name that cannot be set. An
/// attribute with such a name that exists already can be read and removed.
pub(crate) fn missing_xattr_error(name: &[u8], error: FsError) -> FsError {
    match error {
        FsError::Posix(Errno::NODATA) => check_xattr_name(name).err().unwrap_or(error),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_refused(name: &[u8], errno: Errno) {
        assert_eq!(check_xattr_name(name).expect_err("refused").errno(), errno);
    }

    #[test]
    fn xattr_names_of_other_namespaces_are_refused() {
        for name in [
            &b"user.a"[..],
            b"trusted.overlay.opaque",
            b"security.capability",
            b"system.posix_acl_access",
            b"system.posix_acl_default",
        ] {
            check_xattr_name(name).expect("a name");
        }
        for name in [
            &b"foo.bar"[..],
            b"system.posix_acl_other",
            b"system.foo",
            b"user",
            b"osx.",
        ] {
            assert_refused(name, Errno::OPNOTSUPP);
        }
        assert_refused(b"user.", Errno::INVAL);
    }
}
