//! The keeper's own connection to a leg.

use super::state::State;
use pagemesh_base::slice::{Leg, SliceCompletion, SliceError, SliceReply, SliceRequest};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::task::Poll;
use std::time::Instant;

struct Inner {
    /// Once it is lost, why: nothing is awaited any more. Tasks that hold this on
    /// must not keep its pool mapped: its brick could not come back.
    leg: Result<Box<dyn Leg>, String>,
    next: u64,
    outstanding: usize,
    answers: HashMap<u64, Result<SliceReply, SliceError>>,
    reaped: Vec<SliceCompletion>,
}

pub(super) struct Control {
    inner: RefCell<Inner>,
}

impl Control {
    pub(super) fn new(leg: Box<dyn Leg>) -> Rc<Control> {
        Rc::new(Control {
            inner: RefCell::new(Inner {
                leg: Ok(leg),
                next: 0,
                outstanding: 0,
                answers: HashMap::new(),
                reaped: vec![],
            }),
        })
    }

    /// Who waits for an answer gets none: others have found that the leg is
    /// lost, and this connection may be silent for long before it breaks.
    pub(super) fn give_up(&self, why: &str) {
        let mut inner = self.inner.borrow_mut();
        if inner.leg.is_ok() {
            inner.leg = Err(why.to_owned());
            inner.outstanding = 0;
        }
    }

    /// Why it is lost, if it is; looks whether an idle connection has ended. Nobody
    /// else would notice: channels that are idle do not, and a pool that stays
    /// mapped keeps its brick from coming back.
    pub(super) fn ended(&self) -> Option<String> {
        let mut inner = self.inner.borrow_mut();
        let is_idle = inner.outstanding == 0;
        if let Ok(leg) = &mut inner.leg
            && is_idle
            && let Some(error) = leg.ended()
        {
            inner.leg = Err(error.to_string());
        }
        inner.leg.as_ref().err().cloned()
    }

    /// Sends a request; its answer is asked for with the number given back.
    pub(super) fn start(&self, state: &State, request: SliceRequest) -> u64 {
        let mut inner = self.inner.borrow_mut();
        inner.next += 1;
        let tag = inner.next;
        if let Ok(leg) = &mut inner.leg {
            leg.submit(tag, request);
            inner.outstanding += 1;
        }
        state.act();
        tag
    }

    pub(super) async fn answer(&self, state: &State, tag: u64) -> Result<SliceReply, SliceError> {
        poll_fn(|_| {
            let mut inner = self.inner.borrow_mut();
            let Inner {
                leg,
                outstanding,
                answers,
                reaped,
                ..
            } = &mut *inner;
            if let Ok(leg) = leg {
                leg.reap(reaped);
            }
            *outstanding -= reaped.len();
            answers.extend(reaped.drain(..).map(|answer| (answer.tag, answer.result)));
            let answer = answers.remove(&tag);
            let gone = || leg.as_ref().err().cloned();
            match answer.or_else(|| gone().map(|why| Err(SliceError::Lost(why)))) {
                Some(result) => {
                    state.act();
                    Poll::Ready(result)
                }
                None => Poll::Pending,
            }
        })
        .await
    }

    pub(super) async fn ask(
        &self,
        state: &State,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let tag = self.start(state, request);
        self.answer(state, tag).await
    }

    pub(super) fn wait_on(&self, into: &mut Vec<RawFd>) -> Option<Instant> {
        let inner = self.inner.borrow();
        let leg = inner.leg.as_ref().ok()?;
        leg.wait_on(into);
        leg.deadline()
    }
}
