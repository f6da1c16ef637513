//! The endpoint that compares snapshots on the copies of a volume.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::document;
use crate::api::reply::{PathParam, QueryParam};
use crate::client::{LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::snapshots::SnapshotName;
use crate::wire::{CheckPosition, CheckSnapshots, ErrorBody, SnapshotCheckReply};
use axum::Json;
use axum::extract::State;
use axum::http::Method;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default().routes(routes!(check_snapshots))
}

/// Compares the pages that snapshots see on the copies of a volume, by their checksums, for some seconds. A client repeats the
/// call with the `next` of the answer.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/snapshot-check", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), CheckSnapshots),
    responses((status = 200, body = SnapshotCheckReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 502, body = ErrorBody)))]
async fn check_snapshots(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(asked): QueryParam<CheckSnapshots>,
) -> JsonResult<SnapshotCheckReply> {
    let check = move |manager: &Manager| {
        manager.check_snapshots(&name, asked.snapshot.as_ref(), asked.from)
    };
    api.run_brick_work(check).await.map(Json)
}

impl ManagerClient {
    /// Compares the pages that snapshots of a volume see on its copies, for some seconds.
    #[allow(clippy::missing_errors_doc)]
    pub fn check_snapshots(
        &self,
        volume: &VolumeName,
        snapshot: Option<&SnapshotName>,
        from: Option<CheckPosition>,
    ) -> Result<SnapshotCheckReply, ManagerError> {
        let snapshot = snapshot.map(|name| format!("snapshot={name}"));
        let from = from.map(|from| format!("from={from}"));
        let parts: Vec<String> = [snapshot, from].into_iter().flatten().collect();
        let path = format!("volumes/{volume}/snapshot-check?{}", parts.join("&"));
        let answer = self.send(Method::GET, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }
}
