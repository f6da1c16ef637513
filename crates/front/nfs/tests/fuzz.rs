//! Fuzz targets: calls and streams of clients.
//!
//! `pagemesh_fuzz` describes how they run, `docs/rfd/004-fuzzing.md` why.

use client::Fields;
use pagemesh_fuzz::{FuzzTarget, measure_allocation};
use pagemesh_nfs::acl3::{self, AclCall};
use pagemesh_nfs::exports_file::{ExportPath, ExportsFile};
use pagemesh_nfs::handle::{FileHandle, HandleBytes, HandleKey};
use pagemesh_nfs::limits::{FRAGMENT_RESERVED_BYTES_MAX, RECORD_BYTES_MAX};
use pagemesh_nfs::mount3::{self, MountCall};
use pagemesh_nfs::nfs3::attributes::{SetAttributes, SetTime, Time};
use pagemesh_nfs::nfs3::{self, Nfs3Call};
use pagemesh_nfs::nfs4::arguments::Arguments;
use pagemesh_nfs::nfs4::compound::CompoundHead;
use pagemesh_nfs::nfs4::operation::Operation;
use pagemesh_nfs::record::{RecordAssembler, RecordError};
use pagemesh_nfs::rpc::{ArgumentsError, Call, CallError, Refusal, Reply};
use pagemesh_nfs::xdr::{Decode, Reader, XdrError};
use proptest::prelude::*;
use std::hash::Hash;
use std::mem::discriminant;

#[path = "support/client.rs"]
mod client;

const KEY: [u8; 16] = [7; 16];

fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}

/// Calls of each procedure, as clients send them.
fn call_seeds() -> Vec<Vec<u8>> {
    let file = FileHandle {
        volume: [1; 16],
        snapshot_epoch: 0,
        inode: 77,
        generation: 1,
        birth_fold: 2,
    };
    let time = Time {
        seconds: 10,
        nanoseconds: 20,
    };
    let handle = HandleKey::new(KEY).encode(&file).bytes().to_vec();
    let mut fields = Fields {
        other_handle: handle.clone(),
        handle,
        name: b"file".to_vec(),
        other_name: b"a longer name of a file".to_vec(),
        data: b"data of a file".to_vec(),
        verifier: *b"verifier",
        attributes: SetAttributes {
            mode: Some(0o644),
            uid: Some(1000),
            gid: None,
            size_bytes: Some(1 << 33),
            accessed: SetTime::ToServerTime,
            modified: SetTime::To(time),
        },
        guard: Some(time),
        offset: 1 << 34,
        count: 4096,
        other_count: 512,
        choice: 0,
    };
    let mut seeds = Vec::new();
    for choice in 0..4 {
        fields.choice = choice;
        for procedure in 0..client::PROCEDURES {
            let arguments = client::arguments(&client::call(procedure, &fields));
            seeds.push(client::record(nfs3::PROGRAM, procedure, &arguments));
        }
    }
    let mut path = client::Encoder::default();
    path.opaque(b"/data");
    for procedure in 0..6 {
        seeds.push(client::record(mount3::PROGRAM, procedure, &path.0));
    }
    seeds.extend(acl_seeds(&fields.handle));
    seeds.sort();
    seeds.dedup();
    seeds
}

/// GETACL and SETACL with an ACL of four entries.
fn acl_seeds(handle: &[u8]) -> [Vec<u8>; 2] {
    let mut rest = client::Encoder::default();
    rest.opaque(handle).word(acl3::mask::ALL);
    let get = client::record(acl3::PROGRAM, 1, &rest.0);
    rest.word(4).word(4);
    for tag in [1, 4, 16, 32] {
        rest.word(tag).word(0).word(7);
    }
    rest.word(0).word(0);
    [get, client::record(acl3::PROGRAM, 2, &rest.0)]
}

/// The kind of a decoder's result, without numbers.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Outcome {
    Header(&'static str),
    /// The program, the procedure, and the field that is malformed.
    Arguments(u32, u32, Option<&'static str>),
    UnknownProcedure,
    UnknownProgram,
}

fn kind(error: &XdrError) -> &'static str {
    match error {
        XdrError::Short { .. } => "short",
        XdrError::TooLong { what, .. }
        | XdrError::Enumeration { what, .. }
        | XdrError::Contradiction { what, .. }
        | XdrError::Extra { what, .. } => what,
        XdrError::Boolean(_) => "boolean",
    }
}

fn outcome<T>(call: &Call<'_>, decoded: &Result<T, ArgumentsError>) -> Outcome {
    let malformed = match decoded {
        Ok(_) => None,
        Err(ArgumentsError::Procedure(_)) => return Outcome::UnknownProcedure,
        Err(ArgumentsError::Malformed(error)) => Some(kind(error)),
    };
    Outcome::Arguments(call.program, call.procedure, malformed)
}

fn decode_record(record: &[u8]) -> Outcome {
    match Call::decode(record) {
        Ok((call, arguments)) => match call.program {
            nfs3::PROGRAM => {
                let decoded = Nfs3Call::decode(call.procedure, arguments);
                decoded.iter().for_each(check_values);
                outcome(&call, &decoded)
            }
            acl3::PROGRAM => {
                let decoded = AclCall::decode(call.procedure, arguments);
                outcome(&call, &decoded)
            }
            mount3::PROGRAM => {
                let decoded = MountCall::decode(call.procedure, arguments);
                outcome(&call, &decoded)
            }
            _ => Outcome::UnknownProgram,
        },
        Err(CallError::Header(error)) => Outcome::Header(kind(&error)),
        Err(CallError::NotACall(_)) => Outcome::Header("no call"),
        Err(CallError::Denied { .. }) => Outcome::Header("denied"),
    }
}

/// The checks that a procedure makes first.
fn check_values(call: &Nfs3Call<'_>) {
    let handle = match call {
        Nfs3Call::GetAttributes(file) => *file,
        Nfs3Call::Lookup(at) => {
            if let Ok(name) = at.name.check() {
                assert!((1..=255).contains(&name.len()));
            }
            at.directory
        }
        Nfs3Call::MakeSymlink(it) => {
            if let Ok(target) = it.target.check() {
                assert!((1..=4095).contains(&target.len()));
            }
            it.at.directory
        }
        Nfs3Call::SetAttributes(it) => {
            let _ = it.change.check();
            it.file
        }
        Nfs3Call::Read(it) => {
            assert!(it.count <= 1 << 20);
            it.file
        }
        _ => return,
    };
    assert!(handle.0.len() <= 64);
    if let Ok(file) = HandleKey::new(KEY).decode(handle) {
        assert_eq!(handle.claimed_volume(), Some(file.volume));
    }
}

/// Decodes the bytes as a record, and as the arguments of each procedure. Nothing takes memory.
fn check_call(bytes: &[u8]) -> impl Hash + use<> {
    let (found, took) = measure_allocation(|| decode_record(bytes));
    assert_eq!(took, 0, "{found:?}");
    let ((), took) = measure_allocation(|| {
        for procedure in 0..=client::PROCEDURES {
            let arguments = Reader::new(bytes);
            let decoded = Nfs3Call::decode(procedure, arguments.clone());
            decoded.iter().for_each(check_values);
            let _ = MountCall::decode(procedure, arguments.clone());
            let _ = AclCall::decode(procedure, arguments);
        }
        let _ = HandleKey::new(KEY).decode(HandleBytes(bytes));
        let _ = HandleBytes::decode(&mut Reader::new(bytes));
    });
    assert_eq!(took, 0);
    if let Ok(AclCall::Set(set)) = AclCall::decode(2, Reader::new(bytes)) {
        // A valid ACL, or an error.
        let _ = (set.access.acl(), set.default.acl());
    }
    if let Err(CallError::Denied { xid, denial }) = Call::decode(bytes) {
        assert_eq!(bytes[..4], xid.to_be_bytes());
        assert!(Reply::denied(xid, denial).parts().concat().len() >= 24);
    }
    found
}

#[test]
fn fuzz_nfs_calls() {
    let seeds = call_seeds();
    assert!(seeds.len() > 28, "{} seeds", seeds.len());
    for seed in &seeds {
        let found = decode_record(seed);
        assert!(matches!(found, Outcome::Arguments(_, _, None)), "{found:?}");
    }
    target("nfs_calls")
        .seeds(seeds)
        .cases(20_000)
        .run(check_call);
}

/// Decodes the bytes as the arguments of each operation of NFSv4.1. Nothing takes memory.
fn check_operations(bytes: &[u8]) -> impl Hash + use<> {
    let (found, took) = measure_allocation(|| {
        let mut decoded = [0u8; Operation::ALL.len()];
        for (operation, found) in Operation::ALL.iter().zip(&mut decoded) {
            let mut reader = Reader::new(bytes);
            *found = match Arguments::decode(*operation, &mut reader) {
                Ok(_) => {
                    assert!(reader.rest().len() <= bytes.len());
                    1
                }
                Err(XdrError::Short { .. }) => 2,
                Err(XdrError::TooLong { .. }) => 3,
                Err(_) => 4,
            };
        }
        let _ = CompoundHead::decode(&mut Reader::new(bytes));
        decoded
    });
    assert_eq!(took, 0, "{found:?}");
    found
}

#[test]
fn fuzz_nfs4_operations() {
    let words = |words: &[u32]| -> Vec<u8> {
        let bytes = words.iter().flat_map(|word| word.to_be_bytes());
        bytes.collect()
    };
    let stateid = [1, 2, 3, 4];
    // OPEN: access, denied access, owner, a guarded create with a mode, and a name.
    let open = [
        0,
        3,
        0,
        0,
        0,
        4,
        7,
        1,
        1,
        2,
        0,
        2,
        4,
        0o644,
        0,
        1,
        0x6600_0000,
    ];
    // LOCK by a new owner, and by an existing one.
    let new_lock = [&[2, 0, 0, 5, 0, 9, 1, 0][..], &stateid, &[0, 0, 0, 4, 7]].concat();
    let lock = [&[1, 0, 0, 5, 0, 9, 0][..], &stateid, &[0]].concat();
    // EXCHANGE_ID with protection by a secret, which has lists of algorithms.
    let exchange = [1, 2, 4, 7, 0, 2, 1, 5, 1, 6, 1, 4, 9, 1, 4, 9, 8, 1, 0];
    let write = [&stateid[..], &[0, 0, 2, 4, 0x6162_6364]].concat();
    let channel = [0, 4096, 4096, 512, 8, 16, 0];
    let session = [
        &[0, 1, 1, 0][..],
        &channel,
        &channel,
        &[7, 2, 0, 1, 0, 0, 0, 0, 0],
    ]
    .concat();
    let lists = [&[2][..], &stateid, &stateid].concat();
    let seeds = [
        &open[..],
        &new_lock,
        &lock,
        &exchange,
        &write,
        &session,
        &lists,
    ];
    target("nfs4_operations")
        .seeds(seeds.map(words))
        .cases(10_000)
        .run(check_operations);
}

#[test]
fn other_programs_and_procedures_are_refused() {
    let record = client::record(100_000, 0, &[]);
    assert_eq!(decode_record(&record), Outcome::UnknownProgram);
    let record = client::record(nfs3::PROGRAM, 22, &[]);
    assert_eq!(decode_record(&record), Outcome::UnknownProcedure);
    let error = Nfs3Call::decode(22, Reader::new(&[])).unwrap_err();
    assert_eq!(error.refusal(), Refusal::ProcedureUnavailable);
}

/// The lengths of the records of a stream that arrives in pieces, and its error.
fn assemble(stream: &[u8], piece_bytes: usize) -> (Vec<usize>, Option<RecordError>) {
    let mut assembler = RecordAssembler::new();
    let mut lengths = Vec::with_capacity(stream.len() / 4);
    for piece in stream.chunks(piece_bytes) {
        let mut rest = piece;
        while !rest.is_empty() {
            match assembler.push(rest) {
                Ok(pushed) => {
                    assert!(pushed.consumed > 0, "no progress");
                    rest = &rest[pushed.consumed..];
                    lengths.extend(pushed.record.map(|record| record.len()));
                }
                Err(error) => return (lengths, Some(error)),
            }
        }
    }
    (lengths, None)
}

fn check_stream(stream: &[u8]) -> impl Hash + use<> {
    let list_bytes = 8 * (stream.len() as u64 / 4);
    let (whole, took) = measure_allocation(|| assemble(stream, stream.len().max(1)));
    let most = list_bytes + 3 * stream.len() as u64 + 2 * FRAGMENT_RESERVED_BYTES_MAX as u64;
    assert!(took <= most, "{took} bytes for {}", stream.len());
    assert_eq!(assemble(stream, 1), whole, "byte by byte");
    assert_eq!(assemble(stream, 7), whole, "in pieces");
    assert!(
        whole
            .0
            .iter()
            .all(|len| (1..=RECORD_BYTES_MAX).contains(len))
    );
    assert!(whole.0.iter().sum::<usize>() <= stream.len());
    (
        whole.0.len().min(8),
        whole.1.map(|error| discriminant(&error)),
    )
}

/// Parses an exports file. The result has the cause of an error, or the numbers of exports and rules.
fn check_exports(text: &[u8]) -> impl Hash + use<> {
    let (parsed, took) = measure_allocation(|| ExportsFile::parse("exports", text));
    let most = (64 << 10) + 1024 * text.len() as u64;
    assert!(took <= most, "{took} bytes for {}", text.len());
    match parsed {
        Err(error) => {
            let lines = 1 + text.iter().filter(|byte| **byte == b'\n').count();
            assert!((1..=lines).contains(&error.line), "{error}");
            assert!(error.column >= 1);
            assert!(error.to_string().starts_with("exports:"));
            (0, 0, Some(discriminant(&error.cause)))
        }
        Ok(file) => {
            let mut rules = 0;
            for export in &file.exports {
                let path = export.path.to_string();
                assert_eq!(ExportPath::parse(&path).as_ref(), Some(&export.path));
                assert!((1..=256).contains(&export.rules.len()));
                let order = export.rules.iter().map(|it| it.clients.specificity());
                assert!(order.rev().is_sorted());
                rules += export.rules.len();
            }
            (file.exports.len().min(8), rules.min(16), None)
        }
    }
}

#[test]
fn fuzz_nfs_exports() {
    let seeds: [&[u8]; 4] = [
        b"# file systems\n/data 10.0.0.5(rw,no_root_squash) 10.0.0.0/8 *(ro)\n",
        b"\"/data/a b\" fd00::/8(rw,all_squash,anonuid=7,anongid=8,insecure) \\\n  ::1(rw)\n",
        b"/a\\040b *(sync,no_subtree_check,sec=sys,manage_gids)\n/c 0.0.0.0/0(secure)",
        b"/d ::ffff:10.0.0.1(rw) 10.0.0.1/32",
    ];
    target("nfs_exports")
        .seeds(seeds.map(<[u8]>::to_vec))
        .cases(20_000)
        .run(check_exports);
}

#[test]
fn fuzz_nfs_records() {
    let fragment = |len: u32, is_last: bool| {
        let mark = len | u32::from(is_last) << 31;
        [&mark.to_be_bytes()[..], &vec![7; len as usize]].concat()
    };
    let one = fragment(40, true);
    let two = [fragment(3, false), fragment(0, false), fragment(9, true)].concat();
    let endless = fragment(0, false).repeat(60);
    let seeds = [one.clone(), two.clone(), [two, one].concat(), endless];
    target("nfs_records")
        .seeds(seeds)
        .cases(5_000)
        .run(check_stream);
}

proptest! {
    #[test]
    fn random_bytes_are_decoded_without_memory(
        bytes in prop::collection::vec(any::<u8>(), 0..2000),
        small in prop::collection::vec(0u8..3, 0..200),
    ) {
        check_call(&bytes);
        check_call(&small);
        check_operations(&bytes);
        check_operations(&small);
        check_stream(&bytes);
        check_stream(&small);
        check_exports(&bytes);
        check_exports(&small);
    }
}
