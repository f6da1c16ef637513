//! The world of a random history: bricks, a manager, a client, and the random numbers that
//! decide which of them makes the next step.

use super::bricks::Fabric;
use super::client::Client;
use super::manager::{Manager, ManagerMode};
use pagemesh_base::layout::BrickId;
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use std::time::Duration;

pub(crate) struct World {
    pub rng: SplitMix64,
    pub fabric: Fabric,
    pub manager: Manager,
    pub client: Client,
}

impl World {
    /// A world with a client that begins to attach.
    pub(crate) fn new(rng: SplitMix64, fabric: Fabric, manager: Manager) -> World {
        let client = Client::new(&fabric, &manager);
        World {
            rng,
            fabric,
            manager,
            client,
        }
    }

    /// Makes one step without a request: a brick answers, the client is polled, one of its calls
    /// is made, or time passes.
    pub(crate) fn background(&mut self) {
        let World {
            rng,
            fabric,
            client,
            ..
        } = self;
        match rng.below(10) {
            0..=5 => {
                let mut bricks = poison::lock(&fabric.0);
                if let Some(connection) = rng.pick(&bricks.busy()) {
                    bricks.step(connection, rng);
                }
            }
            6 | 7 => client.poll(),
            8 => {
                client.run_call();
            }
            _ => client.now += Duration::from_millis(rng.below(20)),
        }
    }

    /// The client dies, and another one begins to attach.
    pub(crate) fn replace_client(&mut self) {
        self.client = Client::new(&self.fabric, &self.manager);
    }

    pub(crate) fn kill(&mut self, brick: BrickId) {
        poison::lock(&self.fabric.0).kill(brick);
    }

    pub(crate) fn restart(&mut self, brick: BrickId) {
        poison::lock(&self.fabric.0).restart(brick);
    }

    pub(crate) fn break_any_connection(&mut self) {
        poison::lock(&self.fabric.0).break_any_connection(&mut self.rng);
    }

    pub(crate) fn set_room(&mut self, brick: BrickId, pages: u64) {
        let mut bricks = poison::lock(&self.fabric.0);
        bricks.bricks.get_mut(&brick).expect("brick").room = pages;
    }

    /// The manager is in one of these modes from now on.
    pub(crate) fn set_any_manager_mode(&mut self, modes: &[ManagerMode]) {
        let mode = self.rng.pick(modes).expect("a mode");
        self.manager.set_mode(mode);
    }

    /// The manager and all bricks run again.
    pub(crate) fn restart_all(&mut self) {
        self.manager.set_mode(ManagerMode::Up);
        let mut bricks = poison::lock(&self.fabric.0);
        let all: Vec<BrickId> = bricks.bricks.keys().copied().collect();
        all.into_iter().for_each(|brick| bricks.restart(brick));
    }
}
