//! A history of a volume that holds a file system. Operations that the program knows to be done
//! survive any fault. Other operations happened as a whole or not at all, except for pages of one
//! file.
//!
//! Invariants: one program at a time counts, the one on the newest attached client. Its operation
//! is in doubt if the client ended or another one attached meanwhile, until the next program has
//! read the file system. After the promotion of an asynchronous replica the last operations may be
//! lost, but no durable one, and none in between.

use crate::client::VolumeClient;
use crate::cluster::tell;
use crate::direct_clients::shared_files::FileReply;
use crate::direct_clients::{MountClients, PendingFileRequest};
use crate::mount::{MountJob, ProgramHandle, ProgramReply, is_volume_error};
use crate::scenario::Scenario;
use pagemesh_fs_model::{FsModel, Op, OpGenerator, OpResult, OpScale};

/// Odds that a job is a sync.
const SYNC_ODDS: u64 = 15;
/// Separates the random numbers of operations from the others of a seed.
const FILE_OP_SEED: u64 = 0x6f70_6572_6174_696e;
/// Bytes of the volume, which has 16 times as many addresses: more than operations at small offsets
/// can fill.
pub(crate) const VOLUME_BYTES: u64 = 1 << 20;

/// The expected contents of the file system.
pub(crate) struct FilesOracle {
    rng: OpGenerator,
    /// The durable state. None: there may be no file system.
    durable_model: Option<FsModel>,
    /// The operations since then, each with the state after it.
    undurable_ops: Vec<(Op, FsModel)>,
    /// The operation in doubt after those, with the number of its client.
    in_doubt: Option<(u32, Op)>,
    /// The client of the last resolved doubt, and whether the operation was done as a whole.
    resolved: Option<(u32, bool)>,
    /// The newest attachment that has, or had, a program.
    newest_attachment: u32,
    /// The attachment of the last promotion; changes that were not durable may be lost.
    promotion_epoch: u32,
    may_lose_suffix: bool,
}

/// A program, and its task on the files.
pub(crate) struct MountProgram {
    pub(crate) handle: ProgramHandle,
    /// The contents of the file system as this program knows them; none before it is mounted.
    model: Option<FsModel>,
    /// The current task: an operation, or a sync.
    task: Option<ProgramTask>,
    /// Another client has attached since.
    is_superseded: bool,
    /// The current task began before that.
    is_in_doubt: bool,
    /// A change has ended since a replica was promoted that lacks it.
    has_lost_change: bool,
}

#[derive(Clone)]
enum ProgramTask {
    Op(Op),
    Sync,
    /// The final read.
    Read,
    /// A request on a file of the direct clients.
    FileRequest(PendingFileRequest),
}

/// Whether an operation is durable when it is done, without a sync.
fn is_durable_when_done(op: &Op) -> bool {
    matches!(op, Op::Append(_, len, _) if *len > 0)
}

impl FilesOracle {
    pub(crate) fn new(seed: u64) -> FilesOracle {
        FilesOracle {
            rng: OpGenerator::new(seed ^ FILE_OP_SEED, OpScale::Small),
            durable_model: None,
            undurable_ops: vec![],
            in_doubt: None,
            resolved: None,
            newest_attachment: 0,
            promotion_epoch: 0,
            may_lose_suffix: false,
        }
    }

    fn model(&self) -> Option<&FsModel> {
        let last = self.undurable_ops.last().map(|(_, model)| model);
        last.or(self.durable_model.as_ref())
    }

    /// Records an operation that has its answer.
    fn record_op(&mut self, op: Op, after: FsModel, is_done: bool) {
        let is_durable = is_done && is_durable_when_done(&op);
        self.undurable_ops.push((op, after));
        if is_durable {
            self.make_durable();
        }
    }

    /// Marks all operations as durable.
    fn make_durable(&mut self) {
        self.durable_model = self.model().cloned();
        self.undurable_ops.clear();
    }

    /// Adopts the found contents, if they are legal.
    fn adopt(&mut self, found: &FsModel) -> Result<&'static str, String> {
        let Some(model) = self.model().cloned() else {
            // No file system is known: it must be empty.
            FsModel::default().check(found)?;
            self.durable_model = Some(found.clone());
            return Ok("file system made");
        };
        let (told, adopted) = match (self.match_in_doubt(&model, found), self.may_lose_suffix) {
            (Ok(settled), _) => settled,
            (Err(broken), false) => return Err(broken),
            (Err(broken), true) => {
                let prefix = self.match_prefix(found);
                prefix.map_err(|base| {
                    format!("{broken}; nor was it so after a later operation: {base}")
                })?
            }
        };
        // A client that has not heard of a promotion by force ends operations on the copies that it reaches, but none
        // that is durable.
        if std::mem::take(&mut self.may_lose_suffix)
            && let Some((_, op)) = &self.in_doubt
            && !is_durable_when_done(op)
        {
            self.resolved = None;
        }
        self.in_doubt = None;
        self.undurable_ops.clear();
        self.durable_model = Some(adopted);
        Ok(told)
    }

    fn match_in_doubt(
        &mut self,
        model: &FsModel,
        found: &FsModel,
    ) -> Result<(&'static str, FsModel), String> {
        let Some((client, op)) = self.in_doubt.clone() else {
            model.check(found)?;
            return Ok(("file system mounted again", model.clone()));
        };
        let mut after = model.clone();
        // A failing operation changes nothing.
        let _ = after.run(&op);
        let adopted = model.crash_outcome(&op, &after, found)?;
        let is_done = adopted == after;
        self.resolved = Some((client, is_done));
        let told = match (is_done, adopted == *model) {
            (true, _) => "operation without an answer done",
            (_, true) => "operation without an answer undone",
            _ => "operation without an answer partly done",
        };
        Ok((told, adopted))
    }

    /// The found contents, if they equal the state after some prefix of the operations that are not
    /// durable yet.
    fn match_prefix(&mut self, found: &FsModel) -> Result<(&'static str, FsModel), String> {
        let mut before = self.durable_model.clone().ok_or("there was none")?;
        let mut broken = before.check(found).err().unwrap_or_default();
        for (op, after) in &self.undurable_ops {
            match before.crash_outcome(op, after, found) {
                Ok(adopted) => {
                    if let Some((client, _)) = self.in_doubt {
                        self.resolved = Some((client, false));
                    }
                    return Ok(("operations lost with a promotion", adopted));
                }
                Err(cause) => broken = cause,
            }
            before = after.clone();
        }
        Err(broken)
    }
}

impl MountProgram {
    /// Whether the mount may host direct clients: it is mounted and not superseded.
    pub(crate) fn hosts_direct_clients(&self) -> bool {
        self.model.is_some() && !self.is_superseded
    }

    /// Whether the program has mounted and no task is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.model.is_some() && self.handle.is_idle()
    }
}

impl Scenario {
    pub(crate) fn files_oracle(&mut self) -> &mut FilesOracle {
        self.files.as_mut().expect("a history of files")
    }

    /// A client has attached: a program mounts the file system.
    pub(crate) fn start_program(&mut self, at: usize) -> Result<(), String> {
        let attachment = self.clients[at].attachment;
        let promoted = self.manager_host.promotion_epoch();
        // A client may learn late that it has attached.
        let is_superseded = attachment < self.files_oracle().newest_attachment;
        if !is_superseded {
            self.files_oracle().newest_attachment = attachment;
            for other in (0..self.clients.len()).filter(|it| *it != at) {
                self.supersede_program(other);
            }
        }
        let files = self.files_oracle();
        if files.promotion_epoch < promoted && promoted <= attachment {
            (files.promotion_epoch, files.may_lose_suffix) = (promoted, true);
        }
        let may_make = files.durable_model.is_none() && !is_superseded;
        let client = &mut self.clients[at];
        tell!(self.cluster, "client {} mounts", client.number);
        let admitted = self
            .direct_clients
            .is_some()
            .then(|| client.driven.enable_direct_access());
        let segment = admitted.map(|segment| segment.expect("memory"));
        client.mount_clients = segment.clone().map(MountClients::new);
        let (mount, said) = ProgramHandle::new(&client.driven, may_make, segment);
        client.program = Some(MountProgram {
            handle: mount,
            model: None,
            task: None,
            is_superseded,
            is_in_doubt: false,
            has_lost_change: false,
        });
        self.handle_program_reply(at, said)
    }

    /// Puts a program's current task in doubt.
    fn supersede_program(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let Some(program) = client.program.as_mut().filter(|it| !it.is_superseded) else {
            return;
        };
        program.is_superseded = true;
        let number = client.number;
        self.orphan_direct_clients(number);
        let client = &mut self.clients[at];
        let program = client.program.as_mut().expect("a program");
        if program.model.is_none() {
            return;
        }
        if let Some(ProgramTask::Op(op)) = &program.task {
            let doubt = (client.number, op.clone());
            program.is_in_doubt = true;
            self.files_oracle().in_doubt = Some(doubt);
        }
    }

    /// Ends a client's program as a crash would.
    pub(crate) fn end_program(&mut self, at: usize) {
        self.supersede_program(at);
        self.clients[at].program = None;
        self.clients[at].mount_clients = None;
    }

    /// Gives a task to some program.
    pub(crate) fn submit_file_op(&mut self) -> Result<(), String> {
        let at = self.rng.below(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(());
        };
        let is_stopped = client.is_stopped();
        let Some(program) = client.program.as_mut() else {
            return Ok(());
        };
        let is_mounted = program.model.is_some();
        if is_stopped || !is_mounted || !program.handle.is_idle() {
            return Ok(());
        }
        if self.direct_clients.is_some()
            && let Some(asked) = self.next_file_request(at)
        {
            return self.start_task(at, ProgramTask::FileRequest(asked));
        }
        let files = self.files.as_mut().expect("a history of files");
        let program = self.clients[at].program.as_ref().expect("a program");
        let model = program.model.as_ref().expect("it is mounted");
        let task = match files.rng.one_in(SYNC_ODDS) {
            true => ProgramTask::Sync,
            false => ProgramTask::Op(files.rng.next_op(model)),
        };
        self.start_task(at, task)
    }

    fn start_task(&mut self, at: usize, task: ProgramTask) -> Result<(), String> {
        let client = &mut self.clients[at];
        let program = client.program.as_mut().expect("a program");
        let job = match &task {
            ProgramTask::Op(op) => {
                tell!(self.cluster, "client {} begins {op:?}", client.number);
                MountJob::Op(op.clone())
            }
            ProgramTask::Sync => MountJob::Sync,
            ProgramTask::Read => MountJob::Read,
            ProgramTask::FileRequest(asked) => asked.job(),
        };
        program.task = Some(task);
        let said = program.handle.start_job(&client.driven, job);
        self.handle_program_reply(at, said)
    }

    /// Lets a program continue, if its wait is over.
    pub(crate) fn step_program(&mut self, at: usize) -> Result<bool, String> {
        let now = self.cluster.now();
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(false);
        };
        let VolumeClient {
            program, driven, ..
        } = client;
        let said = program.as_mut().and_then(|it| it.handle.poll(driven, now));
        match said {
            None => Ok(false),
            Some(said) => self.handle_program_reply(at, said).map(|()| true),
        }
    }

    fn handle_program_reply(&mut self, at: usize, said: ProgramReply) -> Result<(), String> {
        let number = self.clients[at].number;
        let program = self.clients[at].program.as_mut().expect("a program");
        let is_superseded = program.is_superseded;
        match said {
            ProgramReply::Waiting | ProgramReply::WaitingTimed | ProgramReply::Polling => Ok(()),
            ProgramReply::Panicked(text) => Err(format!("the program of client {number}: {text}")),
            ProgramReply::Mounted(Ok(found)) if is_superseded => {
                program.model = Some(found);
                Ok(())
            }
            ProgramReply::Mounted(Ok(found)) => {
                program.model = Some(found.clone());
                let told = self.files_oracle().adopt(&found);
                let told = told.map_err(|broken| format!("client {number} finds: {broken}"))?;
                tell!(self.cluster, "client {number} finds: {told}");
                self.report.count(told, 1);
                Ok(())
            }
            ProgramReply::Contents(Ok(found)) => {
                program.task = None;
                let model = program.model.clone().expect("it is mounted");
                let same = model.check(&found);
                same.map_err(|broken| format!("client {number} reads at the end: {broken}"))
            }
            ProgramReply::Mounted(Err(cause)) | ProgramReply::Contents(Err(cause)) => {
                tell!(self.cluster, "client {number} cannot read: {cause}");
                match self.may_volume_fail(at) {
                    true => {
                        self.replace_client(at);
                        Ok(())
                    }
                    false => Err(format!("client {number} cannot read: {cause}")),
                }
            }
            ProgramReply::OpDone(outcome) => self.finish_task(at, outcome),
            ProgramReply::FileRequestDone(outcome) => self.finish_file_request(at, outcome),
        }
    }

    /// Whether the volume may fail a client's request.
    fn may_volume_fail(&self, at: usize) -> bool {
        let is_over = self.manager_host.is_superseded(self.clients[at].attachment);
        is_over || !self.is_fault_free && self.plan.damaged_brick.is_none()
    }

    fn replace_client(&mut self, at: usize) {
        let was_newest = at + 1 == self.clients.len();
        self.crash_client(at);
        if was_newest {
            self.start_client();
        }
    }

    fn finish_file_request(
        &mut self,
        at: usize,
        outcome: OpResult<FileReply>,
    ) -> Result<(), String> {
        let client = &mut self.clients[at];
        let number = client.number;
        let program = client.program.as_mut().expect("a program");
        let Some(ProgramTask::FileRequest(asked)) = program.task.take() else {
            return Err(format!("client {number} answers without a request"));
        };
        match outcome {
            Ok(reply) => self.handle_file_reply(at, &asked, reply),
            Err(errno) if is_volume_error(errno) && self.may_volume_fail(at) => {
                self.replace_client(at);
                Ok(())
            }
            Err(errno) => Err(format!(
                "client {number} got {errno} on a direct-client file"
            )),
        }
    }

    fn finish_task(&mut self, at: usize, outcome: OpResult<()>) -> Result<(), String> {
        let number = self.clients[at].number;
        let program = self.clients[at].program.as_mut().expect("a program");
        let (is_superseded, was_in_doubt) = (program.is_superseded, program.is_in_doubt);
        program.is_in_doubt = false;
        let task = program.task.clone().expect("it did something");
        let before = program.model.clone().expect("it is mounted");
        let mut after = before.clone();
        let expected = match &task {
            ProgramTask::Op(op) => after.run(op),
            ProgramTask::Sync | ProgramTask::Read | ProgramTask::FileRequest(_) => Ok(()),
        };
        tell!(self.cluster, "client {number} gets {outcome:?}");
        if outcome != expected {
            return match outcome {
                Err(errno) if is_volume_error(errno) && self.may_volume_fail(at) => {
                    self.report.count("operation failed", 1);
                    // The operation is in doubt, and this program no longer knows the contents.
                    self.replace_client(at);
                    Ok(())
                }
                _ => Err(format!(
                    "client {number} got {outcome:?} and not {expected:?}"
                )),
            };
        }
        let program = self.clients[at].program.as_mut().expect("a program");
        program.task = None;
        program.model = Some(after.clone());
        self.report.acknowledged += 1;
        let is_change = after != before;
        match task {
            ProgramTask::Op(op) if !is_superseded => {
                self.files_oracle().record_op(op, after, outcome.is_ok());
            }
            ProgramTask::Sync if !is_superseded => self.files_oracle().make_durable(),
            ProgramTask::Op(op) if is_change && was_in_doubt => {
                self.confirm_in_doubt(number, op)?;
            }
            task => self.check_superseded_task(at, &task, is_change)?,
        }
        Ok(())
    }

    /// A task has ended well that began after another client had attached. A client that has not heard of a
    /// promotion goes on with the copies that it reaches, but makes no change of that time durable.
    fn check_superseded_task(
        &mut self,
        at: usize,
        task: &ProgramTask,
        is_change: bool,
    ) -> Result<(), String> {
        let is_promoted = self.files_oracle().promotion_epoch > self.clients[at].attachment;
        let client = &mut self.clients[at];
        let number = client.number;
        let program = client.program.as_mut().expect("a program");
        let is_legal = match task {
            ProgramTask::Op(op) if is_change => is_promoted && !is_durable_when_done(op),
            ProgramTask::Sync => !program.has_lost_change,
            _ => return Ok(()),
        };
        program.has_lost_change |= is_change;
        match is_legal {
            true => Ok(()),
            false => Err(format!(
                "client {number} changed files, though another one has attached"
            )),
        }
    }

    /// The operation in doubt has its answer: it is done.
    fn confirm_in_doubt(&mut self, client: u32, op: Op) -> Result<(), String> {
        let files = self.files_oracle();
        if files.in_doubt.as_ref().is_some_and(|(it, _)| *it == client) {
            files.in_doubt = None;
            let mut after = files.model().cloned().expect("it was mounted");
            let _ = after.run(&op);
            files.record_op(op, after, true);
            return Ok(());
        }
        match files.resolved {
            Some((it, false)) if it == client => Err(format!(
                "client {client} got an answer for an operation that the next one did not find"
            )),
            _ => Ok(()),
        }
    }

    /// The only program runs a request on a file of the direct clients.
    pub(crate) fn start_file_request(&mut self, asked: PendingFileRequest) -> Result<(), String> {
        self.start_task(0, ProgramTask::FileRequest(asked))
    }

    /// Whether a client that attached at or after this epoch has read the file system.
    pub(crate) fn has_read_files_since(&self, since: u32) -> bool {
        let has_found = |it: &VolumeClient| {
            let model = it.program.as_ref().and_then(|it| it.model.as_ref());
            it.attachment >= since && model.is_some()
        };
        self.clients.iter().any(has_found)
    }

    /// The last client reads all, deletes all, and reads again.
    pub(crate) fn final_check_files(&mut self) -> Result<(), String> {
        self.final_check_direct_clients()?;
        self.start_task(0, ProgramTask::Read)?;
        self.run_until_quiescent()?;
        self.end_all_clients();
        self.compare_all_legs()?;
        self.start_client();
        self.run_until_quiescent()?;
        loop {
            let program = self.clients[0].program.as_ref().expect("it is calm");
            let model = program.model.as_ref().expect("it is mounted");
            // The deepest path comes first.
            let last = model.paths(&|_| true).into_iter().max_by_key(Vec::len);
            let Some(path) = last else {
                break;
            };
            let is_directory = model.is_directory(&path);
            self.start_task(
                0,
                ProgramTask::Op(match is_directory {
                    true => Op::RemoveDirectory(path),
                    false => Op::Unlink(path),
                }),
            )?;
            self.run_until_quiescent()?;
        }
        self.start_task(0, ProgramTask::Read)?;
        self.run_until_quiescent()?;
        self.end_all_clients();
        self.compare_all_legs()?;
        self.start_client();
        self.run_until_quiescent()?;
        self.end_all_clients();
        self.count_scrubs();
        self.delete_volume()
    }
}
