//! A space in memory that records every change, so that a test can mount the image after each one.

use pagemesh_base::slice::{TransactionPart, check_parts};
use pagemesh_base::space::{
    Channel, Completion, Extent, Reply, Request, Space, SpaceError, Token, check_range,
};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const PAGE: u64 = PAGE_BYTES as u64;

pub type Page = [u8; PAGE_BYTES];

/// The pages that one request changed, as they are afterwards.
type ChangedPages = Vec<(u64, Option<Arc<Page>>)>;

#[derive(Default)]
struct MemoryContent {
    pages: BTreeMap<u64, Arc<Page>>,
    /// The pages before the first change.
    base: BTreeMap<u64, Arc<Page>>,
    steps: Vec<ChangedPages>,
    /// Most pages that may be mapped.
    room: Option<usize>,
    /// Unreadable pages.
    lost: BTreeSet<u64>,
    /// Changes are counted and not recorded.
    discards_history: bool,
}

#[derive(Clone)]
pub struct MemorySpace {
    size_bytes: u64,
    content: Arc<Mutex<MemoryContent>>,
    /// Requests that were submitted and are not done.
    requests_waiting: Arc<AtomicUsize>,
    has_write_cache: bool,
}

impl MemorySpace {
    pub fn new(size_bytes: u64) -> MemorySpace {
        MemorySpace {
            size_bytes,
            content: Arc::default(),
            requests_waiting: Arc::default(),
            has_write_cache: false,
        }
    }

    /// The same memory, as a space with a write cache.
    #[allow(dead_code)]
    pub fn with_write_cache(self) -> MemorySpace {
        MemorySpace {
            has_write_cache: true,
            ..self
        }
    }

    /// Stalls all requests while `run` runs. Its argument waits until a request is submitted.
    pub fn while_stalled<T>(&self, run: impl FnOnce(&dyn Fn()) -> T) -> T {
        let _held = self.content.lock().unwrap();
        run(&|| {
            while self.requests_waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
        })
    }

    /// Limits the number of mapped pages.
    pub fn set_room(&self, pages: Option<usize>) {
        self.content.lock().unwrap().room = pages;
    }

    pub fn mapped_pages(&self) -> usize {
        self.content.lock().unwrap().pages.len()
    }

    /// Number of changes so far.
    pub fn steps(&self) -> usize {
        self.content.lock().unwrap().steps.len()
    }

    /// Pages of the last change.
    #[allow(dead_code)]
    pub fn last_step_pages(&self) -> usize {
        self.content
            .lock()
            .unwrap()
            .steps
            .last()
            .map_or(0, Vec::len)
    }

    /// The image after this many changes.
    pub fn after_steps(&self, steps: usize) -> MemorySpace {
        self.with_changes(|step| step < steps)
    }

    /// The image after the changes of these numbers, in their order.
    pub fn with_changes(&self, is_kept: impl Fn(usize) -> bool) -> MemorySpace {
        let old = MemorySpace::new(self.size_bytes);
        {
            let content = self.content.lock().unwrap();
            let mut into = old.content.lock().unwrap();
            into.pages = content.base.clone();
            let steps = content.steps.iter().enumerate();
            for (_, step) in steps.filter(|(number, _)| is_kept(*number)) {
                apply(&mut into.pages, step);
            }
            into.base = into.pages.clone();
        }
        old
    }

    pub fn pages(&self) -> Vec<u64> {
        self.content.lock().unwrap().pages.keys().copied().collect()
    }

    /// A copy of the current content.
    pub fn snapshot(&self) -> MemorySpace {
        self.with_size(self.size_bytes)
    }

    /// A copy of the current content, of another size, that only counts its changes.
    pub fn with_size(&self, size_bytes: u64) -> MemorySpace {
        let copy = MemorySpace::new(size_bytes);
        {
            let mut into = copy.content.lock().unwrap();
            into.pages = self.content.lock().unwrap().pages.clone();
            into.discards_history = true;
        }
        copy
    }

    /// Flips bits of a byte.
    pub fn flip_bits(&self, page: u64, at: usize, with: u8) {
        self.corrupt(page, |bytes| bytes[at] ^= with);
    }

    pub fn page(&self, page: u64) -> Page {
        self.content.lock().unwrap().page(page)
    }

    /// Changes bytes as another client of the volume would.
    pub fn corrupt(&self, page: u64, change: impl FnOnce(&mut Page)) {
        let mut content = self.content.lock().unwrap();
        let mut bytes = content.page(page);
        change(&mut bytes);
        content.pages.insert(page, Arc::new(bytes));
    }

    /// Makes a page unreadable.
    pub fn make_unreadable(&self, page: u64) {
        self.content.lock().unwrap().lost.insert(page);
    }

    pub fn shared(&self) -> Arc<dyn Space> {
        Arc::new(self.clone())
    }
}

fn apply(pages: &mut BTreeMap<u64, Arc<Page>>, step: &ChangedPages) {
    for (page, bytes) in step {
        match bytes {
            Some(bytes) => pages.insert(*page, bytes.clone()),
            None => pages.remove(page),
        };
    }
}

impl Space for MemorySpace {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn has_write_cache(&self) -> bool {
        self.has_write_cache
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(MemoryChannel {
            memory: self.clone(),
            done: Vec::new(),
        }))
    }
}

struct MemoryChannel {
    memory: MemorySpace,
    done: Vec<Completion>,
}

impl MemoryContent {
    fn page(&self, page: u64) -> Page {
        self.pages.get(&page).map_or([0; PAGE_BYTES], |page| **page)
    }

    fn commit(&mut self, step: ChangedPages) -> Result<Reply, SpaceError> {
        let is_discard = step.iter().all(|(_, bytes)| bytes.is_none());
        let more = step
            .iter()
            .filter(|(page, bytes)| bytes.is_some() && !self.pages.contains_key(page));
        if let Some(room) = self.room
            && !is_discard
            && self.pages.len() + more.count() > room
        {
            return Err(SpaceError::NoSpace("memory".into()));
        }
        apply(&mut self.pages, &step);
        self.steps.push(if self.discards_history {
            ChangedPages::new()
        } else {
            step
        });
        Ok(Reply::Done)
    }

    fn write(&self, offset: u64, data: &[u8], step: &mut ChangedPages) {
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let within = (at % PAGE) as usize;
            let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - within));
            let mut page = self.page(at / PAGE);
            page[within..within + part.len()].copy_from_slice(part);
            step.push((at / PAGE, Some(Arc::new(page))));
            at += part.len() as u64;
            rest = after;
        }
    }
}

impl MemoryChannel {
    fn run(&self, request: Request) -> Result<Reply, SpaceError> {
        let size = self.memory.size_bytes;
        self.memory.requests_waiting.fetch_add(1, Ordering::SeqCst);
        let mut content = self.memory.content.lock().unwrap();
        match request {
            Request::Read { offset, len } => {
                check_range(size, offset, len.into())?;
                let pages = offset / PAGE..(offset + u64::from(len)).div_ceil(PAGE);
                if let Some(lost) = content.lost.range(pages.clone()).next() {
                    return Err(SpaceError::Damaged {
                        offset: lost * PAGE,
                        place: "memory".into(),
                    });
                }
                let bytes: Vec<u8> = pages.flat_map(|page| content.page(page)).collect();
                let first = (offset % PAGE) as usize;
                Ok(Reply::Data(bytes[first..first + len as usize].to_vec()))
            }
            Request::Write { offset, data, .. } => {
                check_range(size, offset, data.len() as u64)?;
                // Page by page: a crash may come between two.
                let mut step = ChangedPages::new();
                content.write(offset, &data, &mut step);
                for page in step {
                    content.commit(vec![page])?;
                }
                Ok(Reply::Done)
            }
            Request::Transact { parts, .. } => {
                check_parts(&parts, size)?;
                let mut step = ChangedPages::new();
                for part in parts {
                    match part {
                        TransactionPart::Write { offset, data } => {
                            content.write(offset, &data, &mut step)
                        }
                        TransactionPart::Clear { offset, len } => {
                            let pages = offset / PAGE..(offset + len) / PAGE;
                            step.extend(pages.map(|page| (page, None)));
                        }
                    }
                }
                content.commit(step)
            }
            Request::Discard { offset, len } => {
                check_range(size, offset, len)?;
                assert!(offset % PAGE == 0 && len % PAGE == 0, "whole pages");
                let range = offset / PAGE..(offset + len) / PAGE;
                let pages: Vec<u64> = content.pages.range(range).map(|(&page, _)| page).collect();
                for page in pages {
                    content.commit(vec![(page, None)])?;
                }
                Ok(Reply::Done)
            }
            Request::WriteZeroes { .. } => panic!("the file system never sends it"),
            Request::Flush => Ok(Reply::Done),
            Request::Extents { offset, len } => {
                check_range(size, offset, len)?;
                let mut extents: Vec<Extent> = Vec::new();
                for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
                    let mapped = content.pages.contains_key(&page);
                    let so_far = extents.len();
                    match extents.last_mut() {
                        Some(last) if last.mapped == mapped => last.len += PAGE,
                        // Replies may end early.
                        _ if so_far == 3 => break,
                        _ => extents.push(Extent { len: PAGE, mapped }),
                    }
                }
                Ok(Reply::Extents(extents))
            }
        }
    }
}

impl Channel for MemoryChannel {
    fn submit(&mut self, token: Token, request: Request) {
        let result = self.run(request);
        self.memory.requests_waiting.fetch_sub(1, Ordering::SeqCst);
        self.done.push(Completion { token, result });
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}

/// This space never blocks.
pub fn wait(_: &[RawFd], _: Option<Instant>) {
    panic!("memory answers at once");
}
