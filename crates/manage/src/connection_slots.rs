//! The slots of connections.
//!
//! Invariants: no more connections than slots are served at once, and no more unauthenticated ones than their own limit.
//! While either limit is reached, a new connection takes the slot of an unauthenticated one: the oldest of the address
//! that has most of them. A connection that has carried a
//! valid credential keeps its slot until it ends. So an address that opens connections and sends nothing locks out no
//! other address.

use crate::access::{PeerAddress, network};
use crate::connection::ConnectionCut;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All slots.
pub(crate) struct ConnectionSlots {
    permits: Arc<Semaphore>,
    unauthenticated_max: usize,
    unauthenticated: Unauthenticated,
}

/// The slot of a connection; dropping it ends its use.
pub(crate) struct ConnectionSlot {
    pub(crate) cut: ConnectionCut,
    pub(crate) mark: AuthenticatedMark,
    _permit: OwnedSemaphorePermit,
}

/// Marks the connection of a request as authenticated; an extension of each request.
#[derive(Clone)]
pub(crate) struct AuthenticatedMark {
    number: u64,
    unauthenticated: Unauthenticated,
}

/// The connections that have carried no valid credential.
#[derive(Clone, Default)]
struct Unauthenticated(Arc<Mutex<UnauthenticatedTable>>);

#[derive(Default)]
struct UnauthenticatedTable {
    /// The number of the next connection; older connections have lower numbers.
    next: u64,
    by_number: BTreeMap<u64, (IpAddr, ConnectionCut)>,
}

impl ConnectionSlots {
    pub(crate) fn new(max: usize, unauthenticated_max: usize) -> ConnectionSlots {
        ConnectionSlots {
            permits: Arc::new(Semaphore::new(max)),
            unauthenticated_max,
            unauthenticated: Unauthenticated::default(),
        }
    }

    /// Takes a slot for a connection, and cuts an unauthenticated one if none is free. Waits for the end of a
    /// connection if all are authenticated. `None` if there are no slots any more.
    pub(crate) async fn take(&self, peer: PeerAddress) -> Option<ConnectionSlot> {
        let free = self.permits.clone().try_acquire_owned();
        let permit = match free {
            Ok(permit) => permit,
            Err(_) => {
                self.unauthenticated.table().cut_one();
                self.permits.clone().acquire_owned().await.ok()?
            }
        };
        let cut = ConnectionCut::default();
        let number = {
            let mut table = self.unauthenticated.table();
            if table.by_number.len() >= self.unauthenticated_max {
                table.cut_one();
            }
            table.add(peer, cut.clone())
        };
        let unauthenticated = self.unauthenticated.clone();
        Some(ConnectionSlot {
            cut,
            mark: AuthenticatedMark {
                number,
                unauthenticated,
            },
            _permit: permit,
        })
    }
}

impl AuthenticatedMark {
    /// Lets the connection keep its slot until it ends.
    pub(crate) fn set(&self) {
        let mut table = self.unauthenticated.table();
        table.by_number.remove(&self.number);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        // A connection that has ended is no longer one to cut.
        self.mark.set();
    }
}

impl Unauthenticated {
    fn table(&self) -> MutexGuard<'_, UnauthenticatedTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnauthenticatedTable {
    fn add(&mut self, peer: PeerAddress, cut: ConnectionCut) -> u64 {
        let number = self.next;
        self.next += 1;
        self.by_number.insert(number, (network(peer.0), cut));
        number
    }

    /// Cuts the oldest connection of the address that has most.
    fn cut_one(&mut self) {
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for (peer, _) in self.by_number.values() {
            *counts.entry(*peer).or_default() += 1;
        }
        // Of several addresses with as many, the one of the oldest connection.
        let mut most = 0;
        let mut chosen = None;
        for (number, (peer, _)) in &self.by_number {
            let count = counts.get(peer).copied().unwrap_or(0);
            if count > most {
                (most, chosen) = (count, Some(*number));
            }
        }
        let cut = chosen.and_then(|number| self.by_number.remove(&number));
        if let Some((peer, cut)) = cut {
            tracing::debug!(%peer, "an unauthenticated connection was cut, because no slot is left for another");
            cut.cut();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use tokio::task::JoinHandle;

    fn peer(number: u8) -> PeerAddress {
        PeerAddress(Ipv4Addr::new(192, 0, 2, number).into())
    }

    async fn take(slots: &ConnectionSlots, number: u8) -> ConnectionSlot {
        slots.take(peer(number)).await.expect("a slot")
    }

    /// A connection that ends when it is cut; the result is its name.
    fn run(slot: ConnectionSlot, name: &'static str) -> JoinHandle<&'static str> {
        tokio::spawn(async move {
            slot.cut.wait().await;
            drop(slot);
            name
        })
    }

    fn in_runtime(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.build().expect("a runtime");
        runtime.block_on(test);
    }

    #[test]
    fn address_with_most_silent_connections_yields() {
        in_runtime(async {
            let slots = ConnectionSlots::new(4, 4);
            let other = run(take(&slots, 2).await, "other");
            let oldest = run(take(&slots, 1).await, "oldest");
            let newer = run(take(&slots, 1).await, "newer");
            let newest = run(take(&slots, 1).await, "newest");
            let third = take(&slots, 3).await;
            assert_eq!(oldest.await.expect("ended"), "oldest");
            let fourth = take(&slots, 4).await;
            assert_eq!(newer.await.expect("ended"), "newer");
            // All addresses have one connection each: the oldest one yields.
            let fifth = take(&slots, 5).await;
            assert_eq!(other.await.expect("ended"), "other");
            assert!(!newest.is_finished());
            drop((third, fourth, fifth));
        });
    }

    #[test]
    fn silent_connections_have_a_limit_of_their_own() {
        in_runtime(async {
            let slots = ConnectionSlots::new(8, 2);
            let client = take(&slots, 1).await;
            client.mark.set();
            let oldest = run(take(&slots, 2).await, "oldest");
            let newer = run(take(&slots, 2).await, "newer");
            let third = take(&slots, 3).await;
            assert_eq!(oldest.await.expect("ended"), "oldest");
            assert!(!newer.is_finished());
            drop((client, third));
        });
    }

    #[test]
    fn authenticated_connections_keep_their_slots() {
        in_runtime(async {
            let slots = Arc::new(ConnectionSlots::new(2, 2));
            let first = take(&slots, 1).await;
            first.mark.set();
            let silent = run(take(&slots, 1).await, "silent");
            let second = take(&slots, 1).await;
            assert_eq!(silent.await.expect("ended"), "silent");
            second.mark.set();
            // No slot is left to take: the next connection waits for the end of one.
            let waiting = {
                let slots = slots.clone();
                tokio::spawn(async move { slots.take(peer(2)).await.is_some() })
            };
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            drop(second);
            assert!(waiting.await.expect("ended"));
            drop(first);
        });
    }

    #[test]
    fn ended_connection_is_not_cut() {
        in_runtime(async {
            let slots = ConnectionSlots::new(2, 2);
            drop(take(&slots, 1).await);
            let oldest = run(take(&slots, 2).await, "oldest");
            let _newer = take(&slots, 1).await;
            let _third = take(&slots, 3).await;
            assert_eq!(oldest.await.expect("ended"), "oldest");
        });
    }
}
