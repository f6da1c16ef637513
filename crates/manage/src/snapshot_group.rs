//! Snapshots of several volumes at one moment: `snapshots::group` says the steps, this module carries them out.

use crate::fault::Fault;
use crate::manager::Manager;
use crate::records::Attachment;
use crate::snapshot_cut::{Attempt, Reservation, change_since};
use crate::snapshots::{
    CutOutcome, CutResult, CutStep, GROUP_ATTEMPTS_MAX, GroupAction, GroupCut, SnapshotFault,
};
use crate::wire::CreateSnapshot;
use pagemesh_base::layout::VolumeName;
use std::time::{Duration, Instant};

/// The time in which clients fetch the order to give a cut up. Their own limit ends the wait of changes in any case.
const ABANDON_TIME: Duration = Duration::from_millis(500);

/// The end of a step that a volume did not reach.
enum StepFailure {
    /// The volume changed, or its changes waited for too long. Another attempt may succeed.
    Void(String),
    Failed(Fault),
}

/// The cuts of a group, and the longest time that the changes of one volume waited. None: no client has attached one.
pub(crate) type CutVolumes<'a> = (Vec<Reservation<'a>>, Option<Duration>);

impl Manager {
    /// Cuts volumes at one moment. The snapshots are not committed yet.
    ///
    /// # Errors
    /// The volume that failed, and its fault; then none has a snapshot.
    pub(crate) fn cut_group(
        &self,
        volumes: &[VolumeName],
        request: &CreateSnapshot,
        until: Instant,
    ) -> Result<CutVolumes<'_>, Box<(VolumeName, Fault)>> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let mut cuts = Vec::new();
            for volume in volumes {
                let reserved = self.reserve(volume, request);
                cuts.push(reserved.map_err(|fault| Box::new((volume.clone(), fault)))?);
            }
            let (number, failure) = match self.try_group(&mut cuts, until) {
                Ok(held) => return Ok((cuts, held)),
                Err(failure) => failure,
            };
            let volume = volumes[number].clone();
            let cause = match failure {
                StepFailure::Failed(fault) => return Err(Box::new((volume, fault))),
                StepFailure::Void(cause) => cause,
            };
            if attempts == GROUP_ATTEMPTS_MAX || Instant::now() >= until {
                let fault = SnapshotFault::Unsteady {
                    volume: volume.clone(),
                    attempts,
                    cause,
                };
                return Err(Box::new((volume, fault.into())));
            }
        }
    }

    /// One attempt. Returns the longest wait of changes, or the first volume that failed.
    fn try_group(
        &self,
        cuts: &mut [Reservation<'_>],
        until: Instant,
    ) -> Result<Option<Duration>, (usize, StepFailure)> {
        let mut group = GroupCut::new(cuts.iter().map(|cut| cut.attachment.is_some()));
        let mut held = None::<Duration>;
        let mut first_failure = None;
        loop {
            let results = match group.next() {
                GroupAction::Order(step, volumes) => self.order_step(cuts, step, &volumes, until),
                GroupAction::PrepareLegs(volumes) => self.prepare_unattached(cuts, &volumes),
                GroupAction::Check => self.check_reservations(cuts),
                GroupAction::Commit => return Ok(held),
                GroupAction::GiveUp => {
                    let unknown = || (0, StepFailure::Void("it was given up".into()));
                    return Err(first_failure.unwrap_or_else(unknown));
                }
            };
            for (number, result) in results {
                match result {
                    Ok(waited) => held = held.max(waited),
                    Err(failure) => {
                        group.fail();
                        first_failure.get_or_insert((number, failure));
                    }
                }
            }
        }
    }

    /// Orders a step from the clients of these volumes at once, and waits for all answers.
    fn order_step(
        &self,
        cuts: &mut [Reservation<'_>],
        step: CutStep,
        volumes: &[usize],
        until: Instant,
    ) -> Vec<(usize, StepResult)> {
        let placed: Vec<_> = volumes
            .iter()
            .map(|&number| (number, self.place_step(&cuts[number], step)))
            .collect();
        let fetch_until = Instant::now() + self.settings.cut.fetch;
        let until = match step {
            CutStep::Abandon => Instant::now() + ABANDON_TIME,
            _ => until,
        };
        let mut results = Vec::new();
        for (number, placed) in placed {
            let result = placed.and_then(|attachment| {
                let cut = &mut cuts[number];
                let outcome = self
                    .cut_orders
                    .wait(&cut.volume, cut.epoch, fetch_until, until);
                note_outcome(cut, step, &outcome);
                step_result(&cut.volume, attachment.client, outcome)
            });
            results.push((number, result));
        }
        results
    }

    /// Orders a step from the client that has attached a volume. Under the lock no other client attaches.
    fn place_step(&self, cut: &Reservation<'_>, step: CutStep) -> Result<Attachment, StepFailure> {
        let book = self.state();
        let attachment = cut.attachment.clone();
        match (attachment, change_since(&book, cut)) {
            (Some(attachment), None) => {
                let order = (cut.epoch, step);
                self.cut_orders
                    .place_step(&cut.volume, attachment.epoch, order);
                Ok(attachment)
            }
            (_, change) => Err(StepFailure::Void(change.unwrap_or_default())),
        }
    }

    fn prepare_unattached(
        &self,
        cuts: &mut [Reservation<'_>],
        volumes: &[usize],
    ) -> Vec<(usize, StepResult)> {
        let prepare = |&number: &usize| {
            let result = match self.prepare_legs(&mut cuts[number]) {
                Ok(Attempt::Done) => Ok(None),
                Ok(Attempt::Void(cause)) => Err(StepFailure::Void(cause)),
                Err(fault) => Err(StepFailure::Failed(fault)),
            };
            (number, result)
        };
        volumes.iter().map(prepare).collect()
    }

    fn check_reservations(&self, cuts: &[Reservation<'_>]) -> Vec<(usize, StepResult)> {
        let book = self.state();
        let check = |(number, cut): (usize, &Reservation<'_>)| {
            let change = change_since(&book, cut);
            (
                number,
                change.map_or(Ok(None), |cause| Err(StepFailure::Void(cause))),
            )
        };
        cuts.iter().enumerate().map(check).collect()
    }
}

/// How long the changes of a volume waited, if the step tells it.
type StepResult = Result<Option<Duration>, StepFailure>;

/// Notes the orders that a client may have given to its bricks. Only the first step prepares them.
fn note_outcome(cut: &mut Reservation<'_>, step: CutStep, outcome: &CutOutcome) {
    if step == CutStep::Prepare {
        cut.is_known = !matches!(outcome, CutOutcome::NotFetched);
        cut.is_certain = matches!(outcome, CutOutcome::NotFetched | CutOutcome::Answered(_));
    }
}

fn step_result(volume: &VolumeName, client: String, outcome: CutOutcome) -> StepResult {
    let volume = volume.clone();
    let fault = match outcome {
        CutOutcome::Answered(CutResult::Done) => return Ok(None),
        CutOutcome::Answered(CutResult::Released(waited_us)) => {
            return Ok(Some(Duration::from_micros(waited_us)));
        }
        CutOutcome::Answered(CutResult::LayoutChanged(cause)) => {
            return Err(StepFailure::Void(cause));
        }
        CutOutcome::Ended => {
            let ended = format!("the attachment of {client} ended");
            return Err(StepFailure::Void(ended));
        }
        CutOutcome::Answered(CutResult::Failed(cause)) => SnapshotFault::Refused {
            volume,
            client,
            cause,
        },
        CutOutcome::NotFetched => SnapshotFault::NotFetched { volume, client },
        CutOutcome::NotAnswered => SnapshotFault::NotAnswered { volume, client },
    };
    Err(StepFailure::Failed(fault.into()))
}
