//! Touches of pages: the heat of memory frames, and repeated touches of flash frames.
//!
//! Invariants: a touch takes no lock. Lost touches cost a move, and never data.

use pagemesh_base::ids::FrameNo;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The heat of a page that is used all the time. The hand of the clock passes it as often before it takes it.
pub(crate) const HEAT_MAX: u8 = 3;
/// Bits of a frame's number in a word of the table of touches; the rest is the time of the touch.
const FRAME_BITS: u32 = 36;

/// The place of a touched page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// The page is in memory.
    Hit,
    /// The page is on flash, and was not touched lately.
    Miss,
    /// The page is on flash, and was touched before within the window.
    Again,
}

/// The touches of a pool's frames.
pub(crate) struct Heat {
    /// The first flash frame.
    flash_start: u64,
    memory: Vec<AtomicU8>,
    /// Direct-mapped: the last touches of flash frames.
    touches: Vec<AtomicU64>,
    /// Touches of flash so far.
    time: AtomicU64,
}

impl Heat {
    /// For frames in memory below `memory_end`. Frames from `flash_start` on are on flash.
    pub(crate) fn new(memory_end: u64, flash_start: u64) -> Heat {
        let words = (memory_end as usize).next_power_of_two();
        Heat {
            flash_start,
            memory: (0..memory_end).map(|_| AtomicU8::new(0)).collect(),
            touches: (0..words).map(|_| AtomicU64::new(0)).collect(),
            time: AtomicU64::new(0),
        }
    }

    pub(crate) fn is_on_flash(&self, frame: FrameNo) -> bool {
        frame.0 >= self.flash_start
    }

    /// Counts a touch.
    pub(crate) fn touch(&self, frame: FrameNo) -> Touch {
        if !self.is_on_flash(frame) {
            self.warm(frame);
            return Touch::Hit;
        }
        let now = self.time.fetch_add(1, Ordering::Relaxed) + 1;
        let now = now & ((1 << (64 - FRAME_BITS)) - 1);
        let hash = frame.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let word = &self.touches[hash as usize & (self.touches.len() - 1)];
        let before = word.swap(now << FRAME_BITS | frame.0, Ordering::Relaxed);
        let (time, of) = (before >> FRAME_BITS, before & ((1 << FRAME_BITS) - 1));
        let is_recent = now.wrapping_sub(time) <= self.touches.len() as u64;
        match before != 0 && of == frame.0 && is_recent {
            true => Touch::Again,
            false => Touch::Miss,
        }
    }

    /// Raises the heat of a memory frame.
    pub(crate) fn warm(&self, frame: FrameNo) {
        if let Some(heat) = self.memory.get(frame.0 as usize) {
            let now = heat.load(Ordering::Relaxed);
            if now < HEAT_MAX {
                heat.store(now + 1, Ordering::Relaxed);
            }
        }
    }

    /// Whether a memory frame is cold. Lowers its heat if not.
    pub(crate) fn cool(&self, frame: FrameNo) -> bool {
        let Some(heat) = self.memory.get(frame.0 as usize) else {
            return false;
        };
        let now = heat.load(Ordering::Relaxed);
        if now > 0 {
            heat.store(now - 1, Ordering::Relaxed);
        }
        now == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_touch_of_flash_is_told_within_the_window() {
        let heat = Heat::new(16, 100);
        assert_eq!(heat.touch(FrameNo(5)), Touch::Hit);
        assert_eq!(heat.touch(FrameNo(130)), Touch::Miss);
        assert_eq!(heat.touch(FrameNo(130)), Touch::Again);
        assert_eq!(heat.touch(FrameNo(131)), Touch::Miss);
        // A scan longer than the window.
        for frame in 1000..1017 {
            heat.touch(FrameNo(frame));
        }
        assert_eq!(heat.touch(FrameNo(130)), Touch::Miss);
    }

    #[test]
    fn hot_frame_outlasts_as_many_passes_as_its_heat() {
        let heat = Heat::new(16, 100);
        for _ in 0..10 {
            heat.warm(FrameNo(3));
        }
        let passes = (0..10).take_while(|_| !heat.cool(FrameNo(3))).count();
        assert_eq!(passes, usize::from(HEAT_MAX));
        assert!(heat.cool(FrameNo(4)));
        assert!(!heat.cool(FrameNo(100)), "a frame on flash is never taken");
    }
}
