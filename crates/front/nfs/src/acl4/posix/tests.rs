use super::super::{aces, is_allowed_by};
use super::*;
use proptest::prelude::*;

/// Owner and owning group of the file.
const FILE: (u32, u32) = (1, 1);
const BITS: [(u16, u32); 3] = [
    (4, mask::READ_DATA),
    (2, mask::WRITE_DATA),
    (1, mask::EXECUTE),
];

/// Callers: users 1 to 4, in some of the groups 1 to 3.
fn callers() -> impl Iterator<Item = (u32, Vec<u32>)> {
    (1..5).flat_map(|uid| {
        (0..8_u32).map(move |groups| {
            let is_in = |gid: &u32| groups >> (gid - 1) & 1 == 1;
            (uid, (1..4).filter(is_in).collect())
        })
    })
}

/// The access check of Linux for one right (`posix_acl_permission`, and `acl_permission_check` before it).
fn is_permitted(acl: &Acl, uid: u32, groups: &[u32], right: u16) -> bool {
    let rights = |tag| {
        let found = acl.entries().iter().find(|entry| entry.tag == tag);
        found.map(|entry| entry.rights)
    };
    let mask = rights(AclTag::Mask);
    let group_class = mask.or(rights(AclTag::GroupObj)).unwrap_or(0);
    let has = |rights: Option<u16>| rights.is_some_and(|rights| rights & right != 0);
    if uid == FILE.0 {
        return has(rights(AclTag::UserObj));
    }
    if group_class == 0 {
        return match groups.contains(&FILE.1) {
            true => false,
            false => has(rights(AclTag::Other)),
        };
    }
    let mask = mask.unwrap_or(7);
    if let Some(own) = rights(AclTag::User(uid)) {
        return own & mask & right != 0;
    }
    let of_groups = acl.entries().iter().filter(|entry| match entry.tag {
        AclTag::GroupObj => groups.contains(&FILE.1),
        AclTag::Group(gid) => groups.contains(&gid),
        _ => false,
    });
    let of_groups: Vec<u16> = of_groups.map(|entry| entry.rights & mask).collect();
    match of_groups.is_empty() {
        true => has(rights(AclTag::Other)),
        false => of_groups.iter().any(|rights| rights & right != 0),
    }
}

fn any_acl() -> impl Strategy<Value = Acl> {
    let rights = || 0..8_u16;
    let users = prop::collection::btree_map(1..5_u32, rights(), 0..3);
    let groups = prop::collection::btree_map(1..4_u32, rights(), 0..3);
    // A mask without rights is a list of its own: Linux does not ask it.
    (users, groups, rights(), rights(), rights(), 1..8_u16).prop_map(
        |(users, groups, owner, group, others, mask)| {
            let entry = |tag, rights| AclEntry { tag, rights };
            let is_named = !users.is_empty() || !groups.is_empty();
            let mut entries = vec![entry(AclTag::UserObj, owner)];
            entries.extend(users.iter().map(|(uid, it)| entry(AclTag::User(*uid), *it)));
            entries.push(entry(AclTag::GroupObj, group));
            let groups = groups.iter();
            entries.extend(groups.map(|(gid, it)| entry(AclTag::Group(*gid), *it)));
            entries.extend(is_named.then_some(entry(AclTag::Mask, mask)));
            entries.push(entry(AclTag::Other, others));
            Acl::new(entries).unwrap()
        },
    )
}

fn any_ace() -> impl Strategy<Value = Ace> {
    let principal = prop_oneof![
        Just(AcePrincipal::Owner),
        Just(AcePrincipal::Group),
        Just(AcePrincipal::Everyone),
        (1..5_u32).prop_map(AcePrincipal::User),
        (1..4_u32).prop_map(AcePrincipal::NamedGroup),
    ];
    let kind = prop_oneof![Just(AceKind::Allow), Just(AceKind::Deny)];
    (kind, principal, 0..8_u16, 0..64_u32).prop_map(|(kind, principal, rights, less)| {
        // Most masks are whole rights; some have a part of the bits only.
        let part = if less < 48 { u32::MAX } else { !(less & 7) };
        Ace {
            kind,
            flags: 0,
            mask: mask_of(rights, false) & part,
            principal,
        }
    })
}

proptest! {
    #[test]
    fn mapping_there_and_back_keeps_decisions(acl in any_acl()) {
        let there = aces(&acl, false, false);
        let back = posix_acls(&there, false, FILE.0).unwrap();
        prop_assert_eq!(&back.default, &None);
        for (uid, groups) in callers() {
            for (right, _) in BITS {
                prop_assert_eq!(
                    is_permitted(&back.access, uid, &groups, right),
                    is_permitted(&acl, uid, &groups, right),
                    "{:?} {} {:?} {}", back.access, uid, groups, right
                );
            }
        }
        let inherited = posix_acls(&aces(&acl, true, true), true, FILE.0).unwrap();
        prop_assert!(inherited.default.is_some());
    }

    #[test]
    fn mapped_acl_never_widens_access(list in prop::collection::vec(any_ace(), 0..8)) {
        let mapped = posix_acls(&list, false, FILE.0).unwrap().access;
        for (uid, groups) in callers() {
            for (right, bit) in BITS {
                let is_permitted = is_permitted(&mapped, uid, &groups, right);
                let is_allowed = is_allowed_by(&list, FILE, (uid, &groups), bit);
                prop_assert!(
                    is_allowed || !is_permitted,
                    "{:?} gives {} to {} {:?}", mapped, right, uid, groups
                );
            }
        }
    }
}

fn ace(kind: AceKind, flags: u32, mask: u32, principal: AcePrincipal) -> Ace {
    Ace {
        kind,
        flags,
        mask,
        principal,
    }
}

#[test]
fn entries_without_a_counterpart_are_refused() {
    let everyone = AcePrincipal::Everyone;
    let inherit = flag::FILE_INHERIT | flag::DIRECTORY_INHERIT;
    let refused = [
        (ace(AceKind::Deny, 0, mask::READ_ACL, everyone), true),
        (
            ace(AceKind::Deny, 0, mask::WRITE_ACL, AcePrincipal::Owner),
            true,
        ),
        (ace(AceKind::Allow, flag::FILE_INHERIT, 1, everyone), true),
        (ace(AceKind::Allow, flag::INHERIT_ONLY, 1, everyone), true),
        (ace(AceKind::Allow, inherit | 0x4, 1, everyone), true),
        (ace(AceKind::Allow, inherit, 1, everyone), false),
    ];
    for (ace, is_directory) in refused {
        let error = posix_acls(&[ace], is_directory, FILE.0).unwrap_err();
        assert!(matches!(error, AclMappingError::Unsupported(_)), "{ace:?}");
    }
    let many: Vec<_> = (0..600)
        .map(|uid| ace(AceKind::Allow, 0, 1, AcePrincipal::User(uid)))
        .collect();
    assert_eq!(posix_acls(&many, false, 1), Err(AclMappingError::TooLong));
}

#[test]
fn denial_of_another_user_spares_the_owner() {
    let write = mask::WRITE_DATA | mask::APPEND_DATA;
    let list = [
        ace(AceKind::Deny, 0, write, AcePrincipal::User(2)),
        ace(AceKind::Allow, 0, write, AcePrincipal::Everyone),
    ];
    let acl = posix_acls(&list, false, 1).unwrap().access;
    let rights: Vec<_> = acl.entries().iter().map(|it| it.rights).collect();
    assert_eq!(rights, [2, 0, 2, 2, 2]);
    let own = posix_acls(&list, false, 2).unwrap().access;
    assert_eq!(own.entries()[0].rights, 0);
}
