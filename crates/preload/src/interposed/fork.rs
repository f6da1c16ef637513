//! Functions that make a copy of the process: see `process::fork`.

use crate::c_library::real;
use crate::process::fork::{
    CloneKind, after_fork, before_fork, begin_vfork, clone_kind, end_vfork,
};
use crate::process::ownership;
use crate::state::thread;
use libc::{c_int, c_long, c_void, pid_t};

/// The child returns from here first and overwrites the stack above. So the return address waits in
/// a register, which the kernel keeps for each of the two, as in the C library's own `vfork`. The
/// result of `begin_vfork` does the same.
#[unsafe(naked)]
unsafe extern "C" fn vfork() -> pid_t {
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {begin}",
        "add rsp, 8",
        "pop rdi",
        "movzx esi, al",
        "mov eax, {vfork}",
        "syscall",
        "push rdi",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "sub rsp, 8",
        "call {end}",
        "add rsp, 8",
        "2: ret",
        begin = sym begin_vfork,
        end = sym end_vfork,
        vfork = const libc::SYS_vfork as i32,
    )
}

macro_rules! copying {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $kind),*) -> $result {
                before_fork();
                // SAFETY: the arguments are the caller's.
                let result = unsafe { real::$name($($arg),*) };
                after_fork();
                result
            }
            names! { $name: self::$name; }
        )*
    };
}

// In all of these the C library creates the child without `fork`. A thread that is cancelled in one
// of them never reports the end, and later files use only the kernel's offset.
copying! {
    system(command: *const c_void) -> c_int;
    popen(command: *const c_void, kind: *const c_void) -> *mut c_void;
    _Fork() -> pid_t;
}

/// # Safety
/// As the C library's. It takes up to seven arguments, of which the last is read from where
/// the caller has put it or has something else; on x86-64 both are the same call.
unsafe extern "C" fn clone(
    run: *const c_void,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_void,
    local: *mut c_void,
    child: c_long,
) -> c_int {
    let child_is = clone_kind(flags);
    if child_is == CloneKind::Thread {
        // SAFETY: the arguments are the caller's.
        return unsafe { real::clone(run, stack, flags, argument, parent, local, child) };
    }
    before_fork();
    let thread = thread::this();
    let was_vforked = thread.is_vforked();
    match child_is {
        CloneKind::Vfork => thread.set_vforked(true),
        CloneKind::SharingProcess => ownership::switch_to_kernel(flags),
        CloneKind::Thread | CloneKind::Fork => {}
    }
    // SAFETY: as above.
    let result = unsafe { real::clone(run, stack, flags, argument, parent, local, child) };
    thread.set_vforked(was_vforked);
    if child_is == CloneKind::Vfork {
        thread.unmap_exec_mapping();
    }
    after_fork();
    result
}

names! {
    clone: self::clone;
    vfork: self::vfork;
    __clone: self::clone;
    __vfork: self::vfork;
}
