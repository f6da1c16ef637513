//! The admin token of the first start.
//!
//! Invariants: a store gets one such token in its life. The token reaches its owner before it is
//! valid, so that a crash between loses a token that opens nothing; the next start makes another.
//! The file is new or replaced as a whole, and only its owner can read it.

use crate::access::TokenSecret;
use crate::call::CallContext;
use crate::fault::Fault;
use crate::manager::Manager;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// The name of the file with the token, beside the store.
pub const ADMIN_TOKEN_FILE: &str = "admin-token";

/// The way of the admin token to its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdminTokenOutput {
    /// Standard output, which is a terminal.
    Terminal,
    /// The file [`ADMIN_TOKEN_FILE`] beside the store.
    #[default]
    File,
}

/// Creates the admin token at the first start. A failure is logged: the cluster key opens the manager
/// all the same, and the next start tries again.
pub(crate) fn create_at_first_start(manager: &Manager, store: &Path, output: AdminTokenOutput) {
    let path = store.with_file_name(ADMIN_TOKEN_FILE);
    let manager = manager.acting_for(CallContext {
        actor: "manager".into(),
        ..CallContext::default()
    });
    let made = manager.create_first_admin_token(|token| match output {
        AdminTokenOutput::Terminal => print(token),
        AdminTokenOutput::File => write_file(&path, token),
    });
    match (made, output) {
        (Ok(true), AdminTokenOutput::File) => {
            tracing::warn!(file = %path.display(), "the file has the first admin token; keep it in a safe place");
        }
        (Ok(_), _) => {}
        (Err(error), _) => log_failure(&error, &path),
    }
}

fn log_failure(error: &Fault, path: &Path) {
    tracing::warn!(%error, file = %path.display(), "there is no admin token; the next start tries again");
}

fn print(token: &TokenSecret) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(
        output,
        "admin token (shown once, the console and --token-file take it): {}",
        token.expose()
    )?;
    output.flush()
}

fn write_file(path: &Path, token: &TokenSecret) -> io::Result<()> {
    let name = format!(".{ADMIN_TOKEN_FILE}.{}", Uuid::new_v4());
    let beside = path.with_file_name(name);
    let written = write_private(&beside, token).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        // It has a token that will never be valid.
        let _ = std::fs::remove_file(&beside);
    }
    written?;
    sync_directory(path)
}

fn write_private(path: &PathBuf, token: &TokenSecret) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    writeln!(file, "{}", token.expose())?;
    file.sync_all()
}

/// A renamed file survives a crash only after its directory is synced.
fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    std::fs::File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}
