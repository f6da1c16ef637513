//! The images that a crash may leave at one point, and the choice of those to check.

use super::{Image, PAGE_WORDS, Recorder};
use pagemesh_base::rng::SplitMix64;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Up to this many units an image is drawn unit by unit: each of the few images is then likely
/// enough.
const FEW_UNITS: usize = 8;
/// Repeated samples in a row after which the search ends.
const DRAWS_MAX: u32 = 64;

/// The first word of a unit, and its stores: word in the unit, value.
type UnitStores = (usize, Vec<(usize, u64)>);

/// The point just before stores become persistent: the certain content, and the stores that may be
/// persistent.
#[derive(Clone)]
pub struct CrashPoint {
    pub(super) durable: Image,
    /// Lines or sectors, and the stores to them.
    pub(super) units: Vec<UnitStores>,
}

impl CrashPoint {
    /// How many different images are legal here; saturates.
    pub fn count(&self) -> u64 {
        count(&self.states())
    }

    /// Image number `index` of [`CrashPoint::count`], each a different one: the index in mixed
    /// radix chooses how much of each line or sector persisted. Image zero has no uncertain store.
    ///
    /// # Panics
    /// When the index is not below the count.
    pub fn image(&self, index: u64) -> Image {
        if index == 0 {
            return self.durable.clone();
        }
        let states = self.states();
        let count = count(&states);
        assert!(index < count, "image {index} of {count}");
        self.image_from_states(&states, index)
    }

    /// The image in which every store persisted.
    pub fn all_persisted(&self) -> Image {
        self.build(self.units.iter().map(|(_, stores)| stores.len()))
    }

    /// An image chosen by the seed, where there are too many to count. Three of four are near the
    /// states that break protocols: all but a few stores, only a few stores, and pages that are
    /// present as a whole or not.
    pub fn sample(&self, seed: u64) -> Image {
        self.build(self.sample_counts(seed))
    }

    /// Every legal image, if there are at most `all_max`. Otherwise no store, every store, and
    /// samples by the seed, at most `sampled` in all. No image is repeated.
    pub fn images(&self, all_max: u64, sampled: u64, seed: u64) -> CrashImages<'_> {
        let states = self.states();
        let count = count(&states);
        let is_all = count <= all_max;
        CrashImages {
            point: self,
            is_all,
            left: if is_all { count } else { sampled },
            next: 0,
            states,
            seed,
            given_sums: HashSet::new(),
        }
    }

    /// For each unit, and each count of its persisted stores, the smallest count that leaves the
    /// same content.
    fn states(&self) -> Vec<Vec<usize>> {
        self.units.iter().map(|unit| self.states_of(unit)).collect()
    }

    fn states_of(&self, (unit, stores): &UnitStores) -> Vec<usize> {
        let (mut held, mut sum) = (BTreeMap::new(), 0);
        let mut fewest = HashMap::from([(sum, 0)]);
        let mut states = vec![0];
        for (count, &(word, value)) in (1..).zip(stores) {
            let durable = || self.durable.get(unit + word);
            let old = held.insert(word, value).unwrap_or_else(durable);
            // Equal words have equal sums, whichever stores led to them.
            sum ^= state_hash(word, old) ^ state_hash(word, value);
            states.push(*fewest.entry(sum).or_insert(count));
        }
        states
    }

    fn image_from_states(&self, states: &[Vec<usize>], index: u64) -> Image {
        let mut rest = index;
        self.build(states.iter().map(|states| {
            let mut different = distinct_states(states);
            let choices = different.clone().count() as u64;
            let chosen = different.nth((rest % choices) as usize);
            rest /= choices;
            chosen.expect("below the count")
        }))
    }

    /// How many stores of each unit persist in the sample of a seed.
    fn sample_counts(&self, seed: u64) -> Vec<usize> {
        let mut random = SplitMix64::new(seed.wrapping_mul(0xd129_0d3f_2d4b_05cd));
        let mut draw = || random.next_u64();
        let style = match self.units.len() <= FEW_UNITS {
            true => 0,
            false => draw() % 4,
        };
        if style == 3 {
            let salt = draw();
            let of_page = |(unit, stores): &UnitStores| {
                let page = salt ^ (unit / PAGE_WORDS) as u64;
                if SplitMix64::new(page).next_u64().is_multiple_of(2) {
                    return stores.len();
                }
                // A line of a missing page is present now and then.
                match draw() % 16 {
                    0 => stores.len(),
                    _ => 0,
                }
            };
            return self.units.iter().map(of_page).collect();
        }
        let count = self.units.len() as u64;
        let odd: Vec<u64> = (0..=draw() % 3).map(|_| draw() % count.max(1)).collect();
        let of_unit = |(at, (_, stores)): (u64, &UnitStores)| {
            let any = random_count(draw(), stores.len());
            match (style, odd.contains(&at)) {
                (1, false) => stores.len(),
                (2, false) => 0,
                (1, true) => any.min(stores.len().saturating_sub(1)),
                _ => any,
            }
        };
        (0..).zip(&self.units).map(of_unit).collect()
    }

    /// Memory that starts as one of the images: the seed draws how much of each unit persisted,
    /// independently of the others.
    #[must_use]
    pub fn sample_recorder(&self, seed: u64) -> Recorder {
        let mut random = SplitMix64::new(seed);
        let of_unit = |(_, stores): &UnitStores| random_count(random.next_u64(), stores.len());
        Recorder::from_image(self.build(self.units.iter().map(of_unit)))
    }

    /// The image in which this many stores of each unit persisted.
    fn build(&self, persisted: impl IntoIterator<Item = usize>) -> Image {
        let mut image = self.durable.clone();
        for ((unit, stores), persisted) in self.units.iter().zip(persisted) {
            for (word, value) in &stores[..persisted] {
                image.set(unit + word, *value);
            }
        }
        image
    }
}

/// Images of a crash point, see [`CrashPoint::images`].
pub struct CrashImages<'p> {
    point: &'p CrashPoint,
    is_all: bool,
    /// The most images left to return.
    left: u64,
    /// The index of the next image, or of the next draw.
    next: u64,
    states: Vec<Vec<usize>>,
    seed: u64,
    /// Hashes of the samples so far.
    given_sums: HashSet<u64>,
}

impl CrashImages<'_> {
    /// Whether these are all legal images.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.is_all
    }

    fn draw(&mut self) -> Vec<usize> {
        let at = self.next;
        self.next += 1;
        match at {
            0 => vec![0; self.states.len()],
            1 => self.states.iter().map(|states| states.len() - 1).collect(),
            _ => self.point.sample_counts(self.seed.wrapping_add(at)),
        }
    }

    /// Whether no earlier image has the same content.
    fn is_new(&mut self, drawn: &[usize]) -> bool {
        let fewest = self.states.iter().zip(drawn).map(|(states, &n)| states[n]);
        let marks = (0..)
            .zip(fewest)
            .map(|(unit, fewest)| state_hash(unit, fewest as u64));
        self.given_sums
            .insert(marks.fold(0, |sum, mark| sum ^ mark))
    }
}

impl Iterator for CrashImages<'_> {
    type Item = Image;

    fn next(&mut self) -> Option<Image> {
        self.left = self.left.checked_sub(1)?;
        if self.is_all {
            self.next += 1;
            return Some(self.point.image_from_states(&self.states, self.next - 1));
        }
        for _ in 0..DRAWS_MAX {
            let drawn = self.draw();
            if self.is_new(&drawn) {
                return Some(self.point.build(drawn));
            }
        }
        self.left = 0;
        None
    }
}

/// The states that differ from each other.
fn distinct_states(states: &[usize]) -> impl Iterator<Item = usize> + Clone {
    let places = states.iter().enumerate();
    places
        .filter(|(at, fewest)| at == *fewest)
        .map(|(at, _)| at)
}

/// The number of images of these unit states; saturates.
fn count(states: &[Vec<usize>]) -> u64 {
    let choices = states
        .iter()
        .map(|states| distinct_states(states).count() as u64);
    choices.fold(1, u64::saturating_mul)
}

/// A hash of a word and its content; sums of them distinguish states of units.
fn state_hash(word: usize, value: u64) -> u64 {
    let seed = value ^ (word as u64).wrapping_mul(0xff51_afd7_ed55_8ccd);
    SplitMix64::new(seed).next_u64()
}

/// How many of a unit's stores persisted. Protocols break at none and all.
fn random_count(drawn: u64, stores: usize) -> usize {
    match drawn >> 62 {
        0 => 0,
        1 => stores,
        _ => (drawn % (stores as u64 + 1)) as usize,
    }
}
