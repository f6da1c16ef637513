//! A read-only space with the changes of a recovery in memory: for mounts of snapshots, which may hold redo logs.
//!
//! Invariants:
//! - No change reaches the space below, not even a flush.
//! - Memory is bounded by [`OverlayLimits`]. A change beyond them fails as on a full pool, and changes nothing.
//! - All channels see a change from its completion on.

use pagemesh_base::poison;
use pagemesh_base::slice::{TransactionPart, check_parts};
use pagemesh_base::space::{
    Channel, Completion, Extent, Reply, Request, Space, SpaceError, Token, check_range,
};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

const PAGE: u64 = PAGE_BYTES as u64;
/// The bounds of the memory of an overlay.
#[derive(Clone, Copy, Debug)]
struct OverlayLimits {
    /// Pages with data. A redo log of the greatest length is copied, with the nodes that name its pages: 528 MiB.
    data_pages: usize,
    /// All changed pages, with cleared ones, which take a few bytes each.
    pages: usize,
}

const LIMITS: OverlayLimits = OverlayLimits {
    data_pages: (1 << 17) + (1 << 12),
    pages: 1 << 19,
};

type Page = [u8; PAGE_BYTES];

/// Pages by number; None: cleared.
type PageMap = BTreeMap<u64, Option<Box<Page>>>;

#[derive(Default)]
struct ChangedPages {
    pages: PageMap,
    /// Those with data.
    data_pages: usize,
}

/// A space, and the changes of its pages in memory.
pub(crate) struct OverlaySpace {
    below: Arc<dyn Space>,
    changed: Arc<Mutex<ChangedPages>>,
    limits: OverlayLimits,
}

impl OverlaySpace {
    pub(crate) fn new(below: Arc<dyn Space>) -> OverlaySpace {
        OverlaySpace {
            below,
            changed: Arc::default(),
            limits: LIMITS,
        }
    }
}

impl Space for OverlaySpace {
    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn lost_writes(&self) -> u64 {
        self.below.lost_writes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(OverlayChannel {
            below: self.below.open()?,
            changed: Arc::clone(&self.changed),
            size_bytes: self.below.size_bytes(),
            limits: self.limits,
            offsets: HashMap::new(),
            completions: vec![],
        }))
    }
}

struct OverlayChannel {
    below: Box<dyn Channel>,
    changed: Arc<Mutex<ChangedPages>>,
    size_bytes: u64,
    limits: OverlayLimits,
    /// The first byte of each read and listing in flight.
    offsets: HashMap<u64, u64>,
    completions: Vec<Completion>,
}

impl Channel for OverlayChannel {
    fn ready(&mut self) -> Result<bool, SpaceError> {
        self.below.ready()
    }

    fn submit(&mut self, token: Token, request: Request) {
        let result = match request {
            Request::Read { offset, .. } | Request::Extents { offset, .. } => {
                self.offsets.insert(token.0, offset);
                return self.below.submit(token, request);
            }
            Request::Flush => Ok(Reply::Done),
            Request::Transact { parts, .. } => self.transact(&parts),
            Request::Discard { offset, len } => self.discard(offset, len),
            // Of any length: a transaction has a limit of pages.
            Request::Write { offset, data, .. } => self.write(offset, &data),
            Request::WriteZeroes { offset, len, .. } => self.discard(offset, len),
        };
        self.completions.push(Completion { token, result });
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let first = into.len();
        self.below.reap(into);
        for completion in &mut into[first..] {
            let Some(offset) = self.offsets.remove(&completion.token.0) else {
                continue;
            };
            let changed = poison::lock(&self.changed);
            match &mut completion.result {
                Ok(Reply::Data(data)) => put_changed(&changed.pages, offset, data),
                Ok(Reply::Extents(extents)) => {
                    *extents = with_changed(&changed.pages, offset, extents)
                }
                _ => {}
            }
        }
        into.append(&mut self.completions);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.below.poll_fds(into);
    }

    fn deadline(&self) -> Option<Instant> {
        match self.completions.is_empty() {
            true => self.below.deadline(),
            false => Some(Instant::now()),
        }
    }
}

impl OverlayChannel {
    fn transact(&self, parts: &[TransactionPart]) -> Result<Reply, SpaceError> {
        check_parts(parts, self.size_bytes)?;
        let mut step = PageMap::new();
        for part in parts {
            let first = part.offset() / PAGE;
            match part {
                TransactionPart::Write { data, .. } => step.extend(numbered_pages(first, data)),
                TransactionPart::Clear { len, .. } => {
                    step.extend((first..first + len / PAGE).map(|page| (page, None)));
                }
            }
        }
        self.apply(step)
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<Reply, SpaceError> {
        let len = data.len() as u64;
        check_range(self.size_bytes, offset, len)?;
        check_whole_pages(offset, len)?;
        self.apply(numbered_pages(offset / PAGE, data).collect())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<Reply, SpaceError> {
        check_range(self.size_bytes, offset, len)?;
        check_whole_pages(offset, len)?;
        if len / PAGE > self.limits.pages as u64 {
            return Err(self.no_space());
        }
        let pages = offset / PAGE..(offset + len) / PAGE;
        self.apply(pages.map(|page| (page, None)).collect())
    }

    fn apply(&self, step: PageMap) -> Result<Reply, SpaceError> {
        let mut changed = poison::lock(&self.changed);
        let (mut pages, mut data_pages) = (changed.pages.len(), changed.data_pages);
        for (page, bytes) in &step {
            let old = changed.pages.get(page);
            pages += usize::from(old.is_none());
            data_pages += usize::from(bytes.is_some());
            data_pages -= usize::from(old.is_some_and(Option::is_some));
        }
        if pages > self.limits.pages || data_pages > self.limits.data_pages {
            return Err(self.no_space());
        }
        changed.pages.extend(step);
        changed.data_pages = data_pages;
        Ok(Reply::Done)
    }

    fn no_space(&self) -> SpaceError {
        let bytes = self.limits.data_pages as u64 * PAGE;
        SpaceError::NoSpace(format!(
            "a read-only mount, whose memory for recovery has {bytes} bytes"
        ))
    }
}

fn numbered_pages(first: u64, data: &[u8]) -> impl Iterator<Item = (u64, Option<Box<Page>>)> {
    let (pages, _) = data.as_chunks::<PAGE_BYTES>();
    (first..).zip(pages.iter().map(|page| Some(Box::new(*page))))
}

fn check_whole_pages(offset: u64, len: u64) -> Result<(), SpaceError> {
    match offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) {
        true => Ok(()),
        false => Err(SpaceError::Unsupported(format!(
            "{len} bytes at {offset} are not whole pages, and a snapshot takes no others in its recovery"
        ))),
    }
}

/// Replaces the bytes of changed pages in bytes that were read at an offset.
fn put_changed(changed: &PageMap, offset: u64, data: &mut [u8]) {
    let end = offset + data.len() as u64;
    for (page, bytes) in changed.range(offset / PAGE..end.div_ceil(PAGE)) {
        let start = (page * PAGE).max(offset);
        let stop = (page * PAGE + PAGE).min(end);
        let into = &mut data[(start - offset) as usize..(stop - offset) as usize];
        match bytes {
            Some(bytes) => {
                let from = (start - page * PAGE) as usize;
                into.copy_from_slice(&bytes[from..from + into.len()]);
            }
            None => into.fill(0),
        }
    }
}

/// The extents of a range that begins at an offset, with the changed pages.
fn with_changed(changed: &PageMap, offset: u64, extents: &[Extent]) -> Vec<Extent> {
    let mut found: Vec<Extent> = Vec::new();
    let mut push = |len: u64, mapped: bool| match found.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.mapped == mapped => last.len += len,
        _ => found.push(Extent { len, mapped }),
    };
    let mut at = offset;
    for extent in extents {
        let end = at + extent.len;
        for (page, bytes) in changed.range(at / PAGE..end.div_ceil(PAGE)) {
            let start = (page * PAGE).clamp(at, end);
            let stop = (page * PAGE + PAGE).min(end);
            push(start - at, extent.mapped);
            push(stop - start, bytes.is_some());
            at = stop;
        }
        push(end - at, extent.mapped);
        at = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    /// A space of 16 pages of ones, of which the second half is a hole.
    struct Ones;

    struct OnesChannel(Vec<Completion>);

    impl Space for Ones {
        fn size_bytes(&self) -> u64 {
            16 * PAGE
        }

        fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
            Ok(Box::new(OnesChannel(vec![])))
        }
    }

    impl Channel for OnesChannel {
        fn submit(&mut self, token: Token, request: Request) {
            let reply = match request {
                Request::Read { len, .. } => Reply::Data(vec![1; len as usize]),
                Request::Extents { offset, len } => {
                    let mapped = (8 * PAGE).saturating_sub(offset).min(len);
                    let extents = [(mapped, true), (len - mapped, false)];
                    let extents = extents.into_iter().filter(|(len, _)| *len > 0);
                    Reply::Extents(
                        extents
                            .map(|(len, mapped)| Extent { len, mapped })
                            .collect(),
                    )
                }
                other => panic!("{other:?} reaches the space below"),
            };
            let result = Ok(reply);
            self.0.push(Completion { token, result });
        }

        fn reap(&mut self, into: &mut Vec<Completion>) {
            into.append(&mut self.0);
        }

        fn poll_fds(&self, _: &mut Vec<RawFd>) {}
    }

    fn overlay(data_pages: usize, pages: usize) -> OverlaySpace {
        OverlaySpace {
            limits: OverlayLimits { data_pages, pages },
            ..OverlaySpace::new(Arc::new(Ones))
        }
    }

    fn ask(space: &OverlaySpace, request: Request) -> Result<Reply, SpaceError> {
        let mut channel = space.open().unwrap();
        channel.submit(Token(1), request);
        let mut done = vec![];
        channel.reap(&mut done);
        done.pop().unwrap().result
    }

    fn write(page: u64, value: u8) -> Request {
        Request::Write {
            offset: page * PAGE,
            data: Bytes::from(vec![value; PAGE_BYTES]),
            durable: true,
        }
    }

    fn clear(first: u64, count: u64) -> Request {
        let (offset, len) = (first * PAGE, count * PAGE);
        Request::Discard { offset, len }
    }

    #[test]
    fn reads_see_changes_of_other_channels() {
        let space = overlay(16, 16);
        ask(&space, write(2, 7)).unwrap();
        ask(&space, clear(3, 1)).unwrap();
        let (offset, len) = (2 * PAGE - 1, 2 * PAGE as u32 + 2);
        let Ok(Reply::Data(data)) = ask(&space, Request::Read { offset, len }) else {
            panic!("no data");
        };
        let [first, middle @ .., last] = &data[..] else {
            panic!("short");
        };
        assert_eq!((*first, *last), (1, 1));
        let (seven, zero) = middle.split_at(PAGE_BYTES);
        assert!(seven.iter().all(|it| *it == 7) && zero.iter().all(|it| *it == 0));
    }

    #[test]
    fn extents_show_changed_pages() {
        let space = overlay(16, 16);
        ask(&space, write(10, 7)).unwrap();
        ask(&space, clear(3, 2)).unwrap();
        let (offset, len) = (PAGE, 15 * PAGE);
        let Ok(Reply::Extents(extents)) = ask(&space, Request::Extents { offset, len }) else {
            panic!("no extents");
        };
        let extents: Vec<_> = extents
            .iter()
            .map(|it| (it.len / PAGE, it.mapped))
            .collect();
        let expected = [
            (2, true),
            (2, false),
            (3, true),
            (2, false),
            (1, true),
            (5, false),
        ];
        assert_eq!(extents, expected);
    }

    #[test]
    fn change_beyond_a_limit_changes_nothing() {
        let space = overlay(2, 4);
        ask(&space, write(0, 7)).unwrap();
        ask(&space, write(1, 7)).unwrap();
        let is_full = |done| matches!(done, Err(SpaceError::NoSpace(_)));
        assert!(is_full(ask(&space, write(2, 7))));
        // A changed page is changed again, and a cleared one makes room.
        ask(&space, write(1, 8)).unwrap();
        ask(&space, clear(1, 1)).unwrap();
        ask(&space, write(2, 9)).unwrap();
        assert!(is_full(ask(&space, clear(3, 2))));
        assert!(is_full(ask(&space, clear(0, 16))));
        ask(&space, clear(3, 1)).unwrap();
        let part = Request::WriteZeroes {
            offset: 0,
            len: 100,
            durable: false,
        };
        let refused = ask(&space, part);
        assert!(matches!(refused, Err(SpaceError::Unsupported(_))));
    }
}
