//! A direct client: a program that reaches files through sessions of its own. It has a thread,
//! which never runs concurrently with the rest of the simulation. One of the two has the baton, as
//! with [`crate::mount`].
//!
//! Invariants: inside an operation the client gives the baton away only at accesses to a medium and
//! where it waits. When it is told to die, it unwinds from there and stores nothing more.

use crate::any_medium::SimMedium;
use pagemesh_base::defect;
use pagemesh_base::slice::SliceError;
use pagemesh_direct::client::io_slot::{Intent, IoSlot, Operation, WriteOutcome};
use pagemesh_direct::shared_file_map::SharedFileMap;
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session};
use pagemesh_store::wait::set_yield_fn;
use pagemesh_volume::DirectLeg;
use pagemesh_volume::direct_access::{DirectSegment, LayoutLease};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A session of a brick's pool.
pub(crate) struct SessionLeg {
    pub(crate) session: Session<SimMedium>,
    pub(crate) handle: Handle,
}

impl DirectLeg for SessionLeg {
    type Media = SimMedium;

    fn session_and_handle(&self) -> (&Session<SimMedium>, &Handle) {
        (&self.session, &self.handle)
    }

    fn session_member(&mut self) -> LegSession<'_, SimMedium> {
        LegSession {
            session: &mut self.session,
            handle: self.handle,
        }
    }
}

/// An operation of a client on a file.
#[derive(Clone)]
pub(crate) enum FileAction {
    Read(u64, usize),
    /// At an offset, or at the end of the file.
    Write(Option<u64>, Vec<u8>),
}

/// The file of an operation.
#[derive(Clone)]
pub(crate) struct ExposedFile {
    pub(crate) ino: u64,
    pub(crate) map: Arc<SharedFileMap>,
}

/// How an operation ended.
pub(crate) enum ActionResult {
    /// The kernel has to do it.
    ByKernel,
    /// The mount may grant append space for it.
    NoRoom,
    Failed(SliceError),
    Read(Vec<u8>),
    Written,
}

/// A command to the client.
pub(crate) enum ClientCommand {
    SetLegs(LayoutLease, Vec<SessionLeg>),
    Begin(ExposedFile, FileAction),
    /// Continue for this many accesses.
    Continue(u32),
}

/// The client's reply when it gives the baton away.
pub(crate) enum ClientReply {
    LegsSet,
    /// The client is at an access, or waits.
    InProgress,
    /// The result, and whether to wake the sender of the replication ring.
    Ended(ActionResult, bool),
    /// The client's thread panicked with this message.
    Panicked(String),
}

/// Panic payload of a dying direct client.
struct ClientKilled;

struct ClientContext {
    commands: Receiver<ClientCommand>,
    replies: Sender<ClientReply>,
    /// Accesses until the client gives the baton away.
    accesses_left: u32,
    /// The medium of the last access.
    last_medium: usize,
}

thread_local! {
    static CONTEXT: RefCell<Option<ClientContext>> = const { RefCell::new(None) };
}

/// Counts an access of this thread to a medium, by its address; returns whether the thread is a
/// direct client. Between two media the client always gives the baton away, because there the legs
/// differ.
pub(crate) fn count_access(medium: usize) -> bool {
    let is_due = CONTEXT.with_borrow_mut(|seat| {
        let seat = seat.as_mut()?;
        let is_due = seat.accesses_left == 0 || seat.last_medium != medium;
        seat.last_medium = medium;
        seat.accesses_left = seat.accesses_left.saturating_sub(1);
        Some(is_due)
    });
    if is_due == Some(true) && !std::thread::panicking() {
        yield_to_simulation();
    }
    is_due.is_some()
}

/// Gives the baton away inside an operation.
fn yield_to_simulation() {
    let told = CONTEXT.with_borrow(|seat| {
        let seat = seat.as_ref()?;
        seat.replies.send(ClientReply::InProgress).ok()?;
        seat.commands.recv().ok()
    });
    match told {
        Some(ClientCommand::Continue(accesses)) => CONTEXT.with_borrow_mut(|seat| {
            seat.as_mut().expect("a direct client").accesses_left = accesses;
        }),
        _ => resume_unwind(Box::new(ClientKilled)),
    }
}

fn run_client(segment: &DirectSegment, row: usize) {
    let mut station = IoSlot::default();
    station.set_row(row);
    loop {
        let told = CONTEXT.with_borrow(|seat| seat.as_ref()?.commands.recv().ok());
        let word = match told {
            Some(ClientCommand::SetLegs(picture, legs)) => {
                station.set_legs(picture, legs.into_iter().collect());
                ClientReply::LegsSet
            }
            Some(ClientCommand::Begin(shown, deed)) => {
                let (end, must_call) = perform(&mut station, segment, &shown, &deed);
                ClientReply::Ended(end, must_call)
            }
            Some(ClientCommand::Continue(_)) => {
                ClientReply::Panicked("no operation is in progress".into())
            }
            None => return,
        };
        let said = CONTEXT.with_borrow(|seat| seat.as_ref()?.replies.send(word).ok());
        if said.is_none() {
            return;
        }
    }
}

fn perform(
    station: &mut IoSlot<SessionLeg>,
    segment: &DirectSegment,
    shown: &ExposedFile,
    deed: &FileAction,
) -> (ActionResult, bool) {
    let place = match deed {
        FileAction::Read(offset, len) => (*offset, *len as u64, Intent::Read),
        FileAction::Write(offset, data) => {
            let offset = offset.unwrap_or_else(|| shown.map.size());
            (offset, data.len() as u64, Intent::Write)
        }
    };
    let begun = station.begin(segment, &shown.map, shown.ino, place);
    let Some(mut operation) = begun else {
        return (ActionResult::ByKernel, false);
    };
    let end = transfer(&mut operation, deed);
    (end, operation.must_wake_replicator())
}

fn transfer(operation: &mut Operation<'_, SessionLeg>, deed: &FileAction) -> ActionResult {
    match deed {
        FileAction::Read(offset, len) => {
            let mut into = vec![0; *len];
            match operation.read(&mut into, *offset) {
                None => ActionResult::ByKernel,
                Some(Err(error)) => ActionResult::Failed(error),
                Some(Ok(len)) => {
                    into.truncate(len);
                    ActionResult::Read(into)
                }
            }
        }
        FileAction::Write(offset, data) => match operation.write(data, *offset) {
            None | Some(Ok(WriteOutcome::LeftToKernel)) => ActionResult::ByKernel,
            Some(Ok(WriteOutcome::NoAppendSpace)) => ActionResult::NoRoom,
            Some(Ok(WriteOutcome::Done(_))) => ActionResult::Written,
            Some(Err(error)) => ActionResult::Failed(error),
        },
    }
}

/// The simulation's side of the baton.
pub(crate) struct ClientThread {
    commands: Option<Sender<ClientCommand>>,
    replies: Receiver<ClientReply>,
    thread: Option<JoinHandle<()>>,
}

impl ClientThread {
    pub(crate) fn start(segment: Arc<DirectSegment>, row: usize) -> ClientThread {
        let (baton, taken) = channel();
        let (say, words) = channel();
        let carried = defect::capture();
        let thread = std::thread::spawn(move || {
            carried.install();
            let last = say.clone();
            CONTEXT.set(Some(ClientContext {
                commands: taken,
                replies: say,
                accesses_left: 0,
                last_medium: 0,
            }));
            set_yield_fn(Some(Rc::new(|| {
                yield_to_simulation();
                true
            })));
            let lived = catch_unwind(AssertUnwindSafe(|| run_client(&segment, row)));
            CONTEXT.set(None);
            set_yield_fn(None);
            if let Err(payload) = lived
                && !payload.is::<ClientKilled>()
            {
                let text = payload.downcast_ref::<String>().cloned();
                let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
                // At the end of the history no receiver is left.
                let _ = last.send(ClientReply::Panicked(text.unwrap_or_default()));
            }
        });
        ClientThread {
            commands: Some(baton),
            replies: words,
            thread: Some(thread),
        }
    }

    /// Gives the baton to the client and waits for it.
    pub(crate) fn send(&self, baton: ClientCommand) -> ClientReply {
        let sent = self.commands.as_ref().map(|to| to.send(baton));
        assert!(
            matches!(sent, Some(Ok(()))),
            "the client's thread has ended"
        );
        let over = |_| ClientReply::Panicked("the client's thread has ended".into());
        self.replies.recv().unwrap_or_else(over)
    }
}

impl Drop for ClientThread {
    /// Kills the client at its current access.
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // The thread reported its panic before.
            let _ = thread.join();
        }
    }
}
