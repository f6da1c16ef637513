//! Replies to a client: in the order of their ends, by one thread at a time, several with one
//! system call, and without a copy.

use super::{Connection, ConnectionState, EndReason, UnsentReply};
use crate::limits::REPLIES_AT_ONCE;
use crate::rpc::Reply;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::TcpStream;
use std::sync::MutexGuard;
use std::time::Instant;

impl Connection {
    /// Sends the reply to an admitted call with these bytes, or keeps it until the socket takes it.
    pub(crate) fn reply(&self, reply: Reply, call_bytes: usize) {
        if self.queue_reply(reply, call_bytes) {
            self.send_queued();
        }
    }

    /// Adds the reply to an admitted call with these bytes. Returns whether the caller must see to it
    /// that [`send_queued`](Self::send_queued) follows.
    pub(crate) fn queue_reply(&self, reply: Reply, call_bytes: usize) -> bool {
        let mut state = self.lock();
        state.bytes = state.bytes - call_bytes + reply.len();
        if state.is_closed {
            let len = reply.len();
            self.release(&mut state, 1, len);
            return false;
        }
        let is_blocked = state.blocked_since.is_some();
        let held = state.held_output + reply.len();
        state.replies.push_back(UnsentReply { reply, sent: 0 });
        if is_blocked {
            let is_overload = self.connections.hold(&mut state.held_output, held);
            drop(state);
            if is_overload {
                self.connections.make_room_for_bytes();
            }
            return false;
        }
        // The thread that writes sends it, too.
        !state.is_writing
    }

    /// Sends queued replies, unless another thread does, or the socket is blocked.
    pub(crate) fn send_queued(&self) {
        let state = self.lock();
        if state.blocked_since.is_none() && !state.replies.is_empty() {
            self.begin_sends(state);
        }
    }

    /// Sends further replies after the socket was blocked.
    pub(super) fn send_blocked(&self) {
        self.begin_sends(self.lock());
    }

    fn begin_sends(&self, mut state: MutexGuard<'_, ConnectionState>) {
        if state.is_writing || state.is_closed {
            return;
        }
        let Some(socket) = state.socket.clone() else {
            return;
        };
        state.is_writing = true;
        let replies = std::mem::take(&mut state.replies);
        drop(state);
        self.send_all(&socket, replies);
    }

    /// Sends replies until there are none, or the socket takes no more. The caller is the one thread
    /// that writes.
    fn send_all(&self, socket: &TcpStream, mut replies: VecDeque<UnsentReply>) {
        loop {
            let sent = send_some(socket, &mut replies);
            let mut state = self.lock();
            let done = match sent {
                Ok(done) => done,
                Err(Errno::AGAIN) => return self.block(state, replies),
                Err(errno) => {
                    state.is_writing = false;
                    drop(state);
                    return self.close(EndReason::of_socket(errno.into()));
                }
            };
            if done.calls > 0 {
                state.last_event = Instant::now();
                if state.blocked_since.is_some() {
                    state.blocked_since = Some(state.last_event);
                }
            }
            if state.is_closed {
                state.is_writing = false;
                return;
            }
            replies.append(&mut state.replies);
            let is_over = replies.is_empty();
            if is_over {
                state.is_writing = false;
                state.blocked_since = None;
                self.connections.hold(&mut state.held_output, 0);
            }
            self.release(&mut state, done.calls, done.bytes);
            let ends = state.end.is_some();
            drop(state);
            if is_over {
                if ends {
                    self.close_if_over();
                }
                return;
            }
        }
    }

    /// Keeps replies until the socket takes bytes again.
    fn block(
        &self,
        mut state: MutexGuard<'_, ConnectionState>,
        mut replies: VecDeque<UnsentReply>,
    ) {
        state.is_writing = false;
        if state.is_closed {
            return;
        }
        replies.append(&mut state.replies);
        state.replies = replies;
        state.blocked_since.get_or_insert_with(Instant::now);
        let unsent = state.replies.iter();
        let held = unsent.map(|it| it.reply.len() - it.sent).sum();
        let is_overload = self.connections.hold(&mut state.held_output, held);
        self.arm(&mut state);
        drop(state);
        if is_overload {
            self.connections.make_room_for_bytes();
        }
    }
}

/// Sends the front replies with one system call, and removes those that are sent as a whole.
fn send_some(
    socket: &TcpStream,
    replies: &mut VecDeque<UnsentReply>,
) -> Result<SentReplies, Errno> {
    let mut parts = Vec::with_capacity(3 * REPLIES_AT_ONCE);
    for unsent in replies.iter().take(REPLIES_AT_ONCE) {
        let mut skipped = unsent.sent;
        for part in unsent.reply.parts() {
            let skip = skipped.min(part.len());
            skipped -= skip;
            if skip < part.len() {
                parts.push(IoSlice::new(&part[skip..]));
            }
        }
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = loop {
        let mut control = SendAncillaryBuffer::default();
        match sendmsg(socket, &parts, &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    Ok(remove_sent(replies, sent))
}

/// Replies that were sent as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SentReplies {
    calls: usize,
    bytes: usize,
}

fn remove_sent(replies: &mut VecDeque<UnsentReply>, mut sent: usize) -> SentReplies {
    let mut done = SentReplies::default();
    while let Some(front) = replies.front_mut() {
        let len = front.reply.len();
        let left = len - front.sent;
        if sent < left {
            front.sent += sent;
            break;
        }
        sent -= left;
        done.calls += 1;
        done.bytes += len;
        replies.pop_front();
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;

    #[test]
    fn sent_bytes_end_at_any_place_of_replies() {
        let reply = || Reply::refused(1, Refusal::SystemError);
        let len = reply().len();
        for sent in 0..=3 * len {
            let unsent = |_| UnsentReply {
                reply: reply(),
                sent: 0,
            };
            let mut replies: VecDeque<_> = (0..3).map(unsent).collect();
            let done = remove_sent(&mut replies, sent);
            assert_eq!((done.calls, done.bytes), (sent / len, sent / len * len));
            assert_eq!(replies.len(), 3 - sent / len);
            assert_eq!(replies.front().map_or(0, |it| it.sent), sent % len);
        }
    }
}
