//! Behind a guest that died inside of an operation: each brick finishes or drops it, and
//! they may differ.
//!
//! Nobody else reads or changes the pages meanwhile: who asks for this keeps them from
//! doing so. So no range is locked; who holds one may be waiting for this to end.

use super::check::compare_chunk;
use super::reform::lost_if_gone;
use super::state::State;
use crate::limits::HEAL_RETRY;
use crate::status::CheckReport;
use crate::view::Gate;
use pagemesh_base::slice::SliceRequest;
use pagemesh_base::units::PAGE_BYTES;
use std::rc::Rc;
use std::sync::mpsc::Sender;

/// The only column of a volume that has guests.
const COLUMN: usize = 0;

/// Makes the legs alike in this range, as the leg has it that guests read.
pub(super) async fn heal(state: Rc<State>, offset: u64, len: u64, done: Sender<()>) {
    let page = PAGE_BYTES as u64;
    let start = offset / page * page;
    let len = (offset + len).next_multiple_of(page) - start;
    loop {
        let gate = || state.model().columns.get(COLUMN).map(|column| column.gate);
        state
            .until(|| state.is_over() || gate() == Some(Gate::Open))
            .await;
        if state.is_over() || try_heal(&state, start, len).await {
            // Whoever asked may have stopped waiting.
            let _ = done.send(());
            return;
        }
        state.sleep(HEAL_RETRY).await;
    }
}

async fn try_heal(state: &State, offset: u64, len: u64) -> bool {
    let epoch = state.model().epoch();
    if !await_windows(state).await {
        return false;
    }
    let first = state.model().columns[COLUMN].sources().legs().next();
    let mut report = CheckReport::default();
    let compared = compare_chunk(state, COLUMN, (offset, len), first, &mut report).await;
    if let Err(cause) = &compared {
        tracing::warn!(volume = %state.name, %cause, "what a guest left is not alike yet");
    }
    let is_alike = report.pages_repaired >= report.pages_differing;
    compared.is_ok() && is_alike && state.model().epoch() == epoch
}

/// The barrier: behind it each brick has cleaned up behind who died before.
async fn await_windows(state: &State) -> bool {
    let asked: Vec<_> = {
        let model = state.model();
        let epoch = model.epoch();
        let column = &model.columns[COLUMN];
        let round = column.told_round();
        let legs = column.legs.iter().enumerate();
        let written = legs.filter(|(_, keep)| keep.is_written());
        let connected = written.filter_map(|(leg, keep)| Some((leg, keep.control.clone()?)));
        connected
            .map(|(leg, control)| {
                let request = SliceRequest::RaiseEpoch { epoch, round };
                let tag = control.start(state, request);
                (leg, control, tag)
            })
            .collect()
    };
    let mut all = true;
    for (leg, control, tag) in asked {
        if let Err(error) = control.answer(state, tag).await {
            lost_if_gone(state, COLUMN, leg, &error);
            all = false;
        }
    }
    all
}
