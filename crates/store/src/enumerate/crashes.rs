//! What crashes may have left: each image is recovered and compared.

use super::budget::Budget;
use super::model::{Oracle, Wrong};
use super::recover::{self, recover};
use super::world::World;
use crate::defect::{self, Defect};
use pagemesh_pmem::{CrashPoint, Image};
use std::collections::BTreeMap;

/// Every so many images the objects that images share are read, too.
const READ_ALL: u64 = 64;
/// Every so many images the recovery itself crashes.
const CRASH_RECOVERY: u64 = 48;

impl World<'_> {
    /// Checks the crashes since the last call: all but the last happened
    /// before `after` was.
    pub(super) fn check_crashes(&mut self, during: &Oracle, after: &Oracle) -> Result<(), Wrong> {
        let points = self.medium.recorder.take_crash_points();
        let (last, synced) = (points.len() - 1, self.synced.take());
        self.last.clear();
        for (number, point) in points.into_iter().enumerate() {
            let oracle = match (number, &synced) {
                _ if number == last => after,
                (1.., Some(synced)) => synced,
                _ => during,
            };
            self.check_point(&point, oracle)?;
            self.last.push((point, oracle.clone()));
        }
        Ok(())
    }

    fn check_point(&mut self, point: &CrashPoint, oracle: &Oracle) -> Result<(), Wrong> {
        let Some(Budget { all_max, sampled }) = self.budget else {
            return Ok(());
        };
        let mut images = point.images(all_max.max(sampled), sampled, self.tally.images);
        self.tally.points += 1;
        self.tally.exhausted += u64::from(images.is_all());
        self.tally.legal.note(point.count());
        images.try_for_each(|image| self.check_image(image, oracle))
    }

    fn check_image(&mut self, image: Image, oracle: &Oracle) -> Result<(), Wrong> {
        self.tally.images += 1;
        if self.tally.images.is_multiple_of(CRASH_RECOVERY) {
            self.crash_recovery(image.clone(), oracle)?;
        }
        let nothing = BTreeMap::new();
        let unread = match self.tally.images.is_multiple_of(READ_ALL) {
            true => &nothing,
            false => &self.unread,
        };
        // It is the pool at work that grants too early.
        let found = defect::without(Defect::FrameReuse, || recover(self.kind, image, unread))?;
        let is_compared = found.listed.values().any(Option::is_none);
        self.tally.compared += u64::from(is_compared);
        oracle.judge(&found).map(drop)
    }

    /// A crash while recovering from a crash.
    fn crash_recovery(&mut self, image: Image, oracle: &Oracle) -> Result<(), Wrong> {
        let (medium, _pool) = recover::open(self.kind, self.kind.recorded(image))?;
        for point in medium.recorder.take_crash_points() {
            for image in [
                point.image(0),
                point.everything(),
                point.sample(self.tally.images),
            ] {
                self.tally.images += 1;
                self.tally.of_recovery += 1;
                let found = defect::without(Defect::FrameReuse, || {
                    recover(self.kind, image, &self.unread)
                })?;
                oracle.judge(&found)?;
            }
        }
        Ok(())
    }
}
