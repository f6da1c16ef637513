//! Bytes that are shown where they lie.
//!
//! Invariants: a guard never keeps a pool from going on: whoever changes its bytes makes it
//! over, and it tells so. What it shows can be read as long as it is there, whatever becomes
//! of the pool, and cannot be written to.

#![allow(unsafe_code)]

use crate::error::Error;
use crate::process;
use pagemesh_direct::client::ConsistentMapping;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages of one guard.
pub const GUARD_PAGES_MAX: usize = crate::ATOMIC_PAGES_MAX;
/// Guards of a process at once: each has some kilobytes of its own, and up to 192 KiB if
/// it is a copy.
pub const GUARDS_MAX: usize = 1024;

static GUARDS: AtomicUsize = AtomicUsize::new(0);

/// Bytes of a file as they were when it was made; see [`crate::File::guard`].
///
/// It is over when one of its pages is overwritten, or 4000 pages of the pool are, so after
/// a few milliseconds beside who writes as fast as possible. Then what is read of it may be
/// anything; [`Guard::finish`] tells.
pub struct Guard<'f> {
    /// Not dropped in a child of fork: there is nothing of the parent's mapping, and maybe
    /// something else in its place.
    source: ManuallyDrop<GuardSource>,
    /// In which process it was made.
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
        match GUARDS.fetch_add(1, Ordering::Relaxed) < GUARDS_MAX {
            true => Ok(counted),
            false => Err(Error::TooManyGuards),
        }
    }
}

impl Drop for GuardCount {
    fn drop(&mut self) {
        GUARDS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes that are shown together.
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

    /// The bytes in their order; pages lie apart.
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

    /// Whether the pool could not show them.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(*self.source, GuardSource::Copy(_))
    }

    /// Whether all that was read of it until now is what the file had when it was made.
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

    /// Ends it.
    ///
    /// # Errors
    /// [`Error::LegsChanged`] where [`Guard::is_valid`] is false.
    pub fn finish(self) -> Result<(), Error> {
        match self.is_valid() {
            true => Ok(()),
            false => Err(Error::Changed),
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
    /// Where they lie.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.at.as_ptr()
    }

    /// How many.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // There is none without bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies them out; as many as there is room for.
    pub fn copy_to(&self, into: &mut [u8]) -> usize {
        let count = self.len.min(into.len());
        // SAFETY: readable as long as the guard; `into` is memory of this process and not
        // in the pane, to which nobody here can store. Torn bytes are the guard's to tell.
        unsafe { std::ptr::copy_nonoverlapping(self.at.as_ptr(), into.as_mut_ptr(), count) };
        count
    }

    /// The bytes.
    ///
    /// # Safety
    /// Another process may change them while they are looked at. Whoever calls must do
    /// nothing with them that other bytes, or changing ones, would make unsound (no
    /// decisions about memory, no `str`), and must not believe anything before the guard
    /// was found valid afterwards.
    #[must_use]
    pub unsafe fn as_bytes(&self) -> &'g [u8] {
        // SAFETY: readable as long as the guard; the rest is the caller's promise.
        unsafe { slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}
