//! `libpagemesh`: files of a pagemesh mount for programs that know it (RFD 017).
//!
//! A [`File`] is opened on a mount as any other. What is read and overwritten goes straight
//! to the pools, in about a microsecond, where the direct path is open (RFD 015), and by the
//! file's descriptor where not, with the same result. Besides, it can do what a descriptor
//! cannot: overwrite several places [as a whole](File::write_atomic), and show bytes
//! [without a copy](File::guard).
//!
//! ```no_run
//! use pagemesh::{File, Part};
//!
//! # fn main() -> Result<(), pagemesh::Error> {
//! let file = File::open("/mnt/home/accounts")?;
//! file.write_all_at(&[1; 4096], 0)?;
//! file.persist()?;
//!
//! // Both pages or none, whatever dies; nobody reads one without the other.
//! let (from, to) = ([2; 4096], [3; 4096]);
//! file.write_atomic(&[Part::new(0, &from), Part::new(40_960, &to)])?;
//!
//! let guard = file.guard(0, 4096)?;
//! let mut sum = 0;
//! for slice in guard.slices() {
//!     // SAFETY: `guard` is there, and a sum of other bytes does no harm.
//!     sum += unsafe { slice.as_bytes() }.iter().map(|&byte| u64::from(byte)).sum::<u64>();
//! }
//! guard.finish()?; // Only now the sum is that of bytes that the file had.
//! # Ok(())
//! # }
//! ```
//!
//! **Threads.** Everything may be called by several threads at once; there are 16 ways to
//! the pools for each mount, and threads that meet at one take turns.
//!
//! **Fork.** A child goes on with the files of its parent by their descriptors; those that
//! it opens itself are on the direct path again. A guard of the parent must not be touched.
//!
//! **Signals.** A handler that interrupts a call must return, and must not touch files of
//! the mount, by this library or otherwise: whoever stays inside of a call holds up others,
//! and is ended.
//!
//! **The process** gets handlers of SIGSEGV and SIGBUS when the first pool is mapped, for
//! pages that cannot be read. They pass on what is not theirs to the handler that was there
//! before; who sets one later must do the same. It gets threads, with all signals blocked:
//! one for each mount, and one for each session of a pool. So a library with this inside
//! must not be unloaded. Memory that the machine finds broken ends who looks at it through a
//! guard.
//!
//! **Limits.** `RLIMIT_FSIZE` holds as ever for what makes a file longer. What is overwritten
//! behind a limit that was set since this process last opened a file, or made one longer, may be
//! written.
//!
//! Invariants: nothing is confirmed that would not be by the descriptor; a panic ends the
//! process, since its thread may hold pages of the pool. `unsafe` is in `abi`, which C calls,
//! `process`, which calls it, and `guard`, where bytes are shown.

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

/// A page of a file, which changes as a whole or not at all.
pub const PAGE_BYTES: usize = 4096;
