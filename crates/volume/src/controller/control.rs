//! The keeper's own connection to a leg.

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
    /// Once it is lost, why: nothing is awaited any more. Tasks that hold this on
    /// must not keep its pool mapped: its brick could not come back.
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
    /// The newest epoch that its slice was told over it; until then, that of the layout
    /// that led to it.
    epoch: Cell<Epoch>,
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
        })
    }

    /// Who waits for an answer gets none: others have found that the leg is
    /// lost, and this connection may be silent for long before it breaks.
    pub(super) fn fail(&self, why: &str) {
        let mut inner = self.inner.borrow_mut();
        if inner.leg.is_ok() {
            inner.leg = Err(why.to_owned());
            inner.outstanding = 0;
        }
    }

    /// Takes the answers that have come, whoever awaits them: one that stayed behind
    /// would keep the keeper awake until its task asks for it. And looks whether an
    /// idle connection has ended. Nobody else would notice: channels that are idle do
    /// not, and a pool that stays mapped keeps its brick from coming back.
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

    /// Why it is lost, if it is.
    pub(super) fn loss_cause(&self) -> Option<String> {
        self.inner.borrow().leg.as_ref().err().cloned()
    }

    /// The epoch of changes over it: the one that its slice was told over it, and not a
    /// newer one that the volume has by now. Were it newer, the next connection might
    /// tell the slice that one, and what this one still carries would not be refused.
    pub(super) fn epoch(&self, state: &ControllerState) -> Epoch {
        match defect::is(Defect::EpochNotAnnounced) {
            true => state.model().epoch(),
            false => self.epoch.get(),
        }
    }

    /// Sends a request; its answer is asked for with the number given back.
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

    /// Whether requests are done inside [`ControlConnection::start`].
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
