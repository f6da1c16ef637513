//! `GET /api/v1/watch`: changes as server-sent events.
//!
//! Invariants: a stream holds no permit of requests, and its own from the first byte to the end of
//! its connection; there are at most [`STREAMS_MAX`], of one address [`PEER_STREAMS_MAX`]. A stream
//! ends when the manager stops, when its credential is no longer valid, and when its client does not
//! read: after [`QUEUE_MESSAGES`](crate::events::QUEUE_MESSAGES) messages that it did not take, or
//! when one message waits for longer than the write limit. Then its connection is cut, because
//! hyper would wait for the client for ever.

use super::ApiState;
use super::reply::Refusal;
use crate::access::{Identity, PeerAddress};
use crate::api_counters::ApiCounters;
use crate::connection::ConnectionCut;
use crate::error_code::ErrorCode;
use crate::events::{Subscription, event_frame, frame};
use crate::manager::{Manager, WatchTimes};
use crate::wire::{EventGap, Hello};
use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use hyper::body::{Bytes, Frame};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval_at, sleep_until};

/// Maximum of streams.
pub const STREAMS_MAX: usize = 64;
/// Maximum of streams of one address, so that one machine cannot take all.
pub const PEER_STREAMS_MAX: usize = 16;
/// Events in one message of the past.
const BACKLOG_EVENTS: usize = 100;

/// The running streams.
#[derive(Clone)]
pub(crate) struct WatchStreams {
    by_peer: Arc<Mutex<BTreeMap<IpAddr, usize>>>,
    counters: Arc<ApiCounters>,
    stopping: Arc<watch::Sender<bool>>,
}

/// The right to one stream.
struct StreamPermit {
    streams: WatchStreams,
    peer: IpAddr,
}

impl WatchStreams {
    pub(super) fn new(counters: Arc<ApiCounters>) -> WatchStreams {
        WatchStreams {
            by_peer: Arc::default(),
            counters,
            stopping: Arc::default(),
        }
    }

    /// Ends all streams, also the ones that begin later.
    pub(crate) fn stop(&self) {
        self.stopping.send_replace(true);
    }

    /// Changes to `true` when the manager stops.
    pub(super) fn stopping(&self) -> watch::Receiver<bool> {
        self.stopping.subscribe()
    }

    fn admit(&self, peer: IpAddr) -> Option<StreamPermit> {
        let mut by_peer = self.by_peer.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = by_peer.values().sum();
        let own = by_peer.get(&peer).copied().unwrap_or(0);
        if all >= STREAMS_MAX || own >= PEER_STREAMS_MAX {
            return None;
        }
        by_peer.insert(peer, own + 1);
        self.counters.add_stream();
        Some(StreamPermit {
            streams: self.clone(),
            peer,
        })
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.streams.counters.remove_stream();
        let by_peer = self.streams.by_peer.lock();
        let mut by_peer = by_peer.unwrap_or_else(PoisonError::into_inner);
        match by_peer.get_mut(&self.peer) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(by_peer.remove(&self.peer)),
        }
    }
}

/// The body of the answer: the messages that the stream's task hands over, one at a time.
struct WatchBody {
    messages: mpsc::Receiver<Bytes>,
    _permit: StreamPermit,
}

impl HttpBody for WatchBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.messages.poll_recv(context);
        next.map(|message| message.map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// Starts a stream, or refuses it.
pub(super) fn open(
    api: &ApiState,
    identity: Identity,
    peer: PeerAddress,
    connection: ConnectionCut,
    headers: &HeaderMap,
) -> Result<Response, Refusal> {
    let resume_at = last_event_id(headers)?;
    let Some(permit) = api.watch_streams.admit(peer.0) else {
        return Ok(too_many());
    };
    let manager = &api.manager;
    let subscription = manager.subscribe();
    let (sender, messages) = mpsc::channel(1);
    let dropped_seq = manager.events().dropped_seq();
    // A number that the manager has not given yet comes from another store.
    let sent_seq = resume_at.unwrap_or(u64::MAX).min(subscription.position);
    let gap = (sent_seq < dropped_seq && resume_at.is_some()).then_some(EventGap {
        after: sent_seq,
        up_to: dropped_seq,
    });
    let stream = WatchStream {
        sent_seq,
        gap,
        subscription,
        sender,
        stopping: api.watch_streams.stopping.subscribe(),
        times: manager.settings.watch,
        connection,
        identity,
        manager: manager.clone(),
    };
    tokio::spawn(stream.run());
    let body = WatchBody {
        messages,
        _permit: permit,
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        // Proxies must pass on each message at once.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    Ok((headers, Body::new(body)).into_response())
}

/// Refuses a stream, and closes the connection: idle connections of many refused clients would keep
/// others out.
fn too_many() -> Response {
    let refusal = Refusal::new(
        ErrorCode::Overloaded,
        "the manager has too many watching clients, or too many of this address",
        "close a page or a `pagemesh events --follow`, or ask for lists at intervals",
    );
    let mut response = refusal.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The number after which the client wants to continue.
fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let Some(value) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    number.map(Some).ok_or_else(|| {
        Refusal::new(
            ErrorCode::BadRequest,
            "Last-Event-ID is not the number of an event",
            "send the id of the last event of the stream, or leave the header out",
        )
    })
}

/// The task of a stream.
struct WatchStream {
    manager: Arc<Manager>,
    subscription: Subscription,
    sent_seq: u64,
    /// The events that are missing between the client's last one and the stream.
    gap: Option<EventGap>,
    sender: mpsc::Sender<Bytes>,
    stopping: watch::Receiver<bool>,
    times: WatchTimes,
    connection: ConnectionCut,
    identity: Identity,
}

impl WatchStream {
    async fn run(mut self) {
        let start = Instant::now();
        let mut checks = interval_at(start + self.times.check_every, self.times.check_every);
        let mut pending = Some(self.first_message());
        let mut since = start;
        loop {
            if pending.is_none() {
                pending = self.next_of_past();
                if pending.is_some() {
                    since = Instant::now();
                }
            }
            let is_pending = pending.is_some();
            let limit = if is_pending {
                self.times.write_limit
            } else {
                self.times.comment_every
            };
            tokio::select! {
                biased;
                _ = self.stopping.wait_for(|stopping| *stopping) => {
                    // A body that waits for its client would hold up the end of the manager.
                    return if is_pending { self.connection.cut() };
                }
                () = self.sender.closed() => return,
                _ = checks.tick() => {
                    if !self.manager.is_still_valid(&self.identity) {
                        return self.connection.cut();
                    }
                }
                permit = self.sender.reserve(), if is_pending => {
                    let (Ok(permit), Some(message)) = (permit, pending.take()) else {
                        return;
                    };
                    permit.send(message);
                    since = Instant::now();
                }
                next = self.subscription.messages.recv(), if !is_pending => {
                    match next {
                        Ok(message) => pending = message.readable_by(self.identity.role),
                        Err(RecvError::Lagged(_)) => return self.connection.cut(),
                        Err(RecvError::Closed) => return,
                    }
                    if pending.is_some() {
                        since = Instant::now();
                    }
                }
                () = sleep_until(since + limit) => {
                    if is_pending {
                        return self.connection.cut();
                    }
                    pending = Some(Bytes::from_static(b": \n\n"));
                    since = Instant::now();
                }
            }
        }
    }

    /// The `hello`, and the gap after it.
    fn first_message(&self) -> Bytes {
        let mut message = frame("hello", None, &self.hello());
        if let Some(gap) = &self.gap {
            message.extend(frame("gap", None, gap));
        }
        message.into()
    }

    fn hello(&self) -> Hello {
        Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_unix_ms: self.manager.started_unix_ms,
            last_seq: self.subscription.position,
        }
    }

    /// The next events before the subscription, in one message.
    fn next_of_past(&mut self) -> Option<Bytes> {
        let ring = self.manager.events();
        let past = ring.after(self.sent_seq);
        let past = past.take_while(|event| event.seq <= self.subscription.position);
        let past = past.filter(|event| event.kind.is_readable_by(self.identity.role));
        let mut message = Vec::new();
        for event in past.take(BACKLOG_EVENTS) {
            self.sent_seq = event.seq;
            message.extend(event_frame(event));
        }
        if message.is_empty() {
            self.sent_seq = self.subscription.position;
            return None;
        }
        Some(message.into())
    }
}
