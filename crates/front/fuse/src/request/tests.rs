use super::*;
use zerocopy::IntoBytes;

fn message(opcode: u32, op: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = abi::InHeader {
        opcode,
        unique: 2,
        node: 1,
        ..abi::InHeader::default()
    };
    [header.as_bytes(), op, payload].concat()
}

/// The same result from both layouts, with and without ACLs.
#[track_caller]
fn check(opcode: u32, op: &[u8], payload: &[u8], expected: &Result<Request<'_>, Errno>) {
    for has_acls in [false, true] {
        check_dialect(opcode, op, payload, expected, Dialect { has_acls });
    }
}

/// The same result from both layouts, in one dialect.
#[track_caller]
fn check_dialect(
    opcode: u32,
    op: &[u8],
    payload: &[u8],
    expected: &Result<Request<'_>, Errno>,
    dialect: Dialect,
) {
    let whole = Bytes::from(message(opcode, op, payload));
    let incoming = RawRequest::from_message(&whole, dialect).expect("a header");
    assert_eq!(&incoming.decode(), expected);
    // The ring's operation header has a fixed length.
    let mut place = [0; OP_BYTES_MAX];
    place[..op.len()].copy_from_slice(op);
    let payload = Bytes::copy_from_slice(payload);
    let apart = RawRequest::from_parts(incoming.header, &place, payload, dialect);
    assert_eq!(&apart.decode(), expected);
}

#[test]
fn requests_decode_alike_from_both_transports() {
    check(op::LOOKUP, b"", b"name\0", &Ok(Request::Lookup(b"name")));
    check(op::LOOKUP, b"", b"name", &Err(Errno::IO));
    check(op::STATFS, b"", b"", &Ok(Request::Statfs));
    let to = abi::Rename2In {
        to: 7,
        flags: 1,
        unused: 0,
    };
    let (name, new): (&[u8], &[u8]) = (b"a", b"bc");
    let (to, flags) = (to.as_bytes(), 1);
    let renamed = Request::Rename {
        name,
        to: 7,
        new,
        flags,
    };
    check(op::RENAME2, to, b"a\0bc\0", &Ok(renamed));
    check(op::RENAME2, to, b"a\0bc", &Err(Errno::IO));
    let write = abi::WriteIn {
        offset: 5,
        size: 3,
        ..abi::WriteIn::default()
    };
    let written = Request::Write {
        file: 0,
        offset: 5,
        data: Bytes::from_static(b"xyz"),
        flags: 0,
        how: 0,
    };
    check(op::WRITE, write.as_bytes(), b"xyz", &Ok(written));
    check(op::WRITE, write.as_bytes(), b"xy", &Err(Errno::IO));
    let many = abi::BatchForgetIn {
        count: u32::MAX,
        unused: 0,
    };
    check(op::BATCH_FORGET, many.as_bytes(), b"", &Err(Errno::IO));
    check(9999, b"", b"", &Err(Errno::NOSYS));
}

#[test]
fn attribute_has_form_of_dialect() {
    let check = |op: &[u8], has_acls, acl_flags| {
        let set = Request::SetXattr {
            name: b"user.a",
            value: b"xy",
            flags: 1,
            acl_flags,
        };
        let (payload, dialect) = (b"user.a\0xy", Dialect { has_acls });
        check_dialect(op::SETXATTR, op, payload, &Ok(set), dialect);
        let short = &payload[..8];
        check_dialect(op::SETXATTR, op, short, &Err(Errno::IO), dialect);
    };
    let (size, flags) = (2, 1);
    check(abi::SetXattrIn { size, flags }.as_bytes(), false, None);
    let ext = abi::SetXattrExtIn {
        size,
        flags,
        acl_flags: abi::SETXATTR_ACL_KILL_SGID,
        unused: 0,
    };
    check(ext.as_bytes(), true, Some(1));
}

#[track_caller]
fn check_written(len: usize, is_copied: bool) {
    let write = abi::WriteIn {
        size: len as u32,
        ..abi::WriteIn::default()
    };
    let bytes = vec![1; len];
    let whole = Bytes::from(message(op::WRITE, write.as_bytes(), &bytes));
    let incoming = RawRequest::from_message(&whole, Dialect::default()).expect("a header");
    let Ok(Request::Write { data, .. }) = incoming.decode() else {
        panic!("a write");
    };
    assert_eq!(data, bytes);
    assert_eq!(!whole.as_ptr_range().contains(&data.as_ptr()), is_copied);
}

#[test]
fn short_write_does_not_retain_large_buffer() {
    check_written(1, true);
    check_written(COPIED_BYTES_MAX - 1, true);
    check_written(COPIED_BYTES_MAX, false);
}

#[test]
fn times_may_lie_before_1970() {
    let wished = abi::SetAttrIn {
        valid: set::MTIME | set::ATIME | set::ATIME_NOW,
        mtime: -2,
        mtime_ns: 800_000_000,
        ..abi::SetAttrIn::default()
    };
    let expected = SetAttr {
        atime: Some(TimeUpdate::Now),
        mtime: Some(TimeUpdate::At(Time {
            sec: -2,
            nsec: 800_000_000,
        })),
        ..SetAttr::default()
    };
    let op = wished.as_bytes();
    check(op::SETATTR, op, b"", &Ok(Request::SetAttr(expected)));
    let wrong = abi::SetAttrIn {
        mtime_ns: 1_000_000_000,
        ..wished
    };
    check(op::SETATTR, wrong.as_bytes(), b"", &Err(Errno::INVAL));
}
