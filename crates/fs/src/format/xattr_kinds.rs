//! The kinds of an inode's extended attributes.

/// The kinds of extended attributes that an inode has, so that operations need not read the attributes. An earlier release
/// clears it when it stores the inode: then the attributes must be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct XattrKinds(u32);

impl XattrKinds {
    /// The other bits are right.
    const KNOWN: u32 = 1;
    /// `security.capability`.
    pub(crate) const CAPABILITIES: XattrKinds = XattrKinds(2);
    /// `system.posix_acl_access`.
    pub(crate) const ACCESS_ACL: XattrKinds = XattrKinds(4);
    /// `system.posix_acl_default`.
    pub(crate) const DEFAULT_ACL: XattrKinds = XattrKinds(8);
    const ALL: u32 = 15;

    /// These kinds, and no others.
    pub(crate) fn of(all: impl IntoIterator<Item = XattrKinds>) -> XattrKinds {
        let bits = all
            .into_iter()
            .fold(Self::KNOWN, |bits, kind| bits | kind.0);
        XattrKinds(bits)
    }

    pub(super) fn encode(self) -> u32 {
        self.0
    }

    /// A later release may have more kinds. This release would store the inode without them, so it knows none.
    pub(super) fn decode(bits: u32) -> XattrKinds {
        match bits & !Self::ALL {
            0 => XattrKinds(bits),
            _ => XattrKinds::default(),
        }
    }

    /// Whether the bits tell the kinds.
    pub(crate) fn is_known(self) -> bool {
        self.0 & Self::KNOWN != 0
    }

    /// With an attribute of this kind. `None`: of no kind.
    pub(crate) fn with(self, kind: Option<XattrKinds>) -> XattrKinds {
        XattrKinds(self.0 | kind.map_or(0, |kind| kind.0) | Self::KNOWN)
    }

    /// Without attributes of this kind.
    pub(crate) fn without(self, kind: Option<XattrKinds>) -> XattrKinds {
        XattrKinds(self.0 & !kind.map_or(0, |kind| kind.0) | Self::KNOWN)
    }

    pub(super) fn may_have(self, kind: XattrKinds) -> bool {
        self.0 & Self::KNOWN == 0 || self.0 & kind.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_kinds_may_be_all() {
        let of_acl = XattrKinds::of([XattrKinds::ACCESS_ACL]);
        assert!(of_acl.may_have(XattrKinds::ACCESS_ACL));
        assert!(!of_acl.may_have(XattrKinds::DEFAULT_ACL));
        assert!(!of_acl.may_have(XattrKinds::CAPABILITIES));
        assert_eq!(XattrKinds::decode(of_acl.encode()), of_acl);
        for bits in [0, XattrKinds::KNOWN | 16] {
            assert!(XattrKinds::decode(bits).may_have(XattrKinds::CAPABILITIES));
        }
    }
}
