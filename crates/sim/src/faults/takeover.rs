//! A takeover of the volume from a client that is isolated from the manager.

use super::{STAGE_STEPS_MAX, STOP_MS_MAX};
use crate::cluster::tell;
use crate::network::Peer;
use crate::scenario::Scenario;
use std::time::Duration;

/// See [`Scenario::start_takeover`].
enum TakeoverStage {
    /// Faults are cleared, until one client is left and has all its legs.
    WaitingHealthy,
    /// The client has lost a leg, and the manager does not hear of it.
    Isolated,
    /// The client hears from no peer while another client attaches.
    Replaced,
}

/// See [`Scenario::start_takeover`].
pub(crate) struct TakeoverFault {
    /// The isolated client.
    client: u32,
    stage: TakeoverStage,
    steps: u32,
}

impl Scenario {
    /// Lets another client take the volume while the first one knows of a lost leg but not of the
    /// takeover, because the manager is out of its reach. The first client then asks the manager
    /// again, with bricks in reach. No other fault happens meanwhile, because this state takes many
    /// steps.
    pub(super) fn start_takeover(&mut self) {
        if !self.plan.is_contested || self.plan.copies < 2 {
            return;
        }
        self.clear_faults();
        self.takeover = Some(TakeoverFault {
            client: 0,
            stage: TakeoverStage::WaitingHealthy,
            steps: 0,
        });
    }

    /// The next stage of a takeover, if its condition holds.
    pub(crate) fn step_takeover(&mut self) {
        let Some(mut takeover) = self.takeover.take() else {
            return;
        };
        takeover.steps += 1;
        if takeover.steps > STAGE_STEPS_MAX {
            return self.clear_faults();
        }
        let client = self
            .clients
            .iter()
            .position(|it| it.number == takeover.client);
        let stage = match (&takeover.stage, client) {
            (TakeoverStage::WaitingHealthy, _) => self.isolate_client(&mut takeover),
            (_, None) => return self.clear_faults(),
            (TakeoverStage::Isolated, Some(at)) => {
                self.clients[at].is_awaiting_manager().then(|| {
                    self.replace_isolated_client(at);
                    TakeoverStage::Replaced
                })
            }
            (TakeoverStage::Replaced, Some(at)) => {
                let mut others = self.clients[at + 1..].iter();
                if others.any(|other| other.attachment > 0) {
                    tell!(
                        self.cluster,
                        "client {} reaches the manager again",
                        takeover.client
                    );
                    return self.clear_faults();
                }
                None
            }
        };
        if let Some(stage) = stage {
            (takeover.stage, takeover.steps) = (stage, 0);
        }
        self.takeover = Some(takeover);
    }

    /// Takes the manager and a brick from a client that had all.
    fn isolate_client(&mut self, takeover: &mut TakeoverFault) -> Option<TakeoverStage> {
        self.end_fenced_client();
        let [client] = &self.clients[..] else {
            return None;
        };
        if !client.is_healthy() {
            return None;
        }
        takeover.client = client.number;
        self.count_event("takeover of an isolated client");
        tell!(self.cluster, "client {} loses the manager", takeover.client);
        self.manager_host.partition_client(takeover.client);
        self.kill_random_brick();
        Some(TakeoverStage::Isolated)
    }

    /// Stops the isolated client, or cuts it off from all bricks; another one attaches.
    fn replace_isolated_client(&mut self, at: usize) {
        let client = &mut self.clients[at];
        if self.rng.one_in(2) {
            client.stopped_until = self.cluster.now() + Duration::from_millis(STOP_MS_MAX);
            tell!(self.cluster, "client {} is stopped", client.number);
        } else {
            let peer = Peer::Client(client.number);
            for host in 0..self.plan.pool_bytes.len() {
                self.cluster.net().partition(peer, host, true, true);
            }
            tell!(
                self.cluster,
                "client {} is cut off from all bricks",
                client.number
            );
        }
        self.start_client();
    }
}
