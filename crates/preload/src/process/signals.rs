//! No handler of the program runs inside an engine call.
//!
//! A handler may read and write the same pages, while its own thread holds their locks, or leave by
//! `longjmp` and never release them. So this library installs [`on_signal`] in place of every
//! handler. If a signal interrupts a thread that is inside, [`on_signal`] sends it again to the
//! same thread with the same information, and blocks it in the mask that the interrupted code
//! returns to. The signal then waits in the kernel, under the kernel's rules for number and order,
//! until the thread is outside and unblocks it. Then the kernel delivers it as any other, with
//! mask, stack and flags. A signal that was sent to the process is thus bound to one thread.
//!
//! Faults (SEGV and the like that the kernel raised) belong to the interrupted instruction and are
//! delivered at once, except the faults of `buffer`.
//!
//! When the program asks for its handlers, it gets its own ones. A handler is one word, so that a
//! signal sees either the old or the new one.

use crate::c_library::real;
use crate::kernel::buffer;
use crate::kernel::lock::{Lock, LockGuard};
use crate::kernel::sys::{self, ALL_SIGNALS};
use crate::state::thread::{self, ThreadState};
use crate::state::withdrawal;
use libc::{c_int, c_void, sigaction as Action, siginfo_t, ucontext_t};
use pagemesh_pmem::unreadable;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

const SIGNALS: usize = 65;
/// A handler's address has 47 bits; above it lie its flags.
const ADDRESS: u64 = (1 << 48) - 1;
const WITH_INFO: u64 = 1 << 48;
const ONE_SHOT: u64 = 1 << 49;
/// Flags that the kernel has and the program did not set.
const HIDES_STACK: u64 = 1 << 50;
const HIDES_RESTART: u64 = 1 << 51;

/// The program's handlers. An entry is valid only while the kernel has `on_signal` for its signal.
static HANDLERS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];
/// The signals that each handler blocks.
static MASKS: [AtomicU64; SIGNALS] = [const { AtomicU64::new(0) }; SIGNALS];
static CHANGE_LOCK: Lock = Lock::new();
/// `buffer` needs SIGSEGV and SIGBUS, also if the program has no handler or ignores them.
static IS_GUARDED: AtomicBool = AtomicBool::new(false);

fn bit(signal: c_int) -> u64 {
    1u64.checked_shl(signal as u32 - 1).unwrap_or(0)
}

fn is_fault(signal: c_int) -> bool {
    matches!(
        signal,
        libc::SIGSEGV
            | libc::SIGBUS
            | libc::SIGFPE
            | libc::SIGILL
            | libc::SIGTRAP
            | libc::SIGSYS
            | libc::SIGABRT
    )
}

fn is_guarded(signal: c_int) -> bool {
    matches!(signal, libc::SIGSEGV | libc::SIGBUS)
}

fn wrapper() -> usize {
    on_signal as *const () as usize
}

unsafe extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gave the arguments.
    if is_guarded(signal) && unsafe { is_fault_handled(signal, info, context) } {
        return;
    }
    let thread = thread::this();
    // SAFETY: as above.
    if thread.is_inside() && unsafe { defer(thread, signal, info, context) } {
        return;
    }
    // SAFETY: as above.
    unsafe {
        release_deferred(thread, signal, context);
        deliver(thread, signal, info, context);
    }
}

/// Handles a fault that this library or the engine expects; then the program goes on.
///
/// # Safety
/// The kernel passed the arguments to a handler.
unsafe fn is_fault_handled(signal: c_int, info: *const siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: the caller's.
    unsafe {
        is_own_fault(signal, info) && buffer::catch_fault(context)
            || unreadable::handle_fault(signal, info)
    }
}

/// Defers a signal. False: the call caused the fault itself, or the kernel has no room to queue the
/// signal. Then the handler runs inside: that is better than losing the signal.
///
/// # Safety
/// The kernel passed the arguments to a handler.
unsafe fn defer(
    thread: &ThreadState,
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut c_void,
) -> bool {
    // SAFETY: the caller's.
    let is_own = is_fault(signal) && unsafe { is_own_fault(signal, info) };
    if is_own || signal == libc::SIGABRT {
        return false;
    }
    // It is blocked already, unless its handler may be interrupted by the same signal.
    let before = sys::mask(libc::SIG_BLOCK, bit(signal));
    // SAFETY: the caller's.
    if !unsafe { sys::requeue_signal(signal, info) } {
        sys::mask(libc::SIG_SETMASK, before);
        return false;
    }
    thread.defer(bit(signal));
    // SAFETY: the caller's; the mask of a kernel's context is the first word of it.
    unsafe { *mask_of(context) |= bit(signal) };
    true
}

/// Whether the interrupted instruction caused this fault: no process sent it, and the kernel did
/// not find the lost page before an access.
///
/// # Safety
/// The kernel passed the info to a handler.
unsafe fn is_own_fault(signal: c_int, info: *const siginfo_t) -> bool {
    // SAFETY: the caller's.
    let code = unsafe { (*info).si_code };
    code > 0 && !(signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO)
}

fn mask_of(context: *mut c_void) -> *mut u64 {
    let context = context.cast::<ucontext_t>();
    // SAFETY: only the address is taken.
    unsafe { (&raw mut (*context).uc_sigmask).cast() }
}

/// Releases deferred signals when a handler runs between the end of a call and their release, since
/// it may never return there. Signals that the handler does not block come before it, the rest
/// after it.
///
/// # Safety
/// The kernel passed the context to a handler.
unsafe fn release_deferred(thread: &ThreadState, signal: c_int, context: *mut c_void) {
    if thread.is_inside() {
        return;
    }
    let deferred = thread.take_deferred();
    if deferred != 0 {
        // SAFETY: the caller's.
        unsafe { *mask_of(context) &= !deferred };
        let blocked = MASKS[signal as usize].load(Relaxed) | bit(signal);
        sys::mask(libc::SIG_UNBLOCK, deferred & !blocked);
    }
}

/// # Safety
/// The kernel passed the arguments to a handler.
unsafe fn deliver(thread: &ThreadState, signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let handler = HANDLERS[signal as usize].load(SeqCst);
    if handler & ONE_SHOT != 0 && !consume_one_shot(signal, handler) {
        return sys::raise(signal);
    }
    let address = (handler & ADDRESS) as usize;
    if address == libc::SIG_DFL || address == libc::SIG_IGN {
        // SAFETY: the caller's.
        return unsafe { run_default(signal, address, info) };
    }
    let began = thread.begin_handler(thread::stack_pointer(), alternate_stack(context));
    // SAFETY: the program said that this is a handler, and of which kind.
    unsafe {
        if handler & WITH_INFO != 0 {
            std::mem::transmute::<usize, real::Handler>(address)(signal, info, context);
        } else {
            std::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(address)(signal);
        }
    }
    if let Some(end) = began {
        end.store(0, Relaxed);
    }
}

/// The alternate signal stack of the interrupted code.
fn alternate_stack(context: *mut c_void) -> Range<usize> {
    // SAFETY: the kernel passed the context to a handler. It holds the alternate stack.
    let other = unsafe { (*context.cast::<ucontext_t>()).uc_stack };
    let start = other.ss_sp as usize;
    start..start.saturating_add(other.ss_size)
}

/// Consumes a one-shot handler: from now on the kernel's default applies. False: another thread was
/// first.
fn consume_one_shot(signal: c_int, handler: u64) -> bool {
    let _changing = HandlerChange::begin();
    let place = &HANDLERS[signal as usize];
    if place.compare_exchange(handler, 0, SeqCst, SeqCst).is_err() {
        return false;
    }
    MASKS[signal as usize].store(0, Relaxed);
    if !(is_guarded(signal) && IS_GUARDED.load(SeqCst)) {
        set_default(signal);
    }
    true
}

/// Does the kernel's default for a signal without a handler of the program.
///
/// # Safety
/// The kernel passed the info to a handler.
unsafe fn run_default(signal: c_int, address: usize, info: *const siginfo_t) {
    // SAFETY: the caller's.
    let code = unsafe { (*info).si_code };
    let is_sent = code <= 0;
    if signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO {
        // The kernel found it before an access: a thread that reads the page gets another signal.
        return;
    }
    if is_sent && address == libc::SIG_IGN {
        return;
    }
    {
        let _changing = HandlerChange::begin();
        set_default(signal);
    }
    if is_sent {
        sys::raise(signal);
    }
    // Otherwise the instruction faults again, and that ends the process.
}

fn set_default(signal: c_int) {
    let none = zeroed();
    // SAFETY: the default action, with an empty mask and no flags.
    unsafe { real::sigaction(signal, &none, std::ptr::null_mut()) };
}

fn zeroed() -> Action {
    // SAFETY: an action is numbers, one of them the address of a handler, for which 0 is the
    // default, and a function that may be none.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Guards a change of handlers: one thread at a time, and no handler runs on it.
struct HandlerChange(#[allow(dead_code)] Option<LockGuard<'static>>, u64);

impl HandlerChange {
    fn begin() -> Self {
        let mask = sys::mask(libc::SIG_SETMASK, ALL_SIGNALS);
        HandlerChange(Some(CHANGE_LOCK.hold()), mask)
    }
}

impl Drop for HandlerChange {
    fn drop(&mut self) {
        drop(self.0.take());
        sys::mask(libc::SIG_SETMASK, self.1);
    }
}

pub fn reset_in_child() {
    CHANGE_LOCK.reset();
}

/// Catches faults in `buffer` from now on.
pub fn guard_faults() {
    if IS_GUARDED.load(Relaxed) || IS_GUARDED.swap(true, SeqCst) {
        return;
    }
    let _changing = HandlerChange::begin();
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        let mut now = zeroed();
        // SAFETY: both are there.
        unsafe { real::sigaction(signal, std::ptr::null(), &mut now) };
        if now.sa_sigaction <= libc::SIG_IGN {
            let (word, new) = guarded_action(&now);
            HANDLERS[signal as usize].store(word, SeqCst);
            // SAFETY: as above.
            unsafe { real::sigaction(signal, &new, std::ptr::null_mut()) };
        }
    }
}

/// Gives the kernel the program's own handlers again.
pub fn restore() {
    let _changing = HandlerChange::begin();
    for (signal, handler) in (0..).zip(&HANDLERS).skip(1) {
        let mut now = zeroed();
        // SAFETY: room for an action.
        let result = unsafe { real::sigaction(signal, std::ptr::null(), &mut now) };
        if result == 0 && now.sa_sigaction == wrapper() {
            restore_program_action(&mut now, handler.load(SeqCst));
            // SAFETY: an action.
            unsafe { real::sigaction(signal, &now, std::ptr::null_mut()) };
        }
    }
}

/// `sigaction` of a process that has withdrawn: installs the program's handler itself.
///
/// # Safety
/// As the C library's.
unsafe fn change_without_wrapper(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the caller's.
    let result = unsafe { real::sigaction(signal, new, old) };
    let known = HANDLERS.get(signal as usize);
    if result == 0
        && let Some(known) = known
        // SAFETY: the caller's: null or an action, which was just written.
        && let Some(old) = unsafe { old.as_mut() }
    {
        restore_program_action(old, known.load(SeqCst));
    }
    result
}

/// In place of the default, or of ignoring a signal: the recorded word, and the action for the
/// kernel. An ignored signal interrupts no call.
fn guarded_action(wanted: &Action) -> (u64, Action) {
    let lacks = |flag, bit| if wanted.sa_flags & flag == 0 { bit } else { 0 };
    let word = wanted.sa_sigaction as u64
        | if wanted.sa_flags & libc::SA_SIGINFO != 0 {
            WITH_INFO
        } else {
            0
        }
        | lacks(libc::SA_ONSTACK, HIDES_STACK)
        | lacks(libc::SA_RESTART, HIDES_RESTART);
    let mut action = *wanted;
    action.sa_sigaction = wrapper();
    action.sa_flags |= libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    action.sa_flags &= !libc::SA_RESETHAND;
    (word, action)
}

/// # Safety
/// As the C library's.
pub unsafe fn change(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    if withdrawal::is_withdrawn() {
        // SAFETY: the caller's.
        return unsafe { change_without_wrapper(signal, new, old) };
    }
    let is_one = (1..SIGNALS as c_int).contains(&signal);
    if !is_one || new.is_null() && old.is_null() {
        // SAFETY: the caller's.
        return unsafe { real::sigaction(signal, new, old) };
    }
    // A child of `vfork` has the parent's memory, but handlers of its own.
    let may_record = !thread::this().is_vforked();
    // Read here, since a bad pointer must not fault with the lock held.
    // SAFETY: the caller's: null or an action.
    let wanted = unsafe { new.as_ref() }.copied();
    let mut before = zeroed();
    let result = {
        let _changing = HandlerChange::begin();
        let known = HANDLERS[signal as usize].load(SeqCst);
        let result = install(signal, wanted.filter(|_| may_record), &mut before);
        restore_program_action(&mut before, known);
        result
    };
    // SAFETY: the caller's: null or room for an action.
    let old = unsafe { old.as_mut() };
    if result == 0
        && let Some(old) = old
    {
        *old = before;
    }
    if may_record || result != 0 || wanted.is_none() {
        return result;
    }
    // SAFETY: the caller's.
    unsafe { real::sigaction(signal, new, std::ptr::null_mut()) }
}

/// Gives the kernel `on_signal` in place of a handler, and otherwise the action as it is.
fn install(signal: c_int, wanted: Option<Action>, before: &mut Action) -> c_int {
    let Some(wanted) = wanted else {
        // SAFETY: room for an action.
        return unsafe { real::sigaction(signal, std::ptr::null(), before) };
    };
    let (mut given, place) = (wanted, &HANDLERS[signal as usize]);
    let known = place.load(SeqCst);
    if wanted.sa_sigaction == wrapper() {
        // A caller restores an action that it got without this library: it means the recorded
        // handler.
    } else if wanted.sa_sigaction > libc::SIG_IGN {
        given.sa_sigaction = wrapper();
        given.sa_flags = wanted.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO;
        place.store(word_of(&wanted), SeqCst);
        MASKS[signal as usize].store(first_word(&wanted.sa_mask), Relaxed);
    } else if is_guarded(signal) && IS_GUARDED.load(SeqCst) {
        let word;
        (word, given) = guarded_action(&wanted);
        place.store(word, SeqCst);
    }
    // SAFETY: both are there.
    let result = unsafe { real::sigaction(signal, &given, before) };
    if result != 0 {
        place.store(known, SeqCst);
    }
    result
}

fn word_of(action: &Action) -> u64 {
    let has = |flag, bit| if action.sa_flags & flag != 0 { bit } else { 0 };
    let address = action.sa_sigaction as u64 & ADDRESS;
    address | has(libc::SA_SIGINFO, WITH_INFO) | has(libc::SA_RESETHAND, ONE_SHOT)
}

fn first_word(set: &libc::sigset_t) -> u64 {
    // SAFETY: a set is at least one word long, and the kernel's is just that.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}

/// Replaces `on_signal` by the action that the program had set.
fn restore_program_action(action: &mut Action, known: u64) {
    if action.sa_sigaction != wrapper() {
        return;
    }
    action.sa_sigaction = (known & ADDRESS) as usize;
    action.sa_flags &= !(libc::SA_SIGINFO | libc::SA_RESETHAND);
    if known & WITH_INFO != 0 {
        action.sa_flags |= libc::SA_SIGINFO;
    }
    if known & ONE_SHOT != 0 {
        action.sa_flags |= libc::SA_RESETHAND;
    }
    if known & HIDES_STACK != 0 {
        action.sa_flags &= !libc::SA_ONSTACK;
    }
    if known & HIDES_RESTART != 0 {
        action.sa_flags &= !libc::SA_RESTART;
    }
}

/// Puts `on_signal` in front of a handler that the C library set by itself. Returns `seen`, or the
/// program's handler if `seen` is `on_signal`.
pub fn wrap_new_handler(signal: c_int, seen: usize, known: usize) -> usize {
    if withdrawal::is_withdrawn() {
        return if seen == wrapper() { known } else { seen };
    }
    let mut now = zeroed();
    // SAFETY: room for an action.
    let result = unsafe { real::sigaction(signal, std::ptr::null(), &mut now) };
    let is_foreign = now.sa_sigaction > libc::SIG_IGN && now.sa_sigaction != wrapper();
    if result == 0 && is_foreign {
        // SAFETY: the action that the kernel has.
        unsafe { change(signal, &now, std::ptr::null_mut()) };
    }
    if seen == wrapper() { known } else { seen }
}

/// The program's handler, as recorded.
pub fn program_handler(signal: c_int) -> usize {
    let handler = HANDLERS
        .get(signal as usize)
        .map_or(0, |handler| handler.load(SeqCst));
    (handler & ADDRESS) as usize
}

/// Signals with handlers that interrupt system calls, by `siginterrupt`.
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);

pub fn interrupts(signal: c_int) -> bool {
    INTERRUPTING.load(Relaxed) & bit(signal) != 0
}

pub fn set_interrupts(signal: c_int, is_so: bool) {
    if is_so {
        INTERRUPTING.fetch_or(bit(signal), Relaxed);
    } else {
        INTERRUPTING.fetch_and(!bit(signal), Relaxed);
    }
}

/// As `signal`. Returns the previous handler, or `SIG_ERR`.
pub fn set(signal: c_int, handler: usize, flags: c_int, blocks_itself: bool) -> usize {
    let (mut new, mut old) = (zeroed(), zeroed());
    new.sa_sigaction = handler;
    new.sa_flags = flags;
    if handler == libc::SIG_ERR {
        sys::returned(-(libc::EINVAL as isize));
        return libc::SIG_ERR;
    }
    if blocks_itself {
        // SAFETY: a set, and a number that is refused if it is none.
        unsafe { libc::sigaddset(&mut new.sa_mask, signal) };
    }
    // SAFETY: both are there.
    match unsafe { change(signal, &new, &mut old) } {
        0 => old.sa_sigaction,
        _ => libc::SIG_ERR,
    }
}
