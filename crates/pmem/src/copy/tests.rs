//! Every kernel that this processor has against the plain checksums.

use super::*;
use crate::cpu::{CopyKernel, cpu};
use pagemesh_base::checksum::{PageChecksums, crc32c, crc32c_append};
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use proptest::prelude::*;
use std::arch::x86_64::_mm_sfence;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[repr(align(64))]
struct AlignedPage([u8; PAGE_BYTES]);

fn kernels() -> impl Iterator<Item = CopyKernel> {
    [
        CopyKernel::Avx512,
        CopyKernel::Avx2,
        CopyKernel::Sse42,
        CopyKernel::Sse2,
    ]
    .into_iter()
    .skip_while(|&kernel| kernel != cpu().copy)
}

fn check(page: &[u8; PAGE_BYTES]) {
    for kernel in kernels() {
        for count in 1..=TARGETS_MAX {
            let mut pages: Vec<AlignedPage> = (0..count)
                .map(|_| AlignedPage([0xee; PAGE_BYTES]))
                .collect();
            let targets: Vec<*mut u8> = pages.iter_mut().map(|p| p.0.as_mut_ptr()).collect();
            // SAFETY: aligned pages of our own, a kernel this CPU has.
            let sums = unsafe { stream_page_by(kernel, &targets, page) };
            // SAFETY: SSE is part of x86-64.
            unsafe { _mm_sfence() };
            assert_eq!(
                sums,
                PageChecksums::of(page),
                "{kernel:?} to {count} targets"
            );
            assert!(pages.iter().all(|p| p.0 == *page), "{kernel:?}");
        }
        let mut copy = [0xee; PAGE_BYTES];
        // SAFETY: a page of our own, a kernel this CPU has.
        let crc = unsafe { read_page_by(kernel, page.as_ptr(), &mut copy) };
        assert_eq!(crc, crc32c(page), "{kernel:?}");
        assert!(copy == *page, "{kernel:?}");
    }
}

/// Changes a part of a page, and compares its patched checksum with a full one.
fn check_patched(page: &[u8; PAGE_BYTES], within: usize, bytes: &[u8]) {
    let old = &page[within..][..bytes.len()];
    let delta: Vec<u8> = old.iter().zip(bytes).map(|(old, new)| old ^ new).collect();
    let mut patched = *page;
    patched[within..][..bytes.len()].copy_from_slice(bytes);
    let behind = PAGE_BYTES - within - bytes.len();
    for kernel in kernels() {
        // SAFETY: a kernel this CPU has.
        let found = unsafe { crc32c_patched_by(kernel, crc32c(page), &delta, behind) };
        let place = format!("{kernel:?}: {} bytes at {within}", bytes.len());
        assert_eq!(found, crc32c(&patched), "{place}");
    }
}

#[test]
fn patched_crc_equals_crc_of_whole_page() {
    let page = std::array::from_fn(|at| (at * 7 % 251) as u8);
    for at in 0..PAGE_BYTES {
        check_patched(&page, at, &[0x5a]);
        check_patched(&page, at, &[0x5a; 70][..70.min(PAGE_BYTES - at)]);
    }
    check_patched(&page, 0, &[0x11; PAGE_BYTES]);
    check_patched(&page, 17, &[]);
}

#[test]
fn crc_of_lines_continues_from_any_seed() {
    let line = |at: usize| std::array::from_fn(|i| (at * 31 + i * 7) as u8);
    let lines: Vec<[u8; LINE_BYTES]> = (0..150).map(line).collect();
    for kernel in kernels() {
        for count in 0..lines.len() {
            let (lines, seed) = (&lines[..count], 0x1234_5678 ^ count as u32);
            // SAFETY: a kernel this CPU has.
            let found = unsafe { crc32c_lines_by(kernel, seed, lines) };
            let expected = crc32c_append(seed, lines.as_flattened());
            assert_eq!(found, expected, "{kernel:?}: {count} lines");
        }
    }
}

/// Another thread stores to the source all the time.
#[test]
fn checksums_match_copy_while_source_changes() {
    let words: Vec<AtomicU64> = (0..PAGE_BYTES as u64 / 8).map(AtomicU64::new).collect();
    let is_over = AtomicBool::new(false);
    struct SetOnDrop<'a>(&'a AtomicBool);
    impl Drop for SetOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let from: *const u8 = words.as_ptr().cast();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 1u64;
            while !is_over.load(Ordering::Relaxed) {
                for word in words.iter().rev() {
                    value = value
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    word.store(value, Ordering::Relaxed);
                }
            }
        });
        let _over = SetOnDrop(&is_over);
        let mut copy = [0; PAGE_BYTES];
        let mut pages = [0; TARGETS_MAX].map(|byte| AlignedPage([byte; PAGE_BYTES]));
        let targets = pages.each_mut().map(|page| page.0.as_mut_ptr());
        for kernel in kernels() {
            for _ in 0..3000 {
                // SAFETY: the words outlive this, and the processor has the kernel.
                let found = unsafe { read_page_by(kernel, from, &mut copy) };
                assert_eq!(found, crc32c(&copy), "{kernel:?}");
                // SAFETY: the same, and pages of our own. A program that stores to a buffer
                // after it passed it to write does the same.
                let sums = unsafe { stream_page_by(kernel, &targets, &*from.cast()) };
                // SAFETY: SSE is part of x86-64.
                unsafe { _mm_sfence() };
                for (target, page) in pages.iter().enumerate() {
                    assert_eq!(sums, PageChecksums::of(&page.0), "{kernel:?} {target}");
                }
            }
        }
    });
}

#[test]
fn stream_writes_exactly_given_bytes() {
    let page: [u8; PAGE_BYTES] = std::array::from_fn(|at| (at * 7 % 251) as u8);
    for kernel in kernels() {
        for (shift, len) in [
            (0, 0),
            (1, 1),
            (0, 63),
            (5, 64),
            (0, 65),
            (7, 512),
            (3, 4093),
        ] {
            let mut target = AlignedPage([0xee; PAGE_BYTES]);
            let from = &page[shift..][..len];
            // SAFETY: an aligned page of our own, a kernel this CPU has.
            unsafe { stream_shared_by(kernel, from.as_ptr(), target.0.as_mut_ptr(), len) };
            store_fence();
            assert_eq!(&target.0[..len], from, "{kernel:?}: {len} bytes");
            assert!(
                target.0[len..].iter().all(|&byte| byte == 0xee),
                "{kernel:?}"
            );
        }
    }
}

#[test]
fn copies_and_sums_plain_pages() {
    check(&[0; PAGE_BYTES]);
    check(&[0xff; PAGE_BYTES]);
}

#[test]
fn checksums_depend_on_every_byte() {
    for at in 0..PAGE_BYTES {
        let mut page = [0; PAGE_BYTES];
        page[at] = 1;
        check(&page);
    }
}

proptest! {
    #[test]
    fn patched_crc_is_right_for_any_part(
        bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES),
        new in prop::collection::vec(any::<u8>(), 0..=PAGE_BYTES),
        place in 0usize..=PAGE_BYTES,
    ) {
        let page = bytes.as_slice().try_into().expect("a page");
        check_patched(page, place.min(PAGE_BYTES - new.len()), &new);
    }

    #[test]
    fn page_copy_is_right_for_any_alignment(
        bytes in prop::collection::vec(any::<u8>(), PAGE_BYTES + 64),
        shift in 0usize..64,
    ) {
        check(bytes[shift..][..PAGE_BYTES].try_into().expect("a page"));
    }
}
