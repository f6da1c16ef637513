//! Files that direct clients read and write themselves.

pub(crate) mod append;
pub(crate) mod shared_file_map;
pub(crate) mod unseen_writes;
