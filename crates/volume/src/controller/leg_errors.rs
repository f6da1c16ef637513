//! The consequences of a leg's error: the leg is lost, or this client is fenced.

use super::state::ControllerState;
use pagemesh_base::slice::SliceError;

/// Handles the error of a leg that refused a mandatory request: either the leg is lost, or this
/// client is fenced.
pub(super) fn handle_leg_error(
    state: &ControllerState,
    column: usize,
    leg: usize,
    error: &SliceError,
) {
    match error {
        SliceError::StaleEpoch { current } if *current > state.shared.held_epoch() => state.fence(),
        other => state.lose_leg(column, leg, &other.to_string()),
    }
}

/// Loses a leg only if its connection is gone. The failed request is not mandatory.
pub(super) fn lose_leg_if_gone(
    state: &ControllerState,
    column: usize,
    leg: usize,
    error: &SliceError,
) {
    if matches!(error, SliceError::Lost(_) | SliceError::StaleEpoch { .. }) {
        handle_leg_error(state, column, leg, error);
    }
}
