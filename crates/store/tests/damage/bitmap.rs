//! Damage in the bitmap: the check names it, and opening or repairing the pool undoes it.

use crate::damage::pools::{
    DamageCase, LifeEnd, MediumKind, POOL_BYTES, Rng, bitmap_of, check_image, used_bitmap_of,
    with_bitmap,
};
use pagemesh_base::bytes::get_u64;
use pagemesh_store::check::{Finding, FindingKind, Remedy};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::test_api::update_line_checksum;
use uuid::Uuid;

impl DamageCase {
    /// Damages lines of the bitmap: the check names them. Opening the pool restores them, with or
    /// without `Plan::apply` before it.
    fn check_bitmap_damage(&self, damage: impl Fn(&mut [u64])) {
        let sound = bitmap_of(&self.image);
        let mut words = sound.clone();
        damage(&mut words);
        let differ = |line: &usize| words[line * 8..][..8] != sound[line * 8..][..8];
        let used_lines = used_bitmap_of(&self.image).len() / 8;
        let expected = (0..used_lines).filter(differ).map(|it| it as u32);
        let geometry = Geometry::plan(POOL_BYTES as u64).expect("a plan");
        let at = |line| geometry.bitmap.start + u64::from(line) * 64;
        let expected: Vec<_> = expected
            .map(|line| (line, Some(at(line)), Remedy::Pool))
            .collect();
        let image = with_bitmap(&self.image, &words);
        let (report, plan) = check_image(self.kind, &image).expect("a pool");
        let named = |it: &Finding| match it.kind {
            FindingKind::Bitmap { line, .. } => Some((line, it.location.byte, it.remedy)),
            _ => None,
        };
        let named: Vec<_> = report.findings.iter().filter_map(named).collect();
        // In a crashed pool the bits of frames that records name are in doubt: their damage need
        // not be named.
        match self.end {
            LifeEnd::Close => assert_eq!(named, expected, "{report:?}"),
            _ => assert!(named.iter().all(|it| expected.contains(it)), "{report:?}"),
        }
        for mends in [false, true] {
            let media = self.kind.media(&image);
            if mends {
                plan.apply(&*media).expect("the damage can be repaired");
            }
            let image = media.crash_point().image(0);
            let (opened, damaged) = self.read(&image).expect("a pool that opens");
            assert_eq!(damaged, 0);
            assert_eq!(used_bitmap_of(&opened), used_bitmap_of(&self.opened));
        }
    }
}

#[test]
fn bitmap_damage_is_named_and_repaired() {
    for (seed, end) in [
        (1, LifeEnd::Close),
        (2, LifeEnd::Close),
        (3, LifeEnd::Crash),
        (4, LifeEnd::Crash),
        (5, LifeEnd::Crash),
    ] {
        let case = DamageCase::new(MediumKind::Memory, seed, end);
        let mut random = Rng(seed);
        for bit in 0..1024 {
            if bit % 3 == seed % 3 {
                case.check_bitmap_damage(|words| words[bit as usize / 64] ^= 1 << (bit % 64));
            }
        }
        let garbage: Vec<u64> = (0..16).map(|_| random.next()).collect();
        case.check_bitmap_damage(|words| words[..8].copy_from_slice(&garbage[..8]));
        case.check_bitmap_damage(|words| words[8..].copy_from_slice(&garbage[..8]));
        case.check_bitmap_damage(|words| words.copy_from_slice(&garbage));
        case.check_bitmap_damage(|words| words.fill(0));
        case.check_bitmap_damage(|words| words.fill(u64::MAX));
        // Each line is sound, but in another line's place.
        case.check_bitmap_damage(|words| words.rotate_left(8));
        for word in 0..16 {
            case.check_bitmap_damage(|words| words[word] = garbage[word]);
        }
    }
}

/// A medium that lost the last write of a line leaves an older line with a valid checksum.
#[test]
fn stale_bitmap_line_is_found_by_frame_count() {
    for seed in 1..6 {
        let case = DamageCase::new(MediumKind::Memory, seed, LifeEnd::Close);
        let mut empty = used_bitmap_of(&case.image);
        for (line, words) in empty.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut bytes = [0; 64];
            update_line_checksum(Uuid::from_u128(7), line, &mut bytes);
            *words = std::array::from_fn(|word| get_u64(&bytes, word * 8));
        }
        let image = with_bitmap(&case.image, &empty);
        let (report, _) = check_image(case.kind, &image).expect("a pool");
        let counts = |it: &Finding| matches!(it.kind, FindingKind::Count { .. });
        assert!(report.findings.iter().all(counts), "{report:?}");
        assert_eq!(
            report.is_sound(),
            used_bitmap_of(&case.image) == empty,
            "{report:?}"
        );
        let (opened, damaged) = case.read(&image).expect("a pool that opens");
        assert_eq!(damaged, 0);
        assert_eq!(used_bitmap_of(&opened), used_bitmap_of(&case.opened));
    }
}
