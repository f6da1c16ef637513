//! The heat of the frames in memory in front of disks. A tier moves the pages of cold frames to flash.
//!
//! Every session raises it, also that of a program that maps the pool. The tier's thread lowers it. A heat is 0 to
//! [`HEAT_MAX`], or the mark of a pinned frame.
//!
//! Invariants: an update takes no lock and may be lost. That costs a move, and never data. A frame that gets another page
//! gets its heat anew, so a mark ends with the page. A session without hints leaves marks as they are.

use super::{Control, heat_at};
use pagemesh_base::ids::FrameNo;
use pagemesh_base::tier_hint::TierHint;
use std::sync::atomic::{AtomicU8, Ordering};

/// The heat of a page that is used all the time. The hand of the clock passes it as often before it takes it.
pub const HEAT_MAX: u8 = 3;
/// The mark of a frame with a page that requests pinned. The hand passes it without lowering it.
const PINNED: u8 = 0x80;

impl Control {
    /// None for a frame without a heat: on flash, or in a pool without a tier.
    #[inline]
    fn heat(&self, frame: FrameNo) -> Option<&AtomicU8> {
        (frame.0 < self.heat_frames).then(|| {
            let first = heat_at(self.session_count);
            self.shared.byte(first + frame.0 as usize)
        })
    }

    /// Counts a read of the frame's page.
    #[inline]
    pub(crate) fn warm_frame(&self, frame: FrameNo, hint: TierHint) {
        self.update_heat(frame, |now| after_read(now, hint));
    }

    /// Counts a change in place of the frame's page.
    #[inline]
    pub(crate) fn warm_changed(&self, frame: FrameNo, hint: TierHint) {
        self.update_heat(frame, |now| after_write(now, hint));
    }

    #[inline]
    fn update_heat(&self, frame: FrameNo, next: impl FnOnce(u8) -> u8) {
        if let Some(heat) = self.heat(frame) {
            let now = heat.load(Ordering::Relaxed);
            let next = next(now);
            // The line of a hot page stays shared.
            if next != now {
                heat.store(next, Ordering::Relaxed);
            }
        }
    }

    /// Counts a write: the page moves from frame `old` to frame `new`, which may have had another page.
    #[inline]
    pub(crate) fn warm_replaced(&self, old: Option<FrameNo>, new: FrameNo, hint: TierHint) {
        if let Some(heat) = self.heat(new) {
            let before = old.and_then(|old| self.heat(old));
            let before = before.map_or(0, |heat| heat.load(Ordering::Relaxed));
            heat.store(after_write(before, hint), Ordering::Relaxed);
        }
    }

    /// Gives the heat of a page to the frame that it moves to.
    pub(crate) fn move_heat(&self, old: Option<FrameNo>, new: FrameNo) {
        let before = old.and_then(|old| self.heat(old));
        let before = before.map_or(0, |heat| heat.load(Ordering::Relaxed));
        if let Some(heat) = self.heat(new) {
            heat.store(before, Ordering::Relaxed);
        }
    }

    /// Sets the heat of a frame with another page.
    pub(crate) fn set_heat(&self, frame: FrameNo, value: u8) {
        if let Some(heat) = self.heat(frame) {
            heat.store(value.min(HEAT_MAX), Ordering::Relaxed);
        }
    }

    /// Marks a frame with another page as pinned.
    pub(crate) fn pin_frame(&self, frame: FrameNo) {
        if let Some(heat) = self.heat(frame) {
            heat.store(PINNED, Ordering::Relaxed);
        }
    }

    /// Whether requests pinned the frame's page.
    #[must_use]
    pub fn is_pinned(&self, frame: FrameNo) -> bool {
        self.heat(frame)
            .is_some_and(|heat| heat.load(Ordering::Relaxed) >= PINNED)
    }

    /// Whether the frame is cold. Lowers its heat if not, unless it is pinned. A frame without a heat is never cold.
    #[must_use]
    pub fn cool_frame(&self, frame: FrameNo) -> bool {
        let Some(heat) = self.heat(frame) else {
            return false;
        };
        let now = heat.load(Ordering::Relaxed);
        if (1..PINNED).contains(&now) {
            heat.store(now - 1, Ordering::Relaxed);
        }
        now == 0
    }
}

/// The heat of a page after a read.
#[inline]
fn after_read(now: u8, hint: TierHint) -> u8 {
    match hint {
        TierHint::None if now >= HEAT_MAX => now,
        TierHint::None => now + 1,
        TierHint::Memory => PINNED,
        TierHint::Flash if now >= PINNED => 0,
        TierHint::Flash => now,
        TierHint::Automatic => now.saturating_add(1).min(HEAT_MAX),
    }
}

/// The heat of a page after a write.
#[inline]
fn after_write(before: u8, hint: TierHint) -> u8 {
    match hint {
        TierHint::None if before >= PINNED => PINNED,
        TierHint::None | TierHint::Automatic => before.saturating_add(1).min(HEAT_MAX),
        TierHint::Memory => PINNED,
        TierHint::Flash => 0,
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
            control.warm_frame(FrameNo(3), TierHint::None);
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
        control.warm_frame(FrameNo(1), TierHint::None);
        control.set_heat(FrameNo(2), HEAT_MAX);
        control.warm_replaced(Some(FrameNo(1)), FrameNo(2), TierHint::None);
        assert_eq!(passes_until_cold(&control, FrameNo(2)), 2);
        control.warm_replaced(Some(FrameNo(100)), FrameNo(5), TierHint::None);
        control.warm_replaced(None, FrameNo(6), TierHint::None);
        assert_eq!(passes_until_cold(&control, FrameNo(5)), 1);
        assert_eq!(passes_until_cold(&control, FrameNo(6)), 1);
    }

    #[test]
    fn pool_without_tier_has_no_heat() {
        let control = Control::create(4, 0, Incarnation(1), Seq(1)).expect("a segment");
        control.warm_frame(FrameNo(0), TierHint::None);
        control.warm_replaced(None, FrameNo(0), TierHint::None);
        assert!(!control.cool_frame(FrameNo(0)));
        assert_eq!(control.shared().len_bytes(), Control::len_for(4, 0));
    }

    #[test]
    fn pinned_frame_is_never_cold_until_its_mark_ends() {
        let control = control();
        let (pinned, other) = (FrameNo(1), FrameNo(2));
        control.warm_frame(pinned, TierHint::Memory);
        assert_eq!(passes_until_cold(&control, pinned), 10);
        control.warm_frame(pinned, TierHint::None);
        assert!(control.is_pinned(pinned), "a session without hints");
        control.warm_replaced(Some(pinned), other, TierHint::None);
        assert!(control.is_pinned(other), "the same page");
        control.warm_frame(other, TierHint::Automatic);
        assert_eq!(passes_until_cold(&control, other), usize::from(HEAT_MAX));
        control.warm_replaced(None, pinned, TierHint::None);
        assert!(!control.is_pinned(pinned), "another page");
    }

    #[test]
    fn flash_hint_leaves_page_cold() {
        let control = control();
        let (one, two) = (FrameNo(1), FrameNo(2));
        control.warm_frame(one, TierHint::None);
        control.warm_replaced(Some(one), two, TierHint::Flash);
        control.warm_frame(two, TierHint::Flash);
        assert_eq!(passes_until_cold(&control, two), 0);
        control.warm_frame(two, TierHint::Memory);
        control.warm_frame(two, TierHint::Flash);
        assert_eq!(passes_until_cold(&control, two), 0, "an earlier mark");
    }

    #[test]
    fn moved_page_takes_its_mark_along() {
        let control = control();
        control.warm_frame(FrameNo(1), TierHint::Memory);
        control.warm_frame(FrameNo(3), TierHint::Memory);
        control.move_heat(Some(FrameNo(1)), FrameNo(2));
        control.move_heat(Some(FrameNo(100)), FrameNo(3));
        assert!(control.is_pinned(FrameNo(2)));
        assert!(control.cool_frame(FrameNo(3)), "it was on flash");
    }
}
