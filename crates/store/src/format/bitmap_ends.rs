//! The used part of the bitmap of each device.
//!
//! Lines behind a device's end have no bit set. They were never used, and their bytes on media mean nothing: the bitmap of
//! a new device is not written, and an opening reads used lines only. So neither takes longer on a larger device.
//!
//! Invariant: the end in a superblock lies behind every line with a bit that was set at its checkpoint. Records above
//! the checkpoint name the frames behind it, so recovery raises the end by them.

use crate::format::devices::DEVICES_MAX;
use crate::format::geometry::{DeviceFrames, Geometry};
use crate::format::regions::LINE_FRAMES;
use pagemesh_base::bytes::{get_u32, put};
use std::ops::Range;

/// Bytes of the ends in the superblock.
pub(crate) const BITMAP_ENDS_BYTES: usize = DEVICES_MAX * 4;

/// For each device the number of lines of its bitmap before those that were never used. A device has its place in the
/// superblock; the first device has place 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitmapEnds([u32; DEVICES_MAX]);

impl BitmapEnds {
    /// The ends of devices without a frame in use. Lines before the first frame count as used, and are written for a new
    /// device.
    #[must_use]
    pub fn of_new(geometry: &Geometry) -> BitmapEnds {
        let mut ends = BitmapEnds::default();
        for tables in geometry.device_frames() {
            ends.0[tables.place] = first_lines(&tables);
        }
        ends
    }

    /// Used lines of the first device.
    #[must_use]
    pub fn lines_of_first(&self) -> u32 {
        self.0[0]
    }

    /// The ends when devices have joined or left. None of their frames is in use.
    pub(crate) fn after_change(&self, from: &Geometry, to: &Geometry) -> BitmapEnds {
        let mut ends = BitmapEnds::of_new(to);
        for kept in to
            .device_frames()
            .filter(|it| from.device_frames().any(|old| old == *it))
        {
            ends.0[kept.place] = self.0[kept.place];
        }
        ends
    }

    /// The used lines of a device, by their numbers in the pool.
    pub(crate) fn used_lines(&self, tables: &DeviceFrames) -> Range<u64> {
        let start = tables.lines().start;
        start..start + u64::from(self.0[tables.place])
    }

    /// The used lines of a device with frames, as frame numbers: frames behind them were never used.
    pub(crate) fn used_frames(&self, tables: &DeviceFrames) -> Range<u64> {
        let end = self.used_lines(tables).end * LINE_FRAMES;
        tables.frames.start..end.clamp(tables.frames.start, tables.frames.end)
    }

    /// Frames of used lines.
    pub(crate) fn frames(&self, geometry: &Geometry) -> u64 {
        let counts = geometry.device_frames().map(|tables| {
            let Range { start, end } = self.used_frames(&tables);
            end - start
        });
        counts.sum()
    }

    /// Makes a line the last used one of its device.
    pub(crate) fn raise(&mut self, tables: &DeviceFrames, line: u64) {
        let lines = (line + 1 - tables.lines().start) as u32;
        let end = &mut self.0[tables.place];
        *end = lines.max(*end);
    }

    /// Writes the ends of a superblock.
    pub(crate) fn encode(&self, into: &mut [u8]) {
        for (end, at) in self.0.iter().zip((0..).step_by(4)) {
            put(into, at, end.to_le_bytes());
        }
    }

    /// Reads the ends of a superblock.
    pub(crate) fn decode(bytes: &[u8], geometry: &Geometry) -> Result<BitmapEnds, &'static str> {
        let ends = BitmapEnds(std::array::from_fn(|place| get_u32(bytes, place * 4)));
        let mut rest = ends;
        for tables in geometry.device_frames() {
            let lines = tables.lines();
            let end = u64::from(std::mem::take(&mut rest.0[tables.place]));
            let least = u64::from(first_lines(&tables));
            if !(least..=lines.end - lines.start).contains(&end) {
                return Err("the used part of a bitmap does not lie in it");
            }
        }
        match rest == BitmapEnds::default() {
            true => Ok(ends),
            false => Err("it has a bitmap of no device"),
        }
    }
}

/// Lines without a frame at the start of a device's bitmap.
fn first_lines(tables: &DeviceFrames) -> u32 {
    (tables.frames.start / LINE_FRAMES - tables.lines().start) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::devices::DeviceKind;
    use uuid::Uuid;

    fn geometry() -> Geometry {
        let mut geometry = Geometry::plan(1 << 30).expect("a plan");
        for number in 1..4 {
            let id = Uuid::from_u128(number);
            let added = geometry.add_device(id, 16 << 20, DeviceKind::LikeFirst);
            added.expect("a device");
        }
        geometry
    }

    fn round_trip(ends: BitmapEnds, geometry: &Geometry) -> Result<BitmapEnds, &'static str> {
        let mut bytes = [0; BITMAP_ENDS_BYTES];
        ends.encode(&mut bytes);
        BitmapEnds::decode(&bytes, geometry)
    }

    #[test]
    fn ends_beyond_a_bitmap_or_before_its_frames_are_refused() {
        let geometry = geometry();
        let new = BitmapEnds::of_new(&geometry);
        assert_eq!(new.frames(&geometry), 0);
        assert_eq!(round_trip(new, &geometry), Ok(new));
        for tables in geometry.device_frames() {
            let lines = tables.lines();
            let mut full = new;
            full.raise(&tables, lines.end - 1);
            full.raise(&tables, lines.start);
            assert_eq!(round_trip(full, &geometry), Ok(full));
            assert_eq!(full.used_frames(&tables), tables.frames);
            full.raise(&tables, lines.end);
            assert!(round_trip(full, &geometry).is_err());
        }
        assert!(round_trip(BitmapEnds::default(), &geometry).is_err());
        let mut of_none = new;
        of_none.0[4] = 1;
        assert!(round_trip(of_none, &geometry).is_err());
    }

    #[test]
    fn end_goes_with_its_device() {
        let all = geometry();
        let mut ends = BitmapEnds::of_new(&all);
        for tables in all.device_frames() {
            ends.raise(&tables, tables.lines().end - 1);
        }
        let mut two = all;
        two.devices.put(Uuid::from_u128(1), None);
        let of_two = ends.after_change(&all, &two);
        assert_eq!(of_two.0[0], ends.0[0]);
        assert_eq!(of_two.0[1..4], [0, ends.0[2], ends.0[3]]);
        // Another device takes the place in the superblock.
        let mut again = two;
        let added = again.add_device(Uuid::from_u128(9), 16 << 20, DeviceKind::LikeFirst);
        added.expect("a device");
        let of_again = of_two.after_change(&two, &again);
        let new = BitmapEnds::of_new(&again);
        assert_eq!(of_again.0[1..4], [new.0[1], ends.0[2], ends.0[3]]);
    }
}
