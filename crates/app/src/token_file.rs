//! The token of an operator without the cluster key.
//!
//! `--token-file` names a file with the token, or `PAGEMESH_TOKEN` has it. No option takes the token
//! itself, because every user of a machine sees the command lines of its processes.
//!
//! Invariant: no error repeats the text of a token.

use anyhow::{Context, bail};
use pagemesh_manage::access::TokenSecret;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The environment variable with a token.
const VARIABLE: &str = "PAGEMESH_TOKEN";
/// Bytes of the longest token file: a token, and white space around it.
const FILE_BYTES_MAX: u64 = 256;
/// Permission bits of group and others.
const GROUP_AND_OTHERS: u32 = 0o077;

/// The token in the named file, or else in the environment; `None` if neither names one.
pub fn find(file: Option<&Path>) -> anyhow::Result<Option<TokenSecret>> {
    if let Some(file) = file.filter(|it| !it.as_os_str().is_empty()) {
        return Ok(Some(load(file)?));
    }
    let Some(text) = std::env::var_os(VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(None);
    };
    let token = text
        .to_str()
        .and_then(|text| TokenSecret::parse(text.trim()));
    let token = token
        .with_context(|| format!("{VARIABLE} has no token; a token is pm_ and 43 characters"))?;
    Ok(Some(token))
}

/// Reads a token file that only its owner can read.
fn load(path: &Path) -> anyhow::Result<TokenSecret> {
    let unreadable = || format!("cannot read the token file {}", path.display());
    // Checked before opening: opening a pipe would wait for a writer.
    if !std::fs::metadata(path).with_context(unreadable)?.is_file() {
        bail!("the token file {} is no regular file", path.display());
    }
    let file = File::open(path).with_context(unreadable)?;
    let mode = file.metadata().with_context(unreadable)?.mode();
    if mode & GROUP_AND_OTHERS != 0 {
        bail!(
            "the token file {} is open to others (mode {:04o}); run: chmod 600 {}",
            path.display(),
            mode & 0o7777,
            path.display()
        );
    }
    let mut bytes = Vec::new();
    let mut limited = file.take(FILE_BYTES_MAX + 1);
    limited.read_to_end(&mut bytes).with_context(unreadable)?;
    let text = std::str::from_utf8(&bytes).ok();
    let token = text.and_then(|text| TokenSecret::parse(text.trim()));
    token.with_context(|| {
        format!(
            "the token file {} has no token; a token is pm_ and 43 characters",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn write(dir: &Path, text: &str, mode: u32) -> std::path::PathBuf {
        let path = dir.join("token");
        std::fs::write(&path, text).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("mode set");
        path
    }

    #[test]
    fn private_token_file_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let token = TokenSecret::random().expect("random bytes");
        let path = write(dir.path(), &format!("{}\n", token.expose()), 0o600);
        assert_eq!(load(&path).expect("a token"), token);
    }

    #[test]
    fn unsafe_token_file_is_refused_without_its_text() {
        let dir = tempfile::tempdir().expect("a directory");
        let token = TokenSecret::random().expect("random bytes");
        let text = token.expose();
        let long = text.repeat(9);
        for (content, mode) in [
            (text, 0o640),
            (text, 0o604),
            (&text[..45], 0o600),
            (&long, 0o600),
            ("", 0o600),
        ] {
            let path = write(dir.path(), content, mode);
            let error = format!("{:#}", load(&path).expect_err("refused"));
            assert!(!error.contains(&text[4..20]), "{error}");
        }
        assert!(load(dir.path()).is_err());
        assert!(load(&dir.path().join("missing")).is_err());
    }
}
