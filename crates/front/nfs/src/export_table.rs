//! The exports of a server: file systems, the paths that clients mount, and the rules of each.
//!
//! Invariants: the file systems of a server stay the same. Its paths and rules are one table, which
//! an exports file replaces as a whole. A call uses one table from its begin to its end.
//!
//! A handle has the id of its export, so the rules of that export decide about each use of it. The
//! export of a whole file system has the id of the volume. The id of an exported directory follows
//! from the volume and the identity of the directory: handles survive restarts and takeovers, and
//! become stale when another directory gets the name.

use crate::client_list::{ListIdentity, StableStore};
use crate::client_pattern::ClientPattern;
use crate::export::{Export, ExportError, ExportOptions, FreeSpaceFn};
use crate::exports_file::{
    ClientRule, ExportLine, ExportPath, ExportsFile, ExportsFileCause, ExportsFileError,
};
use crate::groups::{GroupCache, GroupLookup, system_groups};
use crate::handle::{EncodedHandle, FileHandle, HandleKey};
use crate::nfs3::files::WriteVerifier;
use crate::nfs3::listing::CookieVerifier;
use crate::pin_cache::PinCache;
use crate::pseudo_fs::{PseudoFs, PseudoNo};
use pagemesh_base::poison;
use pagemesh_fs::{Caller, FileId, Fs, FsError, Ino, InodeKind, OpenSnapshots, Pin};
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use siphasher::sip128::{Hasher128, SipHasher24 as WideSipHasher24};
use std::collections::HashMap;
use std::hash::Hasher;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use uuid::Uuid;

/// The key of the hash that makes cookie verifiers. It stays for ever, because clients keep them.
const COOKIE_KEY: [u8; 16] = *b"pagemesh cookies";
/// The key of the hash that makes the ids of exported directories. It stays for ever, too.
const DIRECTORY_KEY: [u8; 16] = *b"pagemesh exports";

/// The snapshots of a file system.
#[derive(Clone)]
pub(crate) struct ExportedSnapshots {
    pub(crate) open: Arc<OpenSnapshots>,
    /// Whether listings of live directories show `.snapshot`.
    pub(crate) are_listed: bool,
}

/// All exports of a server. Clones share their state.
#[derive(Clone)]
pub struct Exports(Arc<ExportsState>);

struct ExportsState {
    file_systems: Box<[Arc<ServedFs>]>,
    table: RwLock<Arc<ExportTable>>,
    /// The number of tables so far.
    version: AtomicU64,
    groups: GroupCache,
}

impl Exports {
    /// Exports that can be served together: each file system under its name, for all clients.
    ///
    /// # Errors
    /// If names or volumes are unusable, or there are more than
    /// [`EXPORTS_MAX`](crate::limits::EXPORTS_MAX).
    pub fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        Self::with_groups(exports, Box::new(system_groups))
    }

    /// As [`Exports::new`], with another source of groups.
    ///
    /// # Errors
    /// As [`Exports::new`].
    pub fn with_groups(exports: Vec<Export>, lookup: GroupLookup) -> Result<Self, ExportError> {
        Export::check_all(&exports)?;
        // Clients trust their cached bytes while the times of the file stay equal.
        exports.iter().for_each(|it| it.fs.keep_write_times());
        let served = exports.into_iter().map(ServedFs::new);
        let (file_systems, exports): (Vec<_>, Vec<_>) = served.unzip();
        Ok(Self(Arc::new(ExportsState {
            file_systems: file_systems.into(),
            table: RwLock::new(Arc::new(ExportTable::new(exports))),
            version: AtomicU64::new(0),
            groups: GroupCache::new(lookup),
        })))
    }

    /// Gives the file system of a volume `.snapshot/NAME` in each directory for each snapshot; `are_listed`: listings show `.snapshot`.
    /// Call it before a server has the exports; only the first call for a volume has an effect.
    #[must_use]
    pub fn with_snapshots(self, volume: Uuid, open: &Arc<OpenSnapshots>, are_listed: bool) -> Self {
        for fs in self.file_systems().filter(|fs| fs.volume == volume) {
            let open = Arc::clone(open);
            let _ = fs.snapshots.set(ExportedSnapshots { open, are_listed });
        }
        self
    }

    /// Keeps the stable list of NFSv4.1 clients of a volume in a file, so that they may reclaim their state after a restart. `content` is
    /// the number of times that the volume got an earlier content. Call it before a server has the exports; only the first call for a
    /// volume has an effect. A file system without a list lets no client reclaim.
    #[must_use]
    pub fn with_client_list(self, volume: Uuid, content: u64, store: Box<dyn StableStore>) -> Self {
        let identity = ListIdentity { volume, content };
        if let Some(fs) = self.file_systems().find(|fs| fs.volume == volume) {
            poison::lock(&fs.list_source).get_or_insert((identity, store));
        }
        self
    }

    /// Replaces all paths and rules by the ones of a file. Calls that begin later use them, also on
    /// present connections. It looks exported directories up, and may wait for their volumes.
    ///
    /// # Errors
    /// If the file names an unknown file system. Then the earlier paths and rules stay. A line with a directory that does not exist is
    /// logged and left out: users may rename a directory, and that must stop no other export.
    pub fn apply(&self, file: &ExportsFile) -> Result<(), ExportsFileError> {
        let mut served = Vec::new();
        for line in &file.exports {
            match self.serve_line(line) {
                Ok(export) => served.push(export),
                Err(cause @ ExportsFileCause::Directory(..)) => {
                    let error = file.error(line.line, cause);
                    tracing::error!(%error, "a path is not exported; the others are");
                }
                Err(cause) => return Err(file.error(line.line, cause)),
            }
        }
        let mut table = poison::recover(self.0.table.write());
        let earlier = table.pseudo.change();
        *table = Arc::new(ExportTable::after(earlier, served));
        self.0.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn serve_line(&self, line: &ExportLine) -> Result<ServedExport, ExportsFileCause> {
        let name = &line.path.file_system;
        let fs = self.file_systems().find(|fs| fs.name == *name);
        let fs = fs.ok_or_else(|| ExportsFileCause::UnknownFileSystem(name.clone()))?;
        let directory = fs.directory(&line.path.directories);
        let directory = directory.map_err(|error| {
            let (path, text) = (line.path.clone(), error.to_string());
            match error {
                FsError::Posix(Errno::NOENT | Errno::NOTDIR) => {
                    ExportsFileCause::Directory(path, text)
                }
                // Without its path, the handles of clients would be stale for ever.
                _ => ExportsFileCause::Unavailable(path, text),
            }
        })?;
        Ok(ServedExport {
            id: match directory {
                None => *fs.volume.as_bytes(),
                Some(directory) => directory_export_id(fs.volume, directory),
            },
            directory,
            path: line.path.clone(),
            rules: line.rules.clone(),
            file_system: Arc::clone(fs),
        })
    }

    /// Another host has the volume of this file system. From now on its calls are refused, also if their answers are in memory.
    pub(crate) fn fence(&self, name: &str) {
        for fs in self.file_systems().filter(|fs| fs.name == name) {
            if fs.set_fenced() {
                tracing::error!(
                    export = name,
                    "another client has the volume; its NFS calls are refused from now on"
                );
            }
        }
    }

    /// The file systems, also those without an export.
    pub(crate) fn file_systems(&self) -> impl Iterator<Item = &Arc<ServedFs>> {
        self.0.file_systems.iter()
    }

    /// The paths and rules of now.
    pub(crate) fn table(&self) -> Arc<ExportTable> {
        let table = poison::recover(self.0.table.read());
        Arc::clone(&table)
    }

    /// A number that changes after each change of the rules.
    pub(crate) fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Whether a host has access to any export.
    pub(crate) fn has_rule(&self, client: IpAddr) -> bool {
        self.table().iter().any(|it| it.rule(client).is_some())
    }

    /// The groups of users.
    pub(crate) fn groups(&self) -> &GroupCache {
        &self.0.groups
    }
}

/// The paths that clients mount.
pub(crate) struct ExportTable {
    exports: Vec<Arc<ServedExport>>,
    by_id: HashMap<[u8; 16], usize>,
    /// Whether a directory is exported.
    has_directories: bool,
    /// The directories that lead to the exports.
    pub(crate) pseudo: PseudoFs,
}

impl ExportTable {
    /// Paths in the order of a file.
    fn new(exports: Vec<ServedExport>) -> Self {
        Self::after(0, exports)
    }

    /// As [`Self::new`], for a table in the place of one with this change attribute.
    fn after(earlier: u64, exports: Vec<ServedExport>) -> Self {
        let exports: Vec<_> = exports.into_iter().map(Arc::new).collect();
        let ids = exports.iter().enumerate();
        let by_id = ids.map(|(at, export)| (export.id, at)).collect();
        let paths: Vec<_> = exports.iter().map(|export| &export.path).collect();
        let pseudo = PseudoFs::new(&paths, wall_clock_nanoseconds().max(earlier + 1));
        Self {
            has_directories: exports.iter().any(|export| export.directory.is_some()),
            exports,
            by_id,
            pseudo,
        }
    }

    /// The export at a directory of the pseudo file system, if a client has access to it.
    pub(crate) fn export_at(&self, at: PseudoNo, client: IpAddr) -> Option<&Arc<ServedExport>> {
        let export = self.exports.get(self.pseudo.export(at)?)?;
        export.rule(client).is_some().then_some(export)
    }

    /// The volume of the export at a directory of the pseudo file system, without a check of access.
    pub(crate) fn volume_at(&self, at: PseudoNo) -> Option<Uuid> {
        let export = self.exports.get(self.pseudo.export(at)?)?;
        Some(export.volume)
    }

    /// Whether a client sees a directory of the pseudo file system. The root is visible to all.
    pub(crate) fn is_visible(&self, at: PseudoNo, client: IpAddr) -> bool {
        let below = self.pseudo.exports_below(at).iter();
        let mut below = below.filter_map(|number| self.exports.get(*number));
        at == PseudoNo::ROOT || below.any(|export| export.rule(client).is_some())
    }

    /// The directory of the pseudo file system with the path of an export.
    pub(crate) fn place(&self, export: &ServedExport) -> PseudoNo {
        let number = self.by_id.get(&export.id);
        number.map_or(PseudoNo::ROOT, |number| self.pseudo.place(*number))
    }

    /// The export that has a file as its root, beside the export of the whole file system, if a client has access to it.
    pub(crate) fn export_of_directory(
        &self,
        volume: Uuid,
        directory: FileId,
        client: IpAddr,
    ) -> Option<&Arc<ServedExport>> {
        if !self.has_directories {
            return None;
        }
        let export = self.by_id(directory_export_id(volume, directory))?;
        export.rule(client).is_some().then_some(export)
    }

    /// The nearest export above the path of another one to which a client has access.
    pub(crate) fn export_above(
        &self,
        export: &ServedExport,
        client: IpAddr,
    ) -> Option<&Arc<ServedExport>> {
        let mut at = self.place(export);
        while let Some(above) = self.pseudo.parent(at) {
            if let Some(export) = self.export_at(above, client) {
                return Some(export);
            }
            at = above;
        }
        None
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<ServedExport>> {
        self.exports.iter()
    }

    /// The export with this id, which handles have.
    pub(crate) fn by_id(&self, id: [u8; 16]) -> Option<&Arc<ServedExport>> {
        self.by_id.get(&id).and_then(|at| self.exports.get(*at))
    }

    /// Whether some client may change files of the file system of this volume.
    pub(crate) fn is_writable(&self, volume: Uuid) -> bool {
        let exports = self.iter().filter(|export| export.volume == volume);
        exports
            .flat_map(|export| &export.rules)
            .any(|rule| !rule.options.is_read_only)
    }

    /// The exports of a path with these names and of the directories above it, the deepest one first.
    pub(crate) fn above(&self, names: &[&[u8]]) -> Vec<&Arc<ServedExport>> {
        let begins = |export: &&Arc<ServedExport>| {
            let mut names = names.iter();
            export.names().all(|name| names.next() == Some(&name))
        };
        let mut found: Vec<_> = self.iter().filter(begins).collect();
        found.sort_by_key(|export| std::cmp::Reverse(export.depth()));
        found
    }
}

/// A path that clients mount, as people read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedPath {
    /// The name of the file system.
    pub file_system: String,
    /// The path.
    pub path: String,
    /// The rules, as in an exports file; the most specific one first.
    pub rules: Vec<String>,
}

/// A path that clients mount, with its rules.
pub(crate) struct ServedExport {
    file_system: Arc<ServedFs>,
    pub(crate) path: ExportPath,
    /// The id of the export in its handles.
    id: [u8; 16],
    /// The directory that clients see as the root; none: the root of the file system.
    pub(crate) directory: Option<FileId>,
    /// The most specific one first.
    rules: Vec<ClientRule>,
}

impl Deref for ServedExport {
    type Target = ServedFs;

    fn deref(&self) -> &ServedFs {
        &self.file_system
    }
}

impl ServedExport {
    /// The rule for a client; none if it has no access.
    pub(crate) fn rule(&self, client: IpAddr) -> Option<&ExportOptions> {
        let rule = self.rules.iter().find(|it| it.clients.matches(client));
        rule.map(|rule| &rule.options)
    }

    pub(crate) fn described(&self) -> ExportedPath {
        let rules = self.rules.iter();
        let rules = rules.map(|rule| format!("{}({})", rule.clients, rule.options));
        ExportedPath {
            file_system: self.name.clone(),
            path: self.path.to_string(),
            rules: rules.collect(),
        }
    }

    /// The clients, as people read them; empty for all.
    pub(crate) fn client_names(&self) -> Vec<String> {
        match self.rules.as_slice() {
            [rule] if rule.clients == ClientPattern::All => Vec::new(),
            rules => rules.iter().map(|it| it.clients.to_string()).collect(),
        }
    }

    fn names(&self) -> impl Iterator<Item = &[u8]> {
        let directories = self.path.directories.iter();
        let names = std::iter::once(&self.path.file_system).chain(directories);
        names.map(String::as_bytes)
    }

    /// The number of names in the path.
    pub(crate) fn depth(&self) -> usize {
        1 + self.path.directories.len()
    }

    /// The id that clients tell file systems by. Each export has its own, so that a client keeps the
    /// files of two exports apart.
    pub(crate) fn file_system_id(&self) -> u64 {
        let (high, low) = Uuid::from_bytes(self.id).as_u64_pair();
        high ^ low
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// The handle of a file in the snapshot of this epoch; 0: the live file system.
    pub(crate) fn handle_in(&self, snapshot_epoch: u32, id: FileId) -> EncodedHandle {
        self.key.encode(&FileHandle {
            volume: self.id,
            snapshot_epoch,
            inode: id.ino.0,
            generation: id.generation,
            birth_fold: id.birth,
        })
    }
}

/// Nanoseconds since 1970.
fn wall_clock_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    let nanoseconds = u64::try_from(now.tv_nsec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(nanoseconds)
}

/// The id of the export of a directory.
fn directory_export_id(volume: Uuid, directory: FileId) -> [u8; 16] {
    let mut hasher = WideSipHasher24::new_with_key(&DIRECTORY_KEY);
    hasher.write(volume.as_bytes());
    hasher.write(&directory.ino.0.to_be_bytes());
    hasher.write(&directory.generation.to_be_bytes());
    hasher.write(&directory.birth.to_be_bytes());
    hasher.finish128().as_bytes()
}

/// A file system with its state.
pub(crate) struct ServedFs {
    pub(crate) name: String,
    pub(crate) fs: Arc<Fs>,
    pub(crate) volume: Uuid,
    pub(crate) key: HandleKey,
    attachment: u32,
    pub(crate) free_space: FreeSpaceFn,
    /// The files in use.
    pub(crate) pins: PinCache,
    /// Another host has the volume. No call gets a reply any more.
    is_fenced: AtomicBool,
    cookie_verifier: CookieVerifier,
    snapshots: OnceLock<ExportedSnapshots>,
    /// Pins that a worker of the file system drops.
    unused_pins: Mutex<Vec<Arc<Pin>>>,
    /// The place of the stable list of clients, until the list is opened.
    list_source: Mutex<Option<ListSource>>,
}

/// The content that a stable list belongs to, and its place.
pub(crate) type ListSource = (ListIdentity, Box<dyn StableStore>);

impl ServedFs {
    /// The state of a file system, and its export under its name, for all clients.
    fn new(export: Export) -> (Arc<Self>, ServedExport) {
        let mut hasher = SipHasher24::new_with_key(&COOKIE_KEY);
        hasher.write(export.volume.as_bytes());
        let fs = Arc::new(Self {
            pins: PinCache::new(Arc::clone(&export.fs)),
            is_fenced: AtomicBool::new(false),
            cookie_verifier: CookieVerifier(hasher.finish().to_be_bytes()),
            snapshots: OnceLock::new(),
            unused_pins: Mutex::default(),
            list_source: Mutex::default(),
            name: export.name,
            fs: export.fs,
            volume: export.volume,
            key: export.key,
            attachment: export.attachment,
            free_space: export.free_space,
        });
        let served = ServedExport {
            path: ExportPath {
                file_system: fs.name.clone(),
                directories: Vec::new(),
            },
            id: *fs.volume.as_bytes(),
            directory: None,
            rules: vec![ClientRule {
                clients: ClientPattern::All,
                options: export.options,
            }],
            file_system: Arc::clone(&fs),
        };
        (fs, served)
    }

    /// The directory with these names below the root; none for no names. Symbolic links are not followed: a user could
    /// change them.
    fn directory(&self, names: &[String]) -> Result<Option<FileId>, FsError> {
        if names.is_empty() {
            return Ok(None);
        }
        let mut id = self.fs.attr(Ino::ROOT)?.file_id();
        let server = Caller::trusted(0, 0);
        for name in names {
            let found = self.fs.lookup_at(id, name.as_bytes(), &server).result?;
            if found.kind != InodeKind::Directory {
                return Err(rustix::io::Errno::NOTDIR.into());
            }
            id = found.file_id();
        }
        Ok(Some(id))
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.is_fenced.load(Ordering::Acquire)
    }

    /// Returns whether it was not fenced before.
    pub(crate) fn set_fenced(&self) -> bool {
        !self.is_fenced.swap(true, Ordering::AcqRel)
    }

    /// Leaves a pin to the workers of the file system: its drop may free the file, and wait for the volume.
    pub(crate) fn add_unused_pin(&self, pin: Arc<Pin>) {
        poison::lock(&self.unused_pins).push(pin);
    }

    pub(crate) fn has_unused_pins(&self) -> bool {
        !poison::lock(&self.unused_pins).is_empty()
    }

    /// Drops these pins, and the cached pins of earlier requests: a removed file is freed with its last close.
    pub(crate) fn drop_unused_pins(&self) {
        let unused = std::mem::take(&mut *poison::lock(&self.unused_pins));
        for pin in unused {
            self.pins.forget(pin.id());
        }
    }

    /// The place of the stable list; none from the second call on.
    pub(crate) fn take_list_source(&self) -> Option<ListSource> {
        poison::lock(&self.list_source).take()
    }

    pub(crate) fn snapshots(&self) -> Option<&ExportedSnapshots> {
        self.snapshots.get()
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
}
