//! A file system: a POSIX name space and its files in the pages of one volume.
//!
//! A call's changes are atomic: after a crash all of them are there, or none. They precede the
//! changes of later calls ([`txn`]). When the call returns, every in-sync copy has them. On pools
//! of class `file-sync` they survive power loss after [`Fs::sync`], or if they were written with
//! `durable_pages`.
//!
//! The kernel of the mounting machine checks permissions for the calls of FUSE. The crate applies them
//! to new inodes: owner, group, set-group-id directories. It checks the callers of stateless servers
//! itself ([`Caller`]).
//!
//! This crate opens no files and knows no kernel; fronts do.
//!
//! The rooms, from the public interface down. Each uses only rooms below it:
//!
//! - `fs`, `mkfs`: the calls;
//! - `recovery`: mounting, and the remains of a crash;
//! - `names`: directories and attributes;
//! - `file`: content, and the use of inodes;
//! - `direct`: files that direct clients have;
//! - `tree`: structures in pages, changed within an operation;
//! - `txn`: operations, batches, and the core under its one lock;
//! - `io`, `alloc`, `live`: channels, free space, and state in memory of inodes in use;
//! - `format`: the on-disk structures.

#![forbid(unsafe_code)]

mod alloc;
mod direct;
mod error;
mod file;
mod format;
mod fs;
mod hash;
mod io;
mod live;
mod mkfs;
mod names;
mod recovery;
mod snapshots;
mod tree;
mod txn;
mod upkeep;

pub use direct::unseen_writes::EndLock;
pub use error::{FsError, Result};
pub use file::access::{AccessMask, CALLER_GROUPS_MAX, Caller};
pub use file::allocate::AllocateMode;
pub use file::attr::Attr;
pub use file::extents::ATOMIC_PAGES_MAX;
pub use file::privileges::SetIdCaller;
pub use file::read::{IO_BYTES_MAX, ReadReply};
pub use file::seek::SeekTarget;
pub use file::sync::LostWriteCursor;
pub use file::wcc::{Wcc, WccAttr, WccReply};
pub use format::acl::{ACL_ENTRIES_MAX, Acl, AclEntry, AclKind, AclTag};
pub use format::append_footer::{APPEND_PAGES_MAX, FOOTER_BYTES, TailWrite, footer_page};
pub use format::file_id::FileId;
pub use format::inode::{
    AppendExtent, FILE_BYTES_MAX, Ino, InodeKind, LINKS_MAX, NAME_MAX, TARGET_MAX, Time,
};
pub use format::page_map::{span_index, span_pages};
pub use fs::stateless::Pin;
pub use fs::{Fs, Usage};
pub use io::channel::{IoChannel, Wait};
pub use io::channel_pool::PooledChannel;
pub use io::write_queue::WriteQueue;
pub use live::kernel_hooks::{DropPages, ForgetName, NotifySize};
pub use live::mmap_dirty::{
    MMAP_DIRTY_PAGES_HARD_MAX, MMAP_DIRTY_PAGES_MAX, MMAP_DIRTY_SECONDS_MAX,
};
pub use live::read_times::ReadTimes;
pub use live::shared_file_map::SharedFileMap;
pub use mkfs::{MkfsOptions, mkfs};
pub use names::acls::Acls;
pub use names::attrs::AttrChanges;
pub use names::by_id::{CreateMode, Created, LinkReply, RenameReply};
pub use names::list::DirEntry;
pub use names::rename::RenameMode;
pub use names::set_attributes::{SetAttributes, SetTime};
pub use names::xattrs::SetXattrMode;
pub use snapshots::{
    OPEN_SNAPSHOTS_MAX, OpenSnapshots, SNAPSHOT_CALLS_MAX, SNAPSHOT_DIR, SNAPSHOT_IDLE_MAX,
    SNAPSHOT_LIST_AGE, SNAPSHOT_LIST_AGE_MAX, SnapshotEntry, SnapshotSource,
};
pub use tree::new_inode::{CreateKind, Credentials, NewMode};
pub use txn::deferred_commit::{CommitHook, UncommittedChanges};
pub use txn::manager::Clock;
pub use upkeep::UpkeepThread;
