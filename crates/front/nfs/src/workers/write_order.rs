//! The order of sequential WRITEs of one file: a WRITE that begins where another one ends runs after
//! it. Clients write files from begin to end with several calls in flight. If the later one ran first,
//! it would leave a hole, and both would take the slow path of the file system. WRITEs at other
//! offsets run side by side.
//!
//! Invariant: each WRITE that waits follows one that runs or waits, and its predecessor came earlier.
//! So the first one of a chain never waits here.

use std::collections::HashMap;

/// A file of an export: a hash of its handle. Two files with one hash cost time only.
pub(crate) type FileHash = u64;

/// The bytes of a WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WriteRange {
    pub(crate) file: FileHash,
    pub(crate) offset: u64,
    pub(crate) end: u64,
}

/// See the module. `T` is a WRITE that waits.
pub(crate) struct WriteOrder<T> {
    /// The WRITEs that have not ended, by file and end, with the next one.
    ends: HashMap<(FileHash, u64), Option<T>>,
}

impl<T> Default for WriteOrder<T> {
    fn default() -> Self {
        Self {
            ends: HashMap::new(),
        }
    }
}

impl<T> WriteOrder<T> {
    /// Adds a WRITE that runs or is queued, unless another one has the same end. Returns whether it
    /// was added; then [`end`](Self::end) removes it.
    pub(crate) fn begin(&mut self, range: WriteRange) -> bool {
        let key = (range.file, range.end);
        let is_new = range.offset < range.end && !self.ends.contains_key(&key);
        if is_new {
            self.ends.insert(key, None);
        }
        is_new
    }

    /// Keeps a WRITE until its predecessor ends. Gives it back if there is none, or it has another
    /// successor.
    pub(crate) fn follow(&mut self, range: WriteRange, write: T) -> Result<(), T> {
        match self.ends.get_mut(&(range.file, range.offset)) {
            Some(next @ None) => {
                *next = Some(write);
                Ok(())
            }
            Some(Some(_)) | None => Err(write),
        }
    }

    /// Removes a WRITE that has ended. Returns its successor, which may run now.
    pub(crate) fn end(&mut self, range: WriteRange) -> Option<T> {
        self.ends.remove(&(range.file, range.end)).flatten()
    }

    /// Removes all.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        std::mem::take(&mut self.ends)
            .into_values()
            .flatten()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(file: FileHash, offset: u64) -> WriteRange {
        WriteRange {
            file,
            offset,
            end: offset + 10,
        }
    }

    #[test]
    fn sequential_writes_run_in_order() {
        let mut order = WriteOrder::default();
        assert_eq!(order.follow(range(1, 0), 0), Err(0));
        assert!(order.begin(range(1, 0)));
        for number in 1..4 {
            let next = range(1, number * 10);
            assert_eq!(order.follow(next, number), Ok(()));
            assert!(order.begin(next));
        }
        for number in 0..4 {
            let successor = (number < 3).then_some(number + 1);
            assert_eq!(order.end(range(1, number * 10)), successor);
        }
        assert!(order.ends.is_empty());
    }

    #[test]
    fn writes_elsewhere_run_side_by_side() {
        let mut order = WriteOrder::default();
        assert!(order.begin(range(1, 0)));
        for other in [range(2, 10), range(1, 20), range(1, 0)] {
            assert_eq!(order.follow(other, 5), Err(5), "{other:?}");
        }
        assert!(!order.begin(range(1, 0)), "the first one has this end");
        assert_eq!(order.follow(range(1, 10), 6), Ok(()));
        assert_eq!(order.follow(range(1, 10), 7), Err(7), "it has a successor");
        assert_eq!(order.drain(), [6]);
    }

    #[test]
    fn empty_write_does_not_follow_itself() {
        let mut order = WriteOrder::<u32>::default();
        let empty = WriteRange {
            file: 1,
            offset: 5,
            end: 5,
        };
        assert!(!order.begin(empty));
    }
}
