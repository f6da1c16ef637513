//! Guards: bytes of a file, mapped in the pool.
//!
//! Invariants: a guard blocks no operation of a pool; a write to its bytes makes the guard invalid,
//! and the guard reports it. Its memory is readable while the guard exists, in any state of the
//! pool, and is never writable.

#![allow(unsafe_code)]

use crate::error::Error;
use crate::process;
use pagemesh_direct::client::ConsistentMapping;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most pages of one guard.
pub const GUARD_PAGES_MAX: usize = crate::ATOMIC_PAGES_MAX;
/// Most guards of a process at once. Each takes some KiB of memory, and up to 192 KiB if it is a
/// copy.
pub const GUARDS_MAX: usize = 1024;

static GUARDS: AtomicUsize = AtomicUsize::new(0);

/// A consistent snapshot of bytes of a file; see [`crate::File::guard`].
///
/// It becomes invalid when one of its pages is overwritten, or 4000 pages of the pool are. With a
/// concurrent writer at full speed that takes a few milliseconds. Bytes that are read from an
/// invalid guard are arbitrary; [`Guard::finish`] reports it.
pub struct Guard<'f> {
    /// Not dropped in a child of fork: the parent's mapping does not exist there, and another one
    /// may lie at its address.
    source: ManuallyDrop<GuardSource>,
    /// The process that created it, as [`process::generation`].
    generation: u64,
    _counted: GuardCount,
    _file: PhantomData<&'f ()>,
}

enum GuardSource {
    Mapping(ConsistentMapping),
    Copy(Vec<u8>),
}

struct GuardCount(());

impl GuardCount {
    fn new() -> Result<GuardCount, Error> {
        let counted = GuardCount(());
        if GUARDS.fetch_add(1, Ordering::Relaxed) < GUARDS_MAX {
            Ok(counted)
        } else {
            Err(Error::TooManyGuards)
        }
    }
}

impl Drop for GuardCount {
    fn drop(&mut self) {
        GUARDS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Contiguous bytes of a guard.
#[derive(Clone, Copy)]
pub struct Slice<'g> {
    at: NonNull<u8>,
    len: usize,
    _guard: PhantomData<&'g ()>,
}

impl<'f> Guard<'f> {
    fn new(source: GuardSource) -> Result<Guard<'f>, Error> {
        Ok(Guard {
            source: ManuallyDrop::new(source),
            generation: process::generation(),
            _counted: GuardCount::new()?,
            _file: PhantomData,
        })
    }

    pub(crate) fn from_mapping(shown: ConsistentMapping) -> Result<Guard<'f>, Error> {
        Guard::new(GuardSource::Mapping(shown))
    }

    pub(crate) fn from_copy(bytes: Vec<u8>) -> Result<Guard<'f>, Error> {
        Guard::new(GuardSource::Copy(bytes))
    }

    /// The bytes in file order; pages may lie apart.
    #[must_use]
    pub fn slices(&self) -> Vec<Slice<'_>> {
        let slice = |(at, len)| Slice {
            at,
            len,
            _guard: PhantomData,
        };
        match &*self.source {
            GuardSource::Mapping(shown) => shown.slices().map(slice).collect(),
            GuardSource::Copy(bytes) if bytes.is_empty() => Vec::new(),
            GuardSource::Copy(bytes) => {
                vec![slice((NonNull::from(&bytes[..]).cast(), bytes.len()))]
            }
        }
    }

    /// Whether the guard holds a copy, because the pool could not map the bytes.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(*self.source, GuardSource::Copy(_))
    }

    /// Whether all bytes read until now are those that the file had when the guard was created.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        match &*self.source {
            GuardSource::Mapping(shown) => self.is_same_process() && shown.is_unchanged(),
            GuardSource::Copy(_) => true,
        }
    }

    fn is_same_process(&self) -> bool {
        self.generation == process::generation()
    }

    /// Ends the guard.
    ///
    /// # Errors
    /// [`Error::Changed`] if [`Guard::is_valid`] is false.
    pub fn finish(self) -> Result<(), Error> {
        if self.is_valid() {
            Ok(())
        } else {
            Err(Error::Changed)
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.is_same_process() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.source) };
        }
    }
}

// SAFETY: the memory is read only, and may be read by any thread.
unsafe impl Send for Slice<'_> {}
// SAFETY: as above.
unsafe impl Sync for Slice<'_> {}

impl<'g> Slice<'g> {
    /// The address of the bytes.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.at.as_ptr()
    }

    /// The number of bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // There is none without bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies bytes out, as many as `into` has room for. Returns their number.
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        let count = self.len.min(into.len());
        // SAFETY: readable as long as the guard exists. `into` is memory of this process, and not
        // in the mapping, which is read only here. [`Guard::is_valid`] reports torn bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.at.as_ptr(), into.as_mut_ptr(), count) };
        count
    }

    /// The bytes.
    ///
    /// # Safety
    /// Another process may change the bytes while they are read. The caller must not use them in a
    /// way that arbitrary or changing bytes would make unsound (no decisions about memory, no
    /// `str`). The caller must not rely on them before the guard was found valid afterwards.
    #[must_use]
    pub unsafe fn as_bytes(&self) -> &'g [u8] {
        // SAFETY: readable as long as the guard exists; the rest is the caller's promise.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}
