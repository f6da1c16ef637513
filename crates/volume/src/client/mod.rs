//! The users' side of a volume: its attach and detach, with threads ([`volume`]) or without
//! ([`driven`]), and the channels through which its requests come.

pub(crate) mod channel;
pub(crate) mod driven;
pub(crate) mod snapshot_space;
pub(crate) mod volume;
