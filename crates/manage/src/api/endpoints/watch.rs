//! The endpoint of streams of changes.

use crate::access::{Identity, PeerAddress};
use crate::api::ApiState;
use crate::api::document::StreamMessage;
use crate::api::reply::Refusal;
use crate::api::watch;
use crate::connection::ConnectionCut;
use crate::wire::ErrorBody;
use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default().routes(routes!(watch_changes))
}

/// Changes as server-sent events: `hello`, then `status`, `brick` and `volume` with the items of the
/// lists (or `{name, deleted}`), `event` with its number as `id`, and `acknowledged`. `Last-Event-ID`
/// continues after an event; `gap` (`{after, up_to}`) names the dropped events that cannot follow. Events
/// about tokens are for the role `admin` and above. A client that falls behind by 256 messages is cut off.
#[utoipa::path(get, path = "/api/v1/watch", tag = "events",
    security(("token" = ["viewer"])),
    params(("Last-Event-ID" = Option<u64>, Header, description = "Begin after the event of this number; with the next event if missing")),
    responses((status = 200, body = StreamMessage, content_type = "text/event-stream",
            description = "The stream of such messages; the first is a `hello`"),
        (status = 400, body = ErrorBody),
        (status = 503, body = ErrorBody, description = "64 streams are open, or 16 from this address")))]
async fn watch_changes(
    State(api): State<ApiState>,
    Extension(identity): Extension<Identity>,
    Extension(peer): Extension<PeerAddress>,
    Extension(connection): Extension<ConnectionCut>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    watch::open(&api, identity, peer, connection, &headers)
}
