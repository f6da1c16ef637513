//! Random choices that depend on a seed only.

use pagemesh_fuzz::Random;

pub(super) struct Rng(Random);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng(Random::new(seed))
    }

    pub(super) fn below(&mut self, sides: u64) -> u64 {
        self.0.draw() % sides
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        *self.0.choose(of)
    }
}
