//! Functions that execute or start a program: see `process::exec_environment`.
//!
//! Invariants: this code does not allocate, take a lock, or change memory of the caller, because it
//! may run in a signal handler or a child of `vfork`.

use crate::c_library::real;
use crate::process::exec_environment::{
    Environment, HERE, Strings, current, environment_for, environment_for_at, environment_for_fd,
    environment_for_found, environment_for_path, with,
};
use crate::process::fork;
use libc::{c_char, c_int, c_void};

macro_rules! executing {
    ($($name:ident($($arg:ident: $kind:ty),*): $environment:expr, $strings:ident => $with:expr;)*) => {
        $(
            /// # Safety
            /// As the C library's.
            unsafe extern "C" fn $name($($arg: $kind),*) -> c_int {
                match $environment {
                    Some(environment) => {
                        // SAFETY: the arguments are the caller's, but for the environment.
                        with(&environment, |$strings| unsafe { $with })
                    }
                    // SAFETY: as above.
                    None => unsafe { real::$name($($arg),*) },
                }
            }
            names! { $name: self::$name; }
        )*
    };
}

executing! {
    execve(path: *const c_char, argv: Strings, envp: Strings):
        environment_for((HERE, path), envp, 0), strings => real::execve(path, argv, strings);
    execv(path: *const c_char, argv: Strings):
        environment_for((HERE, path), current(), 0), strings => real::execve(path, argv, strings);
    execvp(file: *const c_char, argv: Strings):
        environment_for_found(file, current(), 0), strings => real::execvpe(file, argv, strings);
    execvpe(file: *const c_char, argv: Strings, envp: Strings):
        environment_for_found(file, envp, 0), strings => real::execvpe(file, argv, strings);
    execveat(directory: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int):
        environment_for_at(directory, path, flags, envp), strings => real::execveat(directory, path, argv, strings, flags);
    fexecve(fd: c_int, argv: Strings, envp: Strings):
        environment_for_fd(fd, envp), strings => real::fexecve(fd, argv, strings);
}

/// The arguments of a call with a list of them: those in registers; the others are on the stack.
#[repr(C)]
struct ExecArguments {
    registers: [*const c_char; 6],
}

/// The calls with a list of arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExecListCall {
    Execl,
    Execlp,
    Execle,
}

/// An argument of a list, counted from the first behind the path.
///
/// # Safety
/// The caller of `execl` or a relative passed these arguments.
unsafe fn argument(listed: *const ExecArguments, stack: Strings, index: usize) -> *const c_char {
    match index + 1 {
        // SAFETY: the caller's.
        register @ ..6 => unsafe { (*listed).registers[register] },
        // SAFETY: as above.
        place => unsafe { *stack.add(place - 6) },
    }
}

/// Executes the program if it cannot have this library. Returns otherwise, or if the execution
/// fails.
///
/// # Safety
/// As `argument`.
unsafe fn exec_with_list(call: ExecListCall, listed: *const ExecArguments, stack: Strings) {
    // SAFETY: the caller's.
    let at = |index| unsafe { argument(listed, stack, index) };
    // SAFETY: as above.
    let path = unsafe { (*listed).registers[0] };
    let Some(count) = (0..).position(|index| at(index).is_null()) else {
        return;
    };
    let envp = match call {
        ExecListCall::Execle => at(count + 1).cast(),
        ExecListCall::Execl | ExecListCall::Execlp => current(),
    };
    let environment = match call {
        ExecListCall::Execlp => environment_for_found(path, envp, count + 1),
        ExecListCall::Execl | ExecListCall::Execle => {
            environment_for((HERE, path), envp, count + 1)
        }
    };
    let Some(environment) = environment else {
        return;
    };
    let argv = environment.spare();
    for index in 0..count {
        // SAFETY: there is room for one more, which stays null.
        unsafe { argv.add(index).write(at(index)) };
    }
    let argv = argv.cast_const();
    with(&environment, |strings| match call {
        // SAFETY: the arguments are the caller's.
        ExecListCall::Execlp => unsafe { real::execvpe(path, argv, strings) },
        // SAFETY: as above.
        ExecListCall::Execl | ExecListCall::Execle => unsafe { real::execve(path, argv, strings) },
    });
}

macro_rules! listing {
    ($($name:ident, $before:ident: $call:ident;)*) => {
        $(
            /// # Safety
            /// As `argument`.
            unsafe extern "C" fn $before(arguments: *const ExecArguments, stack: Strings) -> *mut c_void {
                // SAFETY: the caller's.
                unsafe { exec_with_list(ExecListCall::$call, arguments, stack) };
                real::addresses::$name()
            }

            /// Passes all arguments on unchanged: the C library's function counts them.
            ///
            /// # Safety
            /// As the C library's.
            #[unsafe(naked)]
            unsafe extern "C" fn $name() -> c_int {
                std::arch::naked_asm!(
                    "push rbp",
                    "mov rbp, rsp",
                    "push r9",
                    "push r8",
                    "push rcx",
                    "push rdx",
                    "push rsi",
                    "push rdi",
                    "mov rdi, rsp",
                    "lea rsi, [rbp + 16]",
                    "call {before}",
                    "mov r11, rax",
                    "pop rdi",
                    "pop rsi",
                    "pop rdx",
                    "pop rcx",
                    "pop r8",
                    "pop r9",
                    "pop rbp",
                    // No floating-point arguments.
                    "xor eax, eax",
                    "jmp r11",
                    before = sym $before,
                )
            }
            names! { $name: self::$name; }
        )*
    };
}

listing! {
    execl, before_execl: Execl;
    execlp, before_execlp: Execlp;
    execle, before_execle: Execle;
}

/// Starts a program, by its path or as `execvp` finds it.
macro_rules! spawning {
    ($($name:ident: $environment:ident;)*) => {
        $(
            /// # Safety
            /// As the C library's.
            unsafe extern "C" fn $name(
                pid: *mut c_int,
                path: *const c_char,
                actions: *const c_void,
                attributes: *const c_void,
                argv: Strings,
                envp: Strings,
            ) -> c_int {
                fork::before_fork();
                let environment = $environment(path, envp, 0);
                let strings = environment.as_ref().map_or(envp, Environment::strings);
                // SAFETY: the arguments are the caller's, but for the environment.
                let result = unsafe { real::$name(pid, path, actions, attributes, argv, strings) };
                fork::after_fork();
                result
            }
            names! { $name: self::$name; }
        )*
    };
}

spawning! {
    posix_spawn: environment_for_path;
    posix_spawnp: environment_for_found;
}
