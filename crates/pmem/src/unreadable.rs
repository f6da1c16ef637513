//! Memory that cannot be read: a machine check, or a bad sector below a mapped file. The kernel
//! reports an access by SIGBUS (mmap(2), sigaction(2)), which by default ends the process.
//!
//! From an offset set by the owner of a mapping on, a page with a failed read is replaced, in this
//! process, by a page of [`PATTERN`], which matches no checksum. Readers find damage, and treat it
//! as any other. The replacement is read-only: a store there, or any access before the offset, ends
//! the process as it would otherwise. The last line that it prints names the file and the byte.
//!
//! Invariants: a page is listed before its pattern can be seen. The handler takes no lock,
//! allocates nothing and preserves `errno` (signal-safety(7)). It passes other faults to the
//! handler that was installed before.

use crate::map_error::MapError;
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::spin_lock::SpinLock;
use pagemesh_base::units::PAGE_BYTES;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

/// Every word of a replaced page. It is not a valid slot of a page table: a test of the store
/// checks that.
pub const PATTERN: u64 = 0xbadb_adba_dbad_badb;

/// Unreadable pages that a process tolerates. A medium with more is failing as a whole, and the
/// next one ends the process.
pub const PAGES_MAX: usize = 64;

/// Mappings that are handled; a fault in a further one ends the process.
const MAPPINGS_MAX: usize = 256;

/// A mapping, or nothing where `base` is 0.
struct MappingEntry {
    base: AtomicUsize,
    end: AtomicUsize,
    /// Pages from this address on are replaced.
    replaced_from: AtomicUsize,
    /// Whether stores are private to this process.
    is_private: AtomicBool,
    name: AtomicPtr<c_char>,
}

static MAPPINGS: [MappingEntry; MAPPINGS_MAX] = [const {
    MappingEntry {
        base: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        replaced_from: AtomicUsize::new(usize::MAX),
        is_private: AtomicBool::new(false),
        name: AtomicPtr::new(ptr::null_mut()),
    }
}; MAPPINGS_MAX];

/// Addresses of replaced pages; 0 is none.
static REPLACED_PAGES: [AtomicUsize; PAGES_MAX] = [const { AtomicUsize::new(0) }; PAGES_MAX];
/// The number of them, or more.
static REPLACED_COUNT: AtomicUsize = AtomicUsize::new(0);
/// Held while entries are added; the handler only reads.
static MAPPINGS_LOCK: SpinLock = SpinLock::new();
static PREVIOUS_HANDLERS: OnceLock<FaultHandler> = OnceLock::new();
/// Whether the handler is installed. Changed under `MAPPINGS_LOCK`.
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
static CALLER_HANDLES_SIGNALS: AtomicBool = AtomicBool::new(false);

/// A handler with the full signal information.
type SigactionFn = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

/// Leaves the handling of SIGBUS and SIGSEGV to the caller: this module installs no handler. The
/// caller's handler calls [`handle_fault`] first. To be called before anything is mapped.
pub fn let_caller_handle_signals() {
    CALLER_HANDLES_SIGNALS.store(true, Ordering::Release);
}

/// For a child of `fork`, before it starts a thread: it has none of the parent's mappings. A thread
/// of the parent may have been adding entries at the fork.
pub fn reset_after_fork() {
    for entry in &MAPPINGS {
        entry.base.store(0, Ordering::Release);
    }
    for page in &REPLACED_PAGES {
        page.store(0, Ordering::Release);
    }
    REPLACED_COUNT.store(0, Ordering::Release);
    MAPPINGS_LOCK.reset();
}

/// The data of the handler, made before it is installed.
struct FaultHandler {
    /// A page of the pattern.
    pattern: c_int,
    /// The previous handlers of the signals.
    bus: libc::sigaction,
    segv: libc::sigaction,
}

/// A mapping with unreadable pages handled, until [`FaultGuard::end`], which must precede its
/// unmapping.
pub(crate) struct FaultGuard {
    index: Option<usize>,
    base: usize,
    end: usize,
    /// The file's name, for the handler.
    name: CString,
}

impl FaultGuard {
    /// Handles faults in `len` bytes that `file` is mapped to at `base`.
    ///
    /// # Errors
    /// When the system refuses the resources that the first mapping needs.
    pub(crate) fn new(
        base: usize,
        len: usize,
        file: &File,
        is_private: bool,
    ) -> Result<FaultGuard, MapError> {
        let mut watched = FaultGuard {
            index: None,
            base,
            end: base + len,
            name: file_name_of(file),
        };
        let _taking = MAPPINGS_LOCK.lock();
        install()?;
        let is_free = |entry: &MappingEntry| entry.base.load(Ordering::Relaxed) == 0;
        let Some(index) = MAPPINGS.iter().position(is_free) else {
            return Ok(watched);
        };
        let entry = &MAPPINGS[index];
        entry.end.store(watched.end, Ordering::Relaxed);
        entry.replaced_from.store(usize::MAX, Ordering::Relaxed);
        entry.is_private.store(is_private, Ordering::Relaxed);
        let name = watched.name.as_ptr().cast_mut();
        entry.name.store(name, Ordering::Relaxed);
        entry.base.store(base, Ordering::Release);
        watched.index = Some(index);
        Ok(watched)
    }

    /// Replaces unreadable pages from this offset on.
    pub(crate) fn tolerate_unreadable(&self, from: usize) {
        assert!(from.is_multiple_of(PAGE_BYTES), "whole pages are replaced");
        if let Some(index) = self.index {
            MAPPINGS[index]
                .replaced_from
                .store(self.base + from, Ordering::Release);
        }
    }

    /// Whether the page that holds this byte was replaced.
    #[inline]
    pub(crate) fn is_unreadable(&self, offset: usize) -> bool {
        let page = (self.base + offset) / PAGE_BYTES * PAGE_BYTES;
        REPLACED_COUNT.load(Ordering::Acquire) > 0 && is_replaced(page)
    }

    /// The first bytes of all pages that were replaced.
    pub(crate) fn unreadable_pages(&self) -> Vec<usize> {
        if REPLACED_COUNT.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let pages = REPLACED_PAGES
            .iter()
            .map(|page| page.load(Ordering::Acquire));
        let own = pages.filter(|page| (self.base..self.end).contains(page));
        own.map(|page| page - self.base).collect()
    }

    /// Stops handling faults: the mapping is about to end.
    pub(crate) fn end(&mut self) {
        let _taking = MAPPINGS_LOCK.lock();
        if let Some(index) = self.index.take() {
            MAPPINGS[index].base.store(0, Ordering::Release);
        }
        // Another mapping may get these addresses.
        for page in &REPLACED_PAGES {
            let at = page.load(Ordering::Acquire);
            if (self.base..self.end).contains(&at) {
                page.store(0, Ordering::Release);
                REPLACED_COUNT.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

fn file_name_of(file: &File) -> CString {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let name = link.map(|path| path.into_os_string().into_vec());
    CString::new(name.unwrap_or_default()).unwrap_or_default()
}

#[cold]
fn is_replaced(page: usize) -> bool {
    REPLACED_PAGES
        .iter()
        .any(|it| it.load(Ordering::Acquire) == page)
}

/// Installs the handler, once.
fn install() -> Result<(), MapError> {
    if IS_INSTALLED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let system = |cause| MapError::System {
        action: "prepare for memory that cannot be read",
        cause,
    };
    if PREVIOUS_HANDLERS.get().is_none() {
        let handler = prepare_handler().map_err(system)?;
        PREVIOUS_HANDLERS.get_or_init(|| handler);
    }
    if CALLER_HANDLES_SIGNALS.load(Ordering::Acquire) {
        IS_INSTALLED.store(true, Ordering::Relaxed);
        return Ok(());
    }
    let of_program = PREVIOUS_HANDLERS
        .get()
        .map(|it| [(libc::SIGBUS, it.bus), (libc::SIGSEGV, it.segv)]);
    for (signal, before) in of_program.into_iter().flatten() {
        let action = chained_action(&before);
        // SAFETY: the handler has the signature that SA_SIGINFO requires, and is
        // async-signal-safe.
        if unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) } != 0 {
            return Err(system(io::Error::last_os_error()));
        }
    }
    IS_INSTALLED.store(true, Ordering::Relaxed);
    Ok(())
}

fn chained_action(before: &libc::sigaction) -> libc::sigaction {
    let mut action = *before;
    action.sa_sigaction = on_fault as *const () as usize;
    action.sa_flags &= libc::SA_NODEFER | libc::SA_RESTART;
    action.sa_flags |= libc::SA_SIGINFO | libc::SA_ONSTACK;
    action
}

fn prepare_handler() -> io::Result<FaultHandler> {
    // SAFETY: a constant name that ends in a zero.
    let fd = unsafe { libc::memfd_create(c"pagemesh-unreadable".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that this function owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut file = File::from(move_fd_high(fd));
    let page = [PATTERN.to_le_bytes(); PAGE_BYTES / 8];
    file.write_all(page.as_flattened())?;
    let action_of = |signal| {
        let mut action = MaybeUninit::uninit();
        // SAFETY: it only asks, and fills the whole structure if it succeeds.
        match unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) } {
            // SAFETY: filled.
            0 => Ok(unsafe { action.assume_init() }),
            _ => Err(io::Error::last_os_error()),
        }
    };
    Ok(FaultHandler {
        bus: action_of(libc::SIGBUS)?,
        segv: action_of(libc::SIGSEGV)?,
        pattern: file.into_raw_fd(),
    })
}

/// Makes the access possible again if a page of a pool cannot be read. False: the signal belongs to
/// another handler. For use in handlers: it preserves `errno`.
///
/// # Safety
/// `info` is the information of a handler of this signal.
pub unsafe fn handle_fault(signal: c_int, info: *const libc::siginfo_t) -> bool {
    // SAFETY: the caller's promise.
    let code = unsafe { (*info).si_code };
    if code <= 0 {
        // A signal sent by kill(2), not a fault.
        return false;
    }
    // SAFETY: as above; a fault has an address.
    let at = unsafe { (*info).si_addr() as usize };
    let Some(entry) = mapping_of(at) else {
        return false;
    };
    if signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO {
        // The kernel found the page before any access: a later access raises the signal again.
        return true;
    }
    // SAFETY: each thread has its own, always valid.
    let errno = unsafe { *libc::__errno_location() };
    let page = at / PAGE_BYTES * PAGE_BYTES;
    let may_be = signal == libc::SIGBUS && page >= entry.replaced_from.load(Ordering::Acquire);
    let is_caught = may_be && replace_page(page, entry);
    if signal == libc::SIGBUS || is_replaced(page) {
        report_fault(entry, at, is_caught);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    is_caught
}

unsafe extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the arguments that the kernel passed.
    if !unsafe { handle_fault(signal, info) } {
        // SAFETY: as above.
        unsafe { call_previous_handler(signal, info, context) };
    }
}

/// Does the default or calls the previous handler.
///
/// # Safety
/// The arguments are those that the kernel passed.
unsafe fn call_previous_handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(handler) = PREVIOUS_HANDLERS.get() else {
        return set_default(signal);
    };
    let before = match signal {
        libc::SIGBUS => &handler.bus,
        _ => &handler.segv,
    };
    // SAFETY: the caller's promise.
    let code = unsafe { (*info).si_code };
    match before.sa_sigaction {
        libc::SIG_IGN if code <= 0 => {}
        // The kernel found the page before any access.
        libc::SIG_IGN | libc::SIG_DFL if signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO => {}
        libc::SIG_IGN | libc::SIG_DFL => {
            set_default(signal);
            if code <= 0 {
                // The signal arrives once this returns; a faulting access is repeated.
                // SAFETY: it touches no memory.
                unsafe { libc::raise(signal) };
            }
        }
        // SAFETY: it was installed as a handler, and its flags state of which kind.
        address => unsafe {
            if before.sa_flags & libc::SA_SIGINFO != 0 {
                std::mem::transmute::<usize, SigactionFn>(address)(signal, info, context);
            } else {
                std::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(address)(signal);
            }
            let mut now: libc::sigaction = zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut now);
            // For a fault that is no stack overflow Rust's handler restores the default, and the
            // repeated fault ends the process. A sent signal is not repeated.
            if now.sa_sigaction == libc::SIG_DFL && code <= 0 {
                libc::raise(signal);
            } else if now.sa_sigaction == libc::SIG_DFL && code == libc::BUS_MCEERR_AO {
                let own = chained_action(before);
                libc::sigaction(signal, &raw const own, ptr::null_mut());
            }
        },
    }
}

fn mapping_of(at: usize) -> Option<&'static MappingEntry> {
    MAPPINGS.iter().find(|entry| {
        let base = entry.base.load(Ordering::Acquire);
        let end = entry.end.load(Ordering::Acquire);
        // Another mapping may have taken the entry in between.
        let is_same = entry.base.load(Ordering::Acquire) == base;
        base != 0 && is_same && (base..end).contains(&at)
    })
}

fn set_default(signal: c_int) {
    // SAFETY: all zeroes is the default action.
    unsafe {
        let default: libc::sigaction = zeroed();
        libc::sigaction(signal, &raw const default, ptr::null_mut());
    }
}

/// Lists the page and maps the pattern in its place.
fn replace_page(page: usize, entry: &MappingEntry) -> bool {
    let Some(handler) = PREVIOUS_HANDLERS.get() else {
        return false;
    };
    if !add_replaced_page(page) {
        return false;
    }
    let access = match entry.is_private.load(Ordering::Relaxed) {
        true => libc::PROT_READ | libc::PROT_WRITE,
        false => libc::PROT_READ,
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    // SAFETY: one page of a handled mapping; only another thread's handler can have replaced it, by
    // the same.
    let mapped = unsafe {
        let at = ptr::without_provenance_mut(page);
        libc::mmap(at, PAGE_BYTES, access, flags, handler.pattern, 0)
    };
    mapped != libc::MAP_FAILED
}

/// False if there is no room.
fn add_replaced_page(page: usize) -> bool {
    // Counted before it can be found: too high a count only costs a check.
    REPLACED_COUNT.fetch_add(1, Ordering::AcqRel);
    for it in &REPLACED_PAGES {
        match it.compare_exchange(0, page, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return true,
            Err(found) if found == page => {
                REPLACED_COUNT.fetch_sub(1, Ordering::AcqRel);
                return true;
            }
            Err(_) => {}
        }
    }
    REPLACED_COUNT.fetch_sub(1, Ordering::AcqRel);
    false
}

/// Prints one line on standard error.
fn report_fault(entry: &MappingEntry, at: usize, is_handled: bool) {
    let (mut digits, mut first) = ([0; 20], 20);
    let mut rest = at - entry.base.load(Ordering::Relaxed);
    while rest > 0 || first == 20 {
        first -= 1;
        digits[first] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let name = entry.name.load(Ordering::Relaxed);
    // SAFETY: it ends in a zero, and lives as long as the entry; the mapping of the entry is
    // being accessed.
    let name = unsafe { std::ffi::CStr::from_ptr(name) };
    let told = match is_handled {
        true => b" cannot be read; its page counts as damaged\n".as_slice(),
        false => b" cannot be accessed: the medium fails\n",
    };
    let parts = [
        b"pagemesh: byte ",
        &digits[first..],
        b" of ",
        name.to_bytes(),
        told,
    ];
    let parts = parts.map(|part| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    });
    // SAFETY: initialised bytes, which are only read.
    unsafe { libc::writev(2, parts.as_ptr(), parts.len() as c_int) };
}
