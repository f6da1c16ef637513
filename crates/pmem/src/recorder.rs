//! Memory that records every store, to enumerate the states that a crash may leave.
//!
//! Model of class `pmem`: stores become persistent in 8-byte words: within a line in the order
//! they were made, across lines in any order. A flush makes the line's earlier stores
//! persistent at the next fence; a line that was never flushed may persist any prefix at any time,
//! also after later fences. Streaming is storing and flushing. The images of `eadr` are a subset of
//! these: a line's stores may persist at once here too, and there a fence guarantees more.
//!
//! Model of class `file-sync`: the kernel writes back at any time, in sectors of 512 bytes, each in
//! a state since the last [`Media::sync`], in any order. Flushes and fences guarantee nothing.
//!
//! Memory in front of disks: `pmem` before the first byte of the disks, `file-sync` from there on. The process keeps
//! unwritten sectors of the disks in its memory, so its death may lose them, too.
//!
//! Images share equal pages, so the cost of one is the stores since, not the size of the medium.

mod crash;

use crate::map_error::MapError;
use crate::media::{FenceProof, Media, UnfencedStores, check_range};
use crate::unreadable::PATTERN;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::{self, recover};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

const SECTOR_BYTES: usize = 512;
const PAGE_WORDS: usize = PAGE_BYTES / 8;
type Page = [u64; PAGE_WORDS];

pub use crash::{CrashImages, CrashPoint};

/// The content of a medium. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Image(Vec<Arc<Page>>);

impl Image {
    /// `len` bytes, every word the same.
    ///
    /// # Panics
    /// When `len` is not whole pages.
    #[must_use]
    pub fn filled(len: usize, word: u64) -> Image {
        assert!(len.is_multiple_of(PAGE_BYTES), "whole pages");
        let page = Arc::new([word; PAGE_WORDS]);
        let pages = std::iter::repeat_n(page, len / PAGE_BYTES);
        Image(pages.collect())
    }

    /// An image of these bytes.
    ///
    /// # Panics
    /// When they are not whole pages.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Image {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        assert!(rest.is_empty(), "whole pages");
        let word = |page: &[u8; PAGE_BYTES], at| u64::from_le_bytes(page.as_chunks::<8>().0[at]);
        let page = |page| Arc::new(std::array::from_fn(|at| word(page, at)));
        Image(pages.iter().map(page).collect())
    }

    /// The content as bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = self.0.iter().flat_map(|page| page.iter());
        words.flat_map(|word| word.to_le_bytes()).collect()
    }

    /// The aligned word at this byte.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn word(&self, offset: usize) -> u64 {
        check_range(self.0.len() * PAGE_BYTES, offset, 8, 8);
        self.get(offset / 8)
    }

    /// Changes the aligned word at this byte, to simulate damage.
    ///
    /// # Panics
    /// When there is none.
    pub fn set_word(&mut self, offset: usize, word: u64) {
        check_range(self.0.len() * PAGE_BYTES, offset, 8, 8);
        self.set(offset / 8, word);
    }

    fn get(&self, index: usize) -> u64 {
        self.0[index / PAGE_WORDS][index % PAGE_WORDS]
    }

    fn set(&mut self, index: usize, word: u64) {
        // A store of the same value needs no page of its own.
        if self.get(index) != word {
            Arc::make_mut(&mut self.0[index / PAGE_WORDS])[index % PAGE_WORDS] = word;
        }
    }

    /// Sets words of one page.
    fn set_all(&mut self, index: usize, words: &[u64]) {
        let page = &mut self.0[index / PAGE_WORDS];
        let within = index % PAGE_WORDS..index % PAGE_WORDS + words.len();
        if page[within.clone()] != *words {
            Arc::make_mut(page)[within].copy_from_slice(words);
        }
    }
}

/// How stores become persistent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Persistence {
    /// By flushed lines, at a fence.
    Lines,
    /// By sectors, at a sync.
    Sectors,
    /// By lines before this word, and by sectors from there on.
    Tiered(usize),
    /// At once: nothing is recorded.
    Instant,
}

impl Persistence {
    /// The words that persist in the order they were stored, around this one.
    fn unit_at(self, index: usize) -> Range<usize> {
        let words = match self.are_sectors(index) {
            true => SECTOR_BYTES / 8,
            false => LINE_BYTES / 8,
        };
        let first = index - index % words;
        first..first + words
    }

    fn are_sectors(self, index: usize) -> bool {
        self.synced_words().contains(&index)
    }

    /// The words that persist by sectors.
    fn synced_words(self) -> Range<usize> {
        match self {
            Persistence::Sectors => 0..usize::MAX,
            Persistence::Tiered(from) => from..usize::MAX,
            Persistence::Lines | Persistence::Instant => usize::MAX..usize::MAX,
        }
    }

    /// The words that persist by lines.
    fn fenced_words(self) -> Range<usize> {
        0..self.synced_words().start
    }
}

#[derive(Clone, Default)]
struct PersistenceUnit {
    /// Stores not known to be persistent: word in the unit, value.
    pending: Vec<(usize, u64)>,
    /// How many of them the next fence makes persistent.
    flushed: usize,
}

struct RecorderState {
    persistence: Persistence,
    /// The content that loads see.
    visible: Image,
    /// The content that is certainly persistent.
    durable: Image,
    /// By their first word.
    units: BTreeMap<usize, PersistenceUnit>,
    /// None: no crash points are recorded.
    crash_points: Option<Vec<CrashPoint>>,
    /// Of an overlay: the pages that it has stored to.
    own_pages: Vec<bool>,
    /// The range of a failed device.
    absent: Option<Range<usize>>,
}

/// Memory that can enumerate its crash states.
pub struct Recorder {
    len: usize,
    /// Boxed: errors carry recorders.
    state: Box<Mutex<RecorderState>>,
    /// Of an overlay: the medium below, visible where the overlay stored nothing.
    base: Option<Arc<Recorder>>,
}

impl Recorder {
    /// Zeroed, persistent memory of `len` bytes.
    ///
    /// # Panics
    /// When `len` is not whole pages.
    #[must_use]
    pub fn new(len: usize) -> Recorder {
        Recorder::from_image(Image::filled(len, 0))
    }

    /// Memory of class `pmem` that starts as an image.
    #[must_use]
    pub fn from_image(image: Image) -> Recorder {
        Recorder::with_persistence(image, Persistence::Lines)
    }

    /// A file of class `file-sync` that starts as an image.
    #[must_use]
    pub fn for_file(image: Image) -> Recorder {
        Recorder::with_persistence(image, Persistence::Sectors)
    }

    /// Memory of class `pmem` before this byte, and disks from there on.
    #[must_use]
    pub fn tiered(image: Image, from: usize) -> Recorder {
        assert!(from.is_multiple_of(PAGE_BYTES), "whole pages");
        Recorder::with_persistence(image, Persistence::Tiered(from / 8))
    }

    /// Memory that starts as an image and records nothing.
    #[must_use]
    pub fn unrecorded(image: Image) -> Recorder {
        Recorder::with_persistence(image, Persistence::Instant)
    }

    fn with_persistence(image: Image, persistence: Persistence) -> Recorder {
        Recorder {
            len: image.0.len() * PAGE_BYTES,
            state: Box::new(Mutex::new(RecorderState {
                persistence,
                durable: image.clone(),
                visible: image,
                units: BTreeMap::new(),
                crash_points: Some(Vec::new()),
                own_pages: Vec::new(),
                absent: None,
            })),
            base: None,
        }
    }

    /// The same without recorded crash points.
    #[must_use]
    pub fn without_crash_points(self) -> Recorder {
        self.state().crash_points = None;
        self
    }

    /// Another medium in the same state: the stores uncertain here are uncertain there.
    #[must_use]
    pub fn fork(&self) -> Recorder {
        let state = self.state();
        Recorder {
            len: self.len,
            state: Box::new(Mutex::new(RecorderState {
                persistence: state.persistence,
                visible: state.visible.clone(),
                durable: state.durable.clone(),
                units: state.units.clone(),
                crash_points: state.crash_points.as_ref().map(|_| Vec::new()),
                own_pages: state.own_pages.clone(),
                absent: state.absent.clone(),
            })),
            base: self.base.clone(),
        }
    }

    /// A private mapping of the same file, like `MappedMedia::overlay`: pages that were never
    /// stored to show the content of the file.
    #[must_use]
    pub fn overlay(self: &Arc<Recorder>) -> Recorder {
        let mut overlay = Recorder::unrecorded(self.visible_image());
        recover(overlay.state.get_mut()).own_pages = vec![false; self.len / PAGE_BYTES];
        overlay.base = Some(self.clone());
        overlay
    }

    /// One point before every fence (of a file: every sync) so far, and one for now.
    pub fn crash_points(&self) -> Vec<CrashPoint> {
        let state = self.state();
        let mut points = state.crash_points.clone().unwrap_or_default();
        points.push(state.crash_point());
        points
    }

    /// Like [`Recorder::crash_points`], and drops the points before now.
    pub fn take_crash_points(&self) -> Vec<CrashPoint> {
        let mut state = self.state();
        let past = state.crash_points.as_mut().map(std::mem::take);
        let mut points = past.unwrap_or_default();
        points.push(state.crash_point());
        points
    }

    /// The crash point of now.
    pub fn crash_point(&self) -> CrashPoint {
        self.state().crash_point()
    }

    /// The content that loads see now, which survives the death of processes.
    pub fn visible_image(&self) -> Image {
        self.state().visible.clone()
    }

    #[inline]
    fn state(&self) -> MutexGuard<'_, RecorderState> {
        poison::lock(&self.state)
    }

    fn page(&self, number: usize) -> Arc<Page> {
        self.state().visible.0[number].clone()
    }

    /// The state, after the visible words were refreshed from the medium below.
    #[inline]
    fn lock_visible(&self, offset: usize, len: usize) -> MutexGuard<'_, RecorderState> {
        let mut state = self.state();
        if let Some(below) = &self.base {
            state.refresh_from_base(below, offset, len);
        }
        state
    }

    /// The state, after the pages of the words were made this medium's own.
    fn lock_for_store(&self, offset: usize, len: usize) -> MutexGuard<'_, RecorderState> {
        let mut state = self.lock_visible(offset, len);
        if self.base.is_some() {
            for page in offset / PAGE_BYTES..=(offset + len - 1) / PAGE_BYTES {
                state.own_pages[page] = true;
            }
        }
        state
    }
}

impl RecorderState {
    /// Whether a byte is of a failed device.
    fn is_absent(&self, offset: usize) -> bool {
        self.absent
            .as_ref()
            .is_some_and(|bytes| bytes.contains(&offset))
    }

    /// Copies the content of the file where nothing was stored.
    fn refresh_from_base(&mut self, below: &Recorder, offset: usize, len: usize) {
        for page in offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES) {
            if !self.own_pages[page] {
                self.visible.0[page] = below.page(page);
            }
        }
    }

    fn store(&mut self, index: usize, word: u64) {
        self.visible.set(index, word);
        if self.persistence != Persistence::Instant {
            let first = self.persistence.unit_at(index).start;
            let unit = self.units.entry(first).or_default();
            unit.pending.push((index - first, word));
        }
    }

    /// Stores whole lines of one page.
    fn store_lines(&mut self, offset: usize, bytes: &[u8]) {
        let (lines, _) = bytes.as_chunks::<LINE_BYTES>();
        for (line, bytes) in lines.iter().enumerate() {
            let (bytes, _) = bytes.as_chunks::<8>();
            let words: [u64; LINE_BYTES / 8] =
                std::array::from_fn(|at| u64::from_le_bytes(bytes[at]));
            let index = (offset + line * LINE_BYTES) / 8;
            self.visible.set_all(index, &words);
            if self.persistence != Persistence::Instant {
                let first = self.persistence.unit_at(index).start;
                let unit = self.units.entry(first).or_default();
                unit.pending
                    .extend((index - first..).zip(words.iter().copied()));
            }
        }
    }

    fn flush(&mut self, offset: usize, len: usize) {
        let fenced = self.persistence.fenced_words();
        let (first, end) = (offset / LINE_BYTES, (offset + len).div_ceil(LINE_BYTES));
        let words = [first, end].map(|line| (line * (LINE_BYTES / 8)).min(fenced.end));
        for (_, unit) in self.units.range_mut(words[0]..words[1]) {
            unit.flushed = unit.pending.len();
        }
    }

    fn fence(&mut self) {
        if matches!(
            self.persistence,
            Persistence::Lines | Persistence::Tiered(_)
        ) {
            self.persist(self.persistence.fenced_words());
        }
    }

    fn sync(&mut self) {
        let synced = self.persistence.synced_words();
        if !synced.is_empty() {
            for (_, unit) in self.units.range_mut(synced.clone()) {
                unit.flushed = unit.pending.len();
            }
            self.persist(synced);
        }
    }

    /// Makes the flushed stores to these words persistent.
    fn persist(&mut self, words: Range<usize>) {
        if self.crash_points.is_some() {
            let point = self.crash_point();
            self.crash_points.get_or_insert_default().push(point);
        }
        for (&first, unit) in self.units.range_mut(words) {
            for (word, value) in unit.pending.drain(..unit.flushed) {
                self.durable.set(first + word, value);
            }
            unit.flushed = 0;
        }
        self.units.retain(|_, unit| !unit.pending.is_empty());
    }

    fn crash_point(&self) -> CrashPoint {
        let pending = |(&first, unit): (&usize, &PersistenceUnit)| (first, unit.pending.clone());
        CrashPoint {
            durable: self.durable.clone(),
            units: self.units.iter().map(pending).collect(),
        }
    }
}

impl Media for Recorder {
    fn len_bytes(&self) -> usize {
        self.len
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        check_range(self.len, offset, into.len(), 1);
        let state = self.lock_visible(offset, into.len());
        if state.is_absent(offset) {
            let words = (offset..).map(|at| PATTERN.to_le_bytes()[at % 8]);
            into.iter_mut().zip(words).for_each(|(byte, it)| *byte = it);
            return;
        }
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let (index, within) = (at / 8, at % 8);
            if within == 0 && rest.len() >= 8 {
                let words = &state.visible.0[index / PAGE_WORDS][index % PAGE_WORDS..];
                let count = words.len().min(rest.len() / 8);
                let (now, after) = rest.split_at_mut(count * 8);
                for (bytes, word) in now.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                    *bytes = word.to_le_bytes();
                }
                at += count * 8;
                rest = after;
            } else {
                rest[0] = state.visible.get(index).to_le_bytes()[within];
                at += 1;
                rest = &mut rest[1..];
            }
        }
    }

    #[inline]
    fn load(&self, offset: usize) -> u64 {
        check_range(self.len, offset, 8, 8);
        let state = self.lock_visible(offset, 8);
        match state.is_absent(offset) {
            true => PATTERN,
            false => state.visible.get(offset / 8),
        }
    }

    fn store(&self, offset: usize, word: u64) {
        check_range(self.len, offset, 8, 8);
        let mut state = self.lock_for_store(offset, 8);
        if !state.is_absent(offset) {
            state.store(offset / 8, word);
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        check_range(self.len, offset, 8, 8);
        let mut state = self.lock_for_store(offset, 8);
        if state.is_absent(offset) {
            return Err(PATTERN);
        }
        let found = state.visible.get(offset / 8);
        if found != old {
            return Err(found);
        }
        state.store(offset / 8, new);
        Ok(())
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        check_range(self.len, offset, LINE_BYTES, LINE_BYTES);
        let mut state = self.lock_for_store(offset, LINE_BYTES);
        if !state.is_absent(offset) {
            state.store_lines(offset, line);
            state.flush(offset, LINE_BYTES);
        }
        UnfencedStores(())
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        for (media, offset) in targets {
            check_range(media.len, *offset, PAGE_BYTES, PAGE_BYTES);
            let mut state = media.lock_for_store(*offset, PAGE_BYTES);
            if state.is_absent(*offset) {
                continue;
            }
            state.store_lines(*offset, page);
            state.flush(*offset, PAGE_BYTES);
        }
        (PageChecksums::of(page), UnfencedStores(()))
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        check_range(self.len, offset, len, 1);
        self.state().flush(offset, len);
        UnfencedStores(())
    }

    /// Fences this recorder; a mirrored write fences each of its recorders.
    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        let UnfencedStores(()) = stores;
        self.state().fence();
        FenceProof(())
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        self.state().is_absent(offset)
    }

    fn attach_absent(&self, bytes: Range<usize>) -> Result<(), MapError> {
        assert!(bytes.end <= self.len, "the recorder has the range");
        self.state().absent = Some(bytes);
        Ok(())
    }

    fn buffers_from(&self) -> Option<usize> {
        match self.state().persistence {
            Persistence::Tiered(from) => Some(from * 8),
            _ => None,
        }
    }

    fn sync(&self) -> Result<(), MapError> {
        self.state().sync();
        Ok(())
    }
}
