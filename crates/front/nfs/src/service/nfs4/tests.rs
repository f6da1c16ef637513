//! The memory of opens. A client calls the service in the thread of the test, so that all allocations are counted.

#![allow(clippy::unwrap_used)] // Tests.

use super::*;
use crate::handle::HandleKey;
use crate::service::{CallRun, Service};
use crate::testing::memory::{MemorySpace, wait};
use crate::{Export, ExportOptions, Squash};
use bytes::Bytes;
use pagemesh_fs::{Caller, CreateMode, Credentials, Fs, Ino, MkfsOptions, SetAttributes, Time};
use pagemesh_fuzz::measure_retained;
use pagemesh_nfs_client::nfs4::operation;
use pagemesh_nfs_client::rpc::{self, Credential};
use pagemesh_nfs_client::xdr::Decoder;
use std::net::{Ipv4Addr, SocketAddr};

const OPENS: u32 = 10_000;
/// Bytes of an open by a client with one owner, in the server and in the file system.
const OPEN_BYTES_MAX: i64 = 720;
/// The same with an owner for each file.
const OPEN_WITH_OWNER_BYTES_MAX: i64 = 896;
const VOLUME: Uuid = Uuid::from_u128(1);
const USER: (u32, u32) = (1000, 100);
const SPACE_BYTES: u64 = 1 << 34;

fn clock() -> Time {
    Time { sec: 1, nsec: 0 }
}

fn file_name(number: u32) -> String {
    format!("file-{number:06}")
}

/// A file system with files, and with their pages in its cache.
fn file_system() -> Arc<Fs> {
    let memory = MemorySpace::new(SPACE_BYTES).with_size(SPACE_BYTES);
    let made = MkfsOptions {
        uuid: VOLUME,
        hash_key: [2, 3],
        limit_bytes: 0,
        owner: Credentials {
            uid: USER.0,
            gid: USER.1,
        },
        mode: 0o755,
    };
    pagemesh_fs::mkfs(&memory.shared(), wait, clock, made).unwrap();
    let fs = Arc::new(Fs::mount(memory.shared(), wait, clock).unwrap());
    let caller = Caller::trusted(USER.0, USER.1);
    let root = fs.attr(Ino::ROOT).unwrap().file_id();
    let attrs = SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::default()
    };
    for number in 0..OPENS {
        let name = file_name(number);
        let made = fs.create_at(root, name.as_bytes(), CreateMode::Guarded, &attrs, &caller);
        made.result.unwrap();
    }
    for number in 0..OPENS {
        let found = fs.lookup_at(root, file_name(number).as_bytes(), &caller);
        found.result.unwrap();
    }
    fs
}

/// A client with a session of one slot.
struct LocalClient {
    service: Service,
    session: [u8; 16],
    sequence: u32,
}

impl LocalClient {
    fn new() -> LocalClient {
        let export = Export {
            name: "data".into(),
            fs: file_system(),
            volume: VOLUME,
            key: HandleKey::new([1; 16]),
            attachment: 1,
            options: ExportOptions {
                squash: Squash::None,
                ..ExportOptions::default()
            },
            free_space: Arc::new(|| Some(SPACE_BYTES)),
        };
        let exports = Exports::new(vec![export]).unwrap();
        let mut client = LocalClient {
            service: Service::new(exports, Box::new(|_, _| {}), &Nfs4Options::default()),
            session: [0; 16],
            sequence: 0,
        };
        client.begin_session();
        client
    }

    fn begin_session(&mut self) {
        let exchange_id = operation(42, |out| {
            out.u64(1).opaque(b"client").u32(0).u32(0).u32(0);
        });
        let results = self.compound(&[exchange_id]);
        let mut fields = Decoder::new(&results[8..]);
        let (id, sequence) = (fields.u64("id").unwrap(), fields.u32("sequence").unwrap());
        let create_session = operation(43, |out| {
            out.u64(id).u32(sequence).u32(0);
            for word in [0, 1 << 16, 1 << 16, 1 << 10, 16, 1, 0].repeat(2) {
                out.u32(word);
            }
            out.u32(0).u32(0);
        });
        let results = self.compound(&[create_session]);
        self.session = Decoder::new(&results[8..]).fixed("session").unwrap();
        let reclaim_complete = operation(58, |out| {
            out.u32(0);
        });
        let sequence = self.sequence();
        self.compound(&[sequence, reclaim_complete]);
    }

    fn sequence(&mut self) -> Vec<u8> {
        self.sequence += 1;
        operation(53, |out| {
            out.fixed(&self.session).u32(self.sequence);
            out.u32(0).u32(0).u32(1);
        })
    }

    /// Runs operations, which all succeed. Returns the bytes of their results.
    fn compound(&self, operations: &[Vec<u8>]) -> Vec<u8> {
        let count = operations.len() as u32;
        let head = [0, 1, count].map(u32::to_be_bytes).concat();
        let arguments = [head, operations.concat()].concat();
        let credential = Credential::sys(USER.0, USER.1);
        let record = rpc::call_record(1, &credential, (100_003, 4, 1), &arguments);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1000));
        // The server gets records without their marks.
        let record = Bytes::from(record).slice(4..);
        let reply = self
            .service
            .answer(address, &record, &mut CallRun::default())
            .unwrap();
        let reply = rpc::Reply::decode(&reply.parts().concat()[4..]).unwrap();
        let result = reply.outcome.unwrap();
        let mut fields = Decoder::new(&result);
        assert_eq!(fields.u32("status"), Ok(0), "{result:?}");
        fields.fixed::<8>("tag and count").unwrap();
        fields.rest().to_vec()
    }

    fn open(&mut self, name: &str, owner: &str) {
        let find = operation(15, |out| {
            out.opaque(b"data");
        });
        let open = operation(18, |out| {
            // Access to read and write, and no denial.
            out.u32(0).u32(3).u32(0).u64(0).opaque(owner.as_bytes());
            out.u32(0).u32(0).opaque(name.as_bytes());
        });
        let operations = [self.sequence(), operation(24, |_| {}), find, open];
        self.compound(&operations);
    }
}

/// Opens each file once.
#[track_caller]
fn check_open_bytes(owner: impl Fn(u32) -> String, bytes_max: i64) {
    let mut client = LocalClient::new();
    let ((), bytes) = measure_retained(|| {
        for number in 0..OPENS {
            client.open(&file_name(number), &owner(number));
        }
    });
    let opens = client
        .service
        .nfs4
        .call(|locked, _| locked.state.counts().opens);
    assert_eq!(opens, OPENS as usize);
    let per_open = bytes / i64::from(OPENS);
    assert!(per_open < bytes_max, "{per_open} bytes for each open");
    assert!(
        per_open > 100,
        "{per_open} bytes for each open: not counted"
    );
}

#[test]
fn open_takes_few_bytes() {
    check_open_bytes(|_| "open id:0000000000000001".into(), OPEN_BYTES_MAX);
}

#[test]
fn open_with_its_own_owner_takes_few_bytes() {
    let owner = |number| format!("open id:{number:016}");
    check_open_bytes(owner, OPEN_WITH_OWNER_BYTES_MAX);
}
