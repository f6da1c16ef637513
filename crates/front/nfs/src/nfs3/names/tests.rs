use super::*;
use crate::nfs3::attributes::{EarlierAttributes, SetTime};
use crate::testing::{
    SOME_EARLIER, attributes, decode_error, decoded, encoded, handle, handle_on_wire,
    some_attributes, words,
};

/// The handle `99 99 99 99` and the name `file`, on the wire.
const AT: [u32; 4] = [4, 0x0909_0909, 4, 0x6669_6c65];
/// No change of attributes, on the wire.
const NO_CHANGE: [u32; 6] = [0; 6];
/// The mode 0700, on the wire.
const PRIVATE: [u32; 7] = [1, 0o700, 0, 0, 0, 0, 0];

fn at() -> DirectoryName<'static> {
    DirectoryName {
        directory: HandleBytes(&[9; 4]),
        name: FileName(b"file"),
    }
}

fn private() -> SetAttributes {
    SetAttributes {
        mode: Some(0o700),
        ..SetAttributes::default()
    }
}

fn change() -> ChangeAttributes {
    ChangeAttributes {
        before: Some(EarlierAttributes::from(&attributes())),
        after: Some(attributes()),
    }
}

fn some_change() -> Vec<u32> {
    [&SOME_EARLIER[..], &some_attributes()].concat()
}

#[test]
fn directory_name_is_decoded() {
    assert_eq!(decoded::<DirectoryName<'_>>(&words(&AT)), at());
}

#[test]
fn modes_of_create_are_decoded() {
    let check = |rest: &[u32], mode| {
        let bytes = words(&[&AT[..], rest].concat());
        let wanted = CreateArguments { at: at(), mode };
        assert_eq!(decoded::<CreateArguments<'_>>(&bytes), wanted);
    };
    let change = SetAttributes::default();
    check(
        &[&[0][..], &NO_CHANGE].concat(),
        CreateMode::Unchecked(change),
    );
    check(
        &[&[1][..], &PRIVATE].concat(),
        CreateMode::Guarded(private()),
    );
    check(
        &[2, 0x0102_0304, 0x0506_0708],
        CreateMode::Exclusive(&[1, 2, 3, 4, 5, 6, 7, 8]),
    );
    let error = decode_error::<CreateMode<'_>>(&words(&[3]));
    assert!(matches!(error, XdrError::Enumeration { value: 3, .. }));
}

#[test]
fn directory_and_symlink_are_decoded() {
    let bytes = words(&[&AT[..], &PRIVATE].concat());
    let wanted = MakeDirectoryArguments {
        at: at(),
        attributes: private(),
    };
    assert_eq!(decoded::<MakeDirectoryArguments<'_>>(&bytes), wanted);

    let target = [3, 0x612f_6200];
    let bytes = words(&[&AT[..], &NO_CHANGE, &target].concat());
    let wanted = SymlinkArguments {
        at: at(),
        attributes: SetAttributes::default(),
        target: SymlinkTarget(b"a/b"),
    };
    assert_eq!(decoded::<SymlinkArguments<'_>>(&bytes), wanted);
}

#[test]
fn special_files_are_decoded() {
    let check = |rest: &[u32], file| {
        let bytes = words(&[&AT[..], rest].concat());
        let wanted = MakeNodeArguments { at: at(), file };
        assert_eq!(decoded::<MakeNodeArguments<'_>>(&bytes), wanted);
    };
    let device = DeviceNumber { major: 8, minor: 1 };
    let with_device = |kind: u32| [&[kind][..], &PRIVATE, &[8, 1]].concat();
    check(
        &with_device(4),
        SpecialFile::CharacterDevice(private(), device),
    );
    check(&with_device(3), SpecialFile::BlockDevice(private(), device));
    let without = |kind: u32| [&[kind][..], &PRIVATE].concat();
    check(&without(6), SpecialFile::Socket(private()));
    check(&without(7), SpecialFile::Fifo(private()));
    for kind in [FileType::Regular, FileType::Directory, FileType::Symlink] {
        check(&[kind.number()], SpecialFile::Unsuitable(kind));
    }
    for kind in [0, 8] {
        let error = decode_error::<SpecialFile>(&words(&[kind]));
        assert!(matches!(error, XdrError::Enumeration { .. }), "{kind}");
    }
}

#[test]
fn rename_and_link_are_decoded() {
    let bytes = words(&[AT, [0, 1, 0x7800_0000, 0]].concat());
    let to = DirectoryName {
        directory: HandleBytes(b""),
        name: FileName(b"x"),
    };
    let mut reader = Reader::new(&bytes);
    let rename = RenameArguments::decode(&mut reader).unwrap();
    assert_eq!(rename, RenameArguments { from: at(), to });
    assert_eq!(reader.rest(), [0; 4]);

    let bytes = words(&[&[4, 0x0707_0707][..], &AT].concat());
    let wanted = LinkArguments {
        file: HandleBytes(&[7; 4]),
        at: at(),
    };
    assert_eq!(decoded::<LinkArguments<'_>>(&bytes), wanted);
}

#[test]
fn long_name_is_decoded_and_then_refused() {
    let name = [b'x'; 256];
    let bytes = [&words(&[256])[..], &name].concat();
    let name: FileName<'_> = decoded(&bytes);
    assert_eq!(name.check(), Err(Status::NameTooLong));
    assert_eq!(FileName(&name.0[1..]).check(), Ok(&name.0[1..]));
    for invalid in [&b""[..], b"a/b", b"/", b"a\0"] {
        assert_eq!(FileName(invalid).check(), Err(Status::Invalid));
    }
    for valid in [&b"."[..], b"..", b"\xff", b" "] {
        assert_eq!(FileName(valid).check(), Ok(valid));
    }
}

#[test]
fn long_target_is_refused() {
    let target = [b'x'; 4096];
    assert_eq!(SymlinkTarget(&target).check(), Err(Status::NameTooLong));
    assert!(SymlinkTarget(&target[1..]).check().is_ok());
    assert_eq!(SymlinkTarget(b"").check(), Err(Status::Invalid));
    assert_eq!(SymlinkTarget(b"a\0").check(), Err(Status::Invalid));
    assert!(SymlinkTarget(b"/a").check().is_ok());
}

#[test]
fn looked_up_file_is_encoded() {
    let reply = LookupReply::Done(LookedUpFile {
        handle: handle(),
        attributes: Some(attributes()),
        directory: None,
    });
    let wanted = [
        words(&[0]),
        handle_on_wire(),
        words(&some_attributes()),
        words(&[0]),
    ];
    assert_eq!(encoded(&reply), wanted.concat());
    let failed = LookupReply::Failed(Status::NoEntry, Some(attributes()));
    let wanted = [&[2][..], &some_attributes()].concat();
    assert_eq!(encoded(&failed), words(&wanted));
}

#[test]
fn created_file_is_encoded() {
    let reply = CreateReply::Done(CreatedFile {
        handle: Some(handle()),
        attributes: Some(attributes()),
        directory: change(),
    });
    let wanted = [
        words(&[0, 1]),
        handle_on_wire(),
        words(&some_attributes()),
        words(&some_change()),
    ];
    assert_eq!(encoded(&reply), wanted.concat());
    let failed = CreateReply::Failed(Status::Exists, change());
    let wanted = [&[17][..], &some_change()].concat();
    assert_eq!(encoded(&failed), words(&wanted));
}

#[test]
fn changed_directories_are_encoded() {
    let removed = RemoveReply::Done(change());
    let wanted = [&[0][..], &some_change()].concat();
    assert_eq!(encoded(&removed), words(&wanted));

    let renamed = RenameReply::Done(RenamedDirectories {
        from: change(),
        to: ChangeAttributes::default(),
    });
    let wanted = [&[0][..], &some_change(), &[0, 0]].concat();
    assert_eq!(encoded(&renamed), words(&wanted));

    let linked = LinkReply::Failed(
        Status::TooManyLinks,
        LinkedFile {
            attributes: Some(attributes()),
            directory: change(),
        },
    );
    let wanted = [&[31][..], &some_attributes(), &some_change()].concat();
    assert_eq!(encoded(&linked), words(&wanted));
}

#[test]
fn times_of_a_new_file_are_decoded() {
    let bytes = words(&[0, 0, 0, 0, 1, 1]);
    let attributes: SetAttributes = decoded(&bytes);
    assert_eq!(attributes.accessed, SetTime::ToServerTime);
    assert_eq!(attributes.modified, SetTime::ToServerTime);
}
