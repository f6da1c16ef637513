//! Arbitrary bytes as requests.

use bytes::Bytes;
use pagemesh_fuse::test_api::abi::{self, Dialect, OP_BYTES_MAX, op};
use pagemesh_fuse::test_api::{RawRequest, Request};
use pagemesh_fuzz::{FuzzTarget, Random, measure_allocation};
use rustix::io::Errno;
use std::hash::Hash;
use zerocopy::IntoBytes;

const HEADER: usize = size_of::<abi::InHeader>();
const OPCODE_AT: usize = 4;
/// More than the highest served operation.
const OPCODES: usize = 60;

fn message(opcode: u32, rest: &[u8]) -> Vec<u8> {
    let header = abi::InHeader {
        opcode,
        unique: 2,
        node: 1,
        ..abi::InHeader::default()
    };
    [header.as_bytes(), rest].concat()
}

/// Every operation with a header of zeroes, followed by names and room; and those with a count of
/// further parts.
fn requests() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = (0..OPCODES as u32)
        .map(|opcode| {
            let op = vec![0; abi::op_bytes(opcode, Dialect::default()).unwrap_or(0)];
            message(opcode, &[&op, &b"name\0other\0"[..]].concat())
        })
        .collect();
    let write = abi::WriteIn {
        size: 5,
        ..abi::WriteIn::default()
    };
    all.push(message(op::WRITE, &[write.as_bytes(), b"bytes"].concat()));
    let xattr = abi::SetXattrIn { size: 5, flags: 0 };
    let rest = [xattr.as_bytes(), b"user.a\0value"].concat();
    all.push(message(op::SETXATTR, &rest));
    let xattr = abi::SetXattrExtIn {
        size: 5,
        ..abi::SetXattrExtIn::default()
    };
    let rest = [xattr.as_bytes(), b"user.a\0value"].concat();
    all.push(message(op::SETXATTR, &rest));
    let forget = abi::BatchForgetIn {
        count: 2,
        unused: 0,
    };
    let rest = [forget.as_bytes(), &[7; 32]].concat();
    all.push(message(op::BATCH_FORGET, &rest));
    let set = abi::SetAttrIn {
        valid: u32::MAX,
        ..abi::SetAttrIn::default()
    };
    all.push(message(op::SETATTR, set.as_bytes()));
    all
}

/// The outcome, without its numbers.
fn outcome(opcode: u32, decoded: &Result<Request<'_>, Errno>) -> impl Hash + use<> {
    let len = match decoded {
        Ok(Request::Write { data, .. }) => data.len(),
        Ok(Request::SetXattr { value, .. }) => value.len(),
        Ok(Request::ForgetAll(all)) => all.len(),
        _ => 0,
    };
    let refused = decoded.as_ref().err().map(|errno| errno.raw_os_error());
    (opcode, refused, len.min(1))
}

fn check(bytes: &[u8]) -> impl Hash + use<> {
    [false, true].map(|has_acls| check_dialect(bytes, Dialect { has_acls }))
}

fn check_dialect(bytes: &[u8], dialect: Dialect) -> impl Hash + use<> {
    let whole = Bytes::copy_from_slice(bytes);
    let Some(incoming) = RawRequest::from_message(&whole, dialect) else {
        assert!(bytes.len() < HEADER, "a header is a header");
        return None;
    };
    let (decoded, allocated) = measure_allocation(|| incoming.decode());
    assert!(
        allocated <= 2 * bytes.len() as u64 + 64,
        "{allocated} bytes"
    );
    // The ring has the same parts in another layout, and its operation header is always long
    // enough.
    let op_len = abi::op_bytes(incoming.header.opcode, dialect).unwrap_or(0);
    if let Some((own, payload)) = bytes[HEADER..].split_at_checked(op_len) {
        let mut place = [0; OP_BYTES_MAX];
        place[..op_len].copy_from_slice(own);
        let payload = Bytes::copy_from_slice(payload);
        let apart = RawRequest::from_parts(incoming.header, &place, payload, dialect);
        assert_eq!(apart.decode(), decoded);
    }
    Some(outcome(incoming.header.opcode, &decoded))
}

/// Sets a valid operation code.
fn reseal(bytes: &mut [u8], random: &mut Random) {
    if let Some(opcode) = bytes.get_mut(OPCODE_AT..OPCODE_AT + 4) {
        opcode.copy_from_slice(&(random.below(OPCODES) as u32).to_ne_bytes());
    }
}

#[test]
fn fuzz_fuse_request() {
    FuzzTarget::new("fuse_request", env!("CARGO_MANIFEST_DIR"))
        .seeds(requests())
        .cases(20_000)
        .bytes_max(400)
        .fixup(reseal)
        .run(check);
}
