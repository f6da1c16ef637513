//! The tests of the file system are one program, because each program links the crate and its dependencies again.

#![allow(clippy::unwrap_used)]

mod acls;
mod cases;
mod channels;
mod crash_times;
mod crashes;
mod create_durability;
mod damage;
mod deferred_commit;
mod deferred_free;
mod direct_append;
mod direct_writes;
mod full_pool;
mod kernel_permissions;
mod listing_reads;
mod long_appends;
mod lost_writes;
mod mmap;
mod mmap_redo_log;
mod mmap_threads;
mod read_times;
mod resend;
mod service_file;
mod shared_spans;
mod snapshot_mount;
mod sparse_files;
mod stale_pages;
mod stateless_attributes;
mod stateless_changes;
mod stateless_files;
mod stateless_names;
mod support;
mod tail_pages;
mod tier;
mod unstable_writes;
mod write_atomic;
mod write_times;
mod xattrs;
