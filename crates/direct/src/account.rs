//! How many operations of a process went directly, how many by the kernel, and why.
//!
//! Two tables. One is of the process: for each file the operations that the kernel got, by
//! reason, and the direct ones of mounts that ended. The other, a [`Ledger`], is of the process
//! and a mount, in memory of the mount: so `pagemesh mount status` reads it while the process
//! runs.
//!
//! ```text
//!      0  magic 8, version 4
//!   4096  for each of 256 files 256 bytes: inode 8, operations by the kernel for each reason 8
//!  69632  for each of 16 stations, for each file: direct operations 8
//! ```
//!
//! Invariants: a direct operation is counted by the holder of its station, in a line that no other
//! station writes, without a locked instruction. What the kernel got is counted by locked
//! instructions: the kernel takes a thousand times as long. Counting neither allocates nor waits.

use pagemesh_base::spin::SpinLock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, Shared};
use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Files of a process that are told apart; the last place is that of all others.
pub const FILES: usize = 256;
const OTHERS: usize = FILES - 1;
/// Stations of a process and mount.
pub(crate) const STATIONS: usize = 16;
const MAGIC: u64 = u64::from_le_bytes(*b"pmaccnt\0");
const VERSION: u32 = 1;
const VERSION_AT: usize = 8;
const FILES_AT: usize = PAGE_BYTES;
const FILE_BYTES: usize = 256;
const DIRECT_AT: usize = FILES_AT + FILES * FILE_BYTES;
const STATION_BYTES: usize = FILES * 8;
/// Bytes of a ledger.
pub const LEDGER_BYTES: usize = DIRECT_AT + STATIONS * STATION_BYTES;
const _: () = assert!(LEDGER_BYTES.is_multiple_of(PAGE_BYTES), "whole pages");
const _: () = assert!(8 + Why::ALL.len() * 8 <= FILE_BYTES, "room for all reasons");

macro_rules! reasons {
    ($($name:ident $level:ident $code:literal $text:literal;)*) => {
        /// Why the kernel serves an operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Why { $(#[doc = $text] $name,)* }

        impl Why {
            /// All reasons.
            pub const ALL: &[Why] = &[$(Why::$name),*];

            /// For programs.
            #[must_use]
            pub fn code(self) -> &'static str {
                match self { $(Why::$name => $code,)* }
            }

            /// For people.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(Why::$name => $text,)* }
            }

            /// How much it matters.
            #[must_use]
            pub fn level(self) -> Level {
                match self { $(Why::$name => Level::$level,)* }
            }
        }
    };
}

/// Of a message to the user, as of `PAGEMESH_LOG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No message.
    Off,
    /// The whole mount is served by the kernel.
    Warn,
    /// A file or descriptor is.
    Info,
    /// A single call is: that passes.
    Debug,
}

reasons! {
    Patience Debug "patience" "first calls of the process (--patience)";
    NoMount Warn "no-mount" "the mount cannot be reached, or lets no process in";
    OtherUser Warn "other-user" "the mount is of another user";
    Turned Warn "connections" "the mount refused the process: another user, or all connections are in use";
    Version Warn "version" "the mount is of another version";
    MountGone Warn "mount-gone" "the mount has ended";
    Joining Debug "joining" "the process is just joining the mount, or forking";
    NoSession Warn "no-session" "no free session of a pool, or no free row of the mount";
    Withheld Warn "withheld" "the mount lets no process in just now";
    Legs Warn "legs" "a copy of the volume is not in-sync";
    Tcp Warn "tcp" "a copy of the volume is reached over TCP";
    Buffers Warn "file-sync" "a pool of the volume is of class file-sync";
    Columns Warn "columns" "the volume has several columns";
    Renewing Debug "renewing" "the sessions are being renewed";
    Asking Debug "opened" "first accesses after an open or a change by others";
    Mapped Info "mapped" "the file is mapped";
    Cached Info "page-cache" "a program without the library has the file open, and the kernel caches its pages";
    Shape Info "shape" "the file has holes, shared pages, set-id bits or extended attributes";
    Boards Info "files" "the mount has no place for a further file";
    Busy Debug "busy" "another thread had the same station";
    Closed Debug "in-use" "others used the file by the kernel at that moment";
    Growth Debug "growth" "the file becomes longer than the mount lent";
    Lost Warn "leg-lost" "a leg failed";
    Long Debug "long" "more than 1 MiB at once, or several parts of more than 8 KiB";
    Handler Debug "signal-handler" "called in a signal handler";
    Flags Info "append-changed" "O_APPEND was set or cleared later";
    Forked Info "shared-offset" "another process may have the descriptor, and so its offset";
    AppendAt Debug "append-at" "pwrite with O_APPEND";
    SizeLimit Info "size-limit" "the process has a limit of file sizes";
    Unknown Info "unknown-descriptor" "the descriptor is unknown to the library: inherited, received, or a stream's";
    Confined Warn "confined" "the process has a limit of memory, memory that is locked, a filter of system calls, or an io_uring, or runs under valgrind or a sanitizer";
}

/// Of a process and a mount.
pub struct Ledger(Shared);

/// What an account says of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Its device number.
    pub device: u64,
    /// Its inode; 0: several files that are not told apart.
    pub ino: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Those by the kernel, by reason.
    pub kernel: Vec<(Why, u64)>,
}

impl Ledger {
    /// Makes an empty one.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn create() -> Result<Ledger, MapError> {
        let shared = Shared::create(LEDGER_BYTES)?;
        shared.half(VERSION_AT).store(VERSION, Relaxed);
        shared.word(0).store(MAGIC, Release);
        Ok(Ledger(shared))
    }

    /// Takes one that a mount made; it takes no descriptor.
    ///
    /// # Errors
    /// What about it is not as expected.
    pub fn join(file: File) -> Result<Ledger, String> {
        let shared = Shared::open(file, LEDGER_BYTES).map_err(|cause| cause.to_string())?;
        let version = shared.half(VERSION_AT).load(Relaxed);
        match (shared.word(0).load(Acquire), version) {
            (MAGIC, VERSION) => Ok(Ledger(shared.without_file())),
            _ => Err("it is no ledger of this version".into()),
        }
    }

    /// The memory's file, to be passed to the process.
    #[must_use]
    pub fn file(&self) -> &File {
        self.0.file()
    }

    fn kernel(&self, slot: usize, why: Why) -> &AtomicU64 {
        self.0
            .word(FILES_AT + slot * FILE_BYTES + 8 + why as usize * 8)
    }

    fn ino(&self, slot: usize) -> &AtomicU64 {
        self.0.word(FILES_AT + slot * FILE_BYTES)
    }

    fn cell(&self, station: usize, slot: usize) -> &AtomicU64 {
        self.0.word(DIRECT_AT + station * STATION_BYTES + slot * 8)
    }

    /// Counts a direct operation. The caller has the station alone.
    #[inline]
    pub(crate) fn count_direct(&self, station: usize, slot: usize) {
        let cell = self.cell(station, slot);
        cell.store(cell.load(Relaxed) + 1, Relaxed);
    }

    fn direct(&self, slot: usize) -> u64 {
        let cells = (0..STATIONS).map(|station| self.cell(station, slot).load(Relaxed));
        cells.fold(0, u64::wrapping_add)
    }

    /// What it says, file by file. The process may say anything.
    #[must_use]
    pub fn told(&self) -> Vec<Told> {
        let told = |slot| Told {
            device: 0,
            ino: self.ino(slot).load(Relaxed),
            direct: self.direct(slot),
            kernel: counts(|why| self.kernel(slot, why).load(Relaxed)),
        };
        let all = (0..FILES).map(told);
        all.filter(|told| told.direct > 0 || !told.kernel.is_empty())
            .collect()
    }
}

fn counts(count: impl Fn(Why) -> u64) -> Vec<(Why, u64)> {
    let all = Why::ALL.iter().map(|&why| (why, count(why)));
    all.filter(|&(_, count)| count > 0).collect()
}

/// A file of this process.
struct Slot {
    device: AtomicU64,
    ino: AtomicU64,
    /// Of mounts that ended.
    direct: AtomicU64,
    kernel: [AtomicU64; Why::ALL.len()],
}

static SLOTS: [Slot; FILES] = [const {
    Slot {
        device: AtomicU64::new(0),
        ino: AtomicU64::new(0),
        direct: AtomicU64::new(0),
        kernel: [const { AtomicU64::new(0) }; Why::ALL.len()],
    }
}; FILES];
/// Held while a file gets a place.
static ADDING: SpinLock = SpinLock::new();
/// Called with each reason.
static LISTENER: OnceLock<fn(Why)> = OnceLock::new();

impl Slot {
    fn is_of(&self, device: u64, ino: u64) -> bool {
        self.ino.load(Acquire) == ino && self.device.load(Relaxed) == device
    }

    fn set(&self, device: u64, ino: u64) {
        self.device.store(device, Relaxed);
        self.ino.store(ino, Release);
    }
}

/// The place of a file; the same as long as the process lives.
#[must_use]
pub fn slot_of(device: u64, ino: u64) -> usize {
    let own = &SLOTS[..OTHERS];
    let find = || own.iter().position(|slot| slot.is_of(device, ino));
    if let Some(slot) = find() {
        return slot;
    }
    let _adding = ADDING.hold();
    let is_free = |slot: &Slot| slot.ino.load(Relaxed) == 0;
    let found = find().or_else(|| {
        let free = own.iter().position(is_free)?;
        own[free].set(device, ino);
        Some(free)
    });
    found.unwrap_or(OTHERS)
}

/// Has this called with the reason of each operation that the kernel gets. The first one counts.
pub fn listen(listener: fn(Why)) {
    let _ = LISTENER.set(listener);
}

/// Counts an operation that the kernel gets.
#[cold]
pub fn note(slot: usize, why: Why) {
    SLOTS[slot].kernel[why as usize].fetch_add(1, Relaxed);
    if let Some(listener) = LISTENER.get() {
        listener(why);
    }
}

impl Ledger {
    /// The same in the ledger.
    #[cold]
    pub(crate) fn note(&self, slot: usize, why: Why) {
        self.kernel(slot, why).fetch_add(1, Relaxed);
    }

    /// The file of a place is this.
    pub(crate) fn name(&self, slot: usize, ino: u64) {
        if slot != OTHERS {
            self.ino(slot).store(ino, Relaxed);
        }
    }

    /// Takes over what the kernel got of the mount's files before the process joined it.
    pub(crate) fn catch_up(&self, device: u64) {
        let all = SLOTS.iter().enumerate();
        for (slot, own) in all.filter(|(_, own)| own.device.load(Relaxed) == device) {
            self.name(slot, own.ino.load(Relaxed));
            for (why, count) in counts(|why| own.kernel[why as usize].load(Relaxed)) {
                self.kernel(slot, why).fetch_add(count, Relaxed);
            }
        }
    }

    /// The mount has ended: the process keeps what went directly there.
    pub(crate) fn close(&self) {
        for (slot, own) in SLOTS.iter().enumerate() {
            own.direct.fetch_add(self.direct(slot), Relaxed);
        }
    }
}

/// What this process did, file by file, with the direct operations of mounts that it is at.
#[must_use]
pub fn told(ledgers: &[&Ledger]) -> Vec<Told> {
    let told = |(slot, own): (usize, &Slot)| Told {
        device: own.device.load(Relaxed),
        ino: own.ino.load(Acquire),
        direct: ledgers
            .iter()
            .fold(own.direct.load(Relaxed), |sum, ledger| {
                sum.wrapping_add(ledger.direct(slot))
            }),
        kernel: counts(|why| own.kernel[why as usize].load(Relaxed)),
    };
    let all = SLOTS.iter().enumerate().map(told);
    all.filter(|told| told.direct > 0 || !told.kernel.is_empty())
        .collect()
}

/// In a child of fork: what its parent did is the parent's.
pub(crate) fn forget() {
    ADDING.reset();
    for slot in &SLOTS {
        slot.set(0, 0);
        slot.direct.store(0, Relaxed);
        slot.kernel.iter().for_each(|count| count.store(0, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_told_file_by_file() {
        // Numbers that no other test has.
        let (device, ino) = (77_777, 12);
        let slot = slot_of(device, ino);
        assert_eq!(slot_of(device, ino), slot);
        assert_ne!(slot_of(device, ino + 1), slot);
        note(slot, Why::Patience);
        let mount = Ledger::create().expect("memory");
        let file = mount.file().try_clone().expect("a descriptor");
        let ledger = Ledger::join(file).expect("the same");
        ledger.catch_up(device);
        for station in [0, STATIONS - 1] {
            ledger.count_direct(station, slot);
        }
        note(slot, Why::Mapped);
        ledger.note(slot, Why::Mapped);
        let kernel = vec![(Why::Patience, 1), (Why::Mapped, 1)];
        let expected = |device| Told {
            device,
            ino,
            direct: 2,
            kernel: kernel.clone(),
        };
        assert_eq!(mount.told(), [expected(0)]);
        let of_file = |told: Vec<Told>| told.into_iter().find(|told| told.device == device);
        assert_eq!(of_file(told(&[&ledger])), Some(expected(device)));
        ledger.close();
        assert_eq!(of_file(told(&[])), Some(expected(device)));
    }

    #[test]
    fn reasons_have_codes_of_their_own() {
        let mut codes: Vec<_> = Why::ALL.iter().map(|why| why.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Why::ALL.len());
    }
}
