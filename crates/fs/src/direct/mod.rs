//! Files that direct clients read and write themselves: the maps that they share with the mount, and
//! grants of append space.

pub(crate) mod append;
pub(crate) mod publish;
pub(crate) mod unseen_writes;
