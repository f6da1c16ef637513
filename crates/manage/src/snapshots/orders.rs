//! Orders to clients: a client that has attached a volume polls for cuts, and answers them.
//!
//! Invariants: a volume has at most one order and one poll at a time; a later poll replaces the earlier one. Memory
//! alone holds them: a restarted manager drops all snapshots that were not committed. The lock is taken last, after the
//! lock of the state, and is not held over waits of other threads.

use pagemesh_base::layout::{EpochNumber, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use utoipa::ToSchema;

/// The result of a cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum CutResult {
    /// The step is done. At the end all written legs have the snapshot, and all earlier changes have ended.
    Done,
    /// The same for `finish`, with the microseconds that changes waited.
    Released(u64),
    /// The layout changed, or a leg was lost. The manager tries again with another epoch.
    LayoutChanged(String),
    /// The client cannot make snapshots of the volume now.
    Failed(String),
}

/// The part of a cut that an order is for.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum CutStep {
    /// All of it, for one volume.
    #[default]
    Whole,
    /// For volumes that are cut at one moment: the legs prepare the snapshot.
    Prepare,
    /// Changes that begin from now on wait, for half a second at most.
    Raise,
    /// They go on with the epoch of the snapshot, and the older ones end.
    Finish,
    /// The snapshots are given up, and changes go on.
    Abandon,
}

impl CutStep {
    pub(crate) fn is_whole(&self) -> bool {
        *self == CutStep::Whole
    }
}

/// The orders of all volumes.
#[derive(Debug, Default)]
pub(crate) struct CutOrders {
    volumes: Mutex<BTreeMap<VolumeName, VolumeOrders>>,
    /// An order has changed its state.
    changed: Condvar,
}

#[derive(Debug)]
struct VolumeOrders {
    attachment: EpochNumber,
    poll: Option<(u64, Arc<Notify>)>,
    /// The number of the last poll.
    last_poll: u64,
    order: Option<(OrderId, OrderState)>,
}

/// The epoch of the snapshot, and the step.
type OrderId = (EpochNumber, CutStep);

#[derive(Clone, Debug)]
enum OrderState {
    Placed,
    Fetched,
    Answered(CutResult),
    Ended,
}

/// The end of an order.
#[derive(Clone, Debug)]
pub(crate) enum CutOutcome {
    /// The client has answered.
    Answered(CutResult),
    /// The client did not fetch the order.
    NotFetched,
    /// The client fetched the order and did not answer.
    NotAnswered,
    /// The attachment ended.
    Ended,
}

/// The state of a poll.
pub(crate) enum PollState {
    /// There is an order.
    Order(EpochNumber, CutStep),
    /// The poll waits under this number, and looks again when it is woken.
    Wait(u64, Arc<Notify>),
    /// A later poll of the same client has taken its place.
    Replaced,
}

impl VolumeOrders {
    fn new(attachment: EpochNumber) -> VolumeOrders {
        VolumeOrders {
            attachment,
            poll: None,
            last_poll: 0,
            order: None,
        }
    }

    fn wake_poll(&self) {
        if let Some((_, wake)) = &self.poll {
            wake.notify_one();
        }
    }
}

/// Removes an order that has ended so.
fn remove_order(
    volumes: &mut BTreeMap<VolumeName, VolumeOrders>,
    volume: &VolumeName,
    outcome: CutOutcome,
) -> CutOutcome {
    let Some(of) = volumes.get_mut(volume) else {
        return outcome;
    };
    let was_fetched = match of.order.take() {
        Some((_, state)) => !matches!(state, OrderState::Placed),
        None => true,
    };
    if of.poll.is_none() {
        volumes.remove(volume);
    }
    match outcome {
        CutOutcome::NotAnswered if !was_fetched => CutOutcome::NotFetched,
        outcome => outcome,
    }
}

impl CutOrders {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeName, VolumeOrders>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders a whole cut from the client of an attachment.
    pub(crate) fn place(&self, volume: &VolumeName, attachment: EpochNumber, epoch: EpochNumber) {
        self.place_step(volume, attachment, (epoch, CutStep::Whole));
    }

    /// Orders a step from the client of an attachment. It replaces the order before.
    pub(crate) fn place_step(&self, volume: &VolumeName, attachment: EpochNumber, order: OrderId) {
        let mut volumes = self.lock();
        let new = || VolumeOrders::new(attachment);
        let of = volumes.entry(volume.clone()).or_insert_with(new);
        if of.attachment != attachment {
            *of = new();
        }
        of.order = Some((order, OrderState::Placed));
        of.wake_poll();
    }

    /// Waits for the end of an order, and removes it.
    pub(crate) fn wait(
        &self,
        volume: &VolumeName,
        epoch: EpochNumber,
        fetch_until: Instant,
        answer_until: Instant,
    ) -> CutOutcome {
        let mut volumes = self.lock();
        loop {
            let order = volumes.get(volume).and_then(|of| of.order.clone());
            let (outcome, until) = match order {
                Some(((of, _), state)) if of == epoch => match state {
                    OrderState::Answered(result) => (Some(CutOutcome::Answered(result)), None),
                    OrderState::Ended => (Some(CutOutcome::Ended), None),
                    OrderState::Placed => (None, Some(fetch_until.min(answer_until))),
                    OrderState::Fetched => (None, Some(answer_until)),
                },
                _ => return CutOutcome::Ended,
            };
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let outcome = outcome.or_else(|| {
                let is_over = left.is_none_or(|left| left.is_zero());
                is_over.then(|| match until == Some(answer_until) {
                    true => CutOutcome::NotAnswered,
                    false => CutOutcome::NotFetched,
                })
            });
            if let Some(outcome) = outcome {
                return remove_order(&mut volumes, volume, outcome);
            }
            let waited = self
                .changed
                .wait_timeout(volumes, left.unwrap_or(Duration::ZERO));
            volumes = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The order of an attachment, or a place to wait. `number` is that of a poll that was woken.
    pub(crate) fn poll(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
        number: Option<u64>,
    ) -> PollState {
        let mut volumes = self.lock();
        let new = || VolumeOrders::new(attachment);
        let of = volumes.entry(volume.clone()).or_insert_with(new);
        if of.attachment != attachment {
            *of = new();
        }
        let present = of.poll.as_ref().map(|(number, _)| *number);
        if number.is_some() && number != present {
            return PollState::Replaced;
        }
        // The answer to an earlier poll may be lost, so a fetched order is given again.
        if let Some((order, state @ (OrderState::Placed | OrderState::Fetched))) = &mut of.order {
            *state = OrderState::Fetched;
            let (epoch, step) = *order;
            if number.is_none() {
                of.wake_poll();
            }
            of.poll = None;
            self.changed.notify_all();
            return PollState::Order(epoch, step);
        }
        if let (Some(number), Some((_, wake))) = (number, &of.poll) {
            return PollState::Wait(number, Arc::clone(wake));
        }
        of.wake_poll();
        of.last_poll += 1;
        let wake = Arc::new(Notify::new());
        of.poll = Some((of.last_poll, Arc::clone(&wake)));
        PollState::Wait(of.last_poll, wake)
    }

    /// Ends a poll without an order.
    pub(crate) fn end_poll(&self, volume: &VolumeName, number: u64) {
        let mut volumes = self.lock();
        if let Some(of) = volumes.get_mut(volume) {
            of.poll.take_if(|(present, _)| *present == number);
        }
    }

    /// Takes the answer to an order; false if there is no such order.
    pub(crate) fn answer(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
        order: OrderId,
        result: CutResult,
    ) -> bool {
        let mut volumes = self.lock();
        let of = volumes.get_mut(volume);
        let of = of.filter(|of| of.attachment == attachment);
        let Some((_, state)) = of
            .and_then(|of| of.order.as_mut())
            .filter(|(present, _)| *present == order)
        else {
            return false;
        };
        *state = OrderState::Answered(result);
        self.changed.notify_all();
        true
    }

    /// Ends the orders and polls of a volume, unless they are those of this attachment.
    pub(crate) fn keep_only(&self, volume: &VolumeName, attachment: Option<EpochNumber>) {
        let mut volumes = self.lock();
        let Some(of) = volumes.get_mut(volume) else {
            return;
        };
        if attachment == Some(of.attachment) {
            return;
        }
        of.wake_poll();
        of.poll = None;
        match &mut of.order {
            Some((_, state)) => *state = OrderState::Ended,
            None => drop(volumes.remove(volume)),
        }
        self.changed.notify_all();
    }
}
