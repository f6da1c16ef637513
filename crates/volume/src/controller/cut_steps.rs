//! A cut in steps: the volumes of a group are cut at one moment.
//!
//! The manager orders each step from the clients of all volumes, and the next one once all have answered:
//!
//! 1. [`CutStep::Prepare`]: the written legs keep the versions that the snapshot sees.
//! 2. [`CutStep::Raise`]: changes that begin from here on wait.
//! 3. [`CutStep::Finish`]: the waiting changes go on with the stamp of the snapshot, and the older ones end.
//!
//! So no change with a new stamp is acknowledged on any volume before the stamps of all are raised: if a snapshot of the
//! group has a change that began after another one was acknowledged, the group has the other one, too.
//!
//! Invariants:
//! - Changes wait [`HOLD_LIMIT`](crate::limits::HOLD_LIMIT) at most, also if a process ends meanwhile. A cut fails if its changes
//!   went on before the order.
//! - A volume has one cut in steps at a time. A newer cut ends it: the manager has given it up.

use super::Task;
use super::cut::{self, CutError, CutLegs};
use super::state::ControllerState;
use crate::limits::CUT_LIMIT;
use pagemesh_base::ids::Epoch;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// A step of a cut, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CutStep {
    /// The legs prepare.
    Prepare,
    /// Changes wait.
    Raise,
    /// Changes go on, and the older ones end.
    Finish,
    /// The cut is given up.
    Abandon,
}

/// The result of a step: for [`CutStep::Finish`], how long changes waited.
pub type StepResult = Result<Duration, CutError>;

/// An order to carry a step out.
pub struct StepOrder {
    /// The epoch of the snapshot.
    pub snapshot: Epoch,
    /// The step.
    pub step: CutStep,
    /// Gets the result.
    pub answer: Sender<StepResult>,
}

/// A cut that goes on in steps.
pub(super) struct StepCut {
    snapshot: Epoch,
    ordered: Cell<CutStep>,
    /// The last step that is done.
    reached: Cell<Option<CutStep>>,
    result: RefCell<Option<StepResult>>,
    answer: RefCell<Option<Sender<StepResult>>>,
}

impl StepCut {
    fn new(snapshot: Epoch) -> StepCut {
        StepCut {
            snapshot,
            ordered: Cell::new(CutStep::Prepare),
            reached: Cell::default(),
            result: RefCell::default(),
            answer: RefCell::default(),
        }
    }

    /// Tells the manager that a step is done, and waits for the order of the next one.
    pub(super) async fn pass(
        &self,
        state: &ControllerState,
        legs: &CutLegs,
        step: CutStep,
        until: Duration,
    ) -> Result<(), CutError> {
        self.reached.set(Some(step));
        self.reply(Ok(Duration::ZERO));
        let is_ordered = || self.ordered.get() > step;
        legs.wait_until(state, until, is_ordered).await?;
        match self.ordered.get() {
            CutStep::Abandon => Err(CutError::Abandoned),
            _ => Ok(()),
        }
    }

    fn reply(&self, result: StepResult) {
        if let Some(answer) = self.answer.take() {
            // The caller may have stopped waiting.
            let _ = answer.send(result);
        }
    }

    fn end(&self, result: StepResult) {
        *self.result.borrow_mut() = Some(result.clone());
        self.reply(result);
    }

    /// Takes an order. A repeated one gets its answer again.
    fn order(&self, step: CutStep, answer: Sender<StepResult>) {
        let result = self.result.borrow().clone();
        let has_reached = |step| self.reached.get().is_some_and(|reached| reached >= step);
        let at_once = match (result, step) {
            (_, CutStep::Abandon) => {
                self.ordered.set(CutStep::Abandon);
                Some(Ok(Duration::ZERO))
            }
            (Some(result), _) => Some(result),
            (None, step) if has_reached(step) => Some(Ok(Duration::ZERO)),
            (None, CutStep::Finish) if !has_reached(CutStep::Raise) => {
                Some(Err(CutError::NoSuchStep(self.snapshot)))
            }
            (None, CutStep::Raise) if !has_reached(CutStep::Prepare) => {
                Some(Err(CutError::NoSuchStep(self.snapshot)))
            }
            (None, step) => {
                self.ordered.set(self.ordered.get().max(step));
                None
            }
        };
        *self.answer.borrow_mut() = Some(answer);
        if let Some(result) = at_once {
            self.reply(result);
        }
    }
}

/// Takes an order for the present cut, or for a new one. Returns the task of the cut that it begins.
pub(super) fn take(
    state: &Rc<ControllerState>,
    present: &mut Option<Rc<StepCut>>,
    order: StepOrder,
) -> Option<Task> {
    let StepOrder {
        snapshot,
        step,
        answer,
    } = order;
    match present.as_ref().filter(|it| it.snapshot == snapshot) {
        Some(same) => same.order(step, answer),
        None if step == CutStep::Prepare => {
            let begun = Rc::new(StepCut::new(snapshot));
            begun.order(step, answer);
            let before = present.replace(Rc::clone(&begun));
            return Some(Box::pin(run(Rc::clone(state), begun, before)));
        }
        None => {
            let result = match step {
                CutStep::Abandon => Ok(Duration::ZERO),
                _ => Err(CutError::NoSuchStep(snapshot)),
            };
            let _ = answer.send(result);
        }
    }
    None
}

/// Carries a cut out, step by step.
async fn run(state: Rc<ControllerState>, begun: Rc<StepCut>, before: Option<Rc<StepCut>>) {
    supersede(&state, before).await;
    let result = cut::run(&state, begun.snapshot, Some(&begun)).await;
    begun.end(result);
    state.record_activity();
}

/// Ends a cut that waits for its next step.
pub(super) async fn supersede(state: &ControllerState, present: Option<Rc<StepCut>>) {
    let Some(present) = present else {
        return;
    };
    present.ordered.set(CutStep::Abandon);
    state.record_activity();
    let until = state.now() + CUT_LIMIT;
    let has_ended = || present.result.borrow().is_some();
    let is_late = || {
        state.wake_at(until);
        state.now() >= until
    };
    state.wait_until(|| has_ended() || is_late()).await;
}
