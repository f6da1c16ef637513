//! COMPOUND: the loop over its operations, their order (RFC 8881, section 2.10.6.1), and the bounds of
//! its reply.
//!
//! A reply beyond the bounds of the session is NFS4ERR_REP_TOO_BIG, or NFS4ERR_REP_TOO_BIG_TO_CACHE. An
//! operation that changes something is not begun unless its longest result fits. READ and READDIR return as much as fits.

use super::handles::CurrentFile;
use super::{Done, Fault};
use crate::counters::count;
use crate::export_table::ExportTable;
use crate::limits::OPERATIONS_MAX;
use crate::nfs4::MINOR_VERSION;
use crate::nfs4::arguments::Arguments;
use crate::nfs4::bitmap::Bitmap;
use crate::nfs4::compound::{CompoundHead, next_operation};
use crate::nfs4::operation::Operation;
use crate::nfs4::state::{ClientId, CompoundStateIds, SessionId, SlotUse};
use crate::nfs4::status::{OK, Status};
use crate::peer::PeerCredential;
use crate::rpc::{AuthStatus, Call, Denial, Refusal, Reply};
use crate::service::{CallRun, NoReply, Service};
use crate::xdr::{Decode, Encode, Reader, UNIT_BYTES, Writer};
use bytes::Bytes;
use std::net::SocketAddr;
use uuid::Uuid;

/// The procedures of the program.
const NULL: u32 = 0;
const COMPOUND: u32 = 1;
/// Bytes of a reply before its tag: the RPC header, the status, and the length of the tag.
const REPLY_HEAD_BYTES: usize = 24 + 2 * UNIT_BYTES;
/// Bytes of the longest result of an operation that changes something, without the owner of a lock.
const CHANGE_RESULT_BYTES: usize = 128;
/// As [`CHANGE_RESULT_BYTES`], of LOCK, which returns the owner of another lock.
const LOCK_RESULT_BYTES: usize = 64 + crate::limits::OWNER_BYTES_MAX;

/// The session of a request, after its SEQUENCE.
pub(super) struct ActiveSession {
    pub(super) client: ClientId,
    pub(super) session: SessionId,
    pub(super) reply_bytes_max: usize,
    /// The bound of a reply that the slot must keep.
    pub(super) cached_bytes_max: Option<usize>,
}

/// A slot in use. It ends with the drop, without a reply, if the request has none.
pub(super) struct SlotGuard<'a> {
    service: &'a Service,
    slot: Option<SlotUse>,
}

impl<'a> SlotGuard<'a> {
    pub(super) fn new(service: &'a Service, slot: SlotUse) -> Self {
        let slot = Some(slot);
        Self { service, slot }
    }

    fn finish(mut self, reply: Option<&[u8]>) {
        self.end(reply);
    }

    fn end(&mut self, reply: Option<&[u8]>) {
        if let Some(slot) = self.slot.take() {
            let nfs4 = &self.service.nfs4;
            nfs4.call(|locked, now| locked.state.finish(slot, reply, now));
        }
    }
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.end(None);
    }
}

/// A request in progress.
pub(super) struct Compound<'a> {
    pub(super) service: &'a Service,
    pub(super) call: &'a Call<'a>,
    pub(super) peer: PeerCredential<'a>,
    pub(super) record: &'a Bytes,
    /// The arguments of the request.
    pub(super) arguments: &'a [u8],
    /// The number of operations.
    pub(super) operations: u32,
    pub(super) current: Option<CurrentFile<'a>>,
    pub(super) saved: Option<CurrentFile<'a>>,
    pub(super) stateids: CompoundStateIds,
    pub(super) session: Option<ActiveSession>,
    pub(super) slot: Option<SlotGuard<'a>>,
    /// The reply of the first request, if this is a repetition.
    pub(super) replay: Option<std::sync::Arc<[u8]>>,
    /// Whether no operation follows.
    pub(super) is_last: bool,
    /// Data that follows the results.
    pub(super) tail: Bytes,
    /// The attributes that a SETATTR has set before it failed.
    pub(super) changed_before_failure: Bitmap,
    /// The volume of the last file that was the current one.
    pub(super) worked_on: Option<Uuid>,
    tag_bytes: usize,
}

/// The result of a request.
struct CompoundReply<'a> {
    status: u32,
    tag: &'a [u8],
    count: u32,
    results: &'a [u8],
    tail: Bytes,
}

impl Encode for CompoundReply<'_> {
    fn encode(&self, writer: &mut Writer) {
        writer.u32(self.status);
        writer.opaque(self.tag);
        writer.u32(self.count);
        writer.fixed(self.results);
    }

    fn tail(&self) -> Bytes {
        self.tail.clone()
    }
}

/// The kept result of an earlier request.
struct KeptReply<'a>(&'a [u8]);

impl Encode for KeptReply<'_> {
    fn encode(&self, writer: &mut Writer) {
        writer.fixed(self.0);
    }
}

/// Whether the client may mount something, by the port that a rule of it demands. State of the server is for such clients: another user
/// of their machine could replace it.
fn may_mount(table: &ExportTable, client: SocketAddr) -> bool {
    let mut rules = table.iter().filter_map(|it| it.rule(client.ip()));
    rules.any(|rule| rule.accepts_port(client))
}

impl Service {
    /// The reply to a call of version 4.
    pub(in crate::service) fn answer_nfs4(
        &self,
        (client, record): (SocketAddr, &Bytes),
        call: &Call<'_>,
        mut arguments: Reader<'_>,
        run: &mut CallRun,
    ) -> Result<Reply, NoReply> {
        match call.procedure {
            NULL => return Ok(Reply::success(call.xid, &())),
            COMPOUND => {}
            _ => return Ok(self.refuse(call, Refusal::ProcedureUnavailable)),
        }
        let whole = arguments.rest();
        let Ok(head) = CompoundHead::decode(&mut arguments) else {
            return Ok(self.refuse(call, Refusal::GarbageArguments));
        };
        count(&self.counters.compounds);
        run.is_compound = true;
        let failed = |status: Status| CompoundReply {
            status: status.number(),
            tag: head.tag,
            count: 0,
            results: &[],
            tail: Bytes::new(),
        };
        if head.minor_version != MINOR_VERSION {
            let reply = failed(Status::MinorVersionMismatch);
            return Ok(Reply::success(call.xid, &reply));
        }
        if std::str::from_utf8(head.tag).is_err() {
            return Ok(Reply::success(call.xid, &failed(Status::Invalid)));
        }
        let table = self.exports.table();
        if !may_mount(&table, client) {
            count(&self.counters.refused_calls);
            let denial = Denial::Authentication(AuthStatus::RejectedCredential);
            return Ok(Reply::denied(call.xid, denial));
        }
        let peer = PeerCredential {
            address: client,
            credential: &call.credential,
            table: &table,
        };
        let mut compound = Compound::new(self, call, peer, (record, whole), &head);
        let reply = compound.answer(&head, arguments);
        let mut file_systems = self.exports.file_systems();
        let worked_on = compound.worked_on;
        run.file_system =
            worked_on.and_then(|volume| file_systems.position(|fs| fs.volume == volume));
        reply
    }
}

impl<'a> Compound<'a> {
    /// A request before its first operation. `bytes` are the record and the arguments in it.
    fn new(
        service: &'a Service,
        call: &'a Call<'a>,
        peer: PeerCredential<'a>,
        bytes: (&'a Bytes, &'a [u8]),
        head: &CompoundHead<'_>,
    ) -> Self {
        let (record, arguments) = bytes;
        Self {
            service,
            call,
            peer,
            record,
            arguments,
            operations: head.operations,
            current: None,
            saved: None,
            stateids: CompoundStateIds::default(),
            session: None,
            slot: None,
            replay: None,
            is_last: false,
            tail: Bytes::new(),
            changed_before_failure: Bitmap::default(),
            worked_on: None,
            tag_bytes: head.tag.len(),
        }
    }
}

impl Compound<'_> {
    fn answer(&mut self, head: &CompoundHead<'_>, arguments: Reader<'_>) -> Result<Reply, NoReply> {
        let mut results = Writer::new();
        let (status, done) = self.run(head, arguments, &mut results)?;
        let xid = self.call.xid;
        if let Some(kept) = &self.replay {
            count(&self.service.counters.repeated_calls);
            return Ok(Reply::success(xid, &KeptReply(kept)));
        }
        let reply = CompoundReply {
            status,
            tag: head.tag,
            count: done,
            results: results.written(0),
            tail: self.tail.clone(),
        };
        if let Some(slot) = self.slot.take() {
            slot.finish(self.kept(&reply).as_deref());
        }
        Ok(Reply::success(xid, &reply))
    }

    /// The bytes that the slot keeps: a reply that the client wants kept, or a small one.
    fn kept(&self, reply: &CompoundReply<'_>) -> Option<Vec<u8>> {
        let is_wanted = self.session.as_ref()?.cached_bytes_max.is_some();
        let bytes = self.reply_bytes(reply.results.len());
        if !is_wanted && bytes > crate::nfs4::state::limits::SMALL_REPLY_BYTES {
            return None;
        }
        let mut writer = Writer::new();
        writer.value(reply);
        writer.fixed(&reply.tail);
        Some(writer.into_bytes())
    }

    /// Runs operations until one fails. Returns the status of the last one, and their number.
    fn run(
        &mut self,
        head: &CompoundHead<'_>,
        mut arguments: Reader<'_>,
        out: &mut Writer,
    ) -> Result<(u32, u32), NoReply> {
        for index in 0..head.operations {
            self.is_last = index + 1 == head.operations;
            let operation = next_operation(&mut arguments);
            let number = operation.unwrap_or(Operation::Illegal);
            out.value(&number);
            let status_at = out.len();
            out.u32(OK);
            let done = match operation {
                Ok(operation) => self.run_one(index, operation, &mut arguments, out),
                Err(error) => Err(error.into()),
            };
            if self.replay.is_some() {
                return Ok((OK, 0));
            }
            let done = done.and_then(|()| self.check_size(out));
            match done {
                Ok(()) => {}
                Err(Fault::Fenced) => return Err(NoReply::Fenced),
                Err(Fault::Status(status)) => {
                    self.fail(number, status, status_at, out);
                    return Ok((status.number(), index + 1));
                }
            }
        }
        Ok((OK, head.operations))
    }

    /// Replaces the result of an operation that has failed.
    fn fail(&mut self, operation: Operation, status: Status, at: usize, out: &mut Writer) {
        count(&self.service.counters.errors);
        self.tail = Bytes::new();
        // The operation has appended the lock of another owner.
        let has_fields = status == Status::Denied;
        if !has_fields {
            out.truncate(at + UNIT_BYTES);
        }
        out.replace_u32(at, status.number());
        if operation == Operation::SetAttributes {
            out.value(&std::mem::take(&mut self.changed_before_failure));
        }
    }

    fn run_one(
        &mut self,
        index: u32,
        operation: Operation,
        arguments: &mut Reader<'_>,
        out: &mut Writer,
    ) -> Done {
        self.check_order(index, operation)?;
        if operation.is_unsupported() {
            return Err(Status::NotSupported.into());
        }
        let decoded = Arguments::decode(operation, arguments)?;
        self.check_room(&decoded, out)?;
        self.execute(&decoded, out)
    }

    fn check_order(&self, index: u32, operation: Operation) -> Done {
        let is_alone = self.operations == 1;
        let status = match operation {
            Operation::Illegal => Status::IllegalOperation,
            Operation::Sequence if index == 0 => return Ok(()),
            Operation::Sequence => Status::SequencePosition,
            Operation::BindConnection if !is_alone => Status::NotOnlyOperation,
            _ if self.session.is_some() => return Ok(()),
            _ if operation.is_sessionless() && is_alone => return Ok(()),
            _ if operation.is_sessionless() => Status::NotOnlyOperation,
            _ => Status::NotInSession,
        };
        Err(status.into())
    }

    /// Bytes of the reply with results of this length.
    fn reply_bytes(&self, results: usize) -> usize {
        let tag = self.tag_bytes.next_multiple_of(UNIT_BYTES);
        REPLY_HEAD_BYTES + tag + UNIT_BYTES + results + self.tail.len()
    }

    /// The bytes that results may still have, and the status beyond them.
    fn room(&self, out: &Writer) -> (usize, Status) {
        let used = self.reply_bytes(out.len());
        let Some(session) = &self.session else {
            return (usize::MAX, Status::ReplyTooBig);
        };
        let left = |max: usize| max.saturating_sub(used);
        match session.cached_bytes_max {
            Some(max) if max < session.reply_bytes_max => (left(max), Status::ReplyTooBigToCache),
            _ => (left(session.reply_bytes_max), Status::ReplyTooBig),
        }
    }

    /// The bytes that the results may still have.
    pub(super) fn reply_room(&self, out: &Writer) -> usize {
        self.room(out).0
    }

    /// Checks that the longest result of an operation fits before it changes anything.
    fn check_room(&self, arguments: &Arguments<'_>, out: &Writer) -> Done {
        let wanted = match arguments {
            Arguments::Lock(_) | Arguments::TestLock(_) => LOCK_RESULT_BYTES,
            Arguments::Read(it) => it.count.min(1) as usize + super::data::READ_BYTES,
            Arguments::Close(_)
            | Arguments::Create(_)
            | Arguments::Link(_)
            | Arguments::Unlock(_)
            | Arguments::Open(_)
            | Arguments::OpenDowngrade(_)
            | Arguments::Remove(_)
            | Arguments::Rename(_)
            | Arguments::SetAttributes(_)
            | Arguments::Write(_) => CHANGE_RESULT_BYTES,
            _ => 0,
        };
        match self.room(out) {
            (left, status) if wanted > left => Err(status.into()),
            _ => Ok(()),
        }
    }

    /// Checks the reply with the result of the last operation.
    fn check_size(&self, out: &Writer) -> Done {
        let Some(session) = &self.session else {
            return Ok(());
        };
        let used = self.reply_bytes(out.len());
        if used > session.reply_bytes_max {
            return Err(Status::ReplyTooBig.into());
        }
        match session.cached_bytes_max {
            Some(max) if used > max => Err(Status::ReplyTooBigToCache.into()),
            _ => Ok(()),
        }
    }

    fn execute(&mut self, arguments: &Arguments<'_>, out: &mut Writer) -> Done {
        match arguments {
            Arguments::Access(wanted) => self.access(*wanted, out),
            Arguments::Commit(it) => self.commit(it, out),
            Arguments::Create(it) => self.create(it, out),
            Arguments::GetAttributes(wanted) => self.get_attributes(*wanted, out),
            Arguments::GetHandle => self.get_handle(out),
            Arguments::Link(name) => self.link(*name, out),
            Arguments::Lookup(name) => self.lookup(*name),
            Arguments::LookupParent => self.lookup_parent(),
            Arguments::Verify(it) => self.verify(it, true),
            Arguments::VerifyDifferent(it) => self.verify(it, false),
            Arguments::PutHandle(handle) => self.put_handle(*handle),
            Arguments::PutRootHandle | Arguments::PutPublicHandle => self.put_root(),
            Arguments::Read(it) => self.read(it, out),
            Arguments::ReadDirectory(it) => self.read_directory(it, out),
            Arguments::ReadSymlink => self.read_symlink(out),
            Arguments::Remove(name) => self.remove(*name, out),
            Arguments::Rename(it) => self.rename(it, out),
            Arguments::RestoreHandle => self.restore_handle(),
            Arguments::SaveHandle => self.save_handle(),
            Arguments::SecurityInfo(name) => self.security_info(*name, out),
            Arguments::SecurityInfoNoName(style) => self.security_info_no_name(*style, out),
            Arguments::SetAttributes(it) => self.set_attributes(it, out),
            Arguments::Write(it) => self.write(it, out),
            other => self.execute_stateful(other, out),
        }
    }

    fn execute_stateful(&mut self, arguments: &Arguments<'_>, out: &mut Writer) -> Done {
        match arguments {
            Arguments::Open(it) => self.open(it, out),
            Arguments::Close(it) => self.close(it, out),
            Arguments::OpenDowngrade(it) => self.open_downgrade(it, out),
            Arguments::DelegationReturn(_) => self.file_or(Status::BadStateid).and_then(|_| {
                // There are no delegations.
                Err(Status::BadStateid.into())
            }),
            Arguments::Lock(it) => self.lock(it, out),
            Arguments::TestLock(it) => self.test_lock(it, out),
            Arguments::Unlock(it) => self.unlock(it, out),
            Arguments::FreeStateid(id) => self.free_stateid(*id),
            Arguments::TestStateid(ids) => self.test_stateids(ids, out),
            Arguments::ExchangeId(it) => self.exchange_id(it, out),
            Arguments::CreateSession(it) => self.create_session(it, out),
            Arguments::DestroySession(session) => self.destroy_session(*session),
            Arguments::BindConnection(it) => self.bind_connection(it, out),
            Arguments::BackchannelControl(_) => Ok(()),
            Arguments::Sequence(it) => self.sequence(it, out),
            Arguments::DestroyClientId(client) => self.destroy_client(*client),
            Arguments::ReclaimComplete(is_one) => self.reclaim_complete(*is_one),
            _ => Err(Status::NotSupported.into()),
        }
    }
}

const _: () = assert!(OPERATIONS_MAX == crate::nfs4::state::limits::OPERATIONS_MAX);
