//! Memory that remembers every store, to enumerate what a crash may leave.
//!
//! Model: stores reach persistence in 8-byte words; those of one line in the
//! order they were made, those of different lines in any order. A flush makes
//! the line's earlier stores persistent at the next fence; a line that was
//! never flushed may still persist any prefix at any time, also after later
//! fences. Streaming is storing and flushing.
//!
//! This is class `pmem`. Of `eadr` every image is among those: a line's stores
//! may persist at once here too, and a fence makes more certain there, not less.

use crate::media::{Fenced, Media, Unfenced, check_range};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const WORDS: usize = LINE_BYTES / 8;
const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// Words by page: a copy shares the pages that neither side has changed since,
/// and pages of zeroes take no room.
#[derive(Clone)]
struct Words(Vec<Option<Arc<[u64; PAGE_WORDS]>>>);

impl Words {
    fn zeroed(len_words: usize) -> Words {
        Words(vec![None; len_words / PAGE_WORDS])
    }

    fn from_image(image: &[u64]) -> Words {
        let page = |words: &[u64; PAGE_WORDS]| {
            let used = words.iter().any(|word| *word != 0);
            used.then(|| Arc::new(*words))
        };
        Words(image.as_chunks().0.iter().map(page).collect())
    }

    fn image(&self) -> Vec<u64> {
        let pages = self.0.iter();
        let words = |page: &Option<Arc<_>>| page.as_deref().copied().unwrap_or([0; PAGE_WORDS]);
        pages.flat_map(words).collect()
    }

    fn len(&self) -> usize {
        self.0.len() * PAGE_WORDS
    }

    fn get(&self, index: usize) -> u64 {
        let page = self.0[index / PAGE_WORDS].as_ref();
        page.map_or(0, |page| page[index % PAGE_WORDS])
    }

    fn set(&mut self, index: usize, word: u64) {
        let page = self.0[index / PAGE_WORDS].get_or_insert_with(|| Arc::new([0; PAGE_WORDS]));
        Arc::make_mut(page)[index % PAGE_WORDS] = word;
    }
}

#[derive(Clone, Default)]
struct Line {
    /// Stores not known to be persistent: word in the line, value.
    pending: Vec<(usize, u64)>,
    /// How many of them the next fence makes persistent.
    flushed: usize,
}

struct State {
    /// What a load sees.
    visible: Words,
    /// What is persistent for certain.
    durable: Words,
    lines: BTreeMap<usize, Line>,
    /// None: nobody will ask for the past.
    points: Option<Vec<CrashPoint>>,
}

/// Memory whose crash states can be enumerated.
pub struct Recorder(Mutex<State>);

/// The moment just before a fence: what is certain, and what may be there.
#[derive(Clone)]
pub struct CrashPoint {
    durable: Words,
    lines: Vec<(usize, Vec<(usize, u64)>)>,
}

impl Recorder {
    /// Zeroed, persistent memory of `len` bytes.
    ///
    /// # Panics
    /// When `len` is not whole pages.
    pub fn new(len: usize) -> Recorder {
        assert!(len.is_multiple_of(PAGE_BYTES), "whole pages");
        Recorder::over(Words::zeroed(len / 8))
    }

    /// Memory that starts as one of the images of a [`CrashPoint`].
    ///
    /// # Panics
    /// When the image is not whole pages.
    pub fn from_image(image: Vec<u64>) -> Recorder {
        assert!((image.len() * 8).is_multiple_of(PAGE_BYTES), "whole pages");
        Recorder::over(Words::from_image(&image))
    }

    fn over(words: Words) -> Recorder {
        Recorder(Mutex::new(State {
            durable: words.clone(),
            visible: words,
            lines: BTreeMap::new(),
            points: Some(Vec::new()),
        }))
    }

    /// The same without the points of the past, each of which is a copy of
    /// the medium.
    pub fn without_past(self) -> Recorder {
        self.state().points = None;
        self
    }

    /// Another medium in the state of this one: what is uncertain here is
    /// uncertain there.
    pub fn fork(&self) -> Recorder {
        let state = self.state();
        Recorder(Mutex::new(State {
            visible: state.visible.clone(),
            durable: state.durable.clone(),
            lines: state.lines.clone(),
            points: state.points.as_ref().map(|_| Vec::new()),
        }))
    }

    /// One point before every fence so far, and one for now.
    pub fn crash_points(&self) -> Vec<CrashPoint> {
        let state = self.state();
        let mut points = state.points.clone().unwrap_or_default();
        points.push(state.crash_point());
        points
    }

    /// What a crash may leave now.
    pub fn crash_point(&self) -> CrashPoint {
        self.state().crash_point()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn store(&mut self, index: usize, word: u64) {
        self.visible.set(index, word);
        let line = self.lines.entry(index / WORDS).or_default();
        line.pending.push((index % WORDS, word));
    }

    fn store_bytes(&mut self, offset: usize, bytes: &[u8]) {
        for (i, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            self.store(offset / 8 + i, u64::from_le_bytes(*word));
        }
    }

    fn flush(&mut self, offset: usize, len: usize) {
        let last = (offset + len).div_ceil(LINE_BYTES);
        for (_, line) in self.lines.range_mut(offset / LINE_BYTES..last) {
            line.flushed = line.pending.len();
        }
    }

    fn fence(&mut self) {
        if self.points.is_some() {
            let point = self.crash_point();
            self.points.get_or_insert_default().push(point);
        }
        for (&number, line) in &mut self.lines {
            for (word, value) in line.pending.drain(..line.flushed) {
                self.durable.set(number * WORDS + word, value);
            }
            line.flushed = 0;
        }
        self.lines.retain(|_, line| !line.pending.is_empty());
    }

    fn crash_point(&self) -> CrashPoint {
        let pending = |(&number, line): (&usize, &Line)| (number, line.pending.clone());
        CrashPoint {
            durable: self.durable.clone(),
            lines: self.lines.iter().map(pending).collect(),
        }
    }
}

impl CrashPoint {
    /// How many images are legal here; saturates.
    pub fn count(&self) -> u64 {
        let choices = |(_, stores): &(usize, Vec<_>)| stores.len() as u64 + 1;
        self.lines.iter().map(choices).fold(1, u64::saturating_mul)
    }

    /// Image number `index` of [`CrashPoint::count`]: the index in mixed
    /// radix chooses how many stores of each line persisted. Zero is nothing
    /// uncertain, the last is everything.
    ///
    /// # Panics
    /// When the index is not below the count.
    pub fn image(&self, index: u64) -> Vec<u64> {
        assert!(index < self.count(), "image {index} of {}", self.count());
        let mut rest = index;
        let words = self.build(|choices| {
            let chosen = rest % choices;
            rest /= choices;
            chosen
        });
        words.image()
    }

    /// The image in which every store persisted.
    pub fn everything(&self) -> Vec<u64> {
        self.build(|choices| choices - 1).image()
    }

    /// An image chosen by the seed, where there are too many to count: each
    /// line's part is drawn on its own, none and all more often (SplitMix64, Steele et al. 2014).
    pub fn sample(&self, seed: u64) -> Vec<u64> {
        self.sampled(seed).image()
    }

    /// The medium that [`CrashPoint::sample`] describes.
    pub fn survivor(&self, seed: u64) -> Recorder {
        Recorder::over(self.sampled(seed))
    }

    fn sampled(&self, seed: u64) -> Words {
        let mut state = seed;
        self.build(|choices| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let mixed = mixed ^ (mixed >> 31);
            // Whole lines missing or present are where protocols break.
            match mixed >> 62 {
                0 => 0,
                1 => choices - 1,
                _ => mixed % choices,
            }
        })
    }

    fn build(&self, mut choose: impl FnMut(u64) -> u64) -> Words {
        let mut image = self.durable.clone();
        for (line, stores) in &self.lines {
            let persisted = choose(stores.len() as u64 + 1) as usize;
            for (word, value) in &stores[..persisted] {
                image.set(line * WORDS + word, *value);
            }
        }
        image
    }
}

impl Media for Recorder {
    fn len_bytes(&self) -> usize {
        self.state().visible.len() * 8
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        check_range(self.len_bytes(), offset, into.len(), 1);
        let state = self.state();
        if offset.is_multiple_of(8) && into.len().is_multiple_of(8) {
            for (at, bytes) in (offset / 8..).zip(into.as_chunks_mut::<8>().0) {
                *bytes = state.visible.get(at).to_le_bytes();
            }
            return;
        }
        for (at, byte) in (offset..).zip(into) {
            *byte = state.visible.get(at / 8).to_le_bytes()[at % 8];
        }
    }

    fn load(&self, offset: usize) -> u64 {
        check_range(self.len_bytes(), offset, 8, 8);
        self.state().visible.get(offset / 8)
    }

    fn store(&self, offset: usize, word: u64) {
        check_range(self.len_bytes(), offset, 8, 8);
        self.state().store(offset / 8, word);
    }

    fn swap(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        check_range(self.len_bytes(), offset, 8, 8);
        let mut state = self.state();
        let found = state.visible.get(offset / 8);
        if found != old {
            return Err(found);
        }
        state.store(offset / 8, new);
        Ok(())
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> Unfenced {
        check_range(self.len_bytes(), offset, LINE_BYTES, LINE_BYTES);
        let mut state = self.state();
        state.store_bytes(offset, line);
        state.flush(offset, LINE_BYTES);
        Unfenced(())
    }

    fn stream_page(targets: &[(&Self, usize)], page: &[u8; PAGE_BYTES]) -> (u32, Unfenced) {
        for (media, offset) in targets {
            check_range(media.len_bytes(), *offset, PAGE_BYTES, PAGE_BYTES);
            let mut state = media.state();
            state.store_bytes(*offset, page);
            state.flush(*offset, PAGE_BYTES);
        }
        (crc32c(page), Unfenced(()))
    }

    fn flush(&self, offset: usize, len: usize) -> Unfenced {
        check_range(self.len_bytes(), offset, len, 1);
        self.state().flush(offset, len);
        Unfenced(())
    }

    /// Fences this recorder; a mirrored write fences each of its recorders.
    fn fence(&self, stores: Unfenced) -> Fenced {
        let Unfenced(()) = stores;
        self.state().fence();
        Fenced(())
    }
}
