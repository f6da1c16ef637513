//! Streams that are whole arrive as they were written. Damaged ones return a prefix of their records, and then an error.

#![allow(clippy::unwrap_used)] // Tests.

use pagemesh_stream::{
    ContentSummary, HEADER_BYTES, Header, PAGE_BYTES, RECORD_HEADER_BYTES, Record, ResumeToken,
    SnapshotIdentity, StreamContent, StreamError, StreamReader, StreamStart, StreamWriter, Totals,
};
use proptest::prelude::*;
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const PAGES: u64 = 4096;

fn header(from_epoch: Option<u32>) -> Header {
    Header {
        stream: Uuid::from_u128(1),
        to: SnapshotIdentity {
            volume: Uuid::from_u128(2),
            epoch: 9,
        },
        to_name: "monday".into(),
        from_epoch,
        from_name: from_epoch.map_or_else(String::new, |_| "sunday".into()),
        has_page_summary: false,
        size_bytes: PAGES * PAGE,
        limit_bytes: PAGES * PAGE,
        content: StreamContent::Blocks,
        created_unix_ms: 1234,
        start: StreamStart::default(),
    }
}

/// A change: pages to skip, pages to change, and whether they become zeroes. One of no pages is a checkpoint.
type Change = (u64, u64, bool);

fn changes() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec((0..20u64, 0..6u64, any::<bool>()), 0..8)
}

/// The bytes of a stream, and its records before the end.
fn stream(header: &Header, changes: &[Change], level: Option<i32>) -> (Vec<u8>, Vec<Record>) {
    let mut out = StreamWriter::new(Vec::new(), header, level).unwrap();
    let (mut records, mut summary, mut offset) = (vec![], ContentSummary::default(), 0);
    for (number, &(skipped, pages, is_zero)) in changes.iter().enumerate() {
        offset += skipped * PAGE;
        let len = pages * PAGE;
        records.push(match (pages, is_zero) {
            (0, _) => {
                out.checkpoint(offset, summary).unwrap();
                let position = offset;
                Record::Checkpoint { position, summary }
            }
            (_, true) => {
                out.zeroes(offset, len).unwrap();
                Record::Zeroes { offset, len }
            }
            (_, false) => {
                // The first half repeats itself.
                let byte = |at: u64| match at < len / 2 {
                    true => number as u8,
                    false => (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50) as u8,
                };
                let data: Vec<u8> = (0..len).map(byte).collect();
                summary.add(offset, &data);
                out.data(offset, &data).unwrap();
                Record::Data { offset, data }
            }
        });
        offset += len;
    }
    (out.end(summary).unwrap().0, records)
}

/// The records before the end of a stream or its damage, and the result.
fn read(bytes: &[u8]) -> (Vec<Record>, Result<Totals, StreamError>) {
    let mut records = vec![];
    let mut reader = match StreamReader::new(bytes) {
        Ok(reader) => reader,
        Err(cause) => return (records, Err(cause)),
    };
    loop {
        match reader.next() {
            Ok(Some(Record::End { totals, .. })) => {
                assert!(reader.next().unwrap().is_none());
                return (records, Ok(totals));
            }
            Ok(Some(record)) => records.push(record),
            Ok(None) => panic!("no end"),
            Err(cause) => {
                assert!(reader.next().unwrap().is_none(), "it goes on after {cause}");
                return (records, Err(cause));
            }
        }
    }
}

/// Asserts that damaged bytes return a prefix of the records, and an error.
#[track_caller]
fn assert_refused(damaged: &[u8], records: &[Record]) -> StreamError {
    let (found, result) = read(damaged);
    assert!(records.starts_with(&found), "other records");
    result.expect_err("a damaged stream is no whole one")
}

/// The places of the records behind the header, and of the end.
fn places(bytes: &[u8]) -> Vec<usize> {
    let (mut at, mut places) = (HEADER_BYTES, vec![HEADER_BYTES]);
    while at < bytes.len() {
        let stored = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap());
        at += RECORD_HEADER_BYTES + stored as usize;
        places.push(at);
    }
    places
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn whole_stream_returns_its_records(list in changes(), level in prop::option::of(1..4i32), from in prop::option::of(1..9u32)) {
        let header = header(from);
        let (bytes, records) = stream(&header, &list, level);
        let reader = StreamReader::new(&bytes[..]).unwrap();
        prop_assert_eq!(reader.header(), &header);
        let (found, result) = read(&bytes);
        prop_assert_eq!(result.unwrap().records, records.len() as u64);
        prop_assert!(found == records);
    }

    #[test]
    fn flipped_bit_is_found(list in changes(), level in prop::option::of(1..4i32), place in any::<prop::sample::Index>(), bit in 0..8u8) {
        let (mut bytes, records) = stream(&header(Some(3)), &list, level);
        let place = place.index(bytes.len());
        bytes[place] ^= 1 << bit;
        assert_refused(&bytes, &records);
    }

    #[test]
    fn cut_is_found(list in changes(), level in prop::option::of(1..4i32), place in any::<prop::sample::Index>()) {
        let (bytes, records) = stream(&header(None), &list, level);
        let cut = &bytes[..place.index(bytes.len())];
        let cause = assert_refused(cut, &records);
        let is_cut = matches!(cause, StreamError::Cut { .. } | StreamError::NotAStream);
        prop_assert!(is_cut, "{}", cause);
    }

    #[test]
    fn moved_records_are_found(list in changes(), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>(), kind in 0..3) {
        let (bytes, records) = stream(&header(None), &list, None);
        let places = places(&bytes);
        let count = places.len() - 1;
        let record = |number: usize| &bytes[places[number]..places[number + 1]];
        let (a, b) = (a.index(count), b.index(count));
        let mut order: Vec<usize> = (0..count).collect();
        match kind {
            0 => order.swap(a, b),
            1 => order.insert(b, a),
            _ => drop(order.remove(a)),
        }
        prop_assume!(order != (0..count).collect::<Vec<_>>());
        let moved = order.iter().flat_map(|number| record(*number)).copied();
        let moved: Vec<u8> = bytes[..HEADER_BYTES].iter().copied().chain(moved).collect();
        assert_refused(&moved, &records);
    }

    #[test]
    fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..800)) {
        prop_assert!(read(&bytes).1.is_err());
        let (mut whole, records) = stream(&header(None), &[(0, 1, false)], None);
        whole.truncate(HEADER_BYTES);
        whole.extend(bytes);
        assert_refused(&whole, &records);
    }
}

#[test]
fn every_flipped_bit_of_a_small_stream_is_found() {
    let list = [(1, 1, false), (0, 0, false), (2, 1, true)];
    for level in [None, Some(1)] {
        let (bytes, records) = stream(&header(Some(3)), &list, level);
        for place in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[place / 8] ^= 1 << (place % 8);
            assert_refused(&damaged, &records);
        }
    }
}

#[test]
fn records_of_another_stream_are_found() {
    let list = [(0, 1, false), (0, 1, false)];
    let (one, records) = stream(&header(None), &list, None);
    let other = Header {
        stream: Uuid::from_u128(7),
        ..header(None)
    };
    let (other, _) = stream(&other, &list, None);
    let spliced = [&one[..HEADER_BYTES], &other[HEADER_BYTES..]].concat();
    let cause = assert_refused(&spliced, &records);
    assert!(matches!(cause, StreamError::Damaged { number: 1, .. }));
}

#[test]
fn other_versions_and_bytes_behind_the_end_are_refused() {
    let (bytes, records) = stream(&header(None), &[(0, 1, false)], None);
    let mut later = bytes.clone();
    later[8] = 2;
    let cause = assert_refused(&later, &records);
    assert!(cause.to_string().contains("version 2"), "{cause}");
    let cause = assert_refused(&[&bytes[..], &[0]].concat(), &records);
    assert!(matches!(cause, StreamError::Trailing));
    let cause = assert_refused(&[&bytes[..], &bytes].concat(), &records);
    assert!(matches!(cause, StreamError::Trailing));
    let cause = assert_refused(b"", &[]);
    assert!(matches!(cause, StreamError::NotAStream));
}

#[test]
fn writer_refuses_disorder() {
    let mut out = StreamWriter::new(Vec::new(), &header(None), None).unwrap();
    out.data(PAGE, &[1; PAGE_BYTES]).unwrap();
    for (offset, len) in [(0, PAGE), (PAGE, PAGE), (2 * PAGE, 1), (PAGES * PAGE, PAGE)] {
        assert!(out.zeroes(offset, len).is_err(), "{len} at {offset}");
    }
    let bad = Header {
        from_epoch: Some(9),
        ..header(None)
    };
    assert!(StreamWriter::new(Vec::new(), &bad, None).is_err());
}

#[test]
fn summaries_of_changes_add_up() {
    let (one, two) = ([1; PAGE_BYTES], [2; PAGE_BYTES]);
    let summary = |pages: &[(u64, &[u8])]| {
        let mut sum = ContentSummary::default();
        for (offset, data) in pages {
            sum.add(*offset, data);
        }
        sum
    };
    let before = summary(&[(0, &one), (PAGE, &two)]);
    assert_eq!(
        before,
        summary(&[(PAGE, &two), (0, &one), (PAGE * 2, &[0; PAGE_BYTES])])
    );
    assert_ne!(
        before,
        summary(&[(PAGE, &one), (0, &two)]),
        "pages have places"
    );
    let mut difference = ContentSummary::default();
    difference.subtract(0, &one);
    difference.add(0, &two);
    assert_eq!(before.plus(difference), summary(&[(0, &two), (PAGE, &two)]));
}

#[test]
fn tokens_are_whole_or_refused() {
    let mut summary = ContentSummary::default();
    summary.add(0, &[1; PAGE_BYTES]);
    let start = StreamStart {
        position: 7 * PAGE,
        summary,
        target: Uuid::from_u128(5),
        target_epoch: 6,
    };
    for from in [None, Some(3)] {
        let token = ResumeToken::new(&header(from), start.clone());
        let text = token.to_string();
        assert_eq!(text.parse(), Ok(token.clone()));
        assert_eq!(format!(" {text}\n").parse(), Ok(token));
        for end in 0..text.len() {
            assert!(text[..end].parse::<ResumeToken>().is_err());
            let other = if text.as_bytes()[end] == b'1' {
                '2'
            } else {
                '1'
            };
            let changed = format!("{}{other}{}", &text[..end], &text[end + 1..]);
            assert!(changed.parse::<ResumeToken>().is_err(), "{changed}");
        }
    }
}
