//! The REST API: routes, and nothing of what they do.
//!
//! Invariants: nothing but `/healthz` is answered without the cluster's
//! token, not even whether a path exists. Every refusal of a request that can
//! be read as HTTP is JSON. Blocking work runs on threads for it, at most [`REQUESTS_MAX`] at once, whatever clients
//! have stopped waiting.

pub mod document;
mod guard;
mod handlers;
mod reply;
mod work;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post, put};
use pagemesh_base::key::Key;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

use crate::manager::Manager;

/// Bytes of the longest body. The largest that makes sense changes every leg
/// of the largest layout with a note each.
pub const BODY_BYTES_MAX: usize = 2 << 20;
/// Requests at once; more are refused. Each may hold a thread.
pub const REQUESTS_MAX: usize = 64;
/// Requests that talk to bricks at once. They may wait for dead ones, and must
/// not keep heartbeats and leg changes waiting.
pub const SLOW_REQUESTS_MAX: usize = 8;
/// A request's time, its body included. Longer than a few dead bricks take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What every handler can reach.
#[derive(Clone)]
pub(crate) struct Api {
    manager: Arc<Manager>,
    key: Key,
    /// Requests being read and answered.
    requests: Arc<Semaphore>,
    /// Blocking work, which may outlast its request.
    work: Arc<Semaphore>,
    /// Of that, what waits for bricks.
    slow: Arc<Semaphore>,
}

impl Api {
    pub(crate) fn new(manager: Arc<Manager>, key: Key) -> Api {
        Api {
            manager,
            key,
            requests: Arc::new(Semaphore::new(REQUESTS_MAX)),
            work: Arc::new(Semaphore::new(REQUESTS_MAX)),
            slow: Arc::new(Semaphore::new(SLOW_REQUESTS_MAX)),
        }
    }

    pub(crate) fn router(self) -> Router {
        let one = get(handlers::show_volume).delete(handlers::delete_volume);
        let brick = put(handlers::heartbeat).delete(handlers::forget_brick);
        let v1 = Router::new()
            .route("/status", get(handlers::status))
            .route("/openapi.json", get(handlers::openapi))
            .route("/bricks", get(handlers::list_bricks))
            .route("/bricks/{brick}", brick)
            .route("/bricks/{brick}/scrub", post(handlers::scrub_brick))
            .route(
                "/volumes",
                get(handlers::list_volumes).post(handlers::create_volume),
            )
            .route("/volumes/{name}", one)
            .route("/volumes/{name}/grow", post(handlers::grow_volume))
            .route("/volumes/{name}/replicas", post(handlers::attach_replica))
            .route(
                "/volumes/{name}/replicas/detach",
                post(handlers::detach_replica),
            )
            .route(
                "/volumes/{name}/replicas/promote",
                post(handlers::promote_replica),
            )
            .route("/volumes/{name}/attach", post(handlers::attach_volume))
            .route("/volumes/{name}/detach", post(handlers::detach_volume))
            .route("/volumes/{name}/copies", post(handlers::tell_copies))
            .route("/volumes/{name}/legs", post(handlers::change_legs));
        Router::new()
            .route("/healthz", get(handlers::healthz))
            .nest("/api/v1", v1)
            .fallback(handlers::no_such_path)
            .method_not_allowed_fallback(handlers::wrong_method)
            .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
            .layer(axum::middleware::from_fn_with_state(
                self.clone(),
                guard::guard,
            ))
            .with_state(self)
    }
}
