//! Damage in the bitmap: named, and undone by whoever opens or repairs the pool.

use crate::pools::{Case, End, Kind, POOL_BYTES, Random, bitmap_of, checked, with_bitmap};
use pagemesh_pmem::Recorder;
use pagemesh_store::check::{Finding, Remedy, What};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::format;
use uuid::Uuid;

impl Case {
    /// Damages lines of the bitmap: the check names them, and opening makes
    /// them what they were, whether it or `Plan::apply` does it.
    fn damage_bitmap(&self, damage: impl Fn(&mut [u64])) {
        let sound = bitmap_of(&self.image);
        let mut words = sound.clone();
        damage(&mut words);
        let differ = |line: &usize| words[line * 8..][..8] != sound[line * 8..][..8];
        let expected = (0..words.len() / 8).filter(differ).map(|it| it as u32);
        let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
        let at = |line| geometry.bitmap.start + u64::from(line) * 64;
        let expected: Vec<_> = expected
            .map(|line| (line, Some(at(line)), Remedy::Pool))
            .collect();
        let image = with_bitmap(&self.image, &words);
        let (report, plan) = checked(self.kind, &image).expect("a pool");
        let named = |it: &Finding| match it.what {
            What::Bitmap { line, .. } => Some((line, it.place.byte, it.remedy)),
            _ => None,
        };
        let named: Vec<_> = report.findings.iter().filter_map(named).collect();
        // Frames that records name may have been in motion: which bits they
        // have is no damage.
        match self.end {
            End::Closed => assert_eq!(named, expected, "{report:?}"),
            _ => assert!(named.iter().all(|it| expected.contains(it)), "{report:?}"),
        }
        for mends in [false, true] {
            let media = self.kind.media(&image);
            if mends {
                plan.apply(&*media).expect("it can be mended");
            }
            let image = media.crash_point().image(0);
            let (opened, damaged) = self.read(&image).expect("a pool that opens");
            assert_eq!(damaged, 0);
            assert_eq!(bitmap_of(&opened), bitmap_of(&self.opened));
        }
    }
}

#[test]
fn damage_in_the_bitmap_is_named_and_undone() {
    for (seed, end) in [
        (1, End::Closed),
        (2, End::Closed),
        (3, End::Crashed),
        (4, End::Crashed),
        (5, End::Crashed),
    ] {
        let case = Case::new(Kind::Memory, seed, end);
        let mut random = Random(seed);
        for bit in 0..1024 {
            if bit % 3 == seed % 3 {
                case.damage_bitmap(|words| words[bit as usize / 64] ^= 1 << (bit % 64));
            }
        }
        let garbage: Vec<u64> = (0..16).map(|_| random.next()).collect();
        case.damage_bitmap(|words| words[..8].copy_from_slice(&garbage[..8]));
        case.damage_bitmap(|words| words[8..].copy_from_slice(&garbage[..8]));
        case.damage_bitmap(|words| words.copy_from_slice(&garbage));
        case.damage_bitmap(|words| words.fill(0));
        case.damage_bitmap(|words| words.fill(u64::MAX));
        // Each line sound, and in the other's place.
        case.damage_bitmap(|words| words.rotate_left(8));
        for word in 0..16 {
            case.damage_bitmap(|words| words[word] = garbage[word]);
        }
    }
}

/// A medium that lost the last write of a line leaves one that checks.
#[test]
fn a_line_of_the_bitmap_that_is_too_old_is_told_by_the_count() {
    for seed in 1..6 {
        let case = Case::new(Kind::Memory, seed, End::Closed);
        let fresh = Recorder::new(POOL_BYTES);
        format(&fresh, Uuid::from_u128(7)).expect("a pool");
        let empty = bitmap_of(&fresh.crash_point().everything());
        let image = with_bitmap(&case.image, &empty);
        let (report, _) = checked(case.kind, &image).expect("a pool");
        let counts = |it: &Finding| matches!(it.what, What::Count { .. });
        assert!(report.findings.iter().all(counts), "{report:?}");
        assert_eq!(
            report.is_sound(),
            bitmap_of(&case.image) == empty,
            "{report:?}"
        );
        let (opened, damaged) = case.read(&image).expect("a pool that opens");
        assert_eq!(damaged, 0);
        assert_eq!(bitmap_of(&opened), bitmap_of(&case.opened));
    }
}
