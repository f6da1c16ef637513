//! A history whose volume holds a file system: what its program was told is there after
//! any fault, and of what it was not told all or nothing, but for pages of one file.
//!
//! Invariants: one program at a time counts, that of the newest client that has attached.
//! What it had at hand when it ended, or when another client attached, is in doubt until
//! the next one has read what is there. Where a copy that follows was promoted, the end
//! of what was done may be gone, but nothing that was made durable, and nothing in between.

use crate::client::Client;
use crate::cluster::tell;
use crate::guests::mount::Reply;
use crate::guests::{Asked, Hosting};
use crate::life::Life;
use crate::mount::{Job, Mount, Said, is_volumes};
use pagemesh_fs_model::{Dice, Model, Op, Outcome, Reach};

/// One job in so many makes all durable.
const SYNCED: u64 = 15;
/// Tells the dice of operations from all others of a seed.
const OPERATING: u64 = 0x6f70_6572_6174_696e;
/// Bytes of the volume, which has 16 times as many addresses: more than operations of near
/// reach can fill.
pub(crate) const VOLUME_BYTES: u64 = 1 << 20;

/// What the file system must hold.
pub(crate) struct Files {
    dice: Dice,
    /// Nothing takes this back. None: there may be no file system.
    base: Option<Model>,
    /// What was done since, and what it made.
    since: Vec<(Op, Model)>,
    /// What may have been done after that, and who did it.
    doubt: Option<(u32, Op)>,
    /// Whose doubt was resolved last, and whether it was done as a whole.
    resolved: Option<(u32, bool)>,
    /// The newest attachment of those that have a program, or had.
    newest: u32,
    /// With which attachment a copy was promoted last; what was not durable may be gone.
    cut: u32,
    is_cut: bool,
}

/// A program and what it has to do with the files.
pub(crate) struct Program {
    pub(crate) mount: Mount,
    /// What it holds, as this program knows it; none before it is mounted.
    model: Option<Model>,
    /// What it does: an operation, or to make all durable.
    at_hand: Option<Task>,
    /// Another client has attached since.
    is_superseded: bool,
    /// What it does was begun before that.
    is_in_doubt: bool,
}

#[derive(Clone)]
enum Task {
    Op(Op),
    Sync,
    /// The last look.
    Read,
    /// Of a file of guests.
    Ask(Asked),
}

impl Files {
    pub(crate) fn new(seed: u64) -> Files {
        Files {
            dice: Dice::new(seed ^ OPERATING, Reach::Near),
            base: None,
            since: vec![],
            doubt: None,
            resolved: None,
            newest: 0,
            cut: 0,
            is_cut: false,
        }
    }

    fn model(&self) -> Option<&Model> {
        let last = self.since.last().map(|(_, model)| model);
        last.or(self.base.as_ref())
    }

    /// An operation is done.
    fn push(&mut self, op: Op, after: Model) {
        // Written so that it survives the loss of what follows.
        let is_durable = matches!(op, Op::Append(_, len, _) if len > 0);
        self.since.push((op, after));
        if is_durable {
            self.rebase();
        }
    }

    /// All that was done is durable.
    fn rebase(&mut self) {
        self.base = self.model().cloned();
        self.since.clear();
    }

    /// Takes what was found for what is there, if it may be.
    fn settle(&mut self, found: &Model) -> Result<&'static str, String> {
        let Some(model) = self.model().cloned() else {
            // Nobody knows of a file system: it is empty.
            Model::default().check(found)?;
            self.base = Some(found.clone());
            return Ok("file system made");
        };
        let (told, adopted) = match (self.settled(&model, found), self.is_cut) {
            (Ok(settled), _) => settled,
            (Err(broken), false) => return Err(broken),
            (Err(broken), true) => {
                let prefix = self.prefix(found);
                prefix.map_err(|base| format!("{broken}; nor was it so since: {base}"))?
            }
        };
        self.is_cut = false;
        self.doubt = None;
        self.since.clear();
        self.base = Some(adopted);
        Ok(told)
    }

    fn settled(&mut self, model: &Model, found: &Model) -> Result<(&'static str, Model), String> {
        let Some((client, op)) = self.doubt.clone() else {
            model.check(found)?;
            return Ok(("file system mounted again", model.clone()));
        };
        let mut after = model.clone();
        // An operation that cannot be done changes nothing.
        let _ = after.run(&op);
        let adopted = model.left(&op, &after, found)?;
        let is_done = adopted == after;
        self.resolved = Some((client, is_done));
        let told = match (is_done, adopted == *model) {
            (true, _) => "operation without an answer done",
            (_, true) => "operation without an answer undone",
            _ => "operation without an answer partly done",
        };
        Ok((told, adopted))
    }

    /// What was found, if it is how it was after some of the operations since all was
    /// durable.
    fn prefix(&mut self, found: &Model) -> Result<(&'static str, Model), String> {
        let mut before = self.base.clone().ok_or("there was none")?;
        let mut broken = before.check(found).err().unwrap_or_default();
        for (op, after) in &self.since {
            match before.left(op, after, found) {
                Ok(adopted) => {
                    if let Some((client, _)) = self.doubt {
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

impl Program {
    /// Whether its mount has guests.
    pub(crate) fn is_host(&self) -> bool {
        self.model.is_some() && !self.is_superseded
    }

    /// Whether it knows what it has, and nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.model.is_some() && self.mount.is_idle()
    }
}

impl Life {
    pub(crate) fn files(&mut self) -> &mut Files {
        self.files.as_mut().expect("a history of files")
    }

    /// A client has attached: a program mounts the file system.
    pub(crate) fn mount(&mut self, at: usize) -> Result<(), String> {
        let attachment = self.clients[at].attachment;
        let promoted = self.desk.promoted();
        // One may hear late that it has attached.
        let is_superseded = attachment < self.files().newest;
        if !is_superseded {
            self.files().newest = attachment;
            for other in (0..self.clients.len()).filter(|it| *it != at) {
                self.supersede(other);
            }
        }
        let files = self.files();
        if files.cut < promoted && promoted <= attachment {
            (files.cut, files.is_cut) = (promoted, true);
        }
        let may_make = files.base.is_none() && !is_superseded;
        let client = &mut self.clients[at];
        tell!(self.cluster, "client {} mounts", client.number);
        let admitted = self.guests.is_some().then(|| client.driven.admit_guests());
        let segment = admitted.map(|segment| segment.expect("memory"));
        client.hosting = segment.clone().map(Hosting::new);
        let (mount, said) = Mount::new(client.driven.size_bytes(), may_make, segment);
        client.program = Some(Program {
            mount,
            model: None,
            at_hand: None,
            is_superseded,
            is_in_doubt: false,
        });
        self.hear(at, said)
    }

    /// What a program does is in doubt from now on.
    fn supersede(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let Some(program) = client.program.as_mut().filter(|it| !it.is_superseded) else {
            return;
        };
        program.is_superseded = true;
        let number = client.number;
        self.orphan_guests(number);
        let client = &mut self.clients[at];
        let program = client.program.as_mut().expect("a program");
        if program.model.is_none() {
            return;
        }
        if let Some(Task::Op(op)) = &program.at_hand {
            let doubt = (client.number, op.clone());
            program.is_in_doubt = true;
            self.files().doubt = Some(doubt);
        }
    }

    /// A client ends as a crash would end it.
    pub(crate) fn end_program(&mut self, at: usize) {
        self.supersede(at);
        self.clients[at].program = None;
        self.clients[at].hosting = None;
    }

    /// Gives some program something to do.
    pub(crate) fn operate(&mut self) -> Result<(), String> {
        let at = self.dice.roll(self.clients.len().max(1) as u64) as usize;
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(());
        };
        let is_stopped = client.is_stopped();
        let Some(program) = client.program.as_mut() else {
            return Ok(());
        };
        let is_mounted = program.model.is_some();
        if is_stopped || !is_mounted || !program.mount.is_idle() {
            return Ok(());
        }
        if self.guests.is_some()
            && let Some(asked) = self.ask(at)
        {
            return self.give(at, Task::Ask(asked));
        }
        let files = self.files.as_mut().expect("a history of files");
        let program = self.clients[at].program.as_ref().expect("a program");
        let model = program.model.as_ref().expect("it is mounted");
        let task = match files.dice.one_in(SYNCED) {
            true => Task::Sync,
            false => Task::Op(files.dice.op(model)),
        };
        self.give(at, task)
    }

    fn give(&mut self, at: usize, task: Task) -> Result<(), String> {
        let client = &mut self.clients[at];
        let program = client.program.as_mut().expect("a program");
        let job = match &task {
            Task::Op(op) => {
                tell!(self.cluster, "client {} begins {op:?}", client.number);
                Job::Op(op.clone())
            }
            Task::Sync => Job::Sync,
            Task::Read => Job::Read,
            Task::Ask(asked) => asked.job(),
        };
        program.at_hand = Some(task);
        let said = program.mount.begin(job);
        self.hear(at, said)
    }

    /// Lets a program go on, if what it waits for is there.
    pub(crate) fn go(&mut self, at: usize) -> Result<bool, String> {
        let now = self.cluster.now();
        let Some(client) = self.clients.get_mut(at) else {
            return Ok(false);
        };
        let Client {
            program, driven, ..
        } = client;
        let said = program.as_mut().and_then(|it| it.mount.turn(driven, now));
        match said {
            None => Ok(false),
            Some(said) => self.hear(at, said).map(|()| true),
        }
    }

    fn hear(&mut self, at: usize, said: Said) -> Result<(), String> {
        let number = self.clients[at].number;
        let program = self.clients[at].program.as_mut().expect("a program");
        let is_superseded = program.is_superseded;
        match said {
            Said::Waits | Said::Rests | Said::Naps => Ok(()),
            Said::Panicked(text) => Err(format!("the program of client {number}: {text}")),
            Said::Mounted(Ok(found)) if is_superseded => {
                program.model = Some(found);
                Ok(())
            }
            Said::Mounted(Ok(found)) => {
                program.model = Some(found.clone());
                let told = self.files().settle(&found);
                let told = told.map_err(|broken| format!("client {number} finds: {broken}"))?;
                tell!(self.cluster, "client {number} finds: {told}");
                self.outcome.count(told, 1);
                Ok(())
            }
            Said::Held(Ok(found)) => {
                program.at_hand = None;
                let model = program.model.clone().expect("it is mounted");
                let same = model.check(&found);
                same.map_err(|broken| format!("client {number} reads at the end: {broken}"))
            }
            Said::Mounted(Err(cause)) | Said::Held(Err(cause)) => {
                tell!(self.cluster, "client {number} cannot read: {cause}");
                match self.may_fail(at) {
                    true => {
                        self.end_and_enter(at);
                        Ok(())
                    }
                    false => Err(format!("client {number} cannot read: {cause}")),
                }
            }
            Said::Ran(outcome) => self.ran(at, outcome),
            Said::Replied(outcome) => self.replied(at, outcome),
        }
    }

    /// Whether the volume may fail what a client asks of it.
    fn may_fail(&self, at: usize) -> bool {
        let is_over = self.desk.is_superseded(self.clients[at].attachment);
        is_over || !self.is_well && self.plan.damaged.is_none()
    }

    fn end_and_enter(&mut self, at: usize) {
        let was_newest = at + 1 == self.clients.len();
        self.leave(at);
        if was_newest {
            self.enter();
        }
    }

    fn replied(&mut self, at: usize, outcome: Outcome<Reply>) -> Result<(), String> {
        let client = &mut self.clients[at];
        let number = client.number;
        let program = client.program.as_mut().expect("a program");
        let Some(Task::Ask(asked)) = program.at_hand.take() else {
            return Err(format!("client {number} was not asked"));
        };
        match outcome {
            Ok(reply) => self.hear_reply(at, &asked, reply),
            Err(errno) if is_volumes(errno) && self.may_fail(at) => {
                self.end_and_enter(at);
                Ok(())
            }
            Err(errno) => Err(format!("client {number} was told {errno} of guests' files")),
        }
    }

    fn ran(&mut self, at: usize, outcome: Outcome<()>) -> Result<(), String> {
        let number = self.clients[at].number;
        let program = self.clients[at].program.as_mut().expect("a program");
        let (is_superseded, was_in_doubt) = (program.is_superseded, program.is_in_doubt);
        program.is_in_doubt = false;
        let task = program.at_hand.clone().expect("it did something");
        let before = program.model.clone().expect("it is mounted");
        let mut after = before.clone();
        let expected = match &task {
            Task::Op(op) => after.run(op),
            Task::Sync | Task::Read | Task::Ask(_) => Ok(()),
        };
        tell!(self.cluster, "client {number} is told {outcome:?}");
        if outcome != expected {
            return match outcome {
                Err(errno) if is_volumes(errno) && self.may_fail(at) => {
                    self.outcome.count("operation failed", 1);
                    // It is in doubt, and this program knows no more what it has.
                    self.end_and_enter(at);
                    Ok(())
                }
                _ => Err(format!(
                    "client {number} was told {outcome:?} and not {expected:?}"
                )),
            };
        }
        let program = self.clients[at].program.as_mut().expect("a program");
        program.at_hand = None;
        program.model = Some(after.clone());
        self.outcome.acknowledged += 1;
        let is_change = after != before;
        match task {
            Task::Op(op) if !is_superseded => self.files().push(op, after),
            Task::Sync if !is_superseded => self.files().rebase(),
            Task::Op(op) if is_change && was_in_doubt => self.confirm(number, op)?,
            Task::Op(_) if is_change => {
                return Err(format!(
                    "client {number} changed files, though another one has attached"
                ));
            }
            _ => {}
        }
        Ok(())
    }

    /// What was in doubt has its answer: it is done.
    fn confirm(&mut self, client: u32, op: Op) -> Result<(), String> {
        let files = self.files();
        if files.doubt.as_ref().is_some_and(|(it, _)| *it == client) {
            files.doubt = None;
            let mut after = files.model().cloned().expect("it was mounted");
            let _ = after.run(&op);
            files.push(op, after);
            return Ok(());
        }
        match files.resolved {
            Some((it, false)) if it == client => Err(format!(
                "client {client} was told that is done what the next one did not find"
            )),
            _ => Ok(()),
        }
    }

    /// The only program does something with a file of guests.
    pub(crate) fn give_ask(&mut self, asked: Asked) -> Result<(), String> {
        self.give(0, Task::Ask(asked))
    }

    /// Whether a client that has attached since has found what is there.
    pub(crate) fn has_found_files(&self, since: u32) -> bool {
        let has_found = |it: &Client| {
            let model = it.program.as_ref().and_then(|it| it.model.as_ref());
            it.attachment >= since && model.is_some()
        };
        self.clients.iter().any(has_found)
    }

    /// The last client reads all, takes everything away, and reads again.
    pub(crate) fn rest_files(&mut self) -> Result<(), String> {
        self.rest_guests()?;
        self.give(0, Task::Read)?;
        self.until_calm()?;
        self.dismiss_all();
        self.compare_all_legs()?;
        self.enter();
        self.until_calm()?;
        loop {
            let program = self.clients[0].program.as_ref().expect("it is calm");
            let model = program.model.as_ref().expect("it is mounted");
            // What lies deepest comes first.
            let last = model.paths(&|_| true).into_iter().max_by_key(Vec::len);
            let Some(path) = last else {
                break;
            };
            let is_directory = model.is_directory(&path);
            self.give(
                0,
                Task::Op(match is_directory {
                    true => Op::RemoveDirectory(path),
                    false => Op::Unlink(path),
                }),
            )?;
            self.until_calm()?;
        }
        self.give(0, Task::Read)?;
        self.until_calm()?;
        self.dismiss_all();
        self.compare_all_legs()?;
        self.enter();
        self.until_calm()?;
        self.dismiss_all();
        self.count_scrubs();
        self.delete_all()
    }
}
