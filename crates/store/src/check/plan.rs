//! What a pool can mend by itself.
//!
//! Everything is words to be stored after a recovery of the pool itself. They
//! may be stored again, and in any order: a repair that was interrupted is
//! begun anew with another check.

use super::{Place, Remedy, Report, What};
use crate::bitmap::{Bitmap, LINE_FRAMES};
use crate::recovery::{PoolError, Recovery, recover, write_superblocks};
use crate::seen::Seen;
use pagemesh_base::units::LINE_BYTES;
use pagemesh_pmem::{Media, Unfenced};

/// What to write to a pool to mend it.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    is_ordered: bool,
    is_given_up: bool,
    words: Vec<(usize, u64)>,
    used_frames: Option<u64>,
}

impl Plan {
    pub(super) fn new(is_ordered: bool) -> Plan {
        Plan {
            is_ordered,
            is_given_up: false,
            words: Vec::new(),
            used_frames: None,
        }
    }

    /// The pool cannot be recovered: nothing may be written to it.
    pub(super) fn give_up(&mut self) {
        self.is_given_up = true;
    }

    /// Whether the pool can be recovered, and so be written to.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        !self.is_given_up
    }

    pub(super) fn set(&mut self, at: usize, word: u64) {
        self.words.push((at, word));
    }

    /// Compares the bitmap and the count with the frames that were seen.
    pub(super) fn compare(&mut self, bitmap: &mut Bitmap, seen: &Seen, report: &mut Report) {
        let (mut not_used, mut leaked) = (Run::default(), Run::default());
        let mut lines = Vec::new();
        for (i, (&seen, &found)) in seen.words().iter().zip(bitmap.words()).enumerate() {
            not_used.add(i, seen & !found);
            // What could not be followed may be in use.
            if report.is_whole {
                leaked.add(i, found & !seen);
            }
            let differs = seen & !found != 0 || report.is_whole && seen != found;
            let line = (i as u64 * 64 / LINE_FRAMES) as u32;
            if differs && lines.last() != Some(&line) {
                lines.push(line);
            }
        }
        for (run, what) in [
            (&not_used, What::NotUsed(not_used.count)),
            (&leaked, What::Leaked(leaked.count)),
        ] {
            if let Some(frame) = run.first {
                let line = (frame / LINE_FRAMES) as usize;
                let byte = bitmap.line_at(line) as u64 + frame % LINE_FRAMES / 8;
                let place = Place {
                    frame: Some(frame),
                    byte: Some(byte),
                    ..Place::default()
                };
                report.add(what, place, Remedy::Pool);
            }
        }
        let is_whole = report.is_whole;
        bitmap.restore(lines.iter().copied(), |word, found| match is_whole {
            true => seen.words()[word],
            false => seen.words()[word] | found,
        });
        for line in lines {
            let at = bitmap.line_at(line as usize);
            let words = bitmap.line(line as usize);
            for (at, word) in (at..at + LINE_BYTES).step_by(8).zip(words) {
                self.set(at, word);
            }
        }
        self.used_frames = Some(bitmap.used());
    }

    /// Recovers the pool and writes what mends it, durably. Check it again
    /// afterwards.
    ///
    /// # Errors
    /// When the pool cannot be recovered, or the medium fails.
    pub fn apply<M: Media>(&self, media: &M) -> Result<(), PoolError> {
        if self.is_given_up {
            return Err(PoolError::Failed);
        }
        let Recovery { mut block, .. } = recover(media, self.is_ordered, None)?;
        let mut stores: Option<Unfenced> = None;
        for &(at, word) in &self.words {
            media.store(at, word);
            let flushed = media.flush(at, 8);
            stores = Some(flushed.after(stores.take()));
        }
        if let Some(stores) = stores {
            let _fenced = media.fence(stores);
        }
        media.sync()?;
        block.used_frames = self.used_frames.unwrap_or(block.used_frames);
        write_superblocks(media, &mut block)?;
        Ok(())
    }
}

/// How many frames, and the first.
#[derive(Default)]
struct Run {
    first: Option<u64>,
    count: u64,
}

impl Run {
    fn add(&mut self, word: usize, bits: u64) {
        if bits != 0 {
            let frame = word as u64 * 64 + u64::from(bits.trailing_zeros());
            self.first.get_or_insert(frame);
            self.count += u64::from(bits.count_ones());
        }
    }
}
