//! Which transactions pass the check.

use super::*;

const PAGE: u64 = PAGE_BYTES as u64;
const SIZE: u64 = 1024 * PAGE;

fn write(page: u64, pages: u64) -> TransactionPart {
    TransactionPart::Write {
        offset: page * PAGE,
        data: vec![0; (pages * PAGE) as usize].into(),
    }
}

fn clear(offset: u64, len: u64) -> TransactionPart {
    TransactionPart::Clear { offset, len }
}

#[test]
fn whole_disjoint_pages_are_a_transaction() {
    let check =
        |parts: &[TransactionPart]| assert_eq!(check_parts(parts, SIZE), Ok(()), "{parts:?}");
    check(&[write(0, 1)]);
    check(&[write(1023, 1), clear(0, PAGE), write(1, 62)]);
    check(&[write(4, 2), write(6, 2), clear(2 * PAGE, 2 * PAGE)]);
    let single: Vec<TransactionPart> = (0..64).map(|page| write(page * 2, 1)).collect();
    check(&single);
}

#[test]
fn malformed_transaction_is_refused() {
    let check = |parts: &[TransactionPart], why: &str| {
        let told = check_parts(parts, SIZE).expect_err(why).to_string();
        assert!(told.contains(why), "{told}");
    };
    check(&[], "no parts");
    check(&[clear(0, 0)], "whole pages");
    check(&[clear(512, PAGE)], "whole pages");
    check(&[write(0, 1), clear(PAGE, 512)], "whole pages");
    check(&[clear(SIZE - PAGE, 2 * PAGE)], "beyond the end");
    check(&[clear(u64::MAX - PAGE + 1, PAGE)], "beyond the end");
    check(&[clear(0, 65 * PAGE)], "more than 64 pages");
    check(
        &[write(0, 32), clear(100 * PAGE, 33 * PAGE)],
        "more than 64",
    );
    check(&[write(4, 2), clear(0, PAGE), write(5, 1)], "overlaps");
    check(&[write(4, 1), write(4, 1)], "overlaps");
    check(&[clear(4 * PAGE, PAGE), write(2, 6)], "overlaps");
}
