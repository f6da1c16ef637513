//! The files of the console, as `make console` built them from the folder `console`.
//!
//! Invariants: the files are part of the program, so the manager serves the console that belongs to its API. They
//! contain no data and no secrets. Cargo builds them without Node.js; a test compares `sources.sha256` with the
//! sources, so that the committed files are never older than those.

mod files;

/// A file of the console.
#[derive(Debug)]
pub struct ConsoleFile {
    /// Its path in URLs, with `/` at the beginning.
    pub path: &'static str,
    /// Its media type.
    pub content_type: &'static str,
    /// A strong entity tag (RFC 9110): quotes around a part of the SHA-256 of its bytes.
    pub etag: &'static str,
    /// Its content.
    pub bytes: &'static [u8],
}

impl ConsoleFile {
    /// Whether the name contains a hash of the content: such a file never changes.
    #[must_use]
    pub fn is_hashed(&self) -> bool {
        self.path.starts_with("/assets/")
    }
}

/// The file at a path, if there is one. `/` has no file of its own: see [`index`].
#[must_use]
pub fn file(path: &str) -> Option<&'static ConsoleFile> {
    files::FILES.iter().find(|file| file.path == path)
}

/// All files.
#[must_use]
pub fn all() -> &'static [ConsoleFile] {
    files::FILES
}

/// The page that all addresses of the console show.
#[must_use]
pub fn index() -> Option<&'static ConsoleFile> {
    file("/index.html")
}
