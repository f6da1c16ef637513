use super::*;
use crate::acl4::{AceKind, AcePrincipal};
use crate::nfs4::identity::NumericIdentities;
use crate::testing::words;

fn file() -> FileAttributes<'static> {
    let time = |seconds| Time {
        seconds,
        nanoseconds: 5,
    };
    FileAttributes {
        kind: FileType::Regular,
        change: 0x1_0000_0002,
        size_bytes: 3,
        used_bytes: 4096,
        file_system: (8, 9),
        handle: b"abcd",
        inode: 77,
        mounted_on: 78,
        acl: &[],
        mode: 0o644,
        links: 2,
        uid: 1000,
        gid: 100,
        device: DeviceNumber { major: 4, minor: 5 },
        accessed: time(-1),
        modified: time(20),
        changed: time(30),
        created: time(40),
    }
}

const SHARED: SharedAttributes<'static> = SharedAttributes {
    lease_seconds: 90,
    file_bytes_max: 1 << 40,
    links_max: 65_000,
    identities: &NumericIdentities,
    space: None,
};

fn encoded(wanted: Bitmap) -> Vec<u8> {
    let mut writer = Writer::new();
    encode_attributes(wanted, &file(), &SHARED, &mut writer).unwrap();
    writer.into_bytes()
}

#[test]
fn values_follow_the_order_of_their_numbers() {
    let wanted = Bitmap::of(&[at::OWNER, at::TYPE, at::CHANGE, at::TIME_ACCESS]);
    let mut bytes = words(&[2, 0b1010, 1 << 4 | 1 << 15, 32, 1, 1, 2, 4]);
    bytes.extend(b"1000");
    bytes.extend(words(&[u32::MAX, u32::MAX, 5]));
    assert_eq!(encoded(wanted), bytes);
}

/// Attribute 14 (ARCHIVE), and one that clients only set.
#[test]
fn absent_attributes_are_left_out() {
    let wanted = Bitmap::of(&[14, at::SIZE, at::TIME_MODIFY_SET]);
    assert_eq!(encoded(wanted), words(&[1, 1 << 4, 8, 0, 3]));
    assert_eq!(encoded(Bitmap::default()), words(&[0, 0]));
    assert_eq!(check_readable(wanted), Err(Status::Invalid));
    assert_eq!(check_readable(SUPPORTED.without(WRITE_ONLY)), Ok(()));
}

/// RFC 8881, section 5.6: each server has these, and SUPPATTR_EXCLCREAT since minor version 1.
#[test]
fn required_attributes_are_supported() {
    for required in (0..12).chain([at::FILEHANDLE, at::SUPPATTR_EXCLCREAT]) {
        assert!(SUPPORTED.contains(required), "{required}");
        let bytes = encoded(Bitmap::of(&[required]));
        assert!(bytes.len() > 12, "{required} has no value");
    }
    for attribute in SUPPORTED.without(WRITE_ONLY).iter() {
        let value_bytes = encoded(Bitmap::of(&[attribute])).len();
        assert!(
            value_bytes > 4 * (attribute as usize / 32 + 3),
            "{attribute}"
        );
    }
}

#[test]
fn equal_values_are_verified() {
    let wanted = Bitmap::of(&[at::SIZE, at::MODE]);
    let check = |attributes, values: &[u8], result| {
        let wanted = EncodedAttributes { attributes, values };
        assert_eq!(has_values(&wanted, &file(), &SHARED), result);
    };
    check(wanted, &words(&[0, 3, 0o644]), Ok(true));
    check(wanted, &words(&[0, 4, 0o644]), Ok(false));
    check(wanted, &words(&[0, 3, 0o644, 0]), Ok(false));
    check(Bitmap::of(&[14]), &[], Err(Status::AttributeNotSupported));
    check(WRITE_ONLY, &[], Err(Status::Invalid));
    check(
        Bitmap::of(&[at::RDATTR_ERROR]),
        &words(&[0]),
        Err(Status::Invalid),
    );
}

fn decode(attributes: Bitmap, values: &[u8]) -> Result<AttributeChange, Status> {
    let encoded = EncodedAttributes { attributes, values };
    AttributeChange::decode(&encoded, SETTABLE, &NumericIdentities)
}

#[test]
fn change_of_all_fields_is_decoded() {
    let mut values = words(&[1, 2, 1, 0, 0, 1, 6]);
    values.extend(b"OWNER@\0\0");
    values.extend(words(&[0o1755, 1]));
    values.extend(b"7\0\0\0");
    values.extend(words(&[2]));
    values.extend(b"42\0\0");
    values.extend(words(&[0, 1, 0, 50, 60]));
    let wanted = AttributeChange {
        size_bytes: Some(0x1_0000_0002),
        acl: Some(vec![Ace {
            kind: AceKind::Allow,
            flags: 0,
            mask: 1,
            principal: AcePrincipal::Owner,
        }]),
        mode: Some(0o1755),
        uid: Some(7),
        gid: Some(42),
        accessed: Some(SetTime::ToServerTime),
        modified: Some(SetTime::To(Time {
            seconds: 50,
            nanoseconds: 60,
        })),
    };
    assert_eq!(decode(SETTABLE, &values), Ok(wanted));
    values.extend([0; 4]);
    assert_eq!(decode(SETTABLE, &values), Err(Status::BadXdr));
    for len in 0..values.len() - 4 {
        let short = decode(SETTABLE, &values[..len]);
        assert_eq!(short, Err(Status::BadXdr), "cut at {len}");
    }
}

#[test]
fn impossible_changes_are_refused() {
    let check = |attribute, values: &[u32], status| {
        let decoded = decode(Bitmap::of(&[attribute]), &words(values));
        assert_eq!(decoded, Err(status), "{attribute} {values:?}");
    };
    check(14, &[0], Status::AttributeNotSupported);
    check(at::ACL, &[1, 2, 0, 1, 0], Status::AttributeNotSupported);
    check(at::ACL, &[2049], Status::BadXdr);
    check(at::CHANGE, &[0, 0], Status::Invalid);
    check(at::MODE, &[0o10_0644], Status::Invalid);
    check(at::OWNER, &[0], Status::Invalid);
    check(at::OWNER, &[1, 0x6100_0000], Status::BadOwner);
    check(at::OWNER, &[1025], Status::BadXdr);
    check(at::TIME_ACCESS_SET, &[2], Status::BadXdr);
    check(
        at::TIME_ACCESS_SET,
        &[1, 0, 0, 1_000_000_000],
        Status::Invalid,
    );
}
