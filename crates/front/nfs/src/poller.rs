//! A polling thread: waits for events of all connections together with the other polling threads,
//! reads calls, and runs them if they are short: a handover to another thread would cost more.

use crate::connection::Received;
use crate::connection::{Connection, EndReason, Input};
use crate::dispatcher::{Deferred, Dispatcher, Turn};
use crate::limits::{EVENTS_AT_ONCE, READS_PER_TURN, RECEIVE_BYTES};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, Event, EventFlags};
use rustix::io::Errno;
use std::sync::Arc;

/// The event of the signal that ends polling threads.
pub(crate) const END_EVENT: u64 = u64::MAX;

/// See the module.
pub(crate) struct Poller<'a> {
    pub(crate) dispatcher: &'a Dispatcher,
    /// The place of its figures.
    pub(crate) thread: usize,
    buffer: Box<[u8]>,
}

impl<'a> Poller<'a> {
    pub(crate) fn new(dispatcher: &'a Dispatcher, thread: usize) -> Self {
        Self {
            dispatcher,
            thread,
            buffer: vec![0; RECEIVE_BYTES].into(),
        }
    }

    /// Serves connections until the end event.
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub(crate) fn run(&mut self) -> Result<(), Errno> {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS_AT_ONCE);
        let mut deferred = Deferred::new(self.thread);
        loop {
            events.clear();
            let epoll = &self.dispatcher.connections.epoll;
            match epoll::wait(epoll, spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
            for event in &events {
                let id = event.data.u64();
                if id == END_EVENT {
                    return Ok(());
                }
                if let Some(connection) = self.dispatcher.connections.get(id) {
                    self.serve(&connection, event.flags, &mut deferred);
                }
            }
            // A call may take long, so calls are the last duty.
            self.dispatcher.run_deferred(&mut deferred);
        }
    }

    fn serve(&mut self, connection: &Arc<Connection>, event: EventFlags, deferred: &mut Deferred) {
        let Some(mut input) = connection.begin_turn(event) else {
            return;
        };
        match self.take_calls(connection, &mut input, deferred) {
            // Another thread may read further calls from now on.
            Ok(Turn::Over | Turn::Parked) => connection.end_turn(input),
            Err(EndReason::Fenced) => connection.close(EndReason::Fenced),
            Err(reason) => connection.end_input(reason),
        }
    }

    fn take_calls(
        &mut self,
        connection: &Arc<Connection>,
        input: &mut Input,
        deferred: &mut Deferred,
    ) -> Result<Turn, EndReason> {
        let dispatcher = self.dispatcher;
        if let Some(record) = input.take_parked() {
            let rest = input.take_unparsed();
            match dispatcher.take_last_record(connection, input, record, deferred)? {
                Turn::Over => {}
                turn => {
                    input.unparse(&rest);
                    return Ok(turn);
                }
            }
            match dispatcher.take_bytes(connection, input, &rest, deferred)? {
                Turn::Over => {}
                turn => return Ok(turn),
            }
        }
        let Some(socket) = connection.socket() else {
            return Ok(Turn::Over);
        };
        for _ in 0..READS_PER_TURN {
            let received = input.receive(&*socket, &mut self.buffer);
            let turn = match received.map_err(EndReason::of_socket)? {
                Received::Nothing => return Ok(Turn::Over),
                Received::End => return Err(EndReason::Closed),
                Received::Part => continue,
                Received::Record(record) => {
                    dispatcher.take_last_record(connection, input, record, deferred)?
                }
                Received::Bytes(count) => {
                    let bytes = self.buffer.get(..count).unwrap_or_default();
                    let turn = dispatcher.take_bytes(connection, input, bytes, deferred)?;
                    let is_drained = count < self.buffer.len() && !input.is_within_long_fragment();
                    match turn {
                        // A short read has taken all bytes.
                        Turn::Over if is_drained => return Ok(Turn::Over),
                        turn => turn,
                    }
                }
            };
            if !matches!(turn, Turn::Over) {
                return Ok(turn);
            }
        }
        Ok(Turn::Over)
    }
}
