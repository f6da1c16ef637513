//! The calls of [`FileCall`] over NFSv4.1 (RFC 8881): one session with one slot. Data goes by the
//! anonymous state id, so that no state outlives a call.

use super::OWNER;
use super::file_calls::{FileCall, FileClient, Outcome};
use pagemesh_nfs_client::xdr::{Decoder, Encoder};
use pagemesh_nfs_client::{Client, Credential};
use std::net::SocketAddr;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
pub const COMPOUND: (u32, u32, u32) = (100_003, 4, 1);
pub const CLOSE: u32 = 4;
const COMMIT: u32 = 5;
pub const LINK: u32 = 11;
const LOOKUP: u32 = 15;
pub const OPEN: u32 = 18;
const PUTROOTFH: u32 = 24;
const READ: u32 = 25;
pub const READDIR: u32 = 26;
pub const REMOVE: u32 = 28;
pub const RENAME: u32 = 29;
pub const SAVEFH: u32 = 32;
const SETATTR: u32 = 34;
const WRITE: u32 = 38;
const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const SEQUENCE: u32 = 53;
const RECLAIM_COMPLETE: u32 = 58;
/// The attribute SIZE, and the word and bit of MODE.
const SIZE: u32 = 1 << 4;
const MODE: u32 = 1 << 1;
/// NFS4ERR_DELAY and NFS4ERR_GRACE: the client asks again.
pub const DELAY: u32 = 10_008;
const GRACE: u32 = 10_013;
/// The slots of a session.
pub const SLOTS: u32 = 4;
const RETRIES_MAX: usize = 10_000;

/// The bytes of one operation.
pub fn operation(number: u32, words: &[u32]) -> Encoder {
    let mut out = Encoder::new();
    out.u32(number);
    for word in words {
        out.u32(*word);
    }
    out
}

/// The arguments of a COMPOUND.
pub fn compound(operations: &[Encoder]) -> Vec<u8> {
    let mut out = Encoder::new();
    out.opaque(b"").u32(1).u32(operations.len() as u32);
    let mut bytes = out.into_bytes();
    for operation in operations {
        bytes.extend(operation.clone().into_bytes());
    }
    bytes
}

/// PUTROOTFH, LOOKUP of the export, and LOOKUP of a name.
pub fn path(name: Option<&[u8]>) -> Vec<Encoder> {
    let mut operations = vec![operation(PUTROOTFH, &[])];
    for name in [Some(&b"data"[..]), name].into_iter().flatten() {
        let mut lookup = operation(LOOKUP, &[]);
        lookup.opaque(name);
        operations.push(lookup);
    }
    operations
}

pub fn named(number: u32, name: &[u8]) -> Encoder {
    let mut out = operation(number, &[]);
    out.opaque(name);
    out
}

/// OPEN that creates a file. The mode of creation is GUARDED4, or EXCLUSIVE4_1 with a verifier.
pub fn create(owner: &[u8], name: &[u8], verifier: Option<&[u8; 8]>) -> Encoder {
    // Sequence, access to read and write, no denial, and the client, which the session names.
    let mut out = operation(OPEN, &[0, 3, 0, 0, 0]);
    out.opaque(owner).u32(1);
    match verifier {
        None => out.u32(1),
        Some(verifier) => out.u32(3).fixed(verifier),
    };
    out.u32(2).u32(0).u32(MODE).u32(4).u32(0o644);
    out.u32(0).opaque(name);
    out
}

/// SEQUENCE of a slot.
pub fn sequence(session: &[u8; 16], (slot, number): (u32, u32), is_kept: bool) -> Encoder {
    let mut out = operation(SEQUENCE, &[]);
    out.fixed(session).u32(number).u32(slot).u32(SLOTS - 1);
    out.u32(is_kept.into());
    out
}

/// A session of one client. [`Session::call`] uses its first slot.
pub struct Session {
    pub client: Client,
    server: SocketAddr,
    name: Vec<u8>,
    pub id: [u8; 16],
    pub sequence: u32,
}

pub fn connect(server: SocketAddr) -> Client {
    let owner = Credential::sys(OWNER.uid, OWNER.gid);
    Client::connect(server, owner, LIMIT).expect("connected")
}

/// The status of a COMPOUND, and its results.
pub fn exchange(client: &mut Client, operations: &[Encoder]) -> (u32, Vec<u8>) {
    let reply = client.call_raw(COMPOUND, &compound(operations));
    let reply = reply.expect("a reply");
    let mut fields = Decoder::new(&reply);
    let status = fields.u32("status").expect("a status");
    fields.opaque("tag", 1024).expect("a tag");
    fields.u32("results").expect("a number");
    (status, fields.rest().to_vec())
}

impl Session {
    pub fn new(server: SocketAddr, name: &[u8]) -> Session {
        let mut client = connect(server);
        let mut exchange_id = operation(EXCHANGE_ID, &[7, 7]);
        exchange_id.opaque(name).u32(0).u32(0).u32(0);
        let (status, results) = exchange(&mut client, &[exchange_id]);
        assert_eq!(status, 0, "EXCHANGE_ID");
        let mut fields = Decoder::new(&results);
        fields.fixed::<8>("operation").expect("a result");
        let mut create = operation(CREATE_SESSION, &[]);
        let id: [u8; 8] = fields.fixed("client id").expect("a client id");
        let sequence = fields.u32("sequence").expect("a sequence");
        create.fixed(&id).u32(sequence).u32(0);
        for _ in 0..2 {
            for word in [0, 1 << 20, 1 << 20, 4096, 16, SLOTS, 0] {
                create.u32(word);
            }
        }
        create.u32(0).u32(0);
        let (status, results) = exchange(&mut client, &[create]);
        assert_eq!(status, 0, "CREATE_SESSION");
        let mut fields = Decoder::new(&results);
        fields.fixed::<8>("operation").expect("a result");
        let mut session = Session {
            client,
            server,
            name: name.to_vec(),
            id: fields.fixed("session").expect("a session"),
            sequence: 0,
        };
        session.sequence += 1;
        let complete = session.call(vec![operation(RECLAIM_COMPLETE, &[0])], true);
        assert_eq!(complete.0, 0, "RECLAIM_COMPLETE");
        session
    }

    /// The same client, after a restart of the server.
    pub fn after_restart(&self, server: SocketAddr) -> Session {
        Session::new(server, &self.name)
    }

    pub fn break_connection(&mut self) {
        self.client = connect(self.server);
    }

    /// Sends operations with the present sequence number. Returns the status of the COMPOUND and the
    /// results after SEQUENCE.
    pub fn call(&mut self, operations: Vec<Encoder>, is_kept: bool) -> (u32, Vec<u8>) {
        let mut all = vec![sequence(&self.id, (0, self.sequence), is_kept)];
        all.extend(operations);
        let (status, results) = exchange(&mut self.client, &all);
        let mut fields = Decoder::new(&results);
        let head = [fields.u32("operation"), fields.u32("status")];
        assert_eq!(head, [Ok(SEQUENCE), Ok(0)], "SEQUENCE");
        fields.fixed::<36>("sequence").expect("a result");
        (status, fields.rest().to_vec())
    }
}

/// See the module.
pub struct Nfs41Files {
    session: Session,
    /// No call was sent over this session yet.
    is_new: bool,
}

/// Whether the server keeps the reply for a repetition. Data is too long for it.
fn is_kept(call: &FileCall) -> bool {
    !matches!(call, FileCall::Read { .. } | FileCall::List)
}

fn operations(call: &FileCall) -> Vec<Encoder> {
    let state = [0; 4];
    match call {
        FileCall::Create(name) => created(name, None),
        FileCall::CreateExclusive(name, verifier) => created(name, Some(verifier)),
        FileCall::Remove(name) => [path(None), vec![named(REMOVE, name)]].concat(),
        FileCall::Rename(from, to) => {
            let mut rename = named(RENAME, from);
            rename.opaque(to);
            [path(None), vec![operation(SAVEFH, &[]), rename]].concat()
        }
        FileCall::Link(from, to) => {
            let save = vec![operation(SAVEFH, &[])];
            [path(Some(from)), save, path(None), vec![named(LINK, to)]].concat()
        }
        FileCall::Write {
            name,
            offset,
            data,
            stable,
        } => {
            let mut write = operation(WRITE, &state);
            write.u64(*offset).u32(*stable as u32).opaque(data);
            [path(Some(name)), vec![write]].concat()
        }
        FileCall::Read {
            name,
            offset,
            count,
        } => {
            let mut read = operation(READ, &state);
            read.u64(*offset).u32(*count);
            [path(Some(name)), vec![read]].concat()
        }
        FileCall::SetSize(name, size) => {
            let mut set = operation(SETATTR, &state);
            set.u32(1).u32(SIZE).u32(8).u64(*size);
            [path(Some(name)), vec![set]].concat()
        }
        FileCall::Commit(name) => [path(Some(name)), vec![operation(COMMIT, &[0, 0, 0])]].concat(),
        FileCall::List => {
            let list = operation(READDIR, &[0, 0, 0, 0, 8192, 8192, 0]);
            [path(None), vec![list]].concat()
        }
    }
}

fn created(name: &[u8], verifier: Option<&[u8; 8]>) -> Vec<Encoder> {
    // CLOSE by the current state id.
    let close = operation(CLOSE, &[0, 1, 0, 0, 0]);
    [path(None), vec![create(b"owner", name, verifier), close]].concat()
}

/// The fields of the last operation, which follows results without fields.
fn outcome(call: &FileCall, results: &[u8]) -> Outcome {
    let skipped = match call {
        FileCall::List => 2,
        FileCall::Write { .. } | FileCall::Read { .. } | FileCall::Commit(_) => 3,
        _ => return Outcome::default(),
    };
    let mut fields = Decoder::new(results);
    for _ in 0..=skipped {
        fields.u32("operation").expect("a result");
        assert_eq!(fields.u32("status"), Ok(0));
    }
    let mut outcome = Outcome::default();
    match call {
        FileCall::Write { .. } => {
            outcome.count = fields.u32("count").expect("a count");
            outcome.committed = fields.u32("committed").expect("a durability");
            outcome.verifier = fields.fixed("verifier").expect("a verifier");
        }
        FileCall::Commit(_) => outcome.verifier = fields.fixed("verifier").expect("a verifier"),
        FileCall::Read { .. } => {
            outcome.is_end = fields.bool("eof").expect("a boolean");
            outcome.data = fields.opaque("data", 1 << 20).expect("data").to_vec();
        }
        _ => {
            fields.fixed::<8>("verifier").expect("a verifier");
            while fields.bool("entry").expect("a boolean") {
                fields.u64("cookie").expect("a cookie");
                let name = fields.opaque("name", 255).expect("a name").to_vec();
                // An empty set of attributes.
                assert_eq!(fields.u32("bitmap"), Ok(0));
                assert_eq!(fields.u32("attributes"), Ok(0));
                outcome.names.push(name);
            }
            assert_eq!(fields.bool("eof"), Ok(true));
        }
    }
    fields.end().expect("no more fields");
    outcome
}

impl Nfs41Files {
    pub fn new(server: SocketAddr) -> Nfs41Files {
        Nfs41Files {
            session: Session::new(server, b"files"),
            is_new: true,
        }
    }

    fn exchange(&mut self, call: &FileCall) -> Outcome {
        let is_kept = is_kept(call);
        for _ in 0..RETRIES_MAX {
            let (status, results) = self.session.call(operations(call), is_kept);
            match status {
                0 => return outcome(call, &results),
                DELAY | GRACE => self.session.sequence += 1,
                _ => {
                    let outcome = Outcome::default();
                    return Outcome { status, ..outcome };
                }
            }
        }
        panic!("the server delays a call for ever");
    }
}

impl FileClient for Nfs41Files {
    fn send(&mut self, call: &FileCall) -> Outcome {
        self.session.sequence += 1;
        self.is_new = false;
        self.exchange(call)
    }

    fn send_again(&mut self, call: &FileCall) -> Outcome {
        // A reply that the server does not keep needs a new number.
        if self.is_new || !is_kept(call) {
            return self.send(call);
        }
        self.exchange(call)
    }

    fn break_connection(&mut self) {
        self.session.break_connection();
    }

    fn reconnect(&mut self, server: SocketAddr) {
        self.session = self.session.after_restart(server);
        self.is_new = true;
    }
}
