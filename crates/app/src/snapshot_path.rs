//! The names of snapshots and bookmarks on the command line: `VOLUME@NAME` and `VOLUME#NAME`.

use anyhow::{anyhow, bail};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::snapshots::SnapshotName;
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// A volume and the name of its snapshot, as `VOLUME@NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SnapshotPath {
    /// The volume.
    pub volume: VolumeName,
    /// The name of the snapshot.
    pub name: SnapshotName,
}

impl FromStr for SnapshotPath {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<SnapshotPath> {
        let (volume, name) = split(text)?;
        let name = name.parse().map_err(|cause| bad_name(text, &cause))?;
        Ok(SnapshotPath { volume, name })
    }
}

impl fmt::Display for SnapshotPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.volume, self.name)
    }
}

/// The volume, and the text behind the first `@`.
pub fn split(text: &str) -> anyhow::Result<(VolumeName, &str)> {
    let Some((volume, name)) = text.split_once('@') else {
        bail!("'{text}' names no snapshot; write VOLUME@NAME");
    };
    let volume = volume.parse().map_err(|cause| bad_name(text, &cause))?;
    Ok((volume, name))
}

/// The error of a text that names no snapshot.
pub fn bad_name(text: &str, cause: &impl fmt::Display) -> anyhow::Error {
    anyhow!("'{text}' names no snapshot: {cause}; write VOLUME@NAME")
}

/// A volume and the name of its bookmark, as `VOLUME#NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BookmarkPath {
    /// The volume.
    pub volume: VolumeName,
    /// The name of the bookmark.
    pub name: SnapshotName,
}

impl FromStr for BookmarkPath {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<BookmarkPath> {
        let Some((volume, name)) = text.split_once('#') else {
            bail!("'{text}' names no bookmark; write VOLUME#NAME, in quotes for a shell");
        };
        let bad = |cause| anyhow!("'{text}' names no bookmark: {cause}; write VOLUME#NAME");
        Ok(BookmarkPath {
            volume: volume.parse().map_err(bad)?,
            name: name.parse().map_err(bad)?,
        })
    }
}

impl fmt::Display for BookmarkPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.volume, self.name)
    }
}

/// The start of changes: a snapshot, or a bookmark of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeStart {
    /// `VOLUME@NAME`.
    Snapshot(SnapshotPath),
    /// `VOLUME#NAME`.
    Bookmark(BookmarkPath),
}

impl FromStr for ChangeStart {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<ChangeStart> {
        match text.contains('#') {
            true => text.parse().map(ChangeStart::Bookmark),
            false => text.parse().map(ChangeStart::Snapshot),
        }
    }
}

impl fmt::Display for ChangeStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChangeStart::Snapshot(path) => path.fmt(f),
            ChangeStart::Bookmark(path) => path.fmt(f),
        }
    }
}

/// A volume, or a snapshot of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeOrSnapshot {
    /// `VOLUME`.
    Volume(VolumeName),
    /// `VOLUME@NAME`.
    Snapshot(SnapshotPath),
}

impl FromStr for VolumeOrSnapshot {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<VolumeOrSnapshot> {
        match text.contains('@') {
            true => text.parse().map(VolumeOrSnapshot::Snapshot),
            false => Ok(VolumeOrSnapshot::Volume(text.parse()?)),
        }
    }
}

impl fmt::Display for VolumeOrSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VolumeOrSnapshot::Volume(name) => name.fmt(f),
            VolumeOrSnapshot::Snapshot(path) => path.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_a_volume_and_a_name() {
        let path: SnapshotPath = "v@a.b".parse().unwrap();
        assert_eq!(path.to_string(), "v@a.b");
        for bad in ["v", "@a", "v@", "v@a@b", "v@a/b", "v@a%b", "a b@c"] {
            let refused = bad.parse::<SnapshotPath>().unwrap_err().to_string();
            assert!(refused.contains("VOLUME@NAME"), "{refused}");
        }
    }

    #[test]
    fn changes_start_at_a_snapshot_or_a_bookmark() {
        for text in ["v@a", "v#a.b"] {
            assert_eq!(text.parse::<ChangeStart>().unwrap().to_string(), text);
        }
        for bad in ["v", "v#", "#a", "v#a#b", "v#a@b", "v@a#b"] {
            assert!(bad.parse::<ChangeStart>().is_err(), "{bad}");
        }
    }

    #[test]
    fn text_with_an_at_sign_is_a_snapshot() {
        let parse = |text: &str| text.parse::<VolumeOrSnapshot>();
        assert!(matches!(parse("v"), Ok(VolumeOrSnapshot::Volume(_))));
        assert!(matches!(parse("v@a"), Ok(VolumeOrSnapshot::Snapshot(_))));
        for text in ["v", "v@a"] {
            assert_eq!(parse(text).unwrap().to_string(), text);
        }
        for bad in ["", "@", "v@", "v@a@b", "a b"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
