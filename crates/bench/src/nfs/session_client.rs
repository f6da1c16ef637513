//! A small client of NFSv4.1 (RFC 8881): one session with one slot, which makes, opens and closes files by name.
//!
//! It decodes the fields that it needs and no more: the load of opens is the purpose, and not the check of the server.

use super::setup::NfsTarget;
use crate::error::BenchError;
use pagemesh_nfs_client::xdr::{DecodeError, Decoder, Encoder};
use pagemesh_nfs_client::{Client, ClientError, Credential};
use std::time::Duration;

/// Limit of each wait for the server.
const CALL_LIMIT: Duration = Duration::from_secs(60);
const PROGRAM: u32 = 100_003;
const COMPOUND: u32 = 1;
const CLOSE: u32 = 4;
const LOOKUP: u32 = 15;
const OPEN: u32 = 18;
const PUTROOTFH: u32 = 24;
const PUTFH: u32 = 22;
const GETFH: u32 = 10;
const EXCHANGE_ID: u32 = 42;
const CREATE_SESSION: u32 = 43;
const SEQUENCE: u32 = 53;
const RECLAIM_COMPLETE: u32 = 58;
/// OPEN4_SHARE_ACCESS_BOTH.
const SHARE_ACCESS_BOTH: u32 = 3;
/// ca_headerpadsize, the longest request, reply and kept reply, operations, slots, and no RDMA.
const CHANNEL: [u32; 7] = [0, 1 << 16, 1 << 16, 1 << 10, 16, 1, 0];
/// Words of the longest set of attributes that a reply names.
const BITMAP_WORDS_MAX: u32 = 3;
/// Bytes of a file handle (NFS4_FHSIZE).
const HANDLE_BYTES_MAX: u32 = 128;

/// An open file: its stateid and its handle.
#[derive(Clone, Debug)]
pub(crate) struct OpenFile {
    state: [u8; 16],
    handle: Vec<u8>,
}

/// See the module.
pub(crate) struct SessionClient {
    client: Client,
    server: String,
    export: String,
    session: [u8; 16],
    sequence: u32,
}

/// A reply after the header of the COMPOUND.
struct Results(Vec<u8>);

impl SessionClient {
    /// Connects, and makes a session. `number` distinguishes the clients of this process.
    pub(crate) fn connect(target: &NfsTarget, number: u32) -> Result<SessionClient, BenchError> {
        let server = format!("{} at {}", target.name, target.server);
        let client = Client::connect(target.server, Credential::sys(0, 0), CALL_LIMIT);
        let mut this = SessionClient {
            client: client.map_err(|cause| failed("the connect", &server, cause.into()))?,
            export: target.export.trim_start_matches('/').to_owned(),
            server,
            session: [0; 16],
            sequence: 0,
        };
        let (id, sequence) = this.exchange_id(number)?;
        this.create_session(id, sequence)?;
        let mut reclaimed = Encoder::new();
        reclaimed.u32(RECLAIM_COMPLETE).u32(0);
        this.call("RECLAIM_COMPLETE", 1, &reclaimed.into_bytes())?;
        Ok(this)
    }

    fn exchange_id(&mut self, number: u32) -> Result<(u64, u32), BenchError> {
        let mut exchange = Encoder::new();
        let owner = format!("pagemesh-bench-{}-{number}", std::process::id());
        exchange.u32(EXCHANGE_ID).u64(u64::from(number) + 1);
        // No flags, no protection of state, no name of the implementation.
        exchange.opaque(owner.as_bytes()).u32(0).u32(0).u32(0);
        let results = self.compound("EXCHANGE_ID", 1, &exchange.into_bytes())?;
        self.decoded("EXCHANGE_ID", &results, |fields| {
            result_header(fields)?;
            Ok((fields.u64("client")?, fields.u32("sequence")?))
        })
    }

    fn create_session(&mut self, id: u64, sequence: u32) -> Result<(), BenchError> {
        let mut create = Encoder::new();
        create.u32(CREATE_SESSION).u64(id).u32(sequence).u32(0);
        for word in CHANNEL.iter().chain(&CHANNEL) {
            create.u32(*word);
        }
        create.u32(0).u32(0);
        let results = self.compound("CREATE_SESSION", 1, &create.into_bytes())?;
        self.session = self.decoded("CREATE_SESSION", &results, |fields| {
            result_header(fields)?;
            fields.fixed("session")
        })?;
        Ok(())
    }

    /// Opens a file of the export's root for reads and writes, and makes it first if `is_new`.
    pub(crate) fn open(&mut self, name: &str, is_new: bool) -> Result<OpenFile, BenchError> {
        let mut calls = Encoder::new();
        calls.u32(PUTROOTFH);
        calls.u32(LOOKUP).opaque(self.export.as_bytes());
        calls.u32(OPEN).u32(0).u32(SHARE_ACCESS_BOTH).u32(0);
        calls.u64(0).opaque(b"owner").u32(u32::from(is_new));
        if is_new {
            // GUARDED4, with the mode as its only attribute.
            calls.u32(1).u32(2).u32(0).u32(2).u32(4).u32(0o644);
        }
        calls.u32(0).opaque(name.as_bytes()).u32(GETFH);
        let results = self.call("OPEN", 4, &calls.into_bytes())?;
        self.decoded("OPEN", &results, |fields| {
            skip_sequence(fields)?;
            result_header(fields)?;
            result_header(fields)?;
            result_header(fields)?;
            let state = fields.fixed("stateid")?;
            // The change of the directory and the flags.
            fields.fixed::<24>("change")?;
            for _ in 0..fields.u32("attributes")?.min(BITMAP_WORDS_MAX) {
                fields.u32("attributes")?;
            }
            fields.u32("delegation")?;
            result_header(fields)?;
            let handle = fields.opaque("handle", HANDLE_BYTES_MAX)?.to_vec();
            Ok(OpenFile { state, handle })
        })
    }

    /// Closes a file.
    pub(crate) fn close(&mut self, file: &OpenFile) -> Result<(), BenchError> {
        let mut calls = Encoder::new();
        calls.u32(PUTFH).opaque(&file.handle);
        calls.u32(CLOSE).u32(0).fixed(&file.state);
        self.call("CLOSE", 2, &calls.into_bytes()).map(drop)
    }

    /// Renews the lease. Returns the flags of SEQUENCE: 0 unless state was lost.
    pub(crate) fn renew(&mut self) -> Result<u32, BenchError> {
        let results = self.call("SEQUENCE", 0, &[])?;
        self.decoded("SEQUENCE", &results, skip_sequence)
    }

    /// Operations after a SEQUENCE.
    fn call(&mut self, during: &str, count: u32, calls: &[u8]) -> Result<Results, BenchError> {
        self.sequence += 1;
        let mut all = Encoder::new();
        all.u32(SEQUENCE).fixed(&self.session).u32(self.sequence);
        // The first slot, which is the last one, and no kept reply.
        all.u32(0).u32(0).u32(0).fixed(calls);
        self.compound(during, count + 1, &all.into_bytes())
    }

    fn compound(&mut self, during: &str, count: u32, calls: &[u8]) -> Result<Results, BenchError> {
        let mut arguments = Encoder::new();
        arguments.opaque(b"").u32(1).u32(count).fixed(calls);
        let target = (PROGRAM, 4, COMPOUND);
        let reply = self.client.call_raw(target, &arguments.into_bytes());
        let reply = reply.map_err(|cause| failed(during, &self.server, cause.into()))?;
        let status = self.decoded(during, &Results(reply.clone()), |fields| {
            fields.u32("status")
        })?;
        if status != 0 {
            let cause = format!("the status is {status}").into();
            return Err(failed(during, &self.server, cause));
        }
        // The status, the empty tag and the number of results.
        Ok(Results(reply.get(12..).unwrap_or_default().to_vec()))
    }

    fn decoded<T>(
        &self,
        during: &str,
        results: &Results,
        decode: impl FnOnce(&mut Decoder<'_>) -> Result<T, DecodeError>,
    ) -> Result<T, BenchError> {
        let decoded = decode(&mut Decoder::new(&results.0));
        decoded.map_err(|cause| failed(during, &self.server, ClientError::from(cause).into()))
    }
}

/// The number and status of a result.
fn result_header(fields: &mut Decoder<'_>) -> Result<(), DecodeError> {
    fields.fixed::<8>("result").map(drop)
}

/// Takes the result of SEQUENCE, and returns its flags.
fn skip_sequence(fields: &mut Decoder<'_>) -> Result<u32, DecodeError> {
    result_header(fields)?;
    fields.fixed::<32>("sequence")?;
    fields.u32("flags")
}

fn failed(
    during: &str,
    server: &str,
    cause: Box<dyn std::error::Error + Send + Sync>,
) -> BenchError {
    BenchError::Nfs {
        during: format!("{during} of {server}"),
        cause,
    }
}
