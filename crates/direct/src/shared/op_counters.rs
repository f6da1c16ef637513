//! Counts how many operations of a process went directly and how many by the kernel, and why.
//!
//! There are two tables. One belongs to the process: for each file it has the operations that the
//! kernel served, by reason, and the direct operations of mounts that ended. The other, an
//! [`OpCounters`], belongs to a process and a mount and lies in memory of the mount: `pagemesh
//! mount status` reads it while the process runs.
//!
//! ```text
//!      0  magic 8, version 4
//!   4096  for each of 256 files 256 bytes: inode 8, operations by the kernel for each reason 8
//!  69632  for each of 16 I/O slots, for each file: direct operations 8
//! 102400  figures of direct operations, see [`op_meter`](super::op_meter)
//! ```
//!
//! Invariants: the holder of an I/O slot counts its direct operations, in a cache line that no
//! other slot writes, without a locked instruction. Operations by the kernel are counted with
//! locked instructions: the kernel takes a thousand times as long. Counting neither allocates nor
//! waits.

use super::op_meter::{METER_BYTES, OpMeter};
use pagemesh_base::spin_lock::SpinLock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MapError, SharedSegment};
use pagemesh_telemetry::{ReadTotals, Totals};
use pagemesh_volume::direct_access::DirectDisabledReason;
use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

/// Files of a process that have counters of their own. All others share the last index.
pub const TRACKED_FILES: usize = 256;
const UNTRACKED_FILES: usize = TRACKED_FILES - 1;
/// I/O slots of a process and mount.
pub(crate) const IO_SLOTS: usize = 16;
const MAGIC: u64 = u64::from_le_bytes(*b"pmaccnt\0");
const VERSION: u32 = 2;
const VERSION_AT: usize = 8;
const FILES_AT: usize = PAGE_BYTES;
const FILE_BYTES: usize = 256;
const DIRECT_AT: usize = FILES_AT + TRACKED_FILES * FILE_BYTES;
const IO_SLOT_BYTES: usize = TRACKED_FILES * 8;
const METER_AT: usize = DIRECT_AT + IO_SLOTS * IO_SLOT_BYTES;
/// Bytes of the counters.
pub const COUNTERS_BYTES: usize = (METER_AT + METER_BYTES).next_multiple_of(PAGE_BYTES);
const _: () = assert!(COUNTERS_BYTES.is_multiple_of(PAGE_BYTES), "whole pages");
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

/// The level of a message to the user, as in `PAGEMESH_LOG`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No message.
    Off,
    /// The kernel serves the whole mount.
    Warn,
    /// The kernel serves a file or descriptor.
    Info,
    /// The kernel serves a single call: that passes.
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
    Busy Debug "busy" "another thread used the same I/O slot";
    Closed Debug "in-use" "others used the file by the kernel at that moment";
    Growth Debug "growth" "the write exceeds the append space that the mount granted";
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

impl Why {
    /// Why direct access is disabled, for this reason of the volume.
    pub(crate) fn of_disabled(reason: Option<DirectDisabledReason>) -> Why {
        match reason {
            None | Some(DirectDisabledReason::Reconfiguring) => Why::Withheld,
            Some(DirectDisabledReason::LegNotInSync) => Why::Legs,
            Some(DirectDisabledReason::TcpLeg) => Why::Tcp,
            Some(DirectDisabledReason::BufferedPool) => Why::Buffers,
            Some(DirectDisabledReason::MultipleColumns) => Why::Columns,
        }
    }
}

/// The counters of a process and a mount.
pub struct OpCounters(SharedSegment);

/// The counts of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileCounts {
    /// Its device number.
    pub device: u64,
    /// Its inode; 0: several files that share one counter.
    pub ino: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations by the kernel, by reason.
    pub kernel: Vec<(Why, u64)>,
}

impl OpCounters {
    /// Makes empty counters.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create() -> Result<OpCounters, MapError> {
        let shared = SharedSegment::create(COUNTERS_BYTES)?;
        shared.half_word(VERSION_AT).store(VERSION, Relaxed);
        shared.word(0).store(MAGIC, Release);
        Ok(OpCounters(shared))
    }

    /// Maps counters that a mount made; it keeps no descriptor.
    ///
    /// # Errors
    /// The property that is not as expected.
    pub fn join(file: File) -> Result<OpCounters, String> {
        let shared =
            SharedSegment::open(file, COUNTERS_BYTES).map_err(|cause| cause.to_string())?;
        let version = shared.half_word(VERSION_AT).load(Relaxed);
        match (shared.word(0).load(Acquire), version) {
            (MAGIC, VERSION) => Ok(OpCounters(shared.without_file())),
            _ => Err("the memory holds no counters of this version".into()),
        }
    }

    /// The memory's file, to be passed to the process.
    #[must_use]
    pub fn file(&self) -> &File {
        self.0.file()
    }

    fn kernel_counter(&self, index: usize, why: Why) -> &AtomicU64 {
        self.0
            .word(FILES_AT + index * FILE_BYTES + 8 + why as usize * 8)
    }

    fn ino(&self, index: usize) -> &AtomicU64 {
        self.0.word(FILES_AT + index * FILE_BYTES)
    }

    fn direct_counter(&self, io_slot: usize, index: usize) -> &AtomicU64 {
        self.0.word(DIRECT_AT + io_slot * IO_SLOT_BYTES + index * 8)
    }

    /// Counts a direct operation, with its bytes and, if it was timed, its latency. The caller holds
    /// the slot.
    #[inline]
    pub(crate) fn count_direct(
        &self,
        (io_slot, index): (usize, usize),
        is_write: bool,
        bytes: u64,
        took: Option<Duration>,
    ) {
        let cell = self.direct_counter(io_slot, index);
        cell.store(cell.load(Relaxed) + 1, Relaxed);
        self.meter().record(io_slot, is_write, bytes, took);
    }

    fn meter(&self) -> OpMeter<'_> {
        OpMeter {
            segment: &self.0,
            start: METER_AT,
        }
    }

    fn direct_count(&self, index: usize) -> u64 {
        let cells = (0..IO_SLOTS).map(|io_slot| self.direct_counter(io_slot, index).load(Relaxed));
        cells.fold(0, u64::wrapping_add)
    }

    /// The counts, file by file. The process writes them, so the mount must not trust them.
    #[must_use]
    pub fn file_counts(&self) -> Vec<FileCounts> {
        let file_counts = |index| FileCounts {
            device: 0,
            ino: self.ino(index).load(Relaxed),
            direct: self.direct_count(index),
            kernel: counts(|why| self.kernel_counter(index, why).load(Relaxed)),
        };
        let all = (0..TRACKED_FILES).map(file_counts);
        all.filter(|file_counts| file_counts.direct > 0 || !file_counts.kernel.is_empty())
            .collect()
    }
}

impl ReadTotals for OpCounters {
    /// The figures of the direct operations. The process writes them, so they may be any numbers.
    fn totals(&self) -> Totals {
        self.meter().totals()
    }
}

fn counts(count: impl Fn(Why) -> u64) -> Vec<(Why, u64)> {
    let all = Why::ALL.iter().map(|&why| (why, count(why)));
    all.filter(|&(_, count)| count > 0).collect()
}

/// A file of this process.
struct TrackedFile {
    device: AtomicU64,
    ino: AtomicU64,
    /// Direct operations at mounts that ended.
    direct: AtomicU64,
    kernel: [AtomicU64; Why::ALL.len()],
}

static PROCESS_FILES: [TrackedFile; TRACKED_FILES] = [const {
    TrackedFile {
        device: AtomicU64::new(0),
        ino: AtomicU64::new(0),
        direct: AtomicU64::new(0),
        kernel: [const { AtomicU64::new(0) }; Why::ALL.len()],
    }
}; TRACKED_FILES];
/// Held while a file gets an index.
static ADD_LOCK: SpinLock = SpinLock::new();
/// Called with the reason of each operation that the kernel serves.
static LISTENER: OnceLock<fn(Why)> = OnceLock::new();

impl TrackedFile {
    fn is_of(&self, device: u64, ino: u64) -> bool {
        self.ino.load(Acquire) == ino && self.device.load(Relaxed) == device
    }

    fn assign(&self, device: u64, ino: u64) {
        self.device.store(device, Relaxed);
        self.ino.store(ino, Release);
    }
}

/// The index of a file; it is the same as long as the process lives.
#[must_use]
pub fn index_of(device: u64, ino: u64) -> usize {
    let tracked = &PROCESS_FILES[..UNTRACKED_FILES];
    let find = || tracked.iter().position(|file| file.is_of(device, ino));
    if let Some(index) = find() {
        return index;
    }
    let _adding = ADD_LOCK.lock();
    let is_free = |file: &TrackedFile| file.ino.load(Relaxed) == 0;
    let found = find().or_else(|| {
        let free = tracked.iter().position(is_free)?;
        tracked[free].assign(device, ino);
        Some(free)
    });
    found.unwrap_or(UNTRACKED_FILES)
}

/// Sets the function that is called with the reason of each operation that the kernel serves. Only
/// the first call has an effect.
pub fn set_listener(listener: fn(Why)) {
    let _ = LISTENER.set(listener);
}

/// Counts an operation that the kernel serves.
#[cold]
pub fn count_kernel(index: usize, why: Why) {
    PROCESS_FILES[index].kernel[why as usize].fetch_add(1, Relaxed);
    if let Some(listener) = LISTENER.get() {
        listener(why);
    }
}

impl OpCounters {
    /// Counts an operation that the kernel serves, in the mount's memory.
    #[cold]
    pub(crate) fn count_kernel(&self, index: usize, why: Why) {
        self.kernel_counter(index, why).fetch_add(1, Relaxed);
    }

    /// Sets the inode of an index.
    pub(crate) fn set_ino(&self, index: usize, ino: u64) {
        if index != UNTRACKED_FILES {
            self.ino(index).store(ino, Relaxed);
        }
    }

    /// Adds the operations on the mount's files that the kernel served before the process joined
    /// it.
    pub(crate) fn import_process_counts(&self, device: u64) {
        let all = PROCESS_FILES.iter().enumerate();
        for (index, tracked) in all.filter(|(_, tracked)| tracked.device.load(Relaxed) == device) {
            self.set_ino(index, tracked.ino.load(Relaxed));
            for (why, count) in counts(|why| tracked.kernel[why as usize].load(Relaxed)) {
                self.kernel_counter(index, why).fetch_add(count, Relaxed);
            }
        }
    }

    /// Saves the direct operations of a mount that has ended in the process's table.
    pub(crate) fn export_direct_counts(&self) {
        for (index, tracked) in PROCESS_FILES.iter().enumerate() {
            tracked.direct.fetch_add(self.direct_count(index), Relaxed);
        }
    }
}

/// The counts of this process, file by file, with the direct operations at joined mounts.
#[must_use]
pub fn file_counts(counters: &[&OpCounters]) -> Vec<FileCounts> {
    let file_counts = |(index, tracked): (usize, &TrackedFile)| FileCounts {
        device: tracked.device.load(Relaxed),
        ino: tracked.ino.load(Acquire),
        direct: counters
            .iter()
            .fold(tracked.direct.load(Relaxed), |sum, counters| {
                sum.wrapping_add(counters.direct_count(index))
            }),
        kernel: counts(|why| tracked.kernel[why as usize].load(Relaxed)),
    };
    let all = PROCESS_FILES.iter().enumerate().map(file_counts);
    all.filter(|file_counts| file_counts.direct > 0 || !file_counts.kernel.is_empty())
        .collect()
}

/// Clears the table in a child of fork: the counts belong to its parent.
pub(crate) fn reset() {
    ADD_LOCK.reset();
    for file in &PROCESS_FILES {
        file.assign(0, 0);
        file.direct.store(0, Relaxed);
        file.kernel.iter().for_each(|count| count.store(0, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_telemetry::OpKind;

    #[test]
    fn counts_are_reported_per_file() {
        // Numbers that no other test uses.
        let (device, ino) = (77_777, 12);
        let index = index_of(device, ino);
        assert_eq!(index_of(device, ino), index);
        assert_ne!(index_of(device, ino + 1), index);
        count_kernel(index, Why::Patience);
        let mount = OpCounters::create().expect("memory");
        let file = mount.file().try_clone().expect("a descriptor");
        let counters = OpCounters::join(file).expect("the same");
        counters.import_process_counts(device);
        for io_slot in [0, IO_SLOTS - 1] {
            let took = Some(Duration::from_micros(1));
            counters.count_direct((io_slot, index), true, 4096, took);
        }
        count_kernel(index, Why::Mapped);
        counters.count_kernel(index, Why::Mapped);
        let kernel = vec![(Why::Patience, 1), (Why::Mapped, 1)];
        let expected = |device| FileCounts {
            device,
            ino,
            direct: 2,
            kernel: kernel.clone(),
        };
        assert_eq!(mount.file_counts(), [expected(0)]);
        let writes = mount.totals().kinds[OpKind::Write as usize].clone();
        assert_eq!((writes.ops, writes.bytes, writes.timed()), (2, 8192, 2));
        let stages = writes.mean_stages().expect("it was timed");
        assert_eq!(stages.mean_ns.total_ns(), 1000);
        let of_file = |file_counts: Vec<FileCounts>| {
            file_counts
                .into_iter()
                .find(|file_counts| file_counts.device == device)
        };
        assert_eq!(of_file(file_counts(&[&counters])), Some(expected(device)));
        counters.export_direct_counts();
        assert_eq!(of_file(file_counts(&[])), Some(expected(device)));
    }

    #[test]
    fn reasons_have_unique_codes() {
        let mut codes: Vec<_> = Why::ALL.iter().map(|why| why.code()).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), Why::ALL.len());
    }
}
