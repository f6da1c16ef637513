//! Choices that follow from a seed.

use pagemesh_fuzz::Random;

pub(super) struct Dice(Random);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        Dice(Random::new(seed))
    }

    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0.draw() % sides
    }

    pub(super) fn any<T: Copy>(&mut self, of: &[T]) -> T {
        *self.0.choose(of)
    }
}
