//! The heat of the frames in memory in front of disks. A tier moves the pages of cold frames to flash.
//!
//! Every session raises it, also that of a program that maps the pool. The tier's thread lowers it. A heat is 0 to
//! [`HEAT_MAX`].
//!
//! Invariant: an update takes no lock and may be lost. That costs a move, and never data.

use super::{Control, heat_at};
use pagemesh_base::ids::FrameNo;
use std::sync::atomic::{AtomicU8, Ordering};

/// The heat of a page that is used all the time. The hand of the clock passes it as often before it takes it.
pub const HEAT_MAX: u8 = 3;

impl Control {
    /// None for a frame without a heat: on flash, or in a pool without a tier.
    #[inline]
    fn heat(&self, frame: FrameNo) -> Option<&AtomicU8> {
        (frame.0 < self.heat_frames).then(|| {
            let first = heat_at(self.session_count);
            self.shared.byte(first + frame.0 as usize)
        })
    }

    /// Counts a read of the frame's page, or a change in place.
    #[inline]
    pub(crate) fn warm_frame(&self, frame: FrameNo) {
        if let Some(heat) = self.heat(frame) {
            let now = heat.load(Ordering::Relaxed);
            // The line of a hot page stays shared.
            if now < HEAT_MAX {
                heat.store(now + 1, Ordering::Relaxed);
            }
        }
    }

    /// Counts a write: the page moves from frame `old` to frame `new`, which may have had another page.
    #[inline]
    pub(crate) fn warm_replaced(&self, old: Option<FrameNo>, new: FrameNo) {
        if let Some(heat) = self.heat(new) {
            let before = old.and_then(|old| self.heat(old));
            let before = before.map_or(0, |heat| heat.load(Ordering::Relaxed));
            heat.store((before + 1).min(HEAT_MAX), Ordering::Relaxed);
        }
    }

    /// Sets the heat of a frame with another page.
    pub(crate) fn set_heat(&self, frame: FrameNo, value: u8) {
        if let Some(heat) = self.heat(frame) {
            heat.store(value.min(HEAT_MAX), Ordering::Relaxed);
        }
    }

    /// Whether the frame is cold. Lowers its heat if not. A frame without a heat is never cold.
    #[must_use]
    pub fn cool_frame(&self, frame: FrameNo) -> bool {
        let Some(heat) = self.heat(frame) else {
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
    use pagemesh_base::ids::{Incarnation, Seq};

    fn control() -> Control {
        Control::create(4, 16, Incarnation(1), Seq(1)).expect("a segment")
    }

    fn passes_until_cold(control: &Control, frame: FrameNo) -> usize {
        (0..10).take_while(|_| !control.cool_frame(frame)).count()
    }

    #[test]
    fn hot_frame_outlasts_as_many_passes_as_its_heat() {
        let control = control();
        for _ in 0..10 {
            control.warm_frame(FrameNo(3));
        }
        assert_eq!(
            passes_until_cold(&control, FrameNo(3)),
            usize::from(HEAT_MAX)
        );
        assert!(control.cool_frame(FrameNo(4)));
        assert!(!control.cool_frame(FrameNo(16)), "a frame on flash");
    }

    #[test]
    fn written_page_keeps_its_heat_in_its_new_frame() {
        let control = control();
        control.warm_frame(FrameNo(1));
        control.set_heat(FrameNo(2), HEAT_MAX);
        control.warm_replaced(Some(FrameNo(1)), FrameNo(2));
        assert_eq!(passes_until_cold(&control, FrameNo(2)), 2);
        control.warm_replaced(Some(FrameNo(100)), FrameNo(5));
        control.warm_replaced(None, FrameNo(6));
        assert_eq!(passes_until_cold(&control, FrameNo(5)), 1);
        assert_eq!(passes_until_cold(&control, FrameNo(6)), 1);
    }

    #[test]
    fn pool_without_tier_has_no_heat() {
        let control = Control::create(4, 0, Incarnation(1), Seq(1)).expect("a segment");
        control.warm_frame(FrameNo(0));
        control.warm_replaced(None, FrameNo(0));
        assert!(!control.cool_frame(FrameNo(0)));
        assert_eq!(control.shared().len_bytes(), Control::len_for(4, 0));
    }
}
