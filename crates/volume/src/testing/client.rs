//! A client of the cluster: a volume without threads.

use super::brick::Fabric;
use super::manager::Manager;
use crate::channel::{self, VolumeChannel};
use crate::driven::{Answer, Driven};
use crate::hub::{Hub, guard};
use crate::keeper::Mailbox;
use crate::status::VolumeStatus;
use crate::volume::AttachError;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct Client {
    driven: Driven,
    pub hub: Arc<Hub>,
    pub mailbox: Arc<Mailbox>,
    fabric: Fabric,
    manager: Manager,
    start: Instant,
    pub now: Duration,
}

impl Client {
    pub(crate) fn new(fabric: &Fabric, manager: &Manager) -> Client {
        let driven = Driven::attach(manager.layout().name).expect("a descriptor");
        Client {
            hub: Arc::clone(&driven.hub),
            mailbox: Arc::clone(&driven.mailbox),
            driven,
            fabric: fabric.clone(),
            manager: manager.clone(),
            start: Instant::now(),
            now: Duration::ZERO,
        }
    }

    pub(crate) fn turn(&mut self) {
        guard(&self.fabric.0).clock = Some(self.start + self.now);
        self.driven.turn(self.now);
    }

    /// Makes the oldest call; false if there is none.
    pub(crate) fn call(&mut self) -> bool {
        let Some(call) = self.driven.take_call() else {
            return false;
        };
        let answer = call.make("test", &self.manager, &self.fabric);
        self.driven.answer(answer);
        true
    }

    /// Makes the oldest call, and keeps its answer on the way.
    pub(crate) fn ask(&mut self) -> Option<Answer> {
        let call = self.driven.take_call()?;
        Some(call.make("test", &self.manager, &self.fabric))
    }

    pub(crate) fn tell(&mut self, answer: Answer) {
        self.driven.answer(answer);
    }

    pub(crate) fn take_attached(&mut self) -> Option<Result<(), AttachError>> {
        self.driven.take_attached()
    }

    pub(crate) fn open(&self) -> VolumeChannel {
        channel::open(&self.hub, &self.mailbox).expect("a channel")
    }

    pub(crate) fn status(&self) -> VolumeStatus {
        self.driven.status().expect("a status")
    }
}
