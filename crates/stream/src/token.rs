//! The token that resumes a stream: the receiver prints it, and the sender begins there.

use crate::ContentSummary;
use crate::header::{Header, SnapshotIdentity, StreamStart};
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

const VERSION: &str = "r1";
/// The version of a token of a stream with a summary of its pages.
const PAGE_SUMMARY_VERSION: &str = "b1";

/// The last checkpoint of a stream that was cut, with the snapshots that it is between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResumeToken {
    /// The snapshot.
    pub to: SnapshotIdentity,
    /// The epoch of the earlier snapshot, if the stream has changes.
    pub from_epoch: Option<u32>,
    /// Whether the summary sums the pages in the stream.
    pub has_page_summary: bool,
    /// Where to go on.
    pub start: StreamStart,
}

impl ResumeToken {
    /// The token that goes on with the stream of this header from here.
    #[must_use]
    pub fn new(header: &Header, start: StreamStart) -> ResumeToken {
        ResumeToken {
            to: header.to.clone(),
            from_epoch: header.from_epoch,
            has_page_summary: header.has_page_summary,
            start,
        }
    }
}

impl fmt::Display for ResumeToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.start;
        let text = format!(
            "{}.{}.{}.{}.{}.{}.{}.{}",
            match self.has_page_summary {
                true => PAGE_SUMMARY_VERSION,
                false => VERSION,
            },
            self.to.volume.simple(),
            self.from_epoch.unwrap_or(0),
            self.to.epoch,
            start.position,
            start.summary,
            start.target.simple(),
            start.target_epoch,
        );
        write!(f, "{text}.{:08x}", crc32c::crc32c(text.as_bytes()))
    }
}

/// The text is no token, or is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this is no resume token; copy all of the token that the receiver printed or stored")]
pub struct BadResumeToken;

impl FromStr for ResumeToken {
    type Err = BadResumeToken;

    fn from_str(text: &str) -> Result<ResumeToken, BadResumeToken> {
        parse(text.trim()).ok_or(BadResumeToken)
    }
}

fn parse(text: &str) -> Option<ResumeToken> {
    let (text, crc) = text.rsplit_once('.')?;
    if u32::from_str_radix(crc, 16).ok()? != crc32c::crc32c(text.as_bytes()) {
        return None;
    }
    let fields: Vec<&str> = text.split('.').collect();
    let [
        version,
        volume,
        from,
        to,
        position,
        summary,
        target,
        target_epoch,
    ] = fields[..]
    else {
        return None;
    };
    let has_page_summary = match version {
        VERSION => false,
        PAGE_SUMMARY_VERSION => true,
        _ => return None,
    };
    let summary = u128::from_str_radix(summary, 16).ok()?;
    Some(ResumeToken {
        to: SnapshotIdentity {
            volume: Uuid::parse_str(volume).ok()?,
            epoch: to.parse().ok()?,
        },
        from_epoch: Some(from.parse().ok()?).filter(|epoch| *epoch != 0),
        has_page_summary,
        start: StreamStart {
            position: position.parse().ok()?,
            summary: ContentSummary::from_bytes(summary.to_le_bytes()),
            target: Uuid::parse_str(target).ok()?,
            target_epoch: target_epoch.parse().ok()?,
        },
    })
}
