//! Memory of models: reports each access before it happens, and moves pages in two halves, because
//! no page access is atomic.
//!
//! Streamed bytes may wait in the processor until its fence. A medium covers one of the two
//! extremes: other threads see the bytes at once, or not before the fence.

use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_models::{Access, step, this_thread};
use pagemesh_pmem::{FenceProof, Image, Media, Recorder, UnfencedStores};
use std::sync::{Mutex, MutexGuard, PoisonError};

const POOL: &str = "pool";
const HALF_BYTES: usize = PAGE_BYTES / 2;

/// When other threads see streamed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamVisibility {
    Immediate,
    AtFence,
}

/// A line that waits for its thread's fence.
struct PendingLine {
    thread: usize,
    offset: usize,
    line: [u8; LINE_BYTES],
}

pub(super) struct ModelMedium {
    recorder: Recorder,
    streams: StreamVisibility,
    pending: Mutex<Vec<PendingLine>>,
}

fn lines(offset: usize, len: usize) -> std::ops::Range<usize> {
    offset / LINE_BYTES..(offset + len).div_ceil(LINE_BYTES)
}

impl ModelMedium {
    pub(super) fn new(image: Image, streams: StreamVisibility) -> ModelMedium {
        ModelMedium {
            recorder: Recorder::unrecorded(image),
            streams,
            pending: Mutex::default(),
        }
    }

    /// The bytes that the death of all processes leaves.
    pub(super) fn now(&self) -> Image {
        self.recorder.visible_image()
    }

    fn lock_pending(&self) -> MutexGuard<'_, Vec<PendingLine>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a thread's streamed bytes visible to all: the thread fenced, or is gone.
    pub(super) fn publish_pending(&self, thread: usize) {
        let due: Vec<PendingLine> = {
            let mut late = self.lock_pending();
            let (due, kept) = std::mem::take(&mut *late)
                .into_iter()
                .partition(|late| late.thread == thread);
            *late = kept;
            due
        };
        for lines_of_one in due.chunk_by(|a, b| a.offset + LINE_BYTES == b.offset) {
            for late in lines_of_one {
                if late.offset == lines_of_one[0].offset || late.offset % HALF_BYTES == 0 {
                    step(POOL, lines(late.offset, LINE_BYTES), Access::Change);
                }
                let _ = self.recorder.stream_line(late.offset, &late.line);
            }
        }
    }

    fn stream(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        match (self.streams, this_thread()) {
            (StreamVisibility::AtFence, Some(thread)) => {
                let line = *line;
                self.lock_pending().push(PendingLine {
                    thread,
                    offset,
                    line,
                });
                self.recorder.flush(offset, LINE_BYTES)
            }
            _ => self.recorder.stream_line(offset, line),
        }
    }

    /// A thread sees its own streamed bytes.
    fn overlay_pending(&self, offset: usize, into: &mut [u8]) {
        let Some(thread) = this_thread() else { return };
        for late in self
            .lock_pending()
            .iter()
            .filter(|late| late.thread == thread)
        {
            let begin = late.offset.max(offset);
            let end = (late.offset + LINE_BYTES).min(offset + into.len());
            if begin < end {
                let line = &late.line[begin - late.offset..end - late.offset];
                into[begin - offset..end - offset].copy_from_slice(line);
            }
        }
    }
}

impl Media for ModelMedium {
    fn len_bytes(&self) -> usize {
        self.recorder.len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        for (half, part) in into.chunks_mut(HALF_BYTES).enumerate() {
            let at = offset + half * HALF_BYTES;
            step(POOL, lines(at, part.len()), Access::Load);
            self.recorder.read(at, part);
        }
        self.overlay_pending(offset, into);
    }

    fn load(&self, offset: usize) -> u64 {
        step(POOL, lines(offset, 8), Access::Load);
        self.recorder.load(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        step(POOL, lines(offset, 8), Access::Change);
        self.recorder.store(offset, word);
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let count = rest.len().min(HALF_BYTES - at % HALF_BYTES);
            let (part, after) = rest.split_at(count);
            step(POOL, lines(at, count), Access::Change);
            self.recorder.write(at, part);
            (at, rest) = (at + count, after);
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        step(POOL, lines(offset, 8), Access::Change);
        self.recorder.compare_exchange(offset, old, new)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        step(POOL, lines(offset, LINE_BYTES), Access::Change);
        self.stream(offset, line)
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        let mut stores = None;
        for (medium, offset) in targets {
            for (index, line) in page.as_chunks::<LINE_BYTES>().0.iter().enumerate() {
                let at = offset + index * LINE_BYTES;
                if at.is_multiple_of(HALF_BYTES) {
                    step(POOL, lines(at, HALF_BYTES), Access::Change);
                }
                stores = Some(medium.stream(at, line));
            }
        }
        (PageChecksums::of(page), stores.expect("a target"))
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        self.recorder.flush(offset, len)
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        if let Some(thread) = this_thread() {
            self.publish_pending(thread);
        }
        self.recorder.fence(stores)
    }
}
