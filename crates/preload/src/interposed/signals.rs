//! Functions that set handlers of signals, and how a thread may be cancelled.

use crate::c_library::real;
use crate::process::signals;
use crate::state::thread;
use libc::{c_int, sigaction as action, size_t};

/// `PTHREAD_CANCEL_ASYNCHRONOUS`
const CANCEL_ASYNCHRONOUS: c_int = 1;

export! {
    sigaction(signal: c_int, new: *const action, old: *mut action) -> c_int {
        // SAFETY: the arguments are the caller's.
        unsafe { signals::change(signal, new, old) }
    }

    signal(signal: c_int, handler: size_t) -> size_t {
        let flags = if signals::interrupts(signal) { 0 } else { libc::SA_RESTART };
        signals::set(signal, handler, flags, true)
    }

    __sysv_signal(signal: c_int, handler: size_t) -> size_t {
        signals::set(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER, false)
    }

    sigset(signal: c_int, handler: size_t) -> size_t {
        let known = signals::program_handler(signal);
        // SAFETY: the arguments are the caller's.
        let seen = unsafe { real::sigset(signal, handler) };
        signals::wrap_new_handler(signal, seen, known)
    }

    siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::siginterrupt(signal, interrupts) };
        if result == 0 {
            signals::set_interrupts(signal, interrupts != 0);
        }
        result
    }

    pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
        // Set before the call, if the thread may be cancelled at any instruction from then on.
        let is_anywhere = kind == CANCEL_ASYNCHRONOUS;
        if is_anywhere {
            thread::this().set_cancelled_anywhere(true);
        }
        // SAFETY: the arguments are the caller's.
        let result = unsafe { real::pthread_setcanceltype(kind, old) };
        if result == 0 {
            thread::this().set_cancelled_anywhere(is_anywhere);
        }
        result
    }
}

// Other names of the C library for these functions, which some programs call.
names! {
    __sigaction: self::sigaction;
    bsd_signal: self::signal;
    ssignal: self::signal;
    sysv_signal: self::__sysv_signal;
}
