use super::*;
use proptest::prelude::*;

const SEED: u32 = 7;

fn owner(number: u8) -> Arc<[u8]> {
    vec![number; usize::from(number)].into()
}

fn records() -> impl Strategy<Value = Vec<JournalRecord>> {
    let record = prop_oneof![
        1 => (1u32..9).prop_map(|it| JournalRecord::Started(Instance(it))),
        6 => (0u8..9, any::<[u32; 3]>()).prop_map(|(it, [flavor, uid, gid])| {
            let principal = Principal { flavor, uid, gid };
            JournalRecord::Active { owner: owner(it), principal }
        }),
        3 => (0u8..9).prop_map(|it| JournalRecord::Removed { owner: owner(it) }),
        1 => Just(JournalRecord::GraceEnded),
    ];
    prop::collection::vec(record, 0..30)
}

/// The list after these records, and the clients at the end of each one.
fn written(records: &[JournalRecord]) -> (Vec<u8>, Vec<(usize, KnownClients)>) {
    let mut known = KnownClients::default();
    let (mut chain, mut bytes) = RecordChain::new(&known, SEED);
    let mut ends = vec![(bytes.len(), known.clone())];
    for record in records {
        chain.append(record, &mut bytes);
        known.apply(record);
        ends.push((bytes.len(), known.clone()));
    }
    (bytes, ends)
}

proptest! {
    #[test]
    fn every_prefix_has_its_whole_records(records in records()) {
        let (bytes, ends) = written(&records);
        for len in 0..=bytes.len() {
            let (known, end) = KnownClients::read(&bytes[..len], SEED).expect("a crash is no damage");
            let whole = ends.iter().rev().find(|(end, _)| *end <= len);
            let expected = whole.map(|(_, it)| it.clone()).unwrap_or_default();
            prop_assert_eq!(known.iter().collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
            let at = whole.map_or(0, |(end, _)| *end);
            let is_whole = bytes[at..len].iter().all(|byte| *byte == 0);
            prop_assert_eq!(end == JournalEnd::Complete, is_whole);
        }
    }

    #[test]
    fn short_list_has_the_same_clients(records in records()) {
        let (_, ends) = written(&records);
        let known = ends.last().expect("a first end").1.clone();
        let (_, mut bytes) = RecordChain::new(&known, SEED);
        bytes.extend([0; 100]);
        prop_assert_eq!(KnownClients::read(&bytes, SEED), Ok((known, JournalEnd::Complete)));
    }

    #[test]
    fn flipped_bit_shows_no_other_records(records in records(), bit: prop::sample::Index) {
        let (mut bytes, ends) = written(&records);
        let bit = bit.index(8 * bytes.len());
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok((known, JournalEnd::Torn { at })) = KnownClients::read(&bytes, SEED) {
            prop_assert!(at <= bit / 8);
            let expected = ends.iter().rev().find(|(end, _)| *end <= at);
            let expected = expected.map(|(_, it)| it.clone()).unwrap_or_default();
            prop_assert_eq!(known.clients, expected.clients);
        } else {
            prop_assert!(KnownClients::read(&bytes, SEED).is_err(), "the flip was not found");
        }
    }

    #[test]
    fn foreign_bytes_are_no_records(bytes: Vec<u8>) {
        let known = KnownClients::read(&bytes, SEED).map(|(known, _)| known.len());
        prop_assert!(known.unwrap_or(0) == 0);
    }
}

fn active(number: u8) -> JournalRecord {
    let principal = Principal {
        flavor: 1,
        uid: 0,
        gid: 0,
    };
    let owner = owner(number);
    JournalRecord::Active { owner, principal }
}

#[test]
fn end_of_grace_drops_clients_of_earlier_runs() {
    let mut known = KnownClients::default();
    known.apply(&JournalRecord::Started(Instance(1)));
    known.apply(&active(1));
    known.apply(&active(2));
    known.apply(&JournalRecord::Started(Instance(2)));
    known.apply(&active(2));
    // A crash in the grace period: both may still reclaim.
    assert_eq!(known.len(), 2);
    known.apply(&JournalRecord::GraceEnded);
    let owners: Vec<_> = known.iter().map(|(owner, _)| owner.clone()).collect();
    assert_eq!(owners, [owner(2)]);
    assert_eq!(known.instance(), Instance(2));
}

#[test]
fn damage_before_the_end_is_an_error() {
    let records: Vec<_> = (0..=u8::MAX).map(active).collect();
    let (mut bytes, ends) = written(&records);
    let at = ends[10].0;
    bytes[at + 7] ^= 1;
    let damaged = Err(JournalError::Damaged { at });
    assert_eq!(KnownClients::read(&bytes, SEED), damaged);
    let large = vec![0; JOURNAL_BYTES_MAX + 1];
    let read = KnownClients::read(&large, SEED);
    assert_eq!(read, Err(JournalError::TooLarge));
}

#[test]
fn records_behind_another_seed_are_none() {
    let (bytes, _) = written(&[active(1), active(2)]);
    let (known, _) = KnownClients::read(&bytes, SEED + 1).expect("no damage");
    assert!(known.is_empty());
}

#[test]
fn long_list_is_due_for_a_new_one() {
    let mut known = KnownClients::default();
    let (mut chain, mut bytes) = RecordChain::new(&known, SEED);
    let mut lists = 1;
    for round in 0..20_000_u32 {
        let record = active((round % 50) as u8);
        chain.append(&record, &mut bytes);
        known.apply(&record);
        assert_eq!(chain.bytes(), bytes.len());
        if chain.is_mostly_garbage() {
            (chain, bytes) = RecordChain::new(&known, SEED);
            lists += 1;
        }
        assert!(bytes.len() <= SMALL_BYTES + RECORD_BYTES_MAX);
    }
    assert!(lists > 1);
    assert_eq!(known.len(), 50);
}
