//! The controller's own connection to a leg.

use super::state::ControllerState;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{Leg, SliceCompletion, SliceError, SliceReply, SliceRequest};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

struct ConnectionState {
    /// The connection, or the cause of its loss. After a loss no answer comes any more. A lost
    /// connection is dropped here: a task that still held it would keep the pool mapped, and
    /// the brick could not come back.
    leg: Result<Box<dyn Leg>, String>,
    next: u64,
    outstanding: usize,
    answers: HashMap<u64, Result<SliceReply, SliceError>>,
    reaped: Vec<SliceCompletion>,
}

impl ConnectionState {
    fn take_answers(&mut self) {
        if let Ok(leg) = &mut self.leg {
            leg.reap(&mut self.reaped);
        }
        self.outstanding -= self.reaped.len();
        let answers = self
            .reaped
            .drain(..)
            .map(|answer| (answer.tag, answer.result));
        self.answers.extend(answers);
    }
}

pub(super) struct ControlConnection {
    inner: RefCell<ConnectionState>,
    /// The newest epoch that this connection has announced to its slice. Until then it is the
    /// epoch of the layout that led to the connection.
    epoch: Cell<Epoch>,
    /// The newest snapshot that the replica behind this connection has prepared, and that was cut; 0 for other legs.
    replica_stamp: Cell<Epoch>,
}

impl ControlConnection {
    pub(super) fn new(leg: Box<dyn Leg>, epoch: Epoch) -> Rc<ControlConnection> {
        Rc::new(ControlConnection {
            inner: RefCell::new(ConnectionState {
                leg: Ok(leg),
                next: 0,
                outstanding: 0,
                answers: HashMap::new(),
                reaped: vec![],
            }),
            epoch: Cell::new(epoch),
            replica_stamp: Cell::new(Epoch(0)),
        })
    }

    /// Ends the connection, and with it every wait for an answer. The leg is known to be lost,
    /// but the connection might be silent for a long time before it breaks.
    pub(super) fn fail(&self, why: &str) {
        let mut inner = self.inner.borrow_mut();
        if inner.leg.is_ok() {
            inner.leg = Err(why.to_owned());
            inner.outstanding = 0;
        }
    }

    /// Takes all answers that have come. An answer that stayed would keep the controller awake
    /// until its task asks for it.
    ///
    /// This also detects the end of an idle connection. Idle channels do not detect it, and a
    /// pool that stays mapped keeps its brick from coming back.
    pub(super) fn poll(&self) {
        let mut inner = self.inner.borrow_mut();
        inner.take_answers();
        let is_idle = inner.outstanding == 0;
        if let Ok(leg) = &mut inner.leg
            && is_idle
            && let Some(error) = leg.poll_closed()
        {
            inner.leg = Err(error.to_string());
        }
    }

    /// The cause of the loss, if the connection is lost.
    pub(super) fn loss_cause(&self) -> Option<String> {
        self.inner.borrow().leg.as_ref().err().cloned()
    }

    /// The epoch of changes over this connection: the one that it has announced to its slice,
    /// not a newer one of the volume, or the newest snapshot under that one. With a newer one, the next connection might announce the
    /// same epoch. Then the slice would not refuse the changes that this connection still
    /// carries.
    pub(super) fn epoch(&self, state: &ControllerState) -> Epoch {
        let announced = match defect::is(Defect::EpochNotAnnounced) {
            true => state.model().epoch(),
            false => self.epoch.get(),
        };
        let stamp = state.shared.newest_stamp(announced);
        stamp.max(self.replica_stamp.get())
    }

    /// The epoch that this connection has announced to its slice.
    pub(super) fn announced(&self) -> Epoch {
        self.epoch.get()
    }

    /// Lets the controller's own changes of an asynchronous replica be younger than a snapshot. The replica does not take
    /// part in layouts, so the stamps of its connection do not rise by themselves.
    pub(super) fn raise_stamp(&self, snapshot: Epoch) {
        self.replica_stamp
            .set(self.replica_stamp.get().max(snapshot));
    }

    /// Sends a request. The returned number identifies its answer.
    pub(super) fn submit(&self, state: &ControllerState, request: SliceRequest) -> u64 {
        if let SliceRequest::RaiseEpoch { epoch, .. } = request {
            self.epoch.set(self.epoch.get().max(epoch));
        }
        let mut inner = self.inner.borrow_mut();
        inner.next += 1;
        let tag = inner.next;
        if let Ok(leg) = &mut inner.leg {
            leg.submit(tag, request);
            inner.outstanding += 1;
        }
        state.record_activity();
        tag
    }

    /// Whether requests are done inside [`ControlConnection::submit`].
    pub(super) fn is_synchronous(&self) -> bool {
        let inner = self.inner.borrow();
        inner.leg.as_ref().is_ok_and(|leg| leg.now().is_none())
    }

    /// The answer to a request, if it has come.
    pub(super) fn try_answer(
        &self,
        state: &ControllerState,
        tag: u64,
    ) -> Option<Result<SliceReply, SliceError>> {
        let mut inner = self.inner.borrow_mut();
        inner.take_answers();
        let gone = |inner: &ConnectionState| inner.leg.as_ref().err().cloned();
        let answer = inner.answers.remove(&tag);
        let answer = answer.or_else(|| gone(&inner).map(|why| Err(SliceError::Lost(why))));
        answer.inspect(|_| state.record_activity())
    }

    pub(super) async fn answer(
        &self,
        state: &ControllerState,
        tag: u64,
    ) -> Result<SliceReply, SliceError> {
        poll_fn(|_| match self.try_answer(state, tag) {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
        .await
    }

    /// Takes the answer to a request that no task waits for any more.
    pub(super) async fn late_answer(&self, tag: u64) {
        poll_fn(|_| {
            let mut inner = self.inner.borrow_mut();
            match inner.answers.remove(&tag).is_some() || inner.leg.is_err() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }

    pub(super) async fn call(
        &self,
        state: &ControllerState,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let tag = self.submit(state, request);
        self.answer(state, tag).await
    }

    pub(super) fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        let inner = self.inner.borrow();
        let leg = inner.leg.as_ref().ok()?;
        leg.poll_fds(into);
        leg.deadline()
    }
}
