use super::*;
use proptest::prelude::*;

fn entry(tag: AclTag, rights: u16) -> AclEntry {
    AclEntry { tag, rights }
}

/// A list with these rights of owner, owning group and others, these named entries, and a mask.
fn list(mode: u16, named: &[AclEntry], mask: Option<u16>) -> Vec<AclEntry> {
    let mut entries = Acl::of_mode(mode).entries;
    entries.extend(named);
    entries.extend(mask.map(|rights| entry(AclTag::Mask, rights)));
    entries.sort_by_key(|entry| entry.tag.rank());
    entries
}

#[track_caller]
fn check_value(value: &[u8], expected: Result<Option<Acl>, Errno>) {
    assert_eq!(Acl::decode(value), expected, "{value:?}");
}

#[test]
fn value_has_format_of_linux() {
    let named = [entry(AclTag::User(0x1234), 6), entry(AclTag::Group(7), 4)];
    let acl = Acl::new(list(0o751, &named, Some(5))).expect("valid");
    #[rustfmt::skip]
    let value = [
        2, 0, 0, 0,
        1, 0, 7, 0, 255, 255, 255, 255,
        2, 0, 6, 0, 0x34, 0x12, 0, 0,
        4, 0, 5, 0, 255, 255, 255, 255,
        8, 0, 4, 0, 7, 0, 0, 0,
        16, 0, 5, 0, 255, 255, 255, 255,
        32, 0, 1, 0, 255, 255, 255, 255,
    ];
    assert_eq!(acl.encode(), value);
    check_value(&value, Ok(Some(acl)));
    check_value(&value[..4], Ok(None));
    for end in 0..value.len() {
        let is_empty = end == 4;
        assert_eq!(
            Acl::decode(&value[..end]).is_err(),
            !is_empty,
            "{end} bytes"
        );
    }
    let mut other = value;
    other[0] = 1;
    check_value(&other, Err(Errno::OPNOTSUPP));
    other = value;
    other[6] = 8;
    check_value(&other, Err(Errno::INVAL));
    other = value;
    other[4] = 3;
    check_value(&other, Err(Errno::INVAL));
}

#[track_caller]
fn check_entries(entries: Vec<AclEntry>, expected: Result<(), Errno>) {
    assert_eq!(Acl::new(entries.clone()).map(drop), expected, "{entries:?}");
}

#[test]
fn lists_are_valid_as_in_linux() {
    let user = |uid| entry(AclTag::User(uid), 7);
    let group = |gid| entry(AclTag::Group(gid), 7);
    check_entries(list(0o640, &[], None), Ok(()));
    check_entries(list(0o640, &[], Some(4)), Ok(()));
    check_entries(list(0o640, &[user(1)], None), Err(Errno::INVAL));
    check_entries(list(0o640, &[group(1)], None), Err(Errno::INVAL));
    check_entries(list(0o640, &[user(2), user(1), group(1)], Some(0)), Ok(()));
    check_entries(list(0o640, &[user(1), user(1)], Some(0)), Ok(()));
    check_entries(list(0o640, &[user(NO_ID)], Some(0)), Err(Errno::INVAL));
    check_entries(list(0o640, &[], Some(8)), Err(Errno::INVAL));
    let double = [entry(AclTag::Mask, 0)];
    check_entries(list(0o640, &double, Some(0)), Err(Errno::INVAL));
    for missing in 0..3 {
        let mut entries = list(0o640, &[], None);
        entries.remove(missing);
        check_entries(entries, Err(Errno::INVAL));
    }
    let mut reverse = list(0o640, &[], None);
    reverse.reverse();
    check_entries(reverse, Err(Errno::INVAL));
    let many: Vec<AclEntry> = (0..ACL_ENTRIES_MAX as u32 - 4).map(user).collect();
    check_entries(list(0o640, &many, Some(0)), Ok(()));
    let full = Acl::new(list(0o640, &many, Some(0))).expect("valid");
    assert_eq!(full.encode().len(), 4092);
    let more = [many, vec![user(9999)]].concat();
    check_entries(list(0o640, &more, Some(0)), Err(Errno::TOOBIG));
}

#[test]
fn mode_and_list_have_same_rights() {
    let mut plain = Acl::new(list(0o754, &[], None)).expect("valid");
    assert!(plain.is_mode());
    assert_eq!(plain.mode_rights(), 0o754);
    plain.set_mode(0o4120);
    assert_eq!(plain, Acl::of_mode(0o120));
    let named = [entry(AclTag::User(5), 7)];
    let mut acl = Acl::new(list(0o754, &named, Some(6))).expect("valid");
    assert!(!acl.is_mode());
    assert_eq!(acl.mode_rights(), 0o764);
    acl.set_mode(0o611);
    assert_eq!(acl.entries, list(0o651, &named, Some(1)));
    assert_eq!(mode_with_rights(0o106_777, &acl), 0o106_611);
    assert!(
        !Acl::new(list(0o640, &[], Some(4)))
            .expect("valid")
            .is_mode()
    );
}

#[test]
fn inherited_list_lacks_rights_without_mode() {
    let named = [entry(AclTag::User(5), 7)];
    let default = Acl::new(list(0o775, &named, Some(7))).expect("valid");
    let file = default.inherited(0o666);
    assert_eq!(file.entries, list(0o674, &named, Some(6)));
    assert_eq!(file.mode_rights(), 0o664);
    let plain = Acl::of_mode(0o750).inherited(0o666);
    assert_eq!(plain, Acl::of_mode(0o640));
}

/// A caller of the tests: a user, and its groups.
type TestCaller = (u32, Vec<u32>);

/// The text of POSIX 1003.1e, section 23.1.5, step by step.
fn is_permitted(entries: &[AclEntry], (uid, groups): &TestCaller, wanted: u16) -> bool {
    const OWNER: (u32, u32) = (1, 1);
    let rights = |tag| {
        let found: Vec<u16> = entries
            .iter()
            .filter(|entry| entry.tag == tag)
            .map(|entry| entry.rights)
            .collect();
        found.first().copied()
    };
    let has = |granted: u16| granted & wanted == wanted;
    let mask = rights(AclTag::Mask).unwrap_or(7);
    if *uid == OWNER.0 {
        return has(rights(AclTag::UserObj).expect("there"));
    }
    if let Some(granted) = rights(AclTag::User(*uid)) {
        return has(granted & mask);
    }
    let mut is_in_group = false;
    for entry in entries {
        let matches = match entry.tag {
            AclTag::GroupObj => groups.contains(&OWNER.1),
            AclTag::Group(gid) => groups.contains(&gid),
            _ => false,
        };
        is_in_group |= matches;
        if matches && has(entry.rights & mask) {
            return true;
        }
    }
    !is_in_group && has(rights(AclTag::Other).expect("there"))
}

fn some_list() -> impl Strategy<Value = Vec<AclEntry>> {
    let named = (any::<bool>(), 1u32..5, 0u16..8).prop_map(|(is_user, id, rights)| match is_user {
        true => entry(AclTag::User(id), rights),
        false => entry(AclTag::Group(id), rights),
    });
    let mask = prop_oneof![Just(Some(7)), (0u16..8).prop_map(Some), Just(None)];
    let all = (0u16..0o1000, prop::collection::vec(named, 0..5), mask);
    all.prop_map(|(mode, named, mask)| match named.is_empty() {
        true => list(mode, &[], mask),
        false => list(mode, &named, Some(mask.unwrap_or(5))),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn evaluation_follows_the_standard(
        entries in some_list(),
        uid in 0u32..6,
        groups in prop::collection::vec(0u32..6, 0..4),
        wanted in 0u16..8,
    ) {
        let acl = Acl::new(entries.clone()).expect("valid");
        let caller = AclCaller {
            uid,
            owner_uid: 1,
            owner_gid: 1,
            is_member: &|gid| groups.contains(&gid),
        };
        let expected = is_permitted(&entries, &(uid, groups.clone()), wanted);
        prop_assert_eq!(acl.permits(&caller, wanted), expected);
    }

    #[test]
    fn value_of_any_list_decodes_to_it(entries in some_list()) {
        let acl = Acl::new(entries).expect("valid");
        prop_assert_eq!(Acl::decode(&acl.encode()), Ok(Some(acl)));
    }

    /// Bytes of a client never cause a panic, and a list that they decode to is valid.
    #[test]
    fn any_value_decodes_to_valid_list_or_error(
        tail in prop::collection::vec(any::<u8>(), 0..100),
        tags in prop::collection::vec((0u16..40, 0u16..9, any::<u32>()), 0..7),
        is_raw in any::<bool>(),
    ) {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (tag, rights, id) in tags {
            value.extend(tag.to_le_bytes());
            value.extend(rights.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        if is_raw {
            value = tail;
        }
        if let Ok(Some(acl)) = Acl::decode(&value) {
            prop_assert!(check(acl.entries()).is_ok());
        }
    }
}
