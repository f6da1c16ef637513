//! The file systems of a server that other clients take over, one by one.
//!
//! A fenced file system ends alone: its NFS calls are refused for now, its mount ends, and the others stay served. The process ends
//! with the last one.

use crate::shutdown::ShutdownTrigger;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::poison;
use pagemesh_nfs::Server;
use std::sync::{Arc, Mutex, Weak};

/// See the module.
pub(super) struct Fences {
    /// The file systems of the process.
    total: usize,
    ending: ShutdownTrigger,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    fenced: Vec<VolumeName>,
    server: Weak<Server>,
    mounts: Vec<(VolumeName, ShutdownTrigger)>,
}

impl Fences {
    /// No file system is fenced. The loss of all triggers the shutdown.
    pub(super) fn new(total: usize, ending: ShutdownTrigger) -> Fences {
        Fences {
            total,
            ending,
            state: Mutex::default(),
        }
    }

    /// Another client has a file system now.
    pub(super) fn record(&self, name: &VolumeName) {
        let mut state = poison::lock(&self.state);
        if state.fenced.contains(name) {
            return;
        }
        state.fenced.push(name.clone());
        let is_last = state.fenced.len() >= self.total;
        let server = state.server.upgrade();
        let mounts = state.mounts.iter().filter(|(mounted, _)| mounted == name);
        let mounts: Vec<_> = mounts.map(|(_, end)| end.clone()).collect();
        drop(state);
        if let Some(server) = server {
            server.fence(name.as_str());
        }
        mounts.iter().for_each(ShutdownTrigger::trigger);
        if is_last {
            self.ending.trigger();
        } else {
            tracing::error!(
                file_system = %name,
                "another client took over the file system, or an operator took it away; its NFS calls get NFS3ERR_JUKEBOX, its mount \
                 here ends, and the other file systems stay served. Restart this server to take it back, or without it"
            );
        }
    }

    /// The server refuses the calls of fenced file systems from now on.
    pub(super) fn set_server(&self, server: &Arc<Server>) {
        let mut state = poison::lock(&self.state);
        state.server = Arc::downgrade(server);
        let fenced = state.fenced.clone();
        drop(state);
        fenced.iter().for_each(|name| server.fence(name.as_str()));
    }

    /// Ends a mount when its file system is fenced.
    pub(super) fn add_mount(&self, name: &VolumeName, end: ShutdownTrigger) {
        let mut state = poison::lock(&self.state);
        if state.fenced.contains(name) {
            end.trigger();
        }
        state.mounts.push((name.clone(), end));
    }

    /// Whether no file system is left.
    pub(super) fn are_all(&self) -> bool {
        poison::lock(&self.state).fenced.len() >= self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shutdown::Shutdown;
    use std::time::Duration;

    fn has_ended(shutdown: &Shutdown) -> bool {
        shutdown.wait_for(Duration::ZERO)
    }

    #[test]
    fn process_ends_with_its_last_file_system() {
        let name = |text: &str| -> VolumeName { text.parse().expect("a name") };
        let (process, mount, late) = (
            Shutdown::of_part(),
            Shutdown::of_part(),
            Shutdown::of_part(),
        );
        let fences = Fences::new(2, process.trigger());
        fences.add_mount(&name("home"), mount.trigger());
        fences.record(&name("data"));
        fences.record(&name("data"));
        assert!(!has_ended(&process) && !has_ended(&mount));
        assert!(!fences.are_all());
        fences.add_mount(&name("data"), late.trigger());
        assert!(has_ended(&late), "a mount of a fenced file system");
        fences.record(&name("home"));
        assert!(has_ended(&process) && has_ended(&mount));
        assert!(fences.are_all());
    }
}
