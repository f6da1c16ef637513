//! Media for tests: a recorder, and hooks for what a test changes about it.

use crate::{FenceProof, MapError, Media, Recorder, UnfencedStores};
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;

/// A medium that passes all its accesses to a recorder. A type with this trait is a [`Media`].
///
/// A change is a store, a line of a longer write or of a stream, a page that is streamed to one or
/// several media, a flush, a fence or a sync. For several media the hooks of the first are called.
pub trait RecordedMedium: Sized {
    /// The recorder.
    fn recorder(&self) -> &Recorder;

    /// Called before each change. If it panics, the user of the medium has died before the change.
    fn before_change(&self) {}

    /// Called before each fence, after [`RecordedMedium::before_change`].
    fn before_fence(&self) {}

    /// Called after each fence.
    fn after_fence(&self) {}

    /// Takes a page that is to be streamed; false: the recorder gets it.
    fn take_page(_targets: &[(&Self, usize)], _page: &[u8; PAGE_BYTES]) -> bool {
        false
    }

    /// Whether flushes have an effect.
    fn does_flush(&self) -> bool {
        true
    }

    /// Whether a sync fails.
    fn fails_sync(&self) -> bool {
        false
    }
}

/// Splits bytes at line boundaries: each part with its offset.
fn lines_of(offset: usize, bytes: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let (mut at, mut rest) = (offset, bytes);
    std::iter::from_fn(move || {
        let count = rest.len().min(LINE_BYTES - at % LINE_BYTES);
        let (part, after) = rest.split_at(count);
        let found = (at, part);
        (at, rest) = (at + count, after);
        (count > 0).then_some(found)
    })
}

impl<T: RecordedMedium> Media for T {
    fn len_bytes(&self) -> usize {
        self.recorder().len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.recorder().read(offset, into);
    }

    fn load(&self, offset: usize) -> u64 {
        self.recorder().load(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.before_change();
        self.recorder().store(offset, word);
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        for (at, part) in lines_of(offset, bytes) {
            self.before_change();
            self.recorder().write(at, part);
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.before_change();
        self.recorder().compare_exchange(offset, old, new)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        self.before_change();
        self.recorder().stream_line(offset, line)
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        targets[0].0.before_change();
        if T::take_page(targets, page) {
            return (PageChecksums::of(page), UnfencedStores(()));
        }
        let recorders = targets.iter().map(|(it, at)| (it.recorder(), *at));
        Recorder::stream_page(&recorders.collect::<Vec<_>>(), page)
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        self.before_change();
        if self.does_flush() {
            self.recorder().flush(offset, len)
        } else {
            UnfencedStores(())
        }
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        T::fence_each(&[self], stores)
    }

    fn fence_each(media: &[&Self], stores: UnfencedStores) -> FenceProof {
        media[0].before_change();
        media[0].before_fence();
        let recorders = media.iter().map(|it| it.recorder());
        let fenced = Recorder::fence_each(&recorders.collect::<Vec<_>>(), stores);
        media.iter().for_each(|it| it.after_fence());
        fenced
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        self.recorder().is_unreadable(offset)
    }

    fn attach_absent(&self, bytes: Range<usize>) -> Result<(), MapError> {
        self.recorder().attach_absent(bytes)
    }

    fn buffers_from(&self) -> Option<usize> {
        self.recorder().buffers_from()
    }

    fn sync(&self) -> Result<(), MapError> {
        self.before_change();
        if self.fails_sync() {
            return Err(MapError::SyncFailed);
        }
        self.recorder().sync()
    }
}
