//! Queries of the authority for the present layout. Each carries the report about the copies.

use super::call::{BlockingCall, CallOutcome};
use super::report;
use super::state::ControllerState;
use pagemesh_base::authority::{AuthorityError, ResolvedLayout};

/// The layout of the authority, if this client still holds the volume.
pub(super) async fn fetch_layout(
    state: &ControllerState,
) -> Result<ResolvedLayout, AuthorityError> {
    let attachment = state.model().attachment;
    let told = report::copy_report(state);
    let reported = told.replica_snapshots.clone();
    match state
        .call(BlockingCall::FetchLayout {
            attachment,
            report: told,
        })
        .await
    {
        CallOutcome::Layout(Err(AuthorityError::Fenced)) => {
            state.fence();
            Err(AuthorityError::Fenced)
        }
        CallOutcome::Layout(result) => {
            if result.is_ok() {
                state.replica_snapshots.borrow_mut().forget(&reported);
            }
            result
        }
        _ => Err(AuthorityError::Unreachable("it returned no layout".into())),
    }
}

/// Fetches the addresses of bricks, since a brick may be back at another address.
pub(super) async fn refresh_addresses(state: &ControllerState) {
    if let Ok(attached) = fetch_layout(state).await {
        state.adopt_addresses(attached.bricks);
    }
}
