//! The members of a volume, which are its controller and its open channels, and the messages
//! between them.
//!
//! Invariants: a message is queued before the member is woken, and the member takes its messages
//! after it took the wake-up. So no message stays unread.

use crate::client::channel::ChannelCore;
use crate::steps;
use crate::wake::Wake;
use pagemesh_base::poison;
use pagemesh_base::slice::Leg;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

/// A connection of a channel to a leg.
pub struct LegLink {
    pub column: usize,
    pub leg: usize,
    pub serial: u64,
    pub connection: Box<dyn Leg>,
}

/// A message to a member.
pub enum MemberMessage {
    /// The member holds a range lock now, or the changes that its read waits for have ended.
    LockGranted(u32),
    /// A connection for the next snapshot.
    NewLink(LegLink),
    /// Ends a connection that is to be replaced. Its session may be the one that the next
    /// connection needs.
    EndLink {
        column: usize,
        leg: usize,
        serial: u64,
    },
    /// A brick has no session for this channel, which has not served yet. The text is the
    /// cause. The channel is no member any more.
    Rejected(String),
}

/// A channel of the volume, or its controller, as the other members reach it.
pub struct Member {
    /// Shared with parties that only wake the member.
    pub wake: Arc<Wake>,
    messages: Mutex<Vec<MemberMessage>>,
    /// Serials of the connections that the member was given, by column and leg.
    pub links: Mutex<BTreeMap<(usize, usize), u64>>,
    /// The member's channel, while it is open. The channel's thread locks it during each call.
    /// The controller locks it to end connections of a channel that is not polled.
    pub core: Mutex<Option<Box<ChannelCore>>>,
    /// The channel had all connections of a snapshot that had some.
    served: AtomicBool,
}

impl Member {
    pub fn new() -> std::io::Result<Member> {
        Ok(Member {
            wake: Arc::new(Wake::new()?),
            messages: Mutex::default(),
            links: Mutex::default(),
            core: Mutex::default(),
            served: AtomicBool::new(false),
        })
    }

    pub fn send(&self, note: MemberMessage) {
        steps::step("notes");
        poison::lock(&self.messages).push(note);
        self.wake.raise();
    }

    /// Ends the selected connections, by place and serial; true if there were any.
    pub fn end_links(&self, is_meant: impl Fn(&(usize, usize), u64) -> bool) -> bool {
        let mut links = poison::lock(&self.links);
        let before = links.len();
        links.retain(|place, serial| {
            let is_meant = is_meant(place, *serial);
            if is_meant {
                let &(column, leg) = place;
                let serial = *serial;
                self.send(MemberMessage::EndLink {
                    column,
                    leg,
                    serial,
                });
            }
            !is_meant
        });
        links.len() < before
    }

    /// Records that the channel has all connections of a snapshot that had some.
    pub fn set_served(&self) {
        self.served.store(true, Ordering::Relaxed);
    }

    pub fn has_served(&self) -> bool {
        self.served.load(Ordering::Relaxed)
    }

    /// Processes the channel's messages on this thread. False: the channel's own thread is
    /// inside a call, and may have looked at its messages before.
    pub fn try_process_messages(&self) -> bool {
        steps::step("core");
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if let Some(core) = core.as_deref_mut() {
            core.process_messages();
            // The channel's thread handles the results.
            self.wake.raise();
        }
        true
    }

    pub fn take_messages(&self) -> Vec<MemberMessage> {
        steps::step("notes");
        std::mem::take(&mut *poison::lock(&self.messages))
    }
}
