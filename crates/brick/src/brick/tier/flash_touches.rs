//! Touches of flash frames, which tell a second touch of a page from the first.
//!
//! Invariants: a touch takes no lock. A lost touch costs a move, and never data.

use pagemesh_base::ids::FrameNo;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a frame's number in a word of the table; the rest is the time of the touch.
const FRAME_BITS: u32 = 36;

/// The touch of a page on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlashTouch {
    /// The page was not touched lately.
    First,
    /// The page was touched before, within the window.
    Again,
}

/// The last touches of a pool's flash frames. The window is as many touches as there are memory frames.
pub(crate) struct FlashTouches {
    /// The first flash frame.
    flash_start: u64,
    /// Direct-mapped.
    touches: Vec<AtomicU64>,
    /// Touches so far.
    time: AtomicU64,
}

impl FlashTouches {
    /// For so many memory frames. Frames from `flash_start` on are on flash.
    pub(crate) fn new(memory_frames: u64, flash_start: u64) -> FlashTouches {
        let words = (memory_frames as usize).next_power_of_two();
        FlashTouches {
            flash_start,
            touches: (0..words).map(|_| AtomicU64::new(0)).collect(),
            time: AtomicU64::new(0),
        }
    }

    pub(crate) fn is_on_flash(&self, frame: FrameNo) -> bool {
        frame.0 >= self.flash_start
    }

    /// Counts a touch of a flash frame.
    pub(crate) fn touch(&self, frame: FrameNo) -> FlashTouch {
        let now = self.time.fetch_add(1, Ordering::Relaxed) + 1;
        let now = now & ((1 << (64 - FRAME_BITS)) - 1);
        let hash = frame.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let word = &self.touches[hash as usize & (self.touches.len() - 1)];
        let before = word.swap(now << FRAME_BITS | frame.0, Ordering::Relaxed);
        let (time, of) = (before >> FRAME_BITS, before & ((1 << FRAME_BITS) - 1));
        let is_recent = now.wrapping_sub(time) <= self.touches.len() as u64;
        match before != 0 && of == frame.0 && is_recent {
            true => FlashTouch::Again,
            false => FlashTouch::First,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_touch_of_flash_is_told_within_the_window() {
        let touches = FlashTouches::new(16, 100);
        assert_eq!(touches.touch(FrameNo(130)), FlashTouch::First);
        assert_eq!(touches.touch(FrameNo(130)), FlashTouch::Again);
        assert_eq!(touches.touch(FrameNo(131)), FlashTouch::First);
        // A scan longer than the window.
        for frame in 1000..1017 {
            touches.touch(FrameNo(frame));
        }
        assert_eq!(touches.touch(FrameNo(130)), FlashTouch::First);
    }
}
