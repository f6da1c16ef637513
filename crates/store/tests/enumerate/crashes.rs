//! Recovers each legal crash image and compares it with the oracle.

use super::budget::Budget;
use super::harness::CrashHarness;
use super::model::{CheckFailure, Oracle};
use super::recover::{self, recover};
use pagemesh_base::defect::{self, Defect};
use pagemesh_pmem::{CrashPoint, Image};
use std::collections::BTreeMap;

/// Interval, in images, at which the objects that no operation touches are read as well.
const READ_ALL_INTERVAL: u64 = 64;
/// Interval, in images, at which the recovery itself crashes.
const CRASH_RECOVERY_INTERVAL: u64 = 48;

impl CrashHarness<'_> {
    /// Checks the crash points since the last call: the last one against `after`, the others
    /// against `during`, or against the oracle of the operation's first sync once that has passed.
    pub(super) fn check_crashes(
        &mut self,
        during: &Oracle,
        after: &Oracle,
    ) -> Result<(), CheckFailure> {
        let points = self.medium.recorder.take_crash_points();
        let (last, synced) = (points.len() - 1, self.oracle_after_sync.take());
        self.last_points.clear();
        for (number, point) in points.into_iter().enumerate() {
            let oracle = match (number, &synced) {
                _ if number == last => after,
                (1.., Some(synced)) => synced,
                _ => during,
            };
            self.check_point(&point, oracle)?;
            self.last_points.push((point, oracle.clone()));
        }
        Ok(())
    }

    fn check_point(&mut self, point: &CrashPoint, oracle: &Oracle) -> Result<(), CheckFailure> {
        let Some(Budget { all_max, sampled }) = self.budget else {
            return Ok(());
        };
        let mut images = point.images(all_max.max(sampled), sampled, self.tally.images);
        self.tally.points += 1;
        self.tally.exhausted_points += u64::from(images.is_all());
        self.tally.legal_images.record(point.count());
        images.try_for_each(|image| self.check_image(image, oracle))
    }

    fn check_image(&mut self, image: Image, oracle: &Oracle) -> Result<(), CheckFailure> {
        self.tally.images += 1;
        if self.tally.images.is_multiple_of(CRASH_RECOVERY_INTERVAL) {
            self.crash_recovery(image.clone(), oracle)?;
        }
        let nothing = BTreeMap::new();
        let unread = match self.tally.images.is_multiple_of(READ_ALL_INTERVAL) {
            true => &nothing,
            false => &self.unread_sums,
        };
        // The defect is in the running pool, not in the recovery: the recovery runs without it.
        let found = defect::without(Defect::FrameReuse, || recover(self.kind, image, unread))?;
        let is_compared = found.in_flight.values().any(Option::is_none);
        self.tally.unlisted_images += u64::from(is_compared);
        oracle.check(&found).map(drop)
    }

    /// Crashes the recovery of a crash image at each of its fences.
    fn crash_recovery(&mut self, image: Image, oracle: &Oracle) -> Result<(), CheckFailure> {
        let (medium, _pool) = recover::open(self.kind, self.kind.recorder(image))?;
        for point in medium.recorder.take_crash_points() {
            for image in [
                point.image(0),
                point.all_persisted(),
                point.sample(self.tally.images),
            ] {
                self.tally.images += 1;
                self.tally.recovery_images += 1;
                let found = defect::without(Defect::FrameReuse, || {
                    recover(self.kind, image, &self.unread_sums)
                })?;
                oracle.check(&found)?;
            }
        }
        Ok(())
    }
}
