//! Runs other programs for their output.
//!
//! Invariant: a program that hangs, or writes without end, costs a bounded time and a bounded memory.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Pause between two looks at a program that has closed its output.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The output of a program.
pub struct ProgramOutput {
    /// Its standard output, or the beginning.
    pub text: String,
    /// None: it was ended, because its output was longer than the limit.
    pub status: Option<ExitStatus>,
}

/// The output of a program, which is ended after its limit. The output is read while the program runs: a full pipe
/// would block it.
///
/// # Errors
/// When there is no such program, or it does not end in time.
pub fn output(
    name: &str,
    words: &[&str],
    limit: Duration,
    bytes_max: usize,
) -> Result<ProgramOutput, String> {
    let mut command = Command::new(name);
    command
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let spawned = command.stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(|cause| format!("{name}: {cause}"))?;
    let until = Instant::now() + limit;
    let (send, read) = mpsc::channel();
    let stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut bytes = vec![];
        let limited = stdout.map(|it| it.take(bytes_max as u64).read_to_end(&mut bytes));
        // The receiver is gone after the limit.
        let _ = send.send(limited.map(|_| bytes));
    });
    let read = read.recv_timeout(limit);
    let status = match &read {
        Ok(Some(bytes)) if bytes.len() < bytes_max => await_exit(&mut child, until),
        _ => None,
    };
    // Fails only if the child has ended.
    let _ = child.kill();
    let _ = child.wait();
    let late = || format!("{name} did not end within {} s", limit.as_secs());
    match read {
        Ok(Some(bytes)) if status.is_some() || bytes.len() >= bytes_max => Ok(ProgramOutput {
            text: String::from_utf8_lossy(&bytes).into_owned(),
            status,
        }),
        _ => Err(late()),
    }
}

/// The exit status of a program that ends in time.
fn await_exit(child: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < until => std::thread::sleep(POLL_INTERVAL),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn output_longer_than_pipe_is_read_meanwhile() {
        let words = ["-c", "head -c 1000000 /dev/zero | tr '\\0' x"];
        let found = output("sh", &words, LIMIT, 2 << 20).expect("its output");
        assert_eq!(found.text.len(), 1_000_000);
        assert!(found.status.is_some_and(|it| it.success()));
        let cut = output("sh", &words, LIMIT, 1000).expect("its beginning");
        assert_eq!((cut.text.len(), cut.status), (1000, None));
    }

    #[test]
    fn silent_program_is_ended() {
        let short = Duration::from_millis(50);
        for words in [
            &["-c", "exec sleep 600"],
            &["-c", "exec >&-; exec sleep 600"],
        ] {
            let error = output("sh", words, short, 10).err().expect("no output");
            assert!(error.contains("did not end"), "{error}");
        }
        assert!(output("/nowhere/program", &[], LIMIT, 10).is_err());
    }
}
