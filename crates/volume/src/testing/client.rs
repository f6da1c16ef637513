//! A client of the cluster: a volume without threads.

use super::brick::Fabric;
use super::manager::Manager;
use crate::channel::{self, VolumeChannel};
use crate::hub::{Hub, Member, guard};
use crate::keeper::{AttachFailure, Call, Caller, Event, Keeper, Mailbox, perform};
use crate::status::VolumeStatus;
use crate::view::View;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

type Calls = Rc<RefCell<VecDeque<(u64, Call)>>>;

struct Queue(Calls);

impl Caller for Queue {
    fn start(&self, id: u64, call: Call) {
        self.0.borrow_mut().push_back((id, call));
    }
}

pub(crate) struct Client {
    pub keeper: Keeper,
    pub hub: Arc<Hub>,
    pub mailbox: Arc<Mailbox>,
    calls: Calls,
    fabric: Fabric,
    manager: Manager,
    pub now: Duration,
    /// When the keeper wants its next turn.
    pub due: Option<Duration>,
}

impl Client {
    pub(crate) fn new(fabric: &Fabric, manager: &Manager) -> Client {
        let member = Arc::new(Member::new().expect("a descriptor"));
        let hub = Arc::new(Hub::new(View::empty(), Arc::clone(&member)));
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&member)));
        let calls = Calls::default();
        let keeper = Keeper::new(
            manager.layout().name,
            Arc::clone(&hub),
            member,
            Arc::clone(&mailbox),
            Box::new(Queue(Rc::clone(&calls))),
        );
        Client {
            keeper,
            hub,
            mailbox,
            calls,
            fabric: fabric.clone(),
            manager: manager.clone(),
            now: Duration::ZERO,
            due: None,
        }
    }

    pub(crate) fn turn(&mut self) {
        self.due = self.keeper.turn(self.now);
    }

    /// Makes the oldest call; false if there is none.
    pub(crate) fn call(&mut self) -> bool {
        let Some((id, call)) = self.calls.borrow_mut().pop_front() else {
            return false;
        };
        let name = self.manager.layout().name;
        let outcome = perform(call, &name, "test", &self.manager, &self.fabric);
        self.mailbox.post(Event::Called(id, outcome));
        true
    }

    pub(crate) fn take_attached(&self) -> Option<Result<(), AttachFailure>> {
        self.keeper.take_attached()
    }

    pub(crate) fn open(&self) -> VolumeChannel {
        channel::open(&self.hub, &self.mailbox).expect("a channel")
    }

    pub(crate) fn status(&self) -> VolumeStatus {
        guard(&self.mailbox.status).clone().expect("a status").1
    }
}
