//! Errors of streams.

use std::io;

/// Why a stream cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The pipe or file failed.
    #[error(
        "the stream cannot be read or written: {0}; send it again, from its last checkpoint if it has one"
    )]
    Io(#[from] io::Error),
    /// It ends before its end record.
    #[error("the stream was cut after {position} bytes of the volume; send the rest")]
    Cut {
        /// The position of the last intact record.
        position: u64,
    },
    /// It does not begin as a stream does.
    #[error("this is no stream of a snapshot; make one with: pagemesh snapshot send VOLUME@NAME")]
    NotAStream,
    /// Another version of the format, or a feature that this release does not know.
    #[error(
        "the stream has {found}, and this release reads version {} without features; use a release that knows it",
        crate::VERSION
    )]
    UnknownVersion {
        /// The version or feature.
        found: String,
    },
    /// Bytes of it changed.
    #[error(
        "the stream is damaged at record {number}: {what}; send it again, from its last checkpoint if it has one"
    )]
    Damaged {
        /// The number of the record; 0 is the header.
        number: u64,
        /// The problem.
        what: &'static str,
    },
    /// Bytes follow its end.
    #[error("bytes follow the end of the stream; receive each stream by a command of its own")]
    Trailing,
    /// The caller writes something that a stream cannot hold.
    #[error("a stream cannot hold this: {0}")]
    Unwritable(&'static str),
}
