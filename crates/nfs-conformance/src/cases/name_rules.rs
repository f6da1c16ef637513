//! Names that no entry may have: empty, too long, with a slash or zero byte, and the dots.

use crate::Case;
use crate::fixture::{CaseResult, Fixture, Problem, one_of, status_of};
use pagemesh_nfs_client::nfs3::{
    Create, CreateHow, Link, Lookup, MakeDirectory, Remove, RemoveDirectory, Rename, SetAttributes,
    Status, Symlink,
};

/// A procedure with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Lookup,
    Create,
    MakeDirectory,
    Symlink,
    Remove,
    RemoveDirectory,
    RenameFrom,
    RenameTo,
    Link,
}

const PROCEDURES: &[(&str, Named)] = &[
    ("lookup", Named::Lookup),
    ("create", Named::Create),
    ("mkdir", Named::MakeDirectory),
    ("symlink", Named::Symlink),
    ("remove", Named::Remove),
    ("rmdir", Named::RemoveDirectory),
    ("rename_from", Named::RenameFrom),
    ("rename_to", Named::RenameTo),
    ("link", Named::Link),
];

impl Named {
    fn makes_a_name(self) -> bool {
        matches!(
            self,
            Self::Create | Self::MakeDirectory | Self::Symlink | Self::RenameTo | Self::Link
        )
    }
}

pub(super) fn add(cases: &mut Vec<Case>) {
    for (subject, named) in PROCEDURES {
        let named = *named;
        let mut case = |rule: &str, name: Vec<u8>, wanted: &'static [Status]| {
            cases.push(Case::new(format!("{subject}.{rule}"), move |it| {
                refused(it, named, &name, wanted)
            }));
        };
        case("name_of_256_bytes", vec![b'n'; 256], &[Status::NAMETOOLONG]);
        case(
            "name_of_5000_bytes",
            vec![b'n'; 5000],
            &[Status::NAMETOOLONG],
        );
        const EMPTY: &[Status] = &[Status::INVAL, Status::ACCES, Status::NOENT, Status::EXIST];
        case("empty_name", Vec::new(), EMPTY);
        const INVALID: &[Status] = &[Status::INVAL, Status::ACCES, Status::NOENT];
        case("name_with_slash", b"a/b".to_vec(), INVALID);
        case("name_with_zero_byte", b"a\0b".to_vec(), INVALID);
        if named.makes_a_name() {
            const DOTS: &[Status] = &[
                Status::EXIST,
                Status::INVAL,
                Status::ACCES,
                Status::ISDIR,
                Status::NOTEMPTY,
            ];
            case("dot", b".".to_vec(), DOTS);
            case("dot_dot", b"..".to_vec(), DOTS);
        }
        if named.makes_a_name() {
            let rule = format!("{subject}.name_of_255_bytes");
            cases.push(Case::new(rule, move |it| longest(it, named)));
        }
    }
}

/// The status of a procedure with this name, in a directory with the file `file` and the directories
/// `a` and `a/b`.
fn status(it: &mut Fixture, named: Named, name: &[u8]) -> Result<Status, Problem> {
    let file = it.file(b"file")?;
    let inner = it.directory(b"a")?;
    it.file_in(&inner, b"b", 0o644)?;
    let dir = it.dir.clone();
    let directory = &dir;
    let attributes = SetAttributes::mode(0o644);
    let how = CreateHow::Guarded(attributes);
    Ok(match named {
        Named::Lookup => status_of(&it.call(&Lookup { directory, name })?),
        Named::Create => status_of(&it.call(&Create {
            directory,
            name,
            how,
        })?),
        Named::MakeDirectory => status_of(&it.call(&MakeDirectory {
            directory,
            name,
            attributes,
        })?),
        Named::Symlink => status_of(&it.call(&Symlink {
            directory,
            name,
            attributes,
            target: b"target",
        })?),
        Named::Remove => status_of(&it.call(&Remove { directory, name })?),
        Named::RemoveDirectory => status_of(&it.call(&RemoveDirectory { directory, name })?),
        Named::RenameFrom => status_of(&it.call(&Rename {
            from: (directory, name),
            to: (directory, b"new"),
        })?),
        Named::RenameTo => status_of(&it.call(&Rename {
            from: (directory, b"file"),
            to: (directory, name),
        })?),
        Named::Link => status_of(&it.call(&Link {
            file: &file,
            directory,
            name,
        })?),
    })
}

fn refused(it: &mut Fixture, named: Named, name: &[u8], wanted: &[Status]) -> CaseResult {
    let found = status(it, named, name)?;
    one_of("the status", found, wanted)?;
    // The entries are as before.
    let dir = it.dir.clone();
    it.lookup(&dir, b"file")?;
    let inner = it.lookup(&dir, b"a")?;
    it.lookup(&inner, b"b")?;
    Ok(())
}

fn longest(it: &mut Fixture, named: Named) -> CaseResult {
    let name = [b'n'; 255];
    let found = status(it, named, &name)?;
    one_of("the status", found, &[Status::OK])?;
    let dir = it.dir.clone();
    it.lookup(&dir, &name)?;
    Ok(())
}
