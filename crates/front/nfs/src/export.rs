//! File systems for clients, and the rules for their callers.

use crate::handle::HandleKey;
use crate::limits::{EXPORT_NAME_BYTES_MAX, EXPORTS_MAX};
use crate::rpc::Credential;
use pagemesh_fs::{Caller, Fs, FsError};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use uuid::Uuid;

/// The user and group ids of callers without a name, `nobody` of Linux.
pub const ANONYMOUS_ID: u32 = 65_534;
/// The first port that every user of a client may use (RFC 6335: system ports are below).
const FIRST_USER_PORT: u16 = 1024;

/// The free bytes of the pools of a volume; none if they are unknown.
pub type FreeSpaceFn = Arc<dyn Fn() -> Option<u64> + Send + Sync>;

/// Called with the name of an export when its file system fails a call: the volume failed, or its
/// data is damaged. [`is_fenced`](crate::is_fenced) tells that another host has the volume.
pub type ErrorHook = Box<dyn Fn(&str, &FsError) + Send + Sync>;

/// The callers that become anonymous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Squash {
    /// User 0 and group 0.
    #[default]
    Root,
    /// All.
    All,
    /// None. Every client that can connect may act as root.
    None,
}

/// The rules of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Whether changes are refused.
    pub is_read_only: bool,
    /// The callers that become anonymous.
    pub squash: Squash,
    /// The user id of anonymous callers.
    pub anonymous_uid: u32,
    /// The group id of anonymous callers.
    pub anonymous_gid: u32,
    /// Whether a call must come from a port below 1024. Only root of a client has them, so other users
    /// of a trusted client cannot claim the ids of others.
    pub needs_reserved_port: bool,
    /// Whether the server looks up the supplementary groups of a caller itself. The groups of a call are
    /// at most 16.
    pub manages_groups: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            is_read_only: false,
            squash: Squash::Root,
            anonymous_uid: ANONYMOUS_ID,
            anonymous_gid: ANONYMOUS_ID,
            needs_reserved_port: false,
            manages_groups: false,
        }
    }
}

impl fmt::Display for ExportOptions {
    /// The options that an exports file would have.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.is_read_only { "ro" } else { "rw" })?;
        formatter.write_str(match self.squash {
            Squash::Root => ",root_squash",
            Squash::All => ",all_squash",
            Squash::None => ",no_root_squash",
        })?;
        for (name, id) in [("uid", self.anonymous_uid), ("gid", self.anonymous_gid)] {
            if id != ANONYMOUS_ID {
                write!(formatter, ",anon{name}={id}")?;
            }
        }
        if !self.needs_reserved_port {
            formatter.write_str(",insecure")?;
        }
        if self.manages_groups {
            formatter.write_str(",manage_gids")?;
        }
        Ok(())
    }
}

impl ExportOptions {
    /// Whether a call may come from the port of this address.
    pub(crate) fn accepts_port(&self, client: SocketAddr) -> bool {
        !self.needs_reserved_port || client.port() < FIRST_USER_PORT
    }

    /// The user id for a lookup of groups; none if the groups of the call count.
    pub(crate) fn user_to_look_up(&self, credential: &Credential<'_>) -> Option<u32> {
        match credential {
            Credential::System(system)
                if self.manages_groups && self.mapped_user(system.uid) == Some(system.uid) =>
            {
                Some(system.uid)
            }
            Credential::System(_) | Credential::None => None,
        }
    }

    /// The user that a user id becomes, if it keeps an identity.
    fn mapped_user(&self, uid: u32) -> Option<u32> {
        match self.squash {
            Squash::All => None,
            Squash::Root if uid == 0 => None,
            Squash::Root | Squash::None => Some(uid),
        }
    }

    /// The user id that the files of a caller get.
    pub(crate) fn user(&self, credential: &Credential<'_>) -> u32 {
        let user = match credential {
            Credential::None => None,
            Credential::System(system) => self.mapped_user(system.uid),
        };
        user.unwrap_or(self.anonymous_uid)
    }

    /// The user of a call. `groups` take the place of the groups in the call. An anonymous user has no
    /// groups: root's groups on a client are no concern of the files.
    pub(crate) fn caller(
        &self,
        credential: &Credential<'_>,
        groups: Option<&[u32]>,
    ) -> Option<Caller> {
        let (uid, gid) = (self.anonymous_uid, self.anonymous_gid);
        let anonymous = || Caller::new(uid, gid, &[]).ok();
        let system = match credential {
            Credential::None => return anonymous(),
            Credential::System(system) => system,
        };
        let Some(user) = self.mapped_user(system.uid) else {
            return anonymous();
        };
        let is_squashed = |id| self.squash == Squash::Root && id == 0;
        let mapped = |id| if is_squashed(id) { gid } else { id };
        let groups = groups.unwrap_or(system.groups.ids());
        let groups: Vec<u32> = groups.iter().map(|id| mapped(*id)).collect();
        Caller::new(user, mapped(system.gid), &groups).ok()
    }
}

/// A file system that clients may mount.
#[derive(Clone)]
pub struct Export {
    /// The path that clients mount is this name after a slash. It has no slash.
    pub name: String,
    /// The file system. The process calls its upkeep, such as [`Fs::flush_all_times`].
    pub fs: Arc<Fs>,
    /// The id of its volume, by the manager.
    pub volume: Uuid,
    /// The key of its handles. Another key makes all handles of clients bad.
    pub key: HandleKey,
    /// The number of the attachment of the volume. It differs after each restart and takeover.
    pub attachment: u32,
    /// The rule for all clients. An exports file takes its place.
    pub options: ExportOptions,
    /// The free space for FSSTAT.
    pub free_space: FreeSpaceFn,
}

/// The reason that file systems cannot be exported together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The name cannot be a path.
    #[error(
        "the export name {0:?} is unusable; use 1 to {EXPORT_NAME_BYTES_MAX} bytes without a slash"
    )]
    Name(String),
    /// Two exports have the same name.
    #[error("two exports have the name {0:?}; rename one of them")]
    SameName(String),
    /// Two exports have the same volume, so a handle would not tell them apart.
    #[error("the exports {0:?} and {1:?} have the same volume; export it once")]
    SameVolume(String, String),
    /// There are too many.
    #[error("{0} exports are too many; at most {EXPORTS_MAX} are allowed")]
    TooMany(usize),
}

impl Export {
    /// Checks that file systems can be served together.
    pub(crate) fn check_all(exports: &[Export]) -> Result<(), ExportError> {
        if exports.len() > EXPORTS_MAX {
            return Err(ExportError::TooMany(exports.len()));
        }
        for (at, export) in exports.iter().enumerate() {
            let name = &export.name;
            let is_dots = matches!(name.as_str(), "." | "..");
            let is_long = name.is_empty() || name.len() > EXPORT_NAME_BYTES_MAX;
            if is_dots || is_long || name.bytes().any(|byte| matches!(byte, 0 | b'/')) {
                return Err(ExportError::Name(name.clone()));
            }
            for other in exports.iter().take(at) {
                if other.name == *name {
                    return Err(ExportError::SameName(name.clone()));
                }
                if other.volume == export.volume {
                    return Err(ExportError::SameVolume(other.name.clone(), name.clone()));
                }
            }
        }
        Ok(())
    }
}
