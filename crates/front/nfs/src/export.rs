//! Exports: the file systems that clients may mount, and the rules for their callers.

use crate::handle::{EncodedHandle, FileHandle, HandleKey};
use crate::limits::{EXPORT_NAME_BYTES_MAX, EXPORTS_MAX};
use crate::nfs3::files::WriteVerifier;
use crate::nfs3::listing::CookieVerifier;
use crate::pin_cache::PinCache;
use crate::rpc::Credential;
use pagemesh_fs::{Caller, FileId, Fs, FsError, OpenSnapshots};
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use uuid::Uuid;

/// The user and group ids of callers without a name, `nobody` of Linux.
pub const ANONYMOUS_ID: u32 = 65_534;
/// The key of the hash that makes cookie verifiers. It stays for ever, because clients keep them.
const COOKIE_KEY: [u8; 16] = *b"pagemesh cookies";

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
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            is_read_only: false,
            squash: Squash::Root,
            anonymous_uid: ANONYMOUS_ID,
            anonymous_gid: ANONYMOUS_ID,
        }
    }
}

impl ExportOptions {
    /// The user of a call. AUTH_SYS has few groups, so the caller always has room for them.
    pub(crate) fn caller(&self, credential: &Credential<'_>) -> Option<Caller> {
        let (uid, gid) = (self.anonymous_uid, self.anonymous_gid);
        let system = match (credential, self.squash) {
            (Credential::None, _) | (_, Squash::All) => return Caller::new(uid, gid, &[]).ok(),
            (Credential::System(system), _) => system,
        };
        let is_squashed = |id| self.squash == Squash::Root && id == 0;
        let mapped = |id, anonymous| if is_squashed(id) { anonymous } else { id };
        let groups: Vec<u32> = system
            .groups
            .ids()
            .iter()
            .map(|id| mapped(*id, gid))
            .collect();
        Caller::new(mapped(system.uid, uid), mapped(system.gid, gid), &groups).ok()
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
    /// The rules.
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

/// The snapshots of an export.
#[derive(Clone)]
pub(crate) struct ExportedSnapshots {
    pub(crate) open: Arc<OpenSnapshots>,
    /// Whether listings of live directories show `.snapshot`.
    pub(crate) are_listed: bool,
}

/// All exports of a server.
#[derive(Clone)]
pub struct Exports(Arc<[ServedExport]>);

impl Exports {
    /// Exports that can be served together.
    ///
    /// # Errors
    /// If names or volumes are unusable, or there are more than [`EXPORTS_MAX`].
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
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
        Ok(Self(exports.into_iter().map(ServedExport::new).collect()))
    }

    /// Gives the export of a volume `.snapshot/NAME` in each directory for each snapshot; `are_listed`: listings show `.snapshot`.
    /// Call it before a server has the exports.
    #[must_use]
    pub fn with_snapshots(
        mut self,
        volume: Uuid,
        open: &Arc<OpenSnapshots>,
        are_listed: bool,
    ) -> Self {
        let exports = Arc::get_mut(&mut self.0).into_iter().flatten();
        for export in exports.filter(|export| export.volume == volume) {
            let open = Arc::clone(open);
            export.snapshots = Some(ExportedSnapshots { open, are_listed });
        }
        self
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ServedExport> {
        self.0.iter()
    }

    pub(crate) fn by_name(&self, name: &[u8]) -> Option<&ServedExport> {
        self.iter().find(|export| export.name.as_bytes() == name)
    }

    pub(crate) fn by_volume(&self, volume: [u8; 16]) -> Option<&ServedExport> {
        self.iter()
            .find(|export| export.volume.as_bytes() == &volume)
    }
}

/// An export with its state.
pub(crate) struct ServedExport {
    export: Export,
    /// The files in use.
    pub(crate) pins: PinCache,
    /// Another host has the volume. No call gets a reply any more.
    is_fenced: AtomicBool,
    cookie_verifier: CookieVerifier,
    snapshots: Option<ExportedSnapshots>,
}

impl std::ops::Deref for ServedExport {
    type Target = Export;

    fn deref(&self) -> &Export {
        &self.export
    }
}

impl ServedExport {
    fn new(export: Export) -> Self {
        let mut hasher = SipHasher24::new_with_key(&COOKIE_KEY);
        hasher.write(export.volume.as_bytes());
        Self {
            pins: PinCache::new(Arc::clone(&export.fs)),
            is_fenced: AtomicBool::new(false),
            cookie_verifier: CookieVerifier(hasher.finish().to_be_bytes()),
            snapshots: None,
            export,
        }
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Acquire)
    }

    /// Returns whether it was not fenced before.
    pub(crate) fn set_fenced(&self) -> bool {
        !self.is_fenced.swap(true, Ordering::AcqRel)
    }

    /// Constant per volume: cookies survive changes, restarts and takeovers.
    pub(crate) fn cookie_verifier(&self) -> CookieVerifier {
        self.cookie_verifier
    }

    /// The verifier of unstable writes, with the low half of a number of losses.
    pub(crate) fn write_verifier(&self, losses: u64) -> WriteVerifier {
        let losses = losses as u32;
        let number = u64::from(self.attachment) << 32 | u64::from(losses);
        WriteVerifier(number.to_be_bytes())
    }

    /// The id that clients tell file systems by.
    pub(crate) fn file_system_id(&self) -> u64 {
        let (high, low) = self.volume.as_u64_pair();
        high ^ low
    }

    pub(crate) fn snapshots(&self) -> Option<&ExportedSnapshots> {
        self.snapshots.as_ref()
    }

    pub(crate) fn handle(&self, id: FileId) -> EncodedHandle {
        self.handle_in(0, id)
    }

    /// The handle of a file in the snapshot of this epoch; 0: the live file system.
    pub(crate) fn handle_in(&self, snapshot_epoch: u32, id: FileId) -> EncodedHandle {
        self.key.encode(&FileHandle {
            volume: *self.volume.as_bytes(),
            snapshot_epoch,
            inode: id.ino.0,
            generation: id.generation,
            birth_fold: id.birth,
        })
    }
}
