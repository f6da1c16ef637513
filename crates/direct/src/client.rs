//! The process's side of the direct path: it reads and writes files of mounts itself.
//!
//! For each mount a process has a few I/O slots ([`io_slot`]): a row, and a session of every leg. A
//! thread always uses the same slot. Threads that share a slot take turns; the kernel serves a call
//! that would have to wait long.
//!
//! Sessions are scarce. Direct clients leave a part of every pool's sessions to users that cannot
//! do without them. Where few sessions are left, an idle slot gives its own back.
//!
//! A process reaches a mount by the name of its socket, or, in another network namespace, through a
//! file of the mount that it has open ([`mount_connection`](pagemesh_base::mount_connection)).
//!
//! Invariants: an operation does its work only inside of the row's operation, after it has checked
//! that direct access is not disabled. If it fails, the kernel does all of it again. A thread waits
//! for bricks to end and drops everything that belongs to an ended brick at once: otherwise the
//! next brick would have to kill this process.

mod backoff;
mod direct_client;
mod end_watch;
mod file;
pub mod internal_fds;
pub mod io_slot;
mod joined_mount;
mod mount_link;
mod mount_status;
mod read;
mod read_mapping;
pub mod report;
mod slot_resources;
mod thread;
mod write_atomic;
mod write_tail;

pub use direct_client::DirectClient;
pub use file::DirectFile;
pub use mount_status::query_mount;
pub use read_mapping::ConsistentMapping;
pub use thread::RunMasked;
pub use write_atomic::write_by_mount;
