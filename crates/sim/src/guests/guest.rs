//! A guest: a program that reaches files by sessions of its own. It has a thread, and
//! never runs beside the rest of the simulation: one of both has the baton, as with
//! [`crate::mount`].
//!
//! Invariants: it gives the baton away at accesses to a medium and where it waits, and
//! nowhere else inside of an operation. Told to die, it unwinds from there, and stores
//! nothing more.

use crate::medium::Medium;
use pagemesh_base::defect;
use pagemesh_base::slice::SliceError;
use pagemesh_direct::board::Board;
use pagemesh_direct::guest::station::{Intent, Operation, Station, Tried};
use pagemesh_store::session::{Member, Session};
use pagemesh_store::view::Handle;
use pagemesh_store::wait::take_turns;
use pagemesh_volume::GuestLeg;
use pagemesh_volume::guests::{Picture, Segment};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// A session of a brick's pool.
pub(crate) struct Leg {
    pub(crate) session: Session<Medium>,
    pub(crate) handle: Handle,
}

impl GuestLeg for Leg {
    type Media = Medium;

    fn seat(&self) -> (&Session<Medium>, &Handle) {
        (&self.session, &self.handle)
    }

    fn member(&mut self) -> Member<'_, Medium> {
        Member {
            session: &mut self.session,
            handle: self.handle,
        }
    }
}

/// What a guest does with a file.
#[derive(Clone)]
pub(crate) enum Deed {
    Read(u64, usize),
    /// At an offset, or at the end.
    Write(Option<u64>, Vec<u8>),
}

/// The file that it does it with.
#[derive(Clone)]
pub(crate) struct Shown {
    pub(crate) ino: u64,
    pub(crate) board: Arc<Board>,
}

/// How an operation ended.
pub(crate) enum End {
    /// The kernel has to do it.
    ByKernel,
    /// The mount may lend room for it.
    NoRoom,
    Failed(SliceError),
    Read(Vec<u8>),
    Written,
}

/// What it is told.
pub(crate) enum Baton {
    Equip(Picture, Vec<Leg>),
    Begin(Shown, Deed),
    /// For so many accesses.
    GoOn(u32),
}

/// What it says when it gives the baton away.
pub(crate) enum Word {
    Equipped,
    /// It is at an access, or waits.
    Inside,
    /// How it ended, and whether who sends what is in the ring is to be woken.
    Ended(End, bool),
    /// It ended itself, with these words.
    Panicked(String),
}

/// The payload of the unwinding of a guest that dies.
struct Died;

struct Seat {
    baton: Receiver<Baton>,
    say: Sender<Word>,
    /// Accesses until it gives the baton away.
    left: u32,
    /// The medium that it went to last.
    at: usize,
}

thread_local! {
    static SEAT: RefCell<Option<Seat>> = const { RefCell::new(None) };
}

/// An access of this thread to a medium, by its address; whether it is a guest's. Between
/// two media the baton is given away always: that is where legs are not alike.
pub(crate) fn access(medium: usize) -> bool {
    let is_due = SEAT.with_borrow_mut(|seat| {
        let seat = seat.as_mut()?;
        let is_due = seat.left == 0 || seat.at != medium;
        seat.at = medium;
        seat.left = seat.left.saturating_sub(1);
        Some(is_due)
    });
    if is_due == Some(true) && !std::thread::panicking() {
        pass();
    }
    is_due.is_some()
}

/// Gives the baton away inside of an operation.
fn pass() {
    let told = SEAT.with_borrow(|seat| {
        let seat = seat.as_ref()?;
        seat.say.send(Word::Inside).ok()?;
        seat.baton.recv().ok()
    });
    match told {
        Some(Baton::GoOn(accesses)) => SEAT.with_borrow_mut(|seat| {
            seat.as_mut().expect("a guest").left = accesses;
        }),
        _ => resume_unwind(Box::new(Died)),
    }
}

fn live(segment: &Segment, row: usize) {
    let mut station = Station::default();
    station.take_row(row);
    loop {
        let told = SEAT.with_borrow(|seat| seat.as_ref()?.baton.recv().ok());
        let word = match told {
            Some(Baton::Equip(picture, legs)) => {
                station.equip(picture, legs.into_iter().collect());
                Word::Equipped
            }
            Some(Baton::Begin(shown, deed)) => {
                let (end, must_call) = work(&mut station, segment, &shown, &deed);
                Word::Ended(end, must_call)
            }
            Some(Baton::GoOn(_)) => Word::Panicked("it is not inside".into()),
            None => return,
        };
        let said = SEAT.with_borrow(|seat| seat.as_ref()?.say.send(word).ok());
        if said.is_none() {
            return;
        }
    }
}

fn work(station: &mut Station<Leg>, segment: &Segment, shown: &Shown, deed: &Deed) -> (End, bool) {
    let place = match deed {
        Deed::Read(offset, len) => (*offset, *len as u64, Intent::Read),
        Deed::Write(offset, data) => {
            let offset = offset.unwrap_or_else(|| shown.board.size());
            (offset, data.len() as u64, Intent::Write)
        }
    };
    let begun = station.begin(segment, &shown.board, shown.ino, place);
    let Some(mut operation) = begun else {
        return (End::ByKernel, false);
    };
    let end = run(&mut operation, deed);
    (end, operation.must_call())
}

fn run(operation: &mut Operation<'_, Leg>, deed: &Deed) -> End {
    match deed {
        Deed::Read(offset, len) => {
            let mut into = vec![0; *len];
            match operation.read(&mut into, *offset) {
                None => End::ByKernel,
                Some(Err(error)) => End::Failed(error),
                Some(Ok(len)) => {
                    into.truncate(len);
                    End::Read(into)
                }
            }
        }
        Deed::Write(offset, data) => match operation.write(data, *offset) {
            None | Some(Ok(Tried::ByKernel)) => End::ByKernel,
            Some(Ok(Tried::NoRoom)) => End::NoRoom,
            Some(Ok(Tried::Done(_))) => End::Written,
            Some(Err(error)) => End::Failed(error),
        },
    }
}

/// The simulation's side of the baton.
pub(crate) struct Thread {
    baton: Option<Sender<Baton>>,
    words: Receiver<Word>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    pub(crate) fn start(segment: Arc<Segment>, row: usize) -> Thread {
        let (baton, taken) = channel();
        let (say, words) = channel();
        let carried = defect::carry();
        let thread = std::thread::spawn(move || {
            carried.take_up();
            let last = say.clone();
            SEAT.set(Some(Seat {
                baton: taken,
                say,
                left: 0,
                at: 0,
            }));
            take_turns(Some(Rc::new(|| {
                pass();
                true
            })));
            let lived = catch_unwind(AssertUnwindSafe(|| live(&segment, row)));
            SEAT.set(None);
            take_turns(None);
            if let Err(payload) = lived
                && !payload.is::<Died>()
            {
                let text = payload.downcast_ref::<String>().cloned();
                let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
                // Nobody listens at the end of the history.
                let _ = last.send(Word::Panicked(text.unwrap_or_default()));
            }
        });
        Thread {
            baton: Some(baton),
            words,
            thread: Some(thread),
        }
    }

    /// Hands the baton over, and has it back.
    pub(crate) fn tell(&self, baton: Baton) -> Word {
        let sent = self.baton.as_ref().map(|to| to.send(baton));
        assert!(matches!(sent, Some(Ok(()))), "a guest listens");
        let over = |_| Word::Panicked("it is over".into());
        self.words.recv().unwrap_or_else(over)
    }
}

impl Drop for Thread {
    /// It dies, wherever it is.
    fn drop(&mut self) {
        self.baton = None;
        if let Some(thread) = self.thread.take() {
            // What it died of was said before.
            let _ = thread.join();
        }
    }
}
