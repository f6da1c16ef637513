//! A client of the cluster: a volume without threads.

use crate::world::bricks::Fabric;
use crate::world::manager::Manager;
use pagemesh_base::poison;
use pagemesh_volume::test_api::lower_replication_limits;
use pagemesh_volume::test_api::{Mailbox, VolumeChannel, VolumeShared, open_channel, parts_of};
use pagemesh_volume::{AttachError, CallAnswer, DrivenVolume, FlushState, VolumeStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) struct Client {
    volume: DrivenVolume,
    pub shared: Arc<VolumeShared>,
    pub mailbox: Arc<Mailbox>,
    fabric: Fabric,
    manager: Manager,
    start: Instant,
    pub now: Duration,
}

impl Client {
    pub(crate) fn new(fabric: &Fabric, manager: &Manager) -> Client {
        lower_replication_limits();
        let driven = DrivenVolume::attach(manager.layout().name).expect("a descriptor");
        let (shared, mailbox) = parts_of(&driven);
        Client {
            shared,
            mailbox,
            volume: driven,
            fabric: fabric.clone(),
            manager: manager.clone(),
            start: Instant::now(),
            now: Duration::ZERO,
        }
    }

    pub(crate) fn poll(&mut self) {
        poison::lock(&self.fabric.0).clock = Some(self.start + self.now);
        self.volume.poll(self.now);
    }

    /// Makes the oldest call; false if there is none.
    pub(crate) fn run_call(&mut self) -> bool {
        let Some(call) = self.volume.take_call() else {
            return false;
        };
        let answer = call.make("test", &self.manager, &self.fabric);
        self.volume.complete_call(answer);
        true
    }

    /// Makes the oldest call. The caller delivers its answer later.
    pub(crate) fn perform_call(&mut self) -> Option<CallAnswer> {
        let call = self.volume.take_call()?;
        Some(call.make("test", &self.manager, &self.fabric))
    }

    pub(crate) fn deliver_answer(&mut self, answer: CallAnswer) {
        self.volume.complete_call(answer);
    }

    pub(crate) fn take_attach_result(&mut self) -> Option<Result<(), AttachError>> {
        self.volume.take_attach_result()
    }

    pub(crate) fn open(&self) -> VolumeChannel {
        open_channel(&self.shared, &self.mailbox).expect("a channel")
    }

    pub(crate) fn flush_state(&self) -> FlushState {
        self.volume.flush_state()
    }

    pub(crate) fn status(&self) -> VolumeStatus {
        self.volume.status().expect("a status")
    }
}
