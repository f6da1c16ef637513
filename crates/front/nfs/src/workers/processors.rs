//! The load of processors and threads, as `/proc` of Linux has it. The supervisor reads it only
//! while calls wait.

use std::num::NonZero;

/// The processors that this process may use.
pub(crate) fn count() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Processors without work, beside the calling thread; 0 if the system does not tell.
pub(crate) fn idle() -> usize {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let runnable = runnable_of(&text);
    runnable.map_or(0, |all| count().saturating_sub(all.saturating_sub(1)))
}

/// The runnable threads of the system: the field before the slash (`proc_loadavg(5)`).
fn runnable_of(loadavg: &str) -> Option<usize> {
    let field = loadavg.split_ascii_whitespace().nth(3)?;
    field.split_once('/')?.0.parse().ok()
}

/// Whether a thread of this process sleeps in the kernel.
pub(crate) fn is_blocked(thread: u32) -> bool {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    text.is_ok_and(|text| matches!(state_of(&text), Some('S' | 'D')))
}

/// The state: the field after the name, which is in brackets (`proc_pid_stat(5)`).
fn state_of(stat: &str) -> Option<char> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_found() {
        assert_eq!(runnable_of("1.0 2.0 3.0 4/567 890\n"), Some(4));
        assert_eq!(runnable_of("1.0 2.0"), None);
        assert_eq!(state_of("12 (nfs) S) D 1 2"), Some('D'));
        assert_eq!(state_of(""), None);
    }

    #[test]
    fn parked_thread_is_blocked() {
        let (told, thread) = std::sync::mpsc::channel();
        let parked = std::thread::spawn(move || {
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            told.send(id.cast_unsigned()).expect("sent");
            std::thread::park();
        });
        let id = thread.recv().expect("a thread");
        while !is_blocked(id) {
            std::thread::yield_now();
        }
        parked.thread().unpark();
        parked.join().expect("no panic");
        assert!(!is_blocked(id), "the thread is gone");
    }
}
