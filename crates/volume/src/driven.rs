//! A volume without threads: its caller takes the keeper's turns and makes the
//! calls that block, whenever it likes. For programs with a loop of their own,
//! and for simulations. [`Volume`](crate::Volume) is the same with threads.
//!
//! Invariants: nothing happens but in a method's call, and the only time is
//! that which [`Driven::turn`] is told.

use crate::authority::Authority;
use crate::channel;
use crate::connector::Connector;
use crate::guests::{Picture, Segment, Wound};
use crate::hub::{Hub, Member};
use crate::keeper::{
    Call, Caller, Event, Keeper, Mailbox, Outcome, ScrubOrder, ScrubPlan, perform,
};
use crate::status::VolumeStatus;
use crate::view::View;
use crate::volume::AttachError;
use pagemesh_base::layout::Name;
use pagemesh_base::space::{Channel, SpaceError};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

type Calls = Rc<RefCell<VecDeque<(u64, Call)>>>;

struct Queue(Calls);

impl Caller for Queue {
    fn start(&self, id: u64, call: Call) {
        self.0.borrow_mut().push_back((id, call));
    }
}

/// A volume that its caller drives.
pub struct Driven {
    name: Name,
    keeper: Keeper,
    pub(crate) hub: Arc<Hub>,
    pub(crate) mailbox: Arc<Mailbox>,
    calls: Calls,
}

/// A call that blocks, to be made by whoever drives.
pub struct Pending {
    id: u64,
    name: Name,
    call: Call,
}

/// What came of a call.
pub struct Answer(u64, Outcome);

impl Pending {
    /// Makes the call; `client` names this client to people.
    pub fn make(
        self,
        client: &str,
        authority: &dyn Authority,
        connector: &dyn Connector,
    ) -> Answer {
        let outcome = perform(self.call, &self.name, client, authority, connector);
        Answer(self.id, outcome)
    }
}

impl Driven {
    /// Begins to attach a volume.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn attach(name: Name) -> std::io::Result<Driven> {
        let member = Arc::new(Member::new()?);
        let hub = Arc::new(Hub::new(View::empty(), Arc::clone(&member)));
        let mailbox = Arc::new(Mailbox::new(Arc::clone(&member)));
        let calls = Calls::default();
        let caller = Box::new(Queue(Rc::clone(&calls)));
        let keeper = Keeper::new(
            name.clone(),
            Arc::clone(&hub),
            member,
            Arc::clone(&mailbox),
            caller,
        );
        Ok(Driven {
            name,
            keeper,
            hub,
            mailbox,
            calls,
        })
    }

    /// Makes all progress that can be made at this time. Gives the time of the
    /// next turn, if nothing happens before; times are since the first one.
    pub fn turn(&mut self, now: Duration) -> Option<Duration> {
        self.keeper.turn(now)
    }

    /// The oldest call that nobody has taken.
    pub fn take_call(&mut self) -> Option<Pending> {
        let (id, call) = self.calls.borrow_mut().pop_front()?;
        let name = self.name.clone();
        Some(Pending { id, name, call })
    }

    /// Tells what came of a call.
    pub fn answer(&mut self, Answer(id, outcome): Answer) {
        self.mailbox.post(Event::Called(id, outcome));
    }

    /// What came of the attach, once.
    pub fn take_attached(&mut self) -> Option<Result<(), AttachError>> {
        let result = self.keeper.take_attached()?;
        Some(result.map_err(|failure| AttachError::new(self.name.clone(), failure)))
    }

    /// Scrubs as [`Volume::plan_scrubs`](crate::Volume::plan_scrubs) does.
    pub fn plan_scrubs(&self, plan: ScrubPlan) {
        self.mailbox.post(Event::Scrub(ScrubOrder::Plan(plan)));
    }

    /// Gives the volume back, once its channels are closed.
    pub fn detach(&mut self) {
        self.mailbox.post(Event::Detach);
    }

    /// Whether there is nothing more to do, ever.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.keeper.is_ended()
    }

    /// How it is, as of the last turn.
    #[must_use]
    pub fn status(&self) -> Option<VolumeStatus> {
        self.mailbox.status(&self.hub, |_| Duration::ZERO)
    }

    /// The epoch of the layout that channels go by; 0 before there is one.
    #[must_use]
    pub fn shown_epoch(&self) -> u32 {
        self.hub.view().1.epoch.0
    }

    /// Bytes; may grow.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.hub.view().1.size_bytes
    }

    /// Lets guests in, as [`Volume::admit_guests`](crate::Volume::admit_guests) does.
    ///
    /// # Errors
    /// When the system has no memory for it.
    pub fn admit_guests(&self) -> Result<Arc<Segment>, pagemesh_pmem::MapError> {
        let guests = self.hub.admit_guests()?;
        self.mailbox.post(Event::Guests);
        Ok(Arc::clone(&guests.segment))
    }

    /// What guests work by now; none: they may do nothing.
    #[must_use]
    pub fn guest_picture(&self) -> Option<Picture> {
        self.hub.guests.get()?.picture()
    }

    /// Begins what [`Volume::heal`](crate::Volume::heal) waits for: something comes when it
    /// is done.
    #[must_use]
    pub fn heal(&self, row: usize, wound: Wound) -> Receiver<()> {
        let (done, told) = mpsc::channel();
        self.mailbox.post(Event::Heal(row, wound, done));
        told
    }

    /// As [`Volume::call_shipping`](crate::Volume::call_shipping).
    pub fn call_shipping(&self) {
        self.hub.wake_keeper();
    }

    /// Opens a channel.
    ///
    /// # Errors
    /// When there are too many already, or another client has attached.
    pub fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let channel = channel::open(&self.hub, &self.mailbox)?;
        Ok(Box::new(channel))
    }
}
