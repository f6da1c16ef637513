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
    /// None once it is lost. Tasks that hold this on must not keep its pool
    /// mapped: its brick could not come back.
    leg: Option<Box<dyn Leg>>,
    next: u64,
    outstanding: usize,
    answers: HashMap<u64, Result<SliceReply, SliceError>>,
    reaped: Vec<SliceCompletion>,
    /// Why it is lost, once it is: nothing is awaited any more.
    lost: Option<String>,
}

pub(super) struct Control {
    inner: RefCell<Inner>,
}

impl Control {
    pub(super) fn new(leg: Box<dyn Leg>) -> Rc<Control> {
        Rc::new(Control {
            inner: RefCell::new(Inner {
                leg: Some(leg),
                next: 0,
                outstanding: 0,
                answers: HashMap::new(),
                reaped: vec![],
                lost: None,
            }),
        })
    }

    /// Who waits for an answer gets none: others have found that the leg is
    /// lost, and this connection may be silent for long before it breaks.
    pub(super) fn give_up(&self, why: &str) {
        let mut inner = self.inner.borrow_mut();
        inner.lost.get_or_insert(why.to_owned());
        inner.leg = None;
        inner.outstanding = 0;
    }

    /// Sends a request; its answer is asked for with the number given back.
    pub(super) fn start(&self, state: &State, request: SliceRequest) -> u64 {
        let mut inner = self.inner.borrow_mut();
        inner.next += 1;
        let tag = inner.next;
        if let Some(leg) = &mut inner.leg {
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
                lost,
                ..
            } = &mut *inner;
            if let Some(leg) = leg {
                leg.reap(reaped);
            }
            *outstanding -= reaped.len();
            answers.extend(reaped.drain(..).map(|answer| (answer.tag, answer.result)));
            let answer = answers.remove(&tag);
            let gone = || lost.clone().map(|why| Err(SliceError::Lost(why)));
            match answer.or_else(gone) {
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
        let leg = inner.leg.as_ref().filter(|_| inner.outstanding > 0)?;
        leg.wait_on(into);
        leg.deadline()
    }
}
