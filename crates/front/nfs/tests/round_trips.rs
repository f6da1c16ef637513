//! The server decodes the calls that a client encodes, and a client decodes the replies of the
//! server.

use crate::support::{client, decoder};
use bytes::Bytes;
use client::Fields;
use decoder::Decoder;
use pagemesh_nfs::handle::{EncodedHandle, FileHandle, HandleKey};
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{
    Attributes, ChangeAttributes, DeviceNumber, EarlierAttributes, FileType, SetAttributes,
    SetTime, Time,
};
use pagemesh_nfs::nfs3::files::{
    Durability, ReadData, ReadReply, WriteReply, WriteVerifier, WrittenData,
};
use pagemesh_nfs::nfs3::listing::{
    CookieVerifier, Entry, EntryFile, ListReply, Listing, ListingBudget,
};
use pagemesh_nfs::nfs3::names::{
    CreateReply, CreatedFile, LookedUpFile, LookupReply, RenameReply, RenamedDirectories,
};
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::record::RecordAssembler;
use pagemesh_nfs::rpc::{Call, Credential, Reply};
use pagemesh_nfs::xdr::Encode;
use proptest::prelude::*;

const XID: u32 = 0x1234_5678;

/// The bytes of a result after its way over a stream.
fn sent(result: &impl Encode) -> Vec<u8> {
    let stream = Reply::success(XID, result).parts().concat();
    let pushed = RecordAssembler::new().push(&stream).expect("a record");
    assert_eq!(pushed.consumed, stream.len());
    let record = pushed.record.expect("a whole record");
    let mut client = Decoder(&record);
    let header: [u32; 6] = std::array::from_fn(|_| client.word());
    assert_eq!(header, [XID, 1, 0, 0, 0, 0]);
    client.0.to_vec()
}

prop_compose! {
    fn any_time()(seconds: u32, nanoseconds in 0..1_000_000_000u32) -> Time {
        Time { seconds, nanoseconds }
    }
}

prop_compose! {
    fn any_attributes()(
        kind in prop::sample::select(FileType::ALL),
        words: [u32; 6],
        longs: [u64; 4],
        accessed in any_time(),
        modified in any_time(),
        changed in any_time(),
    ) -> Attributes {
        let [mode, links, uid, gid, major, minor] = words;
        let [size_bytes, used_bytes, file_system, inode] = longs;
        let device = DeviceNumber { major, minor };
        Attributes {
            kind, mode, links, uid, gid, size_bytes, used_bytes, device, file_system, inode,
            accessed, modified, changed,
        }
    }
}

fn maybe_attributes() -> impl Strategy<Value = Option<Attributes>> {
    prop::option::of(any_attributes())
}

prop_compose! {
    fn any_change()(before in maybe_attributes(), after in maybe_attributes()) -> ChangeAttributes {
        let before = before.as_ref().map(EarlierAttributes::from);
        ChangeAttributes { before, after }
    }
}

prop_compose! {
    fn any_handle()(key: [u8; 16], volume: [u8; 16], inode: u64) -> EncodedHandle {
        let (snapshot_epoch, generation, birth_fold) = (1, 2, 3);
        let file = FileHandle { volume, snapshot_epoch, inode, generation, birth_fold };
        HandleKey::new(key).encode(&file)
    }
}

fn any_status() -> impl Strategy<Value = Status> {
    prop::sample::select(Status::ALL)
}

fn any_set_time() -> impl Strategy<Value = SetTime> {
    prop_oneof![
        Just(SetTime::Keep),
        Just(SetTime::ToServerTime),
        any_time().prop_map(SetTime::To),
    ]
}

prop_compose! {
    fn any_set_attributes()(
        mode in prop::option::of(0..=0o7777u32),
        uid: Option<u32>,
        gid: Option<u32>,
        size_bytes: Option<u64>,
        accessed in any_set_time(),
        modified in any_set_time(),
    ) -> SetAttributes {
        SetAttributes { mode, uid, gid, size_bytes, accessed, modified }
    }
}

fn some_bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..=max)
}

prop_compose! {
    fn any_fields()(
        handles in [some_bytes(64), some_bytes(64)],
        names in [some_bytes(300), some_bytes(300)],
        data in some_bytes(5000),
        verifier: [u8; 8],
        attributes in any_set_attributes(),
        guard in prop::option::of(any_time()),
        offset: u64,
        counts in [0..=64u32 << 10, 0..=64u32 << 10],
        choice: u32,
    ) -> Fields {
        let ([handle, other_handle], [name, other_name]) = (handles, names);
        let [count, other_count] = counts;
        Fields {
            handle, other_handle, name, other_name, data, verifier, attributes, guard, offset,
            count, other_count, choice,
        }
    }
}

proptest! {
    #[test]
    fn calls_of_a_client_are_decoded(
        procedure in 0..client::PROCEDURES,
        fields in any_fields(),
    ) {
        let wanted = client::call(procedure, &fields);
        let record = client::record(100_003, procedure, &client::arguments(&wanted));
        let (call, arguments) = Call::decode(&record).expect("a call");
        prop_assert_eq!((call.program, call.version, call.procedure), (100_003, 3, procedure));
        let Credential::System(credential) = call.credential else {
            panic!("{call:?}");
        };
        prop_assert_eq!(credential.groups.ids(), [4, 27]);
        prop_assert_eq!(Nfs3Call::decode(procedure, arguments), Ok(wanted));
    }

    #[test]
    fn cut_arguments_are_refused(
        procedure in 1..client::PROCEDURES,
        fields in any_fields(),
        cut: prop::sample::Index,
    ) {
        let bytes = client::arguments(&client::call(procedure, &fields));
        let cut = cut.index(bytes.len());
        let reader = pagemesh_nfs::xdr::Reader::new(&bytes[..cut]);
        prop_assert!(Nfs3Call::decode(procedure, reader).is_err());
    }

    #[test]
    fn failures_are_decoded_by_a_client(
        status in any_status(),
        from in any_change(),
        to in any_change(),
    ) {
        let reply = sent(&RenameReply::Failed(status, RenamedDirectories { from, to }));
        let mut client = Decoder(&reply);
        prop_assert_eq!(client.word(), status.number());
        prop_assert_eq!((client.change(), client.change()), (from, to));
        client.end();
    }

    #[test]
    fn new_and_known_files_are_decoded_by_a_client(
        handle in any_handle(),
        attributes in maybe_attributes(),
        directory in any_change(),
    ) {
        let reply = sent(&CreateReply::Done(CreatedFile {
            handle: Some(handle), attributes, directory,
        }));
        let mut client = Decoder(&reply);
        prop_assert_eq!((client.word(), client.word()), (0, 1));
        prop_assert_eq!(client.opaque(), handle.bytes());
        prop_assert_eq!((client.attributes(), client.change()), (attributes, directory));
        client.end();

        let directory = directory.after;
        let reply = sent(&LookupReply::Done(LookedUpFile { handle, attributes, directory }));
        let mut client = Decoder(&reply);
        prop_assert_eq!(client.word(), 0);
        prop_assert_eq!(client.opaque(), handle.bytes());
        prop_assert_eq!((client.attributes(), client.attributes()), (attributes, directory));
        client.end();
    }

    #[test]
    fn data_is_decoded_by_a_client(
        attributes in maybe_attributes(),
        is_end: bool,
        data in some_bytes(5000),
        change in any_change(),
        verifier: [u8; 8],
    ) {
        let count = data.len() as u32;
        let bytes = Bytes::from(data.clone());
        let reply = sent(&ReadReply::Done(ReadData { attributes, is_end, data: bytes }));
        let mut client = Decoder(&reply);
        prop_assert_eq!((client.word(), client.attributes()), (0, attributes));
        prop_assert_eq!((client.word(), client.word()), (count, u32::from(is_end)));
        prop_assert_eq!(client.opaque(), data);
        client.end();

        let reply = sent(&WriteReply::Done(WrittenData {
            attributes: change,
            count,
            durability: Durability::FileSync,
            verifier: WriteVerifier(verifier),
        }));
        let mut client = Decoder(&reply);
        prop_assert_eq!((client.word(), client.change()), (0, change));
        prop_assert_eq!((client.word(), client.word()), (count, 2));
        prop_assert_eq!(client.long(), u64::from_be_bytes(verifier));
        client.end();
    }

    #[test]
    fn listings_are_decoded_by_a_client(
        directory in maybe_attributes(),
        entries in prop::collection::vec(
            (any::<u64>(), some_bytes(255), maybe_attributes(), prop::option::of(any_handle())),
            0..20),
        verifier: [u8; 8],
    ) {
        let budget = ListingBudget { result_bytes: 64 << 10, name_bytes: 64 << 10 };
        let mut listing = Listing::new(budget);
        for (inode, name, attributes, handle) in &entries {
            let entry = Entry { inode: *inode, name, cookie: !inode };
            let file = EntryFile { attributes: *attributes, handle: *handle };
            listing.add_plus(&entry, &file);
        }
        let listed = listing.finish(directory, CookieVerifier(verifier), true);
        let reply = sent(&ListReply::Done(listed.expect("room for all")));
        let mut client = Decoder(&reply);
        prop_assert_eq!((client.word(), client.attributes()), (0, directory));
        prop_assert_eq!(client.long(), u64::from_be_bytes(verifier));
        for (inode, name, attributes, handle) in &entries {
            prop_assert_eq!((client.word(), client.long()), (1, *inode));
            prop_assert_eq!((client.opaque(), client.long()), (&name[..], !inode));
            prop_assert_eq!(client.attributes(), *attributes);
            let found = client.optional(Decoder::opaque);
            prop_assert_eq!(found, handle.as_ref().map(|it| &it.bytes()[..]));
        }
        prop_assert_eq!((client.word(), client.word()), (0, 1));
        client.end();
    }
}
