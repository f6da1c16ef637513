//! Orders to NFS servers to expire clients: a server gets them in the answer to a report, and answers in the next one.
//!
//! Invariants: a server has at most one order for a client, and a bounded number of them. Each has a call that waits for it, and ends
//! with that call. Memory alone holds them. The lock is taken last, after the lock of the state.

use crate::wire::{NFS_ORDERS_MAX, Nfs4ClientId, NfsExpiry, NfsExpiryResult};
use pagemesh_base::layout::VolumeName;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

type Orders = BTreeMap<(VolumeName, Nfs4ClientId), OrderState>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OrderState {
    Placed,
    Given,
    Answered(NfsExpiryResult),
}

/// The end of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrderOutcome {
    Answered(NfsExpiryResult),
    /// The server did not report in time.
    NotGiven,
    /// The server got the order, and did not answer in time.
    NotAnswered,
}

impl OrderOutcome {
    /// The outcomes of orders to several servers for one client: the highest one tells of the client.
    pub(crate) fn weight(self) -> u8 {
        match self {
            OrderOutcome::Answered(NfsExpiryResult::Unknown) => 0,
            OrderOutcome::NotGiven => 1,
            OrderOutcome::NotAnswered => 2,
            OrderOutcome::Answered(_) => 3,
        }
    }
}

/// Why an order is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrderRefusal {
    /// Another call waits for the same order.
    Running,
    /// There are too many.
    Full,
}

/// See the module. The name of a volume stands for the server that has it attached.
#[derive(Default)]
pub(crate) struct NfsOrderTable {
    orders: Mutex<Orders>,
    answered: Condvar,
}

impl NfsOrderTable {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Orders the servers of all these volumes, or none, to expire a client. [`Self::wait`] ends the order of each.
    pub(crate) fn place(
        &self,
        volumes: &[VolumeName],
        client: Nfs4ClientId,
    ) -> Result<(), OrderRefusal> {
        let mut orders = self.lock();
        for volume in volumes {
            if orders.contains_key(&(volume.clone(), client)) {
                return Err(OrderRefusal::Running);
            }
            if orders.keys().filter(|(name, _)| name == volume).count() >= NFS_ORDERS_MAX {
                return Err(OrderRefusal::Full);
            }
        }
        let keys = volumes.iter().map(|volume| (volume.clone(), client));
        orders.extend(keys.map(|key| (key, OrderState::Placed)));
        Ok(())
    }

    /// Waits for the answer to an order, and removes it.
    pub(crate) fn wait(
        &self,
        volume: &VolumeName,
        client: Nfs4ClientId,
        limit: Duration,
    ) -> OrderOutcome {
        let until = Instant::now() + limit;
        let key = (volume.clone(), client);
        let mut orders = self.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let outcome = match orders.get(&key) {
                Some(OrderState::Answered(result)) => OrderOutcome::Answered(*result),
                Some(OrderState::Given) if left.is_zero() => OrderOutcome::NotAnswered,
                Some(OrderState::Placed) if left.is_zero() => OrderOutcome::NotGiven,
                Some(OrderState::Given | OrderState::Placed) => {
                    let waited = self.answered.wait_timeout(orders, left);
                    orders = waited.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
                None => OrderOutcome::NotGiven,
            };
            orders.remove(&key);
            return outcome;
        }
    }

    /// Takes the answers of the server of a volume, and returns its open orders. An order is given with each report until its answer: a
    /// reply with it may be lost.
    pub(crate) fn exchange(&self, volume: &VolumeName, answers: &[NfsExpiry]) -> Vec<Nfs4ClientId> {
        let mut orders = self.lock();
        for answer in answers {
            // Without the order, the call has ended.
            if let Some(state) = orders.get_mut(&(volume.clone(), answer.client)) {
                *state = OrderState::Answered(answer.result);
                self.answered.notify_all();
            }
        }
        let of_volume = orders.iter_mut().filter(|((name, _), _)| name == volume);
        let open = of_volume.filter(|(_, state)| !matches!(state, OrderState::Answered(_)));
        let given = open.map(|((_, client), state)| {
            *state = OrderState::Given;
            *client
        });
        given.collect()
    }
}
