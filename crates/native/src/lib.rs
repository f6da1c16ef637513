//! `libpagemesh`: files of a pagemesh mount for programs that use the direct path (RFD 017).
//!
//! A [`File`] is opened on a mount as any other. On the direct path (RFD 015), reads and overwrites
//! go straight to the pools and take about a microsecond. Otherwise they use the file's descriptor,
//! with the same result. A [`File`] offers two operations that a descriptor does not: it overwrites
//! several ranges [atomically](File::write_atomic), and maps bytes [without a copy](File::guard).
//!
//! ```no_run
//! use pagemesh::{File, Part};
//!
//! # fn main() -> Result<(), pagemesh::Error> {
//! let file = File::open("/mnt/home/accounts")?;
//! file.write_all_at(&[1; 4096], 0)?;
//! file.persist()?;
//!
//! // Both pages or none, after any crash; no reader gets one without the other.
//! let (from, to) = ([2; 4096], [3; 4096]);
//! file.write_atomic(&[Part::new(0, &from), Part::new(40_960, &to)])?;
//!
//! let guard = file.guard(0, 4096)?;
//! let mut sum = 0;
//! for slice in guard.slices() {
//!     // SAFETY: `guard` exists, and a sum of changing bytes does no harm.
//!     sum += unsafe { slice.as_bytes() }.iter().map(|&byte| u64::from(byte)).sum::<u64>();
//! }
//! guard.finish()?; // Only now the sum is known to be the sum of the file's bytes.
//! # Ok(())
//! # }
//! ```
//!
//! **Threads.** Several threads may call all functions concurrently. There are 16 I/O slots for
//! each mount; threads that meet at one take turns.
//!
//! **Fork.** A child uses the files of its parent by their descriptors. Files that it opens itself
//! are on the direct path again. It must not use guards of the parent.
//!
//! **Signals.** A handler that interrupts a call must return. It must not use files of the mount,
//! by this library or otherwise. A process that stays in a call blocks other processes, and is
//! killed.
//!
//! **The process** gets handlers of SIGSEGV and SIGBUS when the first pool is mapped, for pages
//! that cannot be read. They pass other signals on to the previous handler; a handler that is set
//! later must do the same. The process gets threads, with all signals blocked: one for each mount,
//! and one for each session of a pool. So a library that contains this one must not be unloaded. If
//! the machine finds memory broken, a read of it through a guard ends the process.
//!
//! **Limits.** `RLIMIT_FSIZE` holds as usual for writes that extend a file. Overwrites check the
//! limit as of the last time that this process opened or extended a file: an overwrite behind a
//! limit that was set since may succeed.
//!
//! Invariants: a write that the direct path confirms is as good as one that the descriptor
//! confirms. A panic ends the process, since its thread may hold pages of the pool. `unsafe` code
//! is in `abi`, which C calls, in `process`, which calls C, and in `guard`, which maps bytes.

#![deny(unsafe_code)]
#![warn(missing_docs)]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod abi;
mod error;
mod file;
mod guard;
mod process;

pub use error::Error;
pub use file::{ATOMIC_BYTES_MAX, ATOMIC_PAGES_MAX, File, OpenOptions, Part};
pub use guard::{GUARD_PAGES_MAX, GUARDS_MAX, Guard, Slice};

/// A page of a file. It changes as a whole or not at all.
pub const PAGE_BYTES: usize = 4096;
