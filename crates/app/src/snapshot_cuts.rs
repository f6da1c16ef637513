//! Cuts of the volumes that this process has attached: it polls the manager for orders, carries them out, and answers.
//!
//! Invariants: one thread for each volume, so a volume has one cut at a time. A thread ends with its volume, or once
//! another client has attached it. An idle thread makes one request a minute. A process does not wait for it at its end.

use anyhow::Context;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_manage::wire::{AnswerCut, CutOrder, CutResult, CutStep, ErrorCode};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_volume::{CutError, CutStep as VolumeStep, Volume};
use std::ops::ControlFlow;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Pause after a failed request. The manager waits for several of them before it gives up an order.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Pause after a refusal, as by a manager of an earlier release, until that may have been replaced.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// Tries to answer an order. Later the manager has given it up.
const ANSWER_TRIES: usize = 5;

/// Why a volume was not cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutFailure {
    /// The layout changed or a leg was lost: another cut may succeed. The manager orders one.
    LayoutChanged(String),
    /// The volume cannot be cut now.
    Failed(String),
}

/// Serves the cuts of these volumes.
pub fn serve(
    manager: &ManagerClient,
    volumes: &[(VolumeName, Weak<Volume>)],
) -> anyhow::Result<()> {
    for (name, volume) in volumes {
        let (manager, name, volume) = (manager.clone(), name.clone(), Weak::clone(volume));
        let thread = std::thread::Builder::new().name("cuts".into());
        thread
            .spawn(move || {
                while let Some(attached) = volume.upgrade() {
                    let attachment = EpochNumber(attached.attachment().0);
                    // The volume ends although this thread waits.
                    drop(attached);
                    let cut = |order| match volume.upgrade() {
                        Some(volume) => cut_volume(&volume, order),
                        None => Err(CutFailure::Failed("the volume is being detached".into())),
                    };
                    match serve_next(&manager, &name, attachment, cut) {
                        ControlFlow::Continue(pause) => std::thread::sleep(pause),
                        ControlFlow::Break(()) => return,
                    }
                }
            })
            .context("cannot start the thread that cuts volumes for snapshots")?;
    }
    Ok(())
}

/// Carries an order out.
fn cut_volume(volume: &Arc<Volume>, order: CutOrder) -> Result<CutResult, CutFailure> {
    let epoch = Epoch(order.epoch.0);
    let done = match order.step {
        CutStep::Whole => volume.cut_snapshot(epoch).map(|()| CutResult::Done),
        CutStep::Finish => {
            let finished = volume.cut_step(epoch, VolumeStep::Finish);
            finished.map(|held| CutResult::Released(held.as_micros() as u64))
        }
        CutStep::Prepare => take_step(volume, epoch, VolumeStep::Prepare),
        CutStep::Raise => take_step(volume, epoch, VolumeStep::Raise),
        CutStep::Abandon => take_step(volume, epoch, VolumeStep::Abandon),
    };
    done.map_err(|cause| match cause.is_transient() {
        true => CutFailure::LayoutChanged(cause.to_string()),
        false => CutFailure::Failed(cause.to_string()),
    })
}

fn take_step(volume: &Volume, epoch: Epoch, step: VolumeStep) -> Result<CutResult, CutError> {
    volume.cut_step(epoch, step).map(|_| CutResult::Done)
}

/// The requests of a client to the manager.
trait CutManager {
    fn poll(
        &self,
        name: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Option<CutOrder>, ManagerError>;

    fn answer(&self, name: &VolumeName, answer: &AnswerCut) -> Result<(), ManagerError>;
}

impl CutManager for ManagerClient {
    fn poll(
        &self,
        name: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Option<CutOrder>, ManagerError> {
        self.poll_cut(name, attachment)
    }

    fn answer(&self, name: &VolumeName, answer: &AnswerCut) -> Result<(), ManagerError> {
        self.answer_cut(name, answer)
    }
}

/// Polls once, and carries an order out. Returns the pause before the next poll, or the end.
fn serve_next(
    manager: &impl CutManager,
    name: &VolumeName,
    attachment: EpochNumber,
    cut: impl Fn(CutOrder) -> Result<CutResult, CutFailure>,
) -> ControlFlow<(), Duration> {
    let order = match manager.poll(name, attachment) {
        Ok(None) => return ControlFlow::Continue(Duration::ZERO),
        Ok(Some(order)) => order,
        Err(cause) => return after_error(&cause),
    };
    let CutOrder { epoch, step } = order;
    let result = match cut(order) {
        Ok(done) => done,
        Err(CutFailure::LayoutChanged(cause)) => CutResult::LayoutChanged(cause),
        Err(CutFailure::Failed(cause)) => CutResult::Failed(cause),
    };
    tracing::info!(volume = %name, epoch = epoch.0, ?step, ?result, "an order to cut the volume for a snapshot was carried out");
    let answer = AnswerCut {
        attachment,
        epoch,
        step,
        result,
    };
    for _ in 0..ANSWER_TRIES {
        match manager.answer(name, &answer) {
            Ok(()) => return ControlFlow::Continue(Duration::ZERO),
            Err(ManagerError::Unreachable { .. }) => std::thread::sleep(Duration::from_millis(200)),
            Err(cause) => return after_error(&cause),
        }
    }
    ControlFlow::Continue(RETRY_PAUSE)
}

fn after_error(cause: &ManagerError) -> ControlFlow<(), Duration> {
    tracing::debug!(%cause, "no order to cut a volume was fetched");
    match cause {
        ManagerError::Fenced { .. } => ControlFlow::Break(()),
        ManagerError::Refused {
            code: ErrorCode::NotFound | ErrorCode::WrongMethod,
            ..
        } => ControlFlow::Continue(REFUSED_PAUSE),
        _ => ControlFlow::Continue(RETRY_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    type Polled = Result<Option<CutOrder>, ManagerError>;

    /// A manager that answers one poll so, and notes the results.
    struct FakeManager {
        polled: Polled,
        lost_answers: RefCell<usize>,
        results: RefCell<Vec<CutResult>>,
    }

    impl FakeManager {
        fn new(polled: Polled) -> FakeManager {
            FakeManager {
                polled,
                lost_answers: RefCell::new(0),
                results: RefCell::default(),
            }
        }
    }

    impl CutManager for FakeManager {
        fn poll(&self, _: &VolumeName, _: EpochNumber) -> Polled {
            self.polled.clone()
        }

        fn answer(&self, _: &VolumeName, answer: &AnswerCut) -> Result<(), ManagerError> {
            assert_eq!(
                (answer.attachment, answer.epoch, answer.step),
                (EpochNumber(3), EpochNumber(5), CutStep::Raise)
            );
            self.results.borrow_mut().push(answer.result.clone());
            let mut lost = self.lost_answers.borrow_mut();
            match lost.checked_sub(1) {
                None => Ok(()),
                Some(left) => {
                    *lost = left;
                    Err(unreachable())
                }
            }
        }
    }

    fn unreachable() -> ManagerError {
        ManagerError::Unreachable {
            url: "http://manager".into(),
            cause: "closed".into(),
        }
    }

    fn refused(code: ErrorCode) -> ManagerError {
        ManagerError::Refused {
            status: code.status(),
            code,
            error: "no".into(),
            hint: "none".into(),
        }
    }

    fn next(
        manager: &FakeManager,
        result: Result<CutResult, CutFailure>,
    ) -> ControlFlow<(), Duration> {
        let name = "v".parse().unwrap();
        serve_next(manager, &name, EpochNumber(3), |given| {
            assert_eq!(Ok(Some(given)), order());
            result.clone()
        })
    }

    fn order() -> Polled {
        let epoch = EpochNumber(5);
        let step = CutStep::Raise;
        Ok(Some(CutOrder { epoch, step }))
    }

    #[test]
    fn order_is_carried_out_and_answered() {
        let failed = || CutFailure::Failed("full".into());
        for (result, wanted) in [
            (Ok(CutResult::Done), CutResult::Done),
            (Ok(CutResult::Released(7)), CutResult::Released(7)),
            (Err(failed()), CutResult::Failed("full".into())),
        ] {
            let manager = FakeManager::new(order());
            let flow = next(&manager, result);
            assert_eq!(flow, ControlFlow::Continue(Duration::ZERO));
            assert_eq!(manager.results.into_inner(), [wanted]);
        }
    }

    #[test]
    fn lost_answer_is_sent_again() {
        let manager = FakeManager::new(order());
        *manager.lost_answers.borrow_mut() = 1;
        let flow = next(&manager, Ok(CutResult::Done));
        assert_eq!(flow, ControlFlow::Continue(Duration::ZERO));
        assert_eq!(manager.results.into_inner().len(), 2);
    }

    #[test]
    fn errors_end_or_delay_the_next_poll() {
        let after = |polled| next(&FakeManager::new(polled), Ok(CutResult::Done));
        let fenced = ManagerError::Fenced {
            error: "over".into(),
            hint: "none".into(),
        };
        assert_eq!(after(Ok(None)), ControlFlow::Continue(Duration::ZERO));
        assert_eq!(after(Err(fenced)), ControlFlow::Break(()));
        let lost = after(Err(unreachable()));
        assert_eq!(lost, ControlFlow::Continue(RETRY_PAUSE));
        // A manager of an earlier release has no such path.
        let old = after(Err(refused(ErrorCode::NotFound)));
        assert_eq!(old, ControlFlow::Continue(REFUSED_PAUSE));
        let busy = after(Err(refused(ErrorCode::Overloaded)));
        assert_eq!(busy, ControlFlow::Continue(RETRY_PAUSE));
    }
}
