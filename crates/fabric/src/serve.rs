//! One connection of a brick: requests in, replies out, in one thread.
//!
//! A round takes one receive, does every request that has arrived in full,
//! and sends all replies with one send.
//!
//! Invariants: replies that wait for a slow client are bounded; beyond the
//! bound no further request is taken. A message that is not well formed ends
//! the connection. Replies are sent only after the batch's end was told to the
//! handler. Dropping a connection drops its handler.

use crate::inflow::{Body, Inflow};
use crate::limits::{LATER_MAX, UNSENT_REPLY_BYTES_MAX};
use crate::message::reply::{self, Answer, Reply};
use crate::message::request::{Control, Request};
use crate::message::{Direction, Header, Kind, Malformed};
use crate::outflow::Outflow;
use crate::service::{Finished, Handler, Outcome, Ticket};
use crate::spin::Spin;
use crate::stop::Stop;
use crate::stream::{Received, Stream, wait_any};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, LISTED_MAX, SliceError, SliceReply, SliceRequest};
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::io;
use std::time::Instant;

/// Why a connection ended other than by the client or by [`Stop`].
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("a batch could not be ended: {0}")]
    Batch(SliceError),
}

/// Where a connection's handler comes from.
pub(crate) type Opener<'a> = dyn FnMut() -> Result<Box<dyn Handler>, SliceError> + 'a;

/// A connection that is served.
pub(crate) struct Connection<'a> {
    stream: &'a Stream,
    control: &'a dyn BrickControl,
    stop: &'a Stop,
    open: &'a mut Opener<'a>,
    handler: Option<Box<dyn Handler>>,
    inflow: Inflow,
    outflow: Outflow,
    later: HashMap<Ticket, (Kind, u64)>,
    done: Vec<Finished>,
    /// Whether the handler has been asked something since its last batch.
    executed: bool,
    spin: Spin,
}

impl<'a> Connection<'a> {
    /// A connection whose handler is opened when something is first attached.
    pub(crate) fn new(
        stream: &'a Stream,
        control: &'a dyn BrickControl,
        stop: &'a Stop,
        open: &'a mut Opener<'a>,
        spin_us_max: u32,
    ) -> Connection<'a> {
        Connection {
            stream,
            control,
            stop,
            open,
            handler: None,
            inflow: Inflow::new(Direction::Request, true),
            outflow: Outflow::default(),
            later: HashMap::new(),
            done: Vec::new(),
            executed: false,
            spin: Spin::new(spin_us_max),
        }
    }

    /// Serves until the client or [`Stop`] ends it.
    pub(crate) fn run(mut self) -> Result<(), Broken> {
        while !self.stop.is_said() {
            let drained = self.take_requests()?;
            self.finish_later();
            self.end_batch()?;
            self.outflow.flush(self.stream)?;
            if !drained && self.may_take() {
                continue;
            }
            if !self.may_take() {
                self.sleep(PollFlags::OUT)?;
            } else if !self.receive()? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn end_batch(&mut self) -> Result<(), Broken> {
        match &mut self.handler {
            Some(handler) if std::mem::take(&mut self.executed) => {
                handler.batch_end().map_err(Broken::Batch)
            }
            _ => Ok(()),
        }
    }

    fn may_take(&self) -> bool {
        self.outflow.len() < UNSENT_REPLY_BYTES_MAX
    }

    /// Does what has arrived; false if it stopped because too many bytes wait
    /// for the client.
    fn take_requests(&mut self) -> Result<bool, Broken> {
        while self.may_take() {
            let Some((header, body)) = self.inflow.next()? else {
                return Ok(true);
            };
            self.take_request(&header, body)?;
        }
        Ok(false)
    }

    fn take_request(&mut self, header: &Header, body: Body) -> Result<(), Malformed> {
        let request = Request::decode(header, self.inflow.share(body))?;
        let answer = match request {
            Request::Control(control) => self.control(control),
            Request::Attach { slice, epoch } => self.handler().and_then(|handler| {
                let attached = handler.attach(slice, epoch)?;
                Ok(Reply::Attached(attached))
            }),
            Request::Slice { handle, request } => match self.execute(handle, request) {
                Outcome::Now(result) => result.map(Reply::Slice),
                Outcome::Later(ticket) => {
                    self.later.insert(ticket, (header.kind, header.tag));
                    return Ok(());
                }
            },
        };
        self.answer(header.kind, header.tag, answer);
        Ok(())
    }

    fn handler(&mut self) -> Result<&mut Box<dyn Handler>, SliceError> {
        match &mut self.handler {
            Some(handler) => Ok(handler),
            none => Ok(none.insert((self.open)()?)),
        }
    }

    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome {
        if self.later.len() == LATER_MAX {
            let cause = format!("a connection waits for at most {LATER_MAX} requests; end some");
            return Outcome::Now(Err(SliceError::Refused(cause)));
        }
        match &mut self.handler {
            Some(handler) => {
                self.executed = true;
                handler.execute(handle, request)
            }
            None => Outcome::Now(Err(SliceError::OutOfRange(
                "nothing is attached to this connection".into(),
            ))),
        }
    }

    fn answer(&mut self, kind: Kind, tag: u64, answer: Answer) {
        let (header, body) = reply::encode(kind, tag, answer);
        self.outflow.push(&header, body);
    }

    fn finish_later(&mut self) {
        if self.later.is_empty() {
            return;
        }
        if let Some(handler) = &mut self.handler {
            handler.poll(&mut self.done);
        }
        let mut done = std::mem::take(&mut self.done);
        for (ticket, result) in done.drain(..) {
            match self.later.remove(&ticket) {
                Some((kind, tag)) => self.answer(kind, tag, result.map(Reply::Slice)),
                None => tracing::error!(?ticket, "a handler finished what was not begun"),
            }
        }
        self.done = done;
    }

    fn control(&self, control: Control) -> Answer {
        let done = |()| Reply::Slice(SliceReply::Done);
        match control {
            Control::Create { slice, size_bytes } => {
                self.control.create(slice, size_bytes).map(done)
            }
            Control::Resize { slice, size_bytes } => {
                self.control.resize(slice, size_bytes).map(done)
            }
            Control::Delete { slice } => self.control.delete(slice).map(done),
            Control::List { after } => self.list(after),
            Control::Status => self.control.status().map(Reply::Status),
        }
    }

    fn list(&self, after: Option<SliceId>) -> Answer {
        let mut slices = self.control.list()?;
        slices.retain(|info| after.is_none_or(|after| info.slice > after));
        slices.sort_unstable_by_key(|info| info.slice);
        let more = slices.len() > LISTED_MAX;
        slices.truncate(LISTED_MAX);
        Ok(Reply::Listed { slices, more })
    }

    /// Receives, after waiting for it if need be; false if the client is gone.
    fn receive(&mut self) -> io::Result<bool> {
        if self.inflow.is_within_large() {
            match self.inflow.receive(self.stream)? {
                Received::Nothing => {}
                received => return Ok(received != Received::End),
            }
        }
        let began = Instant::now();
        let budget = self.spin.budget();
        while began.elapsed() < budget {
            match self.inflow.receive(self.stream)? {
                // Whoever is to send the next request may need this core.
                Received::Nothing => std::thread::yield_now(),
                received => {
                    self.spin.learn(began.elapsed());
                    return Ok(received != Received::End);
                }
            }
        }
        self.sleep(PollFlags::IN)?;
        self.spin.learn(began.elapsed());
        Ok(self.inflow.receive(self.stream)? != Received::End)
    }

    /// Sleeps until the socket is ready for this or, if replies wait, for
    /// sending; or a ticket may be finished; or [`Stop`] is said.
    fn sleep(&self, flags: PollFlags) -> io::Result<()> {
        let flags = match self.outflow.is_empty() {
            true => flags,
            false => flags | PollFlags::OUT,
        };
        let fixed = [
            PollFd::new(self.stream, flags),
            PollFd::new(self.stop, PollFlags::IN),
        ];
        if self.later.is_empty() {
            let mut fds = fixed;
            return wait_any(&mut fds, None).map(drop);
        }
        let mut handlers = Vec::new();
        if let Some(handler) = &self.handler {
            handler.wait_on(&mut handlers);
        }
        let mut fds = fixed.to_vec();
        let watched = handlers.into_iter();
        fds.extend(watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        wait_any(&mut fds, None).map(drop)
    }
}
