use super::*;
use crate::rpc::Reply;
use crate::testing::{
    attributes, decoded, encoded, encoded_with_tail, handle, handle_on_wire, some_attributes, words,
};
use proptest::prelude::*;

const VERIFIER: CookieVerifier = CookieVerifier([1, 2, 3, 4, 5, 6, 7, 8]);
/// Bytes of an entry of READDIR with a name of four bytes: its mark, number, name and cookie.
const SHORT_ENTRY_BYTES: u32 = 4 + 8 + 8 + 8;

fn budget(result_bytes: u32, name_bytes: u32) -> ListingBudget {
    ListingBudget {
        result_bytes,
        name_bytes,
    }
}

fn entry(cookie: u64) -> Entry<'static> {
    Entry {
        inode: 77,
        name: b"file",
        cookie,
    }
}

fn full_file() -> EntryFile {
    EntryFile {
        attributes: Some(attributes()),
        handle: Some(handle()),
    }
}

/// The number of entries of READDIR that fit, and the bytes of the result.
fn list(budget: ListingBudget) -> Result<(usize, usize), Status> {
    let mut listing = Listing::new(budget);
    let mut cookie = 1;
    while listing.add(&entry(cookie)) == Room::Left {
        cookie += 1;
    }
    let count = listing.entry_count();
    let listed = listing.finish(Some(attributes()), VERIFIER, true)?;
    Ok((count, encoded_with_tail(&listed).len()))
}

#[test]
fn arguments_are_decoded() {
    let bytes = words(&[4, 0x0909_0909, 1, 2, 0x0102_0304, 0x0506_0708, 8192]);
    let arguments: ListArguments<'_> = decoded(&bytes);
    let wanted = ListArguments {
        directory: HandleBytes(&[9; 4]),
        cookie: 0x1_0000_0002,
        verifier: VERIFIER,
        budget: budget(8192, LISTING_BYTES_MAX),
    };
    assert_eq!(arguments, wanted);

    let bytes = words(&[4, 0x0909_0909, 1, 2, 0x0102_0304, 0x0506_0708, 512, 8192]);
    let ListPlusArguments(plus) = decoded(&bytes);
    let budget = budget(8192, 512);
    assert_eq!(plus, ListArguments { budget, ..wanted });
}

#[test]
fn budgets_of_clients_are_bounded() {
    let bytes = words(&[0, 0, 0, 0, 0, u32::MAX, u32::MAX]);
    let ListPlusArguments(plus) = decoded(&bytes);
    assert_eq!(plus.budget, budget(LISTING_BYTES_MAX, LISTING_BYTES_MAX));
}

#[test]
fn entries_have_the_layout_of_the_rfc() {
    let mut listing = Listing::new(budget(4096, 4096));
    assert_eq!(listing.add(&entry(5)), Room::Left);
    let last = Entry {
        inode: 1 << 32,
        name: b"x",
        cookie: 1 << 33,
    };
    assert_eq!(listing.add(&last), Room::Left);
    let listed = listing.finish(None, VERIFIER, true).unwrap();
    let wanted = [
        &[0, 0, 0x0102_0304, 0x0506_0708][..],
        &[1, 0, 77, 4, 0x6669_6c65, 0, 5],
        &[1, 1, 0, 1, 0x7800_0000, 2, 0],
        &[0, 1],
    ];
    let reply = ListReply::Done(listed);
    assert_eq!(encoded_with_tail(&reply), words(&wanted.concat()));
    let sent = Reply::success(7, &reply).parts().concat();
    assert_eq!(sent.len() % 4, 0);
    let failed = ListReply::Failed(Status::BadCookie, None);
    assert_eq!(encoded_with_tail(&failed), words(&[10003, 0]));
}

#[test]
fn entries_of_plus_have_attributes_and_handles() {
    let mut listing = Listing::new(budget(4096, 4096));
    assert_eq!(listing.add_plus(&entry(5), &full_file()), Room::Left);
    let none = EntryFile::default();
    assert_eq!(listing.add_plus(&entry(6), &none), Room::Left);
    let listed = listing.finish(None, VERIFIER, false).unwrap();
    let wanted = [
        words(&[0, 0x0102_0304, 0x0506_0708]),
        words(&[1, 0, 77, 4, 0x6669_6c65, 0, 5]),
        words(&some_attributes()),
        words(&[1]),
        handle_on_wire(),
        words(&[1, 0, 77, 4, 0x6669_6c65, 0, 6, 0, 0]),
        words(&[0, 0]),
    ];
    assert_eq!(encoded_with_tail(&listed), wanted.concat());
}

#[test]
fn result_uses_its_budget_to_the_byte() {
    let fixed = 4 + 84 + 8 + 4 + 4;
    for count in 1..5 {
        let exact = fixed + count * SHORT_ENTRY_BYTES;
        let listed = list(budget(exact, 4096));
        assert_eq!(listed, Ok((count as usize, exact as usize)));
        let listed = list(budget(exact + SHORT_ENTRY_BYTES - 1, 4096));
        assert_eq!(listed, Ok((count as usize, exact as usize)));
    }
}

#[test]
fn budget_without_room_for_an_entry_is_too_small() {
    let fixed = 4 + 84 + 8 + 4 + 4;
    let short = fixed + SHORT_ENTRY_BYTES - 1;
    assert_eq!(list(budget(short, 4096)), Err(Status::TooSmall));
    assert_eq!(list(budget(0, 4096)), Err(Status::TooSmall));
    let empty = |result_bytes| {
        let listing = Listing::new(budget(result_bytes, 4096));
        listing.finish(None, VERIFIER, true)
    };
    assert_eq!(empty(fixed - 1), Err(Status::TooSmall));
    assert!(empty(fixed).is_ok());
}

#[test]
fn names_have_a_budget_of_their_own() {
    let names = SHORT_ENTRY_BYTES - 4;
    let check = |name_bytes, wanted| {
        let mut listing = Listing::new(budget(4096, name_bytes));
        while listing.add_plus(&entry(1), &full_file()) == Room::Left {}
        assert_eq!(listing.entry_count(), wanted, "{name_bytes}");
        let listed = listing.finish(None, VERIFIER, true).unwrap();
        let is_end = encoded_with_tail(&listed).last().copied();
        assert_eq!(is_end, Some(0), "entries are left");
    };
    check(3 * names, 3);
    check(3 * names - 1, 2);
    check(0, 1);
}

#[test]
fn nothing_is_added_after_an_entry_that_did_not_fit() {
    let fixed = 4 + 84 + 8 + 4 + 4;
    let mut listing = Listing::new(budget(fixed + 2 * SHORT_ENTRY_BYTES, 4096));
    assert_eq!(listing.add(&entry(1)), Room::Left);
    let long = Entry {
        name: &[b'x'; 200],
        ..entry(2)
    };
    assert_eq!(listing.add(&long), Room::Full);
    assert_eq!(listing.add(&entry(3)), Room::Full);
    assert_eq!(listing.entry_count(), 1);
}

proptest! {
    #[test]
    fn result_stays_within_its_budget(
        result_bytes in 0u32..3000,
        name_bytes in 0u32..1000,
        names in prop::collection::vec(prop::collection::vec(1u8..255, 1..255), 0..40),
        is_plus: bool,
        has_attributes: bool,
    ) {
        let mut listing = Listing::new(budget(result_bytes, name_bytes));
        let mut file = full_file();
        file.attributes = file.attributes.filter(|_| has_attributes);
        for (inode, name) in (1..).zip(&names) {
            let entry = Entry { inode, name, cookie: inode };
            let room = match is_plus {
                true => listing.add_plus(&entry, &file),
                false => listing.add(&entry),
            };
            if room == Room::Full {
                break;
            }
        }
        let count = listing.entry_count();
        let counted: usize = names[..count]
            .iter()
            .map(|name| 20 + name.len().next_multiple_of(4))
            .sum();
        prop_assert!(count <= 1 || counted <= name_bytes as usize);
        match listing.finish(Some(attributes()), VERIFIER, true) {
            Ok(listed) => {
                let bytes = encoded_with_tail(&listed);
                prop_assert!(bytes.len() <= result_bytes as usize);
                let is_end = u8::from(count == names.len());
                prop_assert_eq!(bytes.last().copied(), Some(is_end));
                prop_assert_eq!(encoded(&listed).len(), 96);
            }
            Err(status) => {
                prop_assert_eq!(status, Status::TooSmall);
                prop_assert_eq!(count, 0);
            }
        }
    }
}
