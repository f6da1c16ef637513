//! The identity of a process on its machine, as attachments record it.
//!
//! A client of the same machine learns from it at once whether the process has ended. Another machine, or another
//! process namespace, learns nothing.

use pagemesh_brick::process;
use std::fmt;
use std::str::FromStr;

/// The file that names the boot of this machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The link that names the process namespace.
const NAMESPACE: &str = "/proc/self/ns/pid";

/// A process of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    boot: String,
    namespace: String,
    pid: u32,
    /// In clock ticks since the boot.
    started: u64,
}

impl ProcessIdentity {
    /// The identity of this process; none without `/proc`.
    pub fn own() -> Option<ProcessIdentity> {
        let pid = std::process::id();
        Some(ProcessIdentity {
            boot: std::fs::read_to_string(BOOT_ID).ok()?.trim().to_owned(),
            namespace: std::fs::read_link(NAMESPACE).ok()?.to_str()?.to_owned(),
            pid,
            started: process::start_time(pid)?,
        })
    }

    /// Whether the process has certainly ended, as seen from `here`.
    pub fn has_ended(&self, here: &ProcessIdentity) -> bool {
        let is_here = (&self.boot, &self.namespace) == (&here.boot, &here.namespace);
        is_here && process::has_ended(self.pid, self.started)
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProcessIdentity {
            boot,
            namespace,
            pid,
            started,
        } = self;
        write!(f, "{boot} {namespace} {pid} {started}")
    }
}

/// The text names no process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoIdentity;

impl FromStr for ProcessIdentity {
    type Err = NoIdentity;

    fn from_str(text: &str) -> Result<ProcessIdentity, NoIdentity> {
        let words: Vec<&str> = text.split(' ').collect();
        let [boot, namespace, pid, started] = words[..] else {
            return Err(NoIdentity);
        };
        Ok(ProcessIdentity {
            boot: boot.to_owned(),
            namespace: namespace.to_owned(),
            pid: pid.parse().map_err(|_| NoIdentity)?,
            started: started.parse().map_err(|_| NoIdentity)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_known_to_run_until_it_is_reaped() {
        let here = ProcessIdentity::own().expect("/proc");
        assert_eq!(here.to_string().parse(), Ok(here.clone()));
        assert!(!here.has_ended(&here));
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("a process");
        let pid = child.id();
        let started = process::start_time(pid).expect("it runs");
        let of_child = ProcessIdentity {
            pid,
            started,
            ..here.clone()
        };
        assert!(!of_child.has_ended(&here));
        drop(child.stdin.take());
        child.wait().expect("ended");
        assert!(of_child.has_ended(&here));
    }

    #[test]
    fn process_of_other_machine_or_boot_has_not_certainly_ended() {
        let here = ProcessIdentity::own().expect("/proc");
        let reused = ProcessIdentity {
            started: here.started + 1,
            ..here.clone()
        };
        assert!(reused.has_ended(&here), "a later process has the number");
        let elsewhere = ProcessIdentity {
            boot: "another".into(),
            ..reused
        };
        assert!(!elsewhere.has_ended(&here));
        assert_eq!("1 2 3".parse::<ProcessIdentity>(), Err(NoIdentity));
    }
}
