//! The exports file of a server, read again at SIGHUP, and the server's registration with rpcbind.

use super::nfs::NfsArgs;
use anyhow::Context;
use pagemesh_nfs::Exports;
use pagemesh_nfs::exports_file::ExportsFile;
use pagemesh_nfs::rpcbind::{RPCBIND_ADDRESS, RpcbindUpkeep};
use signal_hook::consts::SIGHUP;
use signal_hook::iterator::{Handle, Signals};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

/// The exports file of the arguments, if it fits their file systems. A wrong file must not fence another client, so it is read before any
/// volume is attached.
pub(super) fn read(args: &NfsArgs) -> anyhow::Result<Option<ExportsFile>> {
    let Some(path) = &args.exports else {
        return Ok(None);
    };
    let file = ExportsFile::read(path)?;
    if !args.names.is_empty() {
        file.check_file_systems(|name| args.names.iter().any(|known| known.as_str() == name))?;
    }
    Ok(Some(file))
}

/// The exports file after the wait of a standby, which may have taken weeks: it has the present rules. A file with a mistake leaves the
/// earlier ones.
pub(super) fn read_after_wait(args: &NfsArgs, earlier: Option<ExportsFile>) -> Option<ExportsFile> {
    if !args.standby {
        return earlier;
    }
    read(args).unwrap_or_else(|error| {
        tracing::error!(
            error = format!("{error:#}"),
            "the exports file has a mistake; the rules of the start stay"
        );
        earlier
    })
}

/// Reports the content of an exports file that was checked.
pub(super) fn print_check(file: &ExportsFile) {
    let clients: usize = file.exports.iter().map(|export| export.rules.len()).sum();
    let exports = file.exports.len();
    println!("{} is valid: {exports} exports, {clients} rules", file.name);
}

/// The paths that clients mount.
pub(super) fn paths(args: &NfsArgs, file: Option<&ExportsFile>) -> Vec<String> {
    match file {
        Some(file) => file.exports.iter().map(|it| it.path.to_string()).collect(),
        None => args.names.iter().map(|name| format!("/{name}")).collect(),
    }
}

/// SIGHUP of a server with an exports file. Register it before any slow operation: an unregistered signal ends the process.
pub(super) struct ReloadSignal {
    signals: Signals,
    path: PathBuf,
}

impl ReloadSignal {
    pub(super) fn listen(path: &Path) -> anyhow::Result<Self> {
        Ok(Self {
            signals: Signals::new([SIGHUP]).context("cannot listen for SIGHUP")?,
            path: path.into(),
        })
    }

    /// Applies the file at each signal from now on, in a thread.
    pub(super) fn start(mut self, exports: Exports) -> anyhow::Result<Reloader> {
        let handle = self.signals.handle();
        let reload = move || {
            for _ in self.signals.forever() {
                reload(&self.path, &exports);
            }
        };
        let thread = std::thread::Builder::new().name("exports".into());
        Ok(Reloader {
            handle,
            thread: Some(thread.spawn(reload)?),
        })
    }
}

/// Replaces the rules, or keeps them if the file has a mistake.
fn reload(path: &Path, exports: &Exports) {
    let applied = ExportsFile::read(path).and_then(|file| {
        exports.apply(&file)?;
        Ok(file.exports.len())
    });
    match applied {
        Ok(count) => {
            tracing::info!(path = %path.display(), exports = count, "the exports file was read again")
        }
        Err(error) => {
            tracing::error!(%error, "the exports file has a mistake; the earlier exports and rules stay")
        }
    }
}

/// The thread that reads the file again. The drop ends it: it holds the file systems.
pub(super) struct Reloader {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reloader {
    fn drop(&mut self) {
        self.handle.close();
        // A panic of the thread was reported where it happened.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Registers the server, whenever an rpcbind runs. Clients that name the ports need none.
pub(super) fn register(args: &NfsArgs, addresses: &[SocketAddr]) -> Option<RpcbindUpkeep> {
    if args.no_rpcbind {
        return None;
    }
    RpcbindUpkeep::start(RPCBIND_ADDRESS, addresses)
        .inspect_err(|cause| tracing::warn!(%cause, "the server is not registered with rpcbind"))
        .ok()
}
