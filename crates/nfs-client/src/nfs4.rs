//! A client of NFSv4.1 (RFC 8881): one session with one slot, and one request after the other.
//!
//! It is strict as the rest of the crate. [`Nfs4Client::compound`] sends any operations; the other calls
//! are the ones of a program that opens, locks, reads and writes a file.

use crate::rpc::Credential;
use crate::xdr::{DecodeError, Decoder, Encoder};
use crate::{Client, ClientError};
use std::net::SocketAddr;
use std::time::Duration;

const TARGET: (u32, u32, u32) = (100_003, 4, 1);
/// Bytes of the longest handle, owner or tag (RFC 8881).
const HANDLE_BYTES_MAX: u32 = 128;
const OPAQUE_BYTES_MAX: u32 = 1024;
/// Bytes that one READ may return.
const READ_BYTES_MAX: u32 = 1 << 20;
const TAG: &[u8] = b"test";

/// Operations (RFC 8881, section 16.2).
pub mod operation {
    #![allow(missing_docs)]
    pub const CLOSE: u32 = 4;
    pub const GETFH: u32 = 10;
    pub const LOCK: u32 = 12;
    pub const LOOKUP: u32 = 15;
    pub const OPEN: u32 = 18;
    pub const PUTFH: u32 = 22;
    pub const PUTROOTFH: u32 = 24;
    pub const READ: u32 = 25;
    pub const WRITE: u32 = 38;
    pub const EXCHANGE_ID: u32 = 42;
    pub const CREATE_SESSION: u32 = 43;
    pub const DESTROY_SESSION: u32 = 44;
    pub const SEQUENCE: u32 = 53;
    pub const DESTROY_CLIENTID: u32 = 57;
    pub const RECLAIM_COMPLETE: u32 = 58;
}

/// Statuses (RFC 8881, section 15.1).
pub mod status {
    #![allow(missing_docs)]
    pub const DELAY: u32 = 10_008;
    pub const DENIED: u32 = 10_010;
    pub const GRACE: u32 = 10_013;
    pub const STALE_CLIENTID: u32 = 10_022;
    pub const STALE_STATEID: u32 = 10_023;
    pub const NO_GRACE: u32 = 10_033;
    pub const RECLAIM_BAD: u32 = 10_034;
    pub const RECLAIM_CONFLICT: u32 = 10_035;
    pub const BADSESSION: u32 = 10_052;
    pub const COMPLETE_ALREADY: u32 = 10_054;
}

/// Why a request has no result.
#[derive(Debug, thiserror::Error)]
pub enum Nfs4Error {
    /// There is no reply, or it breaks the protocol.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// An operation failed.
    #[error("operation {operation} failed with the status {status}")]
    Status {
        /// The number of the operation.
        operation: u32,
        /// Its status.
        status: u32,
    },
}

impl From<DecodeError> for Nfs4Error {
    fn from(error: DecodeError) -> Self {
        Self::Client(error.into())
    }
}

impl Nfs4Error {
    /// The status, if an operation failed.
    #[must_use]
    pub fn status(&self) -> Option<u32> {
        match self {
            Self::Client(_) => None,
            Self::Status { status, .. } => Some(*status),
        }
    }
}

/// The result of a request.
pub type Nfs4Result<T> = Result<T, Nfs4Error>;

/// A stateid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateId(pub [u8; 16]);

/// An open file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// The handle.
    pub handle: Vec<u8>,
    /// The stateid of the open.
    pub stateid: StateId,
}

/// The arguments of an OPEN.
#[derive(Clone, Copy, Debug)]
pub struct Open<'a> {
    /// The open owner.
    pub owner: &'a [u8],
    /// OPEN4_SHARE_ACCESS bits.
    pub access: u32,
    /// OPEN4_SHARE_DENY bits.
    pub deny: u32,
    /// Whether a file that is not there is made.
    pub creates: bool,
}

impl<'a> Open<'a> {
    /// An open for reads and writes that denies nothing.
    #[must_use]
    pub fn shared(owner: &'a [u8]) -> Self {
        Self {
            owner,
            access: 3,
            deny: 0,
            creates: false,
        }
    }
}

/// The arguments of a LOCK for writes, by a new lock owner.
#[derive(Clone, Copy, Debug)]
pub struct Lock<'a> {
    /// The lock owner.
    pub owner: &'a [u8],
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
    /// Whether it reclaims a lock of before a restart of the server.
    pub is_reclaim: bool,
}

/// See the module.
pub struct Nfs4Client {
    client: Client,
    id: u64,
    session: [u8; 16],
    sequence: u32,
    /// sr_status_flags of the last SEQUENCE.
    status_flags: u32,
}

/// The bytes of an operation: its number, and its arguments.
#[must_use]
pub fn operation(number: u32, arguments: impl FnOnce(&mut Encoder)) -> Vec<u8> {
    let mut out = Encoder::new();
    out.u32(number);
    arguments(&mut out);
    out.into_bytes()
}

fn put_handle(handle: &[u8]) -> Vec<u8> {
    operation(operation::PUTFH, |out| {
        out.opaque(handle);
    })
}

fn get_handle() -> Vec<u8> {
    operation(operation::GETFH, |_| {})
}

/// Takes the head of the result of an operation.
fn expect(results: &mut Decoder<'_>, wanted: u32) -> Nfs4Result<()> {
    let number = results.u32("operation")?;
    let status = results.u32("status")?;
    if number != wanted {
        let (field, value) = ("operation", number);
        return Err(DecodeError::Value { field, value }.into());
    }
    match status {
        0 => Ok(()),
        status => Err(Nfs4Error::Status {
            operation: number,
            status,
        }),
    }
}

fn expect_handle(results: &mut Decoder<'_>) -> Nfs4Result<Vec<u8>> {
    expect(results, operation::GETFH)?;
    Ok(results.opaque("handle", HANDLE_BYTES_MAX)?.to_vec())
}

fn send(client: &mut Client, operations: &[Vec<u8>]) -> Nfs4Result<Vec<u8>> {
    let mut out = Encoder::new();
    out.opaque(TAG).u32(1).u32(operations.len() as u32);
    for operation in operations {
        out.fixed(operation);
    }
    let reply = client.call_raw(TARGET, &out.into_bytes())?;
    let mut fields = Decoder::new(&reply);
    // Each operation has its own status.
    fields.u32("status")?;
    fields.opaque("tag", OPAQUE_BYTES_MAX)?;
    fields.u32("results")?;
    Ok(fields.rest().to_vec())
}

fn channel(out: &mut Encoder) {
    for value in [0, 1 << 20, 1 << 20, 4096, 16, 1, 0] {
        out.u32(value);
    }
}

fn exchange_id(client: &mut Client, owner: &[u8], verifier: [u8; 8]) -> Nfs4Result<(u64, u32)> {
    let exchange = operation(operation::EXCHANGE_ID, |out| {
        out.fixed(&verifier).opaque(owner).u32(0);
        // SP4_NONE, and no implementation id.
        out.u32(0).u32(0);
    });
    let results = send(client, &[exchange])?;
    let mut results = Decoder::new(&results);
    expect(&mut results, operation::EXCHANGE_ID)?;
    Ok((results.u64("clientid")?, results.u32("sequence")?))
}

impl Nfs4Client {
    /// Connects, and makes a session. The verifier names the run of the client. State is granted after
    /// [`Self::reclaim_complete`].
    ///
    /// # Errors
    /// If the server cannot be reached, or refuses.
    pub fn connect(
        server: SocketAddr,
        credential: Credential,
        (owner, verifier): (&[u8], [u8; 8]),
        limit: Duration,
    ) -> Nfs4Result<Self> {
        let mut client = Client::connect(server, credential, limit)?;
        let (id, sequence) = exchange_id(&mut client, owner, verifier)?;
        let create = operation(operation::CREATE_SESSION, |out| {
            out.u64(id).u32(sequence).u32(0);
            channel(out);
            channel(out);
            // No callback program, and no credential for it.
            out.u32(0).u32(0);
        });
        let results = send(&mut client, &[create])?;
        let mut results = Decoder::new(&results);
        expect(&mut results, operation::CREATE_SESSION)?;
        let session = results.fixed("session")?;
        Ok(Self {
            client,
            id,
            session,
            sequence: 0,
            status_flags: 0,
        })
    }

    /// The client id.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Sends the operations after a SEQUENCE, and returns the bytes of their results.
    ///
    /// # Errors
    /// If SEQUENCE fails, or there is no reply.
    pub fn compound(&mut self, operations: &[Vec<u8>]) -> Nfs4Result<Vec<u8>> {
        self.sequence += 1;
        // The reply to a READ is larger than the server keeps, and a READ may run twice.
        let is_read = |it: &Vec<u8>| it.starts_with(&operation::READ.to_be_bytes());
        let keeps_reply = !operations.iter().any(is_read);
        let sequence = operation(operation::SEQUENCE, |out| {
            out.fixed(&self.session).u32(self.sequence);
            out.u32(0).u32(0).u32(u32::from(keeps_reply));
        });
        let all = [&[sequence], operations].concat();
        let results = send(&mut self.client, &all)?;
        let mut fields = Decoder::new(&results);
        expect(&mut fields, operation::SEQUENCE)?;
        // The session, the slot and its limits.
        let _: [u8; 32] = fields.fixed("sequence")?;
        self.status_flags = fields.u32("status flags")?;
        Ok(fields.rest().to_vec())
    }

    /// A lone SEQUENCE, which renews the lease. Returns its status flags (RFC 8881, section 18.46.3): 0 unless the server reports a
    /// loss of state.
    ///
    /// # Errors
    /// As [`Self::compound`].
    pub fn renew(&mut self) -> Nfs4Result<u32> {
        self.compound(&[])?;
        Ok(self.status_flags)
    }

    /// RECLAIM_COMPLETE.
    ///
    /// # Errors
    /// As [`Self::compound`], and the status of the operation.
    pub fn reclaim_complete(&mut self) -> Nfs4Result<()> {
        let complete = operation(operation::RECLAIM_COMPLETE, |out| {
            out.u32(0);
        });
        let results = self.compound(&[complete])?;
        expect(&mut Decoder::new(&results), operation::RECLAIM_COMPLETE)
    }

    /// DESTROY_SESSION and DESTROY_CLIENTID: the server forgets the client.
    ///
    /// # Errors
    /// As [`Self::compound`], and the status of an operation.
    pub fn destroy(mut self) -> Nfs4Result<()> {
        let session = operation(operation::DESTROY_SESSION, |out| {
            out.fixed(&self.session);
        });
        let results = send(&mut self.client, &[session])?;
        expect(&mut Decoder::new(&results), operation::DESTROY_SESSION)?;
        let client = operation(operation::DESTROY_CLIENTID, |out| {
            out.u64(self.id);
        });
        let results = send(&mut self.client, &[client])?;
        expect(&mut Decoder::new(&results), operation::DESTROY_CLIENTID)
    }

    /// The handle of an export in the root.
    ///
    /// # Errors
    /// As [`Self::compound`], and the status of an operation.
    pub fn export(&mut self, name: &[u8]) -> Nfs4Result<Vec<u8>> {
        let root = operation(operation::PUTROOTFH, |_| {});
        let lookup = operation(operation::LOOKUP, |out| {
            out.opaque(name);
        });
        let results = self.compound(&[root, lookup, get_handle()])?;
        let mut results = Decoder::new(&results);
        expect(&mut results, operation::PUTROOTFH)?;
        expect(&mut results, operation::LOOKUP)?;
        expect_handle(&mut results)
    }

    fn open_at(&mut self, at: &[u8], open: Open<'_>, claim: Vec<u8>) -> Nfs4Result<OpenFile> {
        let operation = operation(operation::OPEN, |out| {
            out.u32(0).u32(open.access).u32(open.deny);
            out.u64(self.id).opaque(open.owner);
            match open.creates {
                false => out.u32(0),
                // UNCHECKED4, with the mode 0644.
                true => {
                    out.u32(1).u32(0).u32(2).u32(0).u32(2);
                    out.u32(4).u32(0o644)
                }
            };
            out.fixed(&claim);
        });
        let results = self.compound(&[put_handle(at), operation, get_handle()])?;
        let mut results = Decoder::new(&results);
        expect(&mut results, operation::PUTFH)?;
        expect(&mut results, operation::OPEN)?;
        let stateid = StateId(results.fixed("stateid")?);
        // The change of the directory, and flags.
        let _: [u8; 24] = results.fixed("change")?;
        for _ in 0..results.u32("attributes")? {
            results.u32("attributes")?;
        }
        results.u32("delegation")?;
        let handle = expect_handle(&mut results)?;
        Ok(OpenFile { handle, stateid })
    }

    /// OPEN of a name in a directory.
    ///
    /// # Errors
    /// As [`Self::compound`], and the status of an operation.
    pub fn open(&mut self, directory: &[u8], name: &[u8], open: Open<'_>) -> Nfs4Result<OpenFile> {
        let mut claim = Encoder::new();
        claim.u32(0).opaque(name);
        self.open_at(directory, open, claim.into_bytes())
    }

    /// OPEN that reclaims an open of before a restart of the server (CLAIM_PREVIOUS).
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn reclaim_open(&mut self, file: &[u8], open: Open<'_>) -> Nfs4Result<OpenFile> {
        let mut claim = Encoder::new();
        // No delegation.
        claim.u32(1).u32(0);
        self.open_at(file, open, claim.into_bytes())
    }

    /// Sends an operation on a file. Returns the bytes of its result.
    fn on_file(&mut self, handle: &[u8], number: u32, request: Vec<u8>) -> Nfs4Result<Vec<u8>> {
        let results = self.compound(&[put_handle(handle), request])?;
        let mut results = Decoder::new(&results);
        expect(&mut results, operation::PUTFH)?;
        expect(&mut results, number)?;
        Ok(results.rest().to_vec())
    }

    /// LOCK for writes. Returns the stateid of the lock.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn lock(&mut self, file: &OpenFile, lock: Lock<'_>) -> Nfs4Result<StateId> {
        let request = operation(operation::LOCK, |out| {
            out.u32(2).u32(lock.is_reclaim.into());
            out.u64(lock.offset).u64(lock.length);
            out.u32(1).u32(0).fixed(&file.stateid.0).u32(0);
            out.u64(self.id).opaque(lock.owner);
        });
        let result = self.on_file(&file.handle, operation::LOCK, request)?;
        Ok(StateId(Decoder::new(&result).fixed("stateid")?))
    }

    /// WRITE with FILE_SYNC. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn write(&mut self, file: &OpenFile, offset: u64, data: &[u8]) -> Nfs4Result<u32> {
        let request = operation(operation::WRITE, |out| {
            out.fixed(&file.stateid.0).u64(offset).u32(2).opaque(data);
        });
        let result = self.on_file(&file.handle, operation::WRITE, request)?;
        Ok(Decoder::new(&result).u32("count")?)
    }

    /// READ.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(&mut self, file: &OpenFile, offset: u64, count: u32) -> Nfs4Result<Vec<u8>> {
        let request = operation(operation::READ, |out| {
            out.fixed(&file.stateid.0).u64(offset).u32(count);
        });
        let result = self.on_file(&file.handle, operation::READ, request)?;
        let mut fields = Decoder::new(&result);
        fields.bool("end of file")?;
        Ok(fields.opaque("data", READ_BYTES_MAX)?.to_vec())
    }

    /// CLOSE.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn close(&mut self, file: &OpenFile) -> Nfs4Result<()> {
        let request = operation(operation::CLOSE, |out| {
            out.u32(0).fixed(&file.stateid.0);
        });
        self.on_file(&file.handle, operation::CLOSE, request)?;
        Ok(())
    }
}
