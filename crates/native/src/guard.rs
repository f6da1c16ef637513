//! Bytes that are shown where they lie.
//!
//! Invariants: a guard never keeps a pool from going on: whoever changes its bytes makes it
//! over, and it tells so. What it shows can be read as long as it is there, whatever becomes
//! of the pool, and cannot be written to.

#![allow(unsafe_code)]

use crate::error::Error;
use crate::process;
use pagemesh_direct::guest::Shown;
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
    source: ManuallyDrop<Source>,
    /// In which process it was made.
    generation: u64,
    _counted: Counted,
    _file: PhantomData<&'f ()>,
}

enum Source {
    Shown(Shown),
    Copied(Vec<u8>),
}

struct Counted(());

impl Counted {
    fn new() -> Result<Counted, Error> {
        let counted = Counted(());
        match GUARDS.fetch_add(1, Ordering::Relaxed) < GUARDS_MAX {
            true => Ok(counted),
            false => Err(Error::TooManyGuards),
        }
    }
}

impl Drop for Counted {
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
    fn of(source: Source) -> Result<Guard<'f>, Error> {
        Ok(Guard {
            source: ManuallyDrop::new(source),
            generation: process::generation(),
            _counted: Counted::new()?,
            _file: PhantomData,
        })
    }

    pub(crate) fn shown(shown: Shown) -> Result<Guard<'f>, Error> {
        Guard::of(Source::Shown(shown))
    }

    pub(crate) fn copied(bytes: Vec<u8>) -> Result<Guard<'f>, Error> {
        Guard::of(Source::Copied(bytes))
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
            Source::Shown(shown) => shown.slices().map(slice).collect(),
            Source::Copied(bytes) if bytes.is_empty() => Vec::new(),
            Source::Copied(bytes) => vec![slice((NonNull::from(&bytes[..]).cast(), bytes.len()))],
        }
    }

    /// Whether the pool could not show them.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        matches!(*self.source, Source::Copied(_))
    }

    /// Whether all that was read of it until now is what the file had when it was made.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        match &*self.source {
            Source::Shown(shown) => self.is_own() && shown.is_same(),
            Source::Copied(_) => true,
        }
    }

    fn is_own(&self) -> bool {
        self.generation == process::generation()
    }

    /// Ends it.
    ///
    /// # Errors
    /// [`Error::Changed`] where [`Guard::is_valid`] is false.
    pub fn finish(self) -> Result<(), Error> {
        match self.is_valid() {
            true => Ok(()),
            false => Err(Error::Changed),
        }
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.is_own() {
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
