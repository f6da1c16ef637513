//! The REST API: its routes and limits.
//!
//! Invariants: only `/healthz`, the login and the files of the console are answered without a credential;
//! without one even the existence of another path stays hidden. A role needs no look-up in handlers: the guard compares it with
//! the role that the route's annotation states. Every refusal of a readable HTTP request is JSON. Blocking
//! work runs on its own threads, at most [`REQUESTS_MAX`] at once, even if clients stop waiting.

mod blocking;
mod caller;
mod common_answers;
mod console;
mod credentials;
pub mod document;
mod document_schemas;
mod endpoints;
mod etag;
pub mod paging;
mod reply;
mod request_guard;
pub mod watch;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use pagemesh_base::key::Key;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

use crate::access::{AllowedHosts, RouteRoles, WrongTokens};
use crate::api_counters::ApiCounters;
use crate::manager::{Manager, VOLUMES_MAX};
use watch::WatchStreams;

/// Bytes of the longest body. The largest sensible body changes every leg of the largest layout,
/// with a note each.
pub const BODY_BYTES_MAX: usize = 2 << 20;
/// Maximum of concurrent requests; the server refuses more. Each may hold a thread.
pub const REQUESTS_MAX: usize = 64;
/// Maximum of concurrent requests that call bricks. They may wait for dead bricks, and must not
/// delay heartbeats and leg changes.
pub const SLOW_REQUESTS_MAX: usize = 8;
/// Maximum of concurrent polls for orders to clients: each attached volume has one.
pub const POLLS_MAX: usize = VOLUMES_MAX;
/// Time limit of a request, its body included. Longer than a few dead bricks take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// The state that all handlers share.
#[derive(Clone)]
pub(crate) struct ApiState {
    manager: Arc<Manager>,
    key: Key,
    /// The role that each route needs.
    roles: Arc<RouteRoles>,
    /// The names under which browsers may reach the manager.
    allowed_hosts: Arc<AllowedHosts>,
    /// The wrong tokens of each address.
    wrong_tokens: Arc<Mutex<WrongTokens>>,
    /// Permits of requests being read and answered.
    request_permits: Arc<Semaphore>,
    /// Permits of polls for orders, which wait for long and do nothing.
    poll_permits: Arc<Semaphore>,
    /// Permits of blocking work, which may outlast its request.
    blocking_permits: Arc<Semaphore>,
    /// Permits of blocking work that waits for bricks.
    brick_permits: Arc<Semaphore>,
    /// The running streams of changes.
    watch_streams: WatchStreams,
}

impl ApiState {
    pub(crate) fn new(manager: Arc<Manager>, key: Key, allowed_hosts: AllowedHosts) -> ApiState {
        ApiState {
            watch_streams: WatchStreams::new(manager.api_counters.clone()),
            manager,
            key,
            roles: Arc::new(document::route_roles()),
            allowed_hosts: Arc::new(allowed_hosts),
            wrong_tokens: Arc::default(),
            request_permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
            poll_permits: Arc::new(Semaphore::new(POLLS_MAX)),
            blocking_permits: Arc::new(Semaphore::new(REQUESTS_MAX)),
            brick_permits: Arc::new(Semaphore::new(SLOW_REQUESTS_MAX)),
        }
    }

    /// The running streams, to end them.
    pub(crate) fn watch_streams(&self) -> WatchStreams {
        self.watch_streams.clone()
    }

    pub(crate) fn router(self) -> Router {
        let (routes, _) = endpoints::routes().split_for_parts();
        routes
            .fallback(endpoints::no_such_path)
            .method_not_allowed_fallback(endpoints::wrong_method)
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .layer(axum::middleware::from_fn_with_state(
                self.clone(),
                request_guard::guard,
            ))
            .layer(axum::middleware::from_fn(console::serve_files))
            .layer(axum::middleware::from_fn_with_state(
                self.manager.api_counters.clone(),
                count_answer,
            ))
            .with_state(self)
    }
}

/// Counts each answer, also the ones of the guard and of the console.
async fn count_answer(
    State(counters): State<Arc<ApiCounters>>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    counters.count_answer(response.status().as_u16());
    response
}
