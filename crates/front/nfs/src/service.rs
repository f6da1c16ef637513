//! Calls and their answers: a record in, a reply out.

mod acls;
mod attributes;
mod convert;
mod data;
mod filesystem;
mod listing;
mod mount;
mod names;
pub(crate) mod nfs4;
mod route;
mod snapshots;

use crate::acl3;
use crate::counters::{CounterCells, count};
use crate::export::{ErrorHook, ExportOptions};
use crate::export_table::{Exports, ServedExport, ServedFs};
use crate::groups::Pending;
use crate::handle::{EncodedHandle, HandleBytes};
use crate::mount_list::MountRegister;
use crate::mount3::{self, MountCall};
use crate::nfs3::status::{Answer, Status};
use crate::nfs3::{self, Nfs3Call};
use crate::nfs4::VERSION as NFS4_VERSION;
use crate::peer::PeerCredential;
use crate::reply_cache::{Admission, ReplyCache};
use crate::rpc::{ArgumentsError, Call, CallError, Refusal, Reply};
use crate::workers::QueuedCall;
use crate::xdr::{Encode, Reader};
use bytes::Bytes;
use nfs4::{Nfs4, Nfs4Options};
use pagemesh_base::space::SpaceError;
use pagemesh_fs::{Caller, FileId, Fs, FsError, Ino};
use snapshots::View;
use std::net::SocketAddr;
use std::sync::Arc;

pub(crate) use route::{CallRoute, Route};

/// Whether another host has the volume of the file system that failed.
#[must_use]
pub fn is_fenced(error: &FsError) -> bool {
    matches!(
        error,
        FsError::Space(SpaceError::Fenced) | FsError::Stopped(SpaceError::Fenced)
    )
}

/// Why a call gets no reply, and its connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoReply {
    /// Other hosts have the volumes of all file systems. They answer when the client asks again.
    Fenced,
    /// The record is no call.
    NotACall(CallError),
    /// The call is a repetition, and the first one still runs. Its connection goes on: the reply
    /// follows at the end of the first one.
    Running,
}

/// A call that runs, as its answer changes it.
#[derive(Default)]
pub(crate) struct CallRun {
    /// The call. The reply cache takes it if the same call still runs.
    pub(crate) waiting: Option<QueuedCall>,
    /// It is a COMPOUND of NFSv4.
    pub(crate) is_compound: bool,
    /// The number of the file system of the last file that a COMPOUND worked on.
    pub(crate) file_system: Option<usize>,
}

/// Why a procedure has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Status(Status),
    /// See [`NoReply::Fenced`].
    Fenced,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// A failure with the attributes that its result has.
struct Failed<F> {
    failure: Failure,
    /// In a box, so that results stay small.
    attributes: Box<F>,
}

impl<F> Failed<F> {
    fn new(failure: Failure, attributes: F) -> Self {
        Self {
            failure,
            attributes: Box::new(attributes),
        }
    }
}

/// The result of a procedure.
type Outcome<T, F> = Result<T, Failed<F>>;

impl<F: Default> From<Failure> for Failed<F> {
    fn from(failure: Failure) -> Self {
        Self::new(failure, F::default())
    }
}

impl<F: Default> From<Status> for Failed<F> {
    fn from(status: Status) -> Self {
        Failure::Status(status).into()
    }
}

/// The exports and the state that all connections share.
pub(crate) struct Service {
    pub(crate) exports: Exports,
    pub(crate) counters: Arc<CounterCells>,
    pub(crate) nfs4: Nfs4,
    /// The repeated calls that wait, and the replies to others.
    pub(crate) replies: ReplyCache<QueuedCall>,
    mounts: MountRegister,
    on_error: ErrorHook,
}

/// A file that a call names.
#[derive(Clone)]
struct Target<'a> {
    service: &'a Service,
    export: Arc<ServedExport>,
    /// The rule for the client.
    options: ExportOptions,
    id: FileId,
    caller: Caller,
    view: View,
    /// The file system of the view.
    fs: Arc<Fs>,
}

impl Service {
    pub(crate) fn new(exports: Exports, on_error: ErrorHook, nfs4: &Nfs4Options) -> Self {
        Self {
            nfs4: Nfs4::new(&exports, nfs4),
            exports,
            counters: Arc::default(),
            replies: ReplyCache::default(),
            mounts: MountRegister::default(),
            on_error,
        }
    }

    /// The reply to the call in a record of a client.
    pub(crate) fn answer(
        &self,
        client: SocketAddr,
        record: &Bytes,
        run: &mut CallRun,
    ) -> Result<Reply, NoReply> {
        let (call, arguments) = match Call::decode(record) {
            Ok(decoded) => decoded,
            Err(CallError::Denied { xid, denial }) => {
                count(&self.counters.refused_calls);
                return Ok(Reply::denied(xid, denial));
            }
            Err(error) => return Err(NoReply::NotACall(error)),
        };
        match (call.program, call.version) {
            (nfs3::PROGRAM, nfs3::VERSION) => {
                self.answer_once((client, record), &call, arguments, &mut run.waiting)
            }
            (nfs3::PROGRAM, NFS4_VERSION) => {
                self.answer_nfs4((client, record), &call, arguments, run)
            }
            (mount3::PROGRAM, mount3::VERSION) => self.answer_mount(client, &call, arguments),
            (acl3::PROGRAM, acl3::VERSION) => self.answer_acl(client, &call, arguments),
            (nfs3::PROGRAM, _) => {
                let (low, high) = (nfs3::VERSION, NFS4_VERSION);
                Ok(self.refuse(&call, Refusal::ProgramMismatch { low, high }))
            }
            (mount3::PROGRAM | acl3::PROGRAM, _) => {
                let (low, high) = (mount3::VERSION, mount3::VERSION);
                Ok(self.refuse(&call, Refusal::ProgramMismatch { low, high }))
            }
            _ => Ok(self.refuse(&call, Refusal::ProgramUnavailable)),
        }
    }

    fn refuse(&self, call: &Call<'_>, refusal: Refusal) -> Reply {
        count(&self.counters.refused_calls);
        Reply::refused(call.xid, refusal)
    }

    fn refuse_arguments(&self, call: &Call<'_>, error: ArgumentsError) -> Reply {
        tracing::debug!(program = call.program, %error, "a call is refused");
        self.refuse(call, error.refusal())
    }

    fn answer_mount(
        &self,
        client: SocketAddr,
        call: &Call<'_>,
        arguments: Reader<'_>,
    ) -> Result<Reply, NoReply> {
        match MountCall::decode(call.procedure, arguments) {
            Ok(decoded) => {
                count(&self.counters.mount_calls);
                let table = self.exports.table();
                let peer = PeerCredential {
                    address: client,
                    credential: &call.credential,
                    table: &table,
                };
                self.mount(call.xid, peer, &decoded)
            }
            Err(error) => Ok(self.refuse_arguments(call, error)),
        }
    }

    /// Runs a call, unless it is a repetition of one that must not run again.
    fn answer_once(
        &self,
        (client, record): (SocketAddr, &Bytes),
        call: &Call<'_>,
        arguments: Reader<'_>,
        waiting: &mut Option<QueuedCall>,
    ) -> Result<Reply, NoReply> {
        let was_known = waiting.as_ref().is_some_and(|call| call.is_released);
        let from = client.ip();
        let (admission, is_repeated) = self.replies.admit(from, call, arguments.rest(), waiting);
        if is_repeated && !was_known {
            count(&self.counters.repeated_calls);
        }
        match admission {
            Admission::Run(execution) => {
                let reply = self.answer_nfs(client, call, arguments, record)?;
                execution.finish(&reply);
                Ok(reply)
            }
            Admission::Repeat(reply) => Ok(reply),
            Admission::Running => Err(NoReply::Running),
        }
    }

    fn answer_nfs(
        &self,
        client: SocketAddr,
        call: &Call<'_>,
        arguments: Reader<'_>,
        record: &Bytes,
    ) -> Result<Reply, NoReply> {
        let decoded = match Nfs3Call::decode(call.procedure, arguments) {
            Ok(decoded) => decoded,
            Err(error) => return Ok(self.refuse_arguments(call, error)),
        };
        self.counters.count_call(call.procedure);
        let table = self.exports.table();
        let peer = PeerCredential {
            address: client,
            credential: &call.credential,
            table: &table,
        };
        let xid = call.xid;
        match &decoded {
            Nfs3Call::Null => Ok(Reply::success(xid, &())),
            Nfs3Call::GetAttributes(file) => self.reply(xid, self.get_attributes(peer, *file)),
            Nfs3Call::SetAttributes(it) => self.reply(xid, self.set_attributes(peer, it)),
            Nfs3Call::Lookup(at) => self.reply(xid, self.lookup(peer, at)),
            Nfs3Call::Access(it) => self.reply(xid, self.access(peer, it)),
            Nfs3Call::ReadSymlink(file) => self.read_symlink(xid, peer, *file),
            Nfs3Call::Read(it) => self.reply(xid, self.read(peer, it)),
            Nfs3Call::Write(it) => self.reply(xid, self.write(peer, it, record)),
            Nfs3Call::Create(it) => self.reply(xid, self.create(peer, it)),
            Nfs3Call::MakeDirectory(it) => self.reply(xid, self.make_directory(peer, it)),
            Nfs3Call::MakeSymlink(it) => self.reply(xid, self.make_symlink(peer, it)),
            Nfs3Call::MakeNode(it) => self.reply(xid, self.make_node(peer, it)),
            Nfs3Call::Remove(at) => self.reply(xid, self.remove(peer, at)),
            Nfs3Call::RemoveDirectory(at) => self.reply(xid, self.remove_directory(peer, at)),
            Nfs3Call::Rename(it) => self.reply(xid, self.rename(peer, it)),
            Nfs3Call::Link(it) => self.reply(xid, self.link(peer, it)),
            Nfs3Call::List(it) => self.reply(xid, self.list(peer, it)),
            Nfs3Call::ListPlus(it) => self.reply(xid, self.list_plus(peer, it)),
            Nfs3Call::SpaceUsage(file) => self.reply(xid, self.space_usage(peer, *file)),
            Nfs3Call::ServerLimits(file) => self.reply(xid, self.server_limits(peer, *file)),
            Nfs3Call::NameRules(file) => self.reply(xid, self.name_rules(peer, *file)),
            Nfs3Call::Commit(it) => self.reply(xid, self.commit(peer, it)),
        }
    }

    /// The reply with the outcome of a procedure.
    fn reply<T: Encode, F: Encode>(
        &self,
        xid: u32,
        outcome: Outcome<T, F>,
    ) -> Result<Reply, NoReply> {
        let answer = match outcome {
            Ok(result) => Answer::Done(result),
            Err(failed) => match failed.failure {
                Failure::Status(status) => {
                    self.counters.count_error(status);
                    Answer::Failed(status, *failed.attributes)
                }
                Failure::Fenced => return Err(NoReply::Fenced),
            },
        };
        Ok(Reply::success(xid, &answer))
    }

    /// The file of a handle. The file system checks that it exists.
    fn target(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Result<Target<'_>, Failure> {
        let export = file.claimed_volume().ok_or(Status::BadHandle)?;
        let export = peer.table.by_id(export).ok_or(Status::Stale)?;
        let handle = export.key.decode(file).map_err(|_| Status::BadHandle)?;
        let id = FileId {
            ino: Ino(handle.inode),
            generation: handle.generation,
            birth: handle.birth_fold,
        };
        let target = self.target_in(export, id, peer)?;
        target.in_view(View::of_epoch(handle.snapshot_epoch))
    }

    /// A file of an export, if the client has access to it. A client that has lost it gets
    /// NFS3ERR_ACCES: its handles are good again when it gets access again.
    fn target_in(
        &self,
        export: &Arc<ServedExport>,
        id: FileId,
        peer: PeerCredential<'_>,
    ) -> Result<Target<'_>, Failure> {
        if export.is_fenced() {
            return Err(self.fenced());
        }
        let options = export.rule(peer.address.ip()).ok_or(Status::Access)?;
        if !options.accepts_port(peer.address) {
            return Err(Status::Access.into());
        }
        let user = options.user_to_look_up(peer.credential);
        let groups = match user.map(|uid| self.exports.groups().groups(uid)) {
            Some(Err(Pending)) => return Err(Status::Jukebox.into()),
            Some(Ok(groups)) => groups,
            None => None,
        };
        let caller = options.caller(peer.credential, groups.as_deref());
        Ok(Target {
            service: self,
            export: Arc::clone(export),
            options: *options,
            id,
            caller: caller.ok_or(Status::ServerFault)?,
            view: View::Live,
            fs: Arc::clone(&export.fs),
        })
    }

    /// The file of a call that changes it.
    fn changed_target(
        &self,
        peer: PeerCredential<'_>,
        file: HandleBytes<'_>,
    ) -> Result<Target<'_>, Failure> {
        let target = self.target(peer, file)?;
        target.check_live()?;
        match target.options.is_read_only {
            true => Err(Status::ReadOnly.into()),
            false => Ok(target),
        }
    }

    /// The failure of a call to a fenced file system. A connection has calls for several file systems, so the call is refused
    /// for now as long as this process serves another one. Nothing of a fenced file system is read.
    fn fenced(&self) -> Failure {
        match self.exports.file_systems().all(|fs| fs.is_fenced()) {
            true => Failure::Fenced,
            false => Status::Jukebox.into(),
        }
    }

    /// Reports an error of a file system, once for each call.
    fn report(&self, export: &ServedFs, error: &FsError) -> Failure {
        let name = export.name.as_str();
        if is_fenced(error) {
            if export.set_fenced() {
                tracing::error!(export = name, %error, "the export gets no more replies");
            }
            (self.on_error)(name, error);
            return self.fenced();
        }
        if !matches!(error, FsError::Posix(_) | FsError::Snapshot) {
            tracing::warn!(export = name, %error, "an NFS call failed");
            (self.on_error)(name, error);
        }
        convert::status(error).into()
    }
}

impl Target<'_> {
    /// See [`Service::report`].
    fn report(&self, error: &FsError) -> Failure {
        match self.view {
            View::Snapshot(epoch) => self.snapshot_failure(epoch, error),
            View::Live | View::Directory => self.service.report(&self.export, error),
        }
    }

    /// The handle of a file of the same view.
    fn handle(&self, id: FileId) -> EncodedHandle {
        self.export.handle_in(self.view.epoch(), id)
    }
}
