//! Numbers and bytes that derive from a seed.

/// A sequence of random numbers.
pub struct Random(pagemesh_fuzz::Random);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(pagemesh_fuzz::Random::new(seed))
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0.draw() % end
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.0.draw().to_le_bytes()[..chunk.len()]);
        }
    }
}
