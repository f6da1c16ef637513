//! The targets of the comparison.

use crate::error::BenchError;
use crate::file_peers::FilePeer;
use crate::peers::NbdPeer;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The kind of target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// The disk itself.
    Raw,
    /// One pool.
    OneLeg,
    /// Two pools.
    TwoLegs,
    /// QEMU's quorum over two servers.
    QemuQuorum,
    /// GlusterFS with two copies.
    Glusterfs,
    /// A Ceph block device.
    Rbd,
}

impl TargetKind {
    /// All kinds, in the order of reports.
    pub const ALL: [TargetKind; 6] = [
        TargetKind::Raw,
        TargetKind::OneLeg,
        TargetKind::TwoLegs,
        TargetKind::QemuQuorum,
        TargetKind::Glusterfs,
        TargetKind::Rbd,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            TargetKind::Raw => "raw",
            TargetKind::OneLeg => "one-leg",
            TargetKind::TwoLegs => "two-legs",
            TargetKind::QemuQuorum => "qemu-quorum",
            TargetKind::Glusterfs => "glusterfs",
            TargetKind::Rbd => "rbd",
        }
    }

    /// Its name in reports.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            TargetKind::Raw => "raw disk",
            TargetKind::OneLeg => "pagemesh, one leg",
            TargetKind::TwoLegs => "pagemesh, two legs",
            TargetKind::QemuQuorum => "QEMU quorum",
            TargetKind::Glusterfs => "GlusterFS",
            TargetKind::Rbd => "Ceph RBD",
        }
    }
}

/// The way to a target.
#[derive(Clone, Debug)]
pub(super) enum TargetAccess {
    File(PathBuf),
    Nbd(String),
    Rbd { pool: String, image: String },
}

/// Something to measure.
pub struct DiskTarget {
    pub(super) kind: TargetKind,
    pub(super) class: String,
    pub(super) access: TargetAccess,
    pub(super) pids: Vec<u32>,
    _server: Option<TargetServer>,
}

/// A server that ends with its target.
#[expect(dead_code, reason = "held to be dropped")]
enum TargetServer {
    Nbd(NbdPeer),
    Files(FilePeer),
}

impl DiskTarget {
    fn new(kind: TargetKind, class: &str, access: TargetAccess, pids: &[u32]) -> DiskTarget {
        DiskTarget {
            kind,
            class: class.to_owned(),
            access,
            pids: pids.to_vec(),
            _server: None,
        }
    }

    /// The disk itself: a file, or a block device. Its content is overwritten.
    #[must_use]
    pub fn raw(path: &Path) -> DiskTarget {
        DiskTarget::new(
            TargetKind::Raw,
            "none",
            TargetAccess::File(path.into()),
            &[],
        )
    }

    /// A volume of pagemesh behind NBD, with its class and the processes that serve it.
    #[must_use]
    pub fn pagemesh(kind: TargetKind, class: &str, uri: &str, pids: &[u32]) -> DiskTarget {
        DiskTarget::new(kind, class, TargetAccess::Nbd(uri.to_owned()), pids)
    }

    /// QEMU's quorum over two files in `dir`, with its sockets in `sockets`.
    ///
    /// # Errors
    /// If QEMU is not installed or does not start, or a file cannot be made.
    pub fn qemu_quorum(
        dir: &Path,
        sockets: &Path,
        size_bytes: u64,
    ) -> Result<DiskTarget, BenchError> {
        let peer = NbdPeer::qemu_quorum_on_disk(dir, sockets, size_bytes)?;
        let access = TargetAccess::Nbd(peer.uri.clone());
        let target = DiskTarget::new(TargetKind::QemuQuorum, "none", access, &peer.pids);
        Ok(DiskTarget {
            _server: Some(TargetServer::Nbd(peer)),
            ..target
        })
    }

    /// A file on a running GlusterFS.
    #[must_use]
    pub fn glusterfs(peer: FilePeer) -> DiskTarget {
        let place = peer.mount_place();
        let access = TargetAccess::File(place.dir.join("test"));
        let target = DiskTarget::new(TargetKind::Glusterfs, "none", access, &place.pids);
        DiskTarget {
            _server: Some(TargetServer::Files(peer)),
            ..target
        }
    }

    /// An image of a running Ceph cluster. Its content is overwritten.
    #[must_use]
    pub fn rbd(pool: &str, image: &str) -> DiskTarget {
        let access = TargetAccess::Rbd {
            pool: pool.to_owned(),
            image: image.to_owned(),
        };
        DiskTarget::new(TargetKind::Rbd, "none", access, &[])
    }

    pub(super) fn is_pagemesh(&self) -> bool {
        matches!(self.kind, TargetKind::OneLeg | TargetKind::TwoLegs)
    }

    /// Its name for errors.
    pub(super) fn label(&self) -> String {
        format!("on {}", self.kind.title())
    }
}
