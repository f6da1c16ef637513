//! Direct clients that extend a file.

use bytes::Bytes;
use pagemesh_base::slice::TransactionPart;
use pagemesh_base::space::{Request, Space, Token};
use pagemesh_fs::{APPEND_PAGES_MAX, AppendExtent, SharedFileMap, TailWrite, Time, span_index};
use std::sync::{Arc, Mutex};

/// Size of a space in memory that direct clients write to.
pub const MEMORY_BYTES: u64 = 1 << 36;
const PAGE: u64 = 4096;

/// The state that the direct clients of a file share. One client acts at a time.
#[derive(Default)]
pub struct FileMapState {
    pub closed: u64,
    pub is_outdated: bool,
    pub is_torn: bool,
    pub end: u64,
    pub growth: Option<AppendExtent>,
    pub tail: Vec<u8>,
    pub spans: Vec<u64>,
}

#[derive(Default)]
pub struct TestDirectClient(
    pub Mutex<FileMapState>,
    pub Mutex<Option<Time>>,
    /// Runs at the next close of the map.
    Mutex<Option<Box<dyn FnOnce() + Send>>>,
);

impl SharedFileMap for TestDirectClient {
    fn close(&self) {
        self.0.lock().unwrap().closed += 1;
        let closing = self.2.lock().unwrap().take();
        if let Some(closing) = closing {
            closing();
        }
    }

    fn reopen(&self) {
        self.0.lock().unwrap().closed -= 1;
    }

    fn outdate(&self) {
        self.0.lock().unwrap().is_outdated = true;
    }

    fn publish(&self, size: u64, spans: &[u64]) {
        let mut told = self.0.lock().unwrap();
        *told = FileMapState {
            closed: told.closed,
            end: size,
            spans: spans.to_vec(),
            ..FileMapState::default()
        };
    }

    fn take_write_time(&self) -> Option<Time> {
        self.1.lock().unwrap().take()
    }

    fn is_outdated(&self) -> bool {
        self.0.lock().unwrap().is_outdated
    }

    fn grant_append_space(&self, growth: AppendExtent, tail: &[u8]) {
        let mut told = self.0.lock().unwrap();
        told.growth = Some(growth);
        told.tail = tail.to_vec();
    }

    fn append_end(&self, growth: AppendExtent) -> Option<u64> {
        let told = self.0.lock().unwrap();
        (!told.is_torn && told.growth == Some(growth)).then_some(told.end)
    }
}

/// How a direct client ends a write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WriteEnd {
    Completed,
    /// The client dies, and its data is written.
    DiesAfterWrite,
    /// The client dies before it writes.
    DiesBeforeWrite,
}

impl TestDirectClient {
    /// Runs `run` once, at the next close of the map.
    pub fn on_next_close(&self, run: impl FnOnce() + Send + 'static) {
        *self.2.lock().unwrap() = Some(Box::new(run));
    }

    /// Writes to the last page or at the end; false if the kernel must do it.
    pub fn write(&self, space: &Arc<dyn Space>, back: u64, data: &[u8], ending: WriteEnd) -> bool {
        let mut told = self.0.lock().unwrap();
        assert_eq!(told.closed, 0);
        let (false, Some(growth)) = (told.is_outdated, told.growth) else {
            return false;
        };
        let (end, offset) = (told.end, told.end - back);
        let Some(composed) = TailWrite::plan(growth, end, offset, data.len()) else {
            return false;
        };
        let mut pages = vec![0xee; APPEND_PAGES_MAX * 4096];
        pages[..told.tail.len()].copy_from_slice(&told.tail);
        composed.fill(growth, &mut pages, end, offset, data);
        let (index, within) = span_index(composed.first_page);
        let place = (told.spans[index] + within) * PAGE;
        pages.truncate(composed.page_count * 4096);
        if ending != WriteEnd::DiesBeforeWrite {
            write_record(space, place, &pages);
        }
        if ending != WriteEnd::Completed {
            told.is_torn = true;
            told.is_outdated = true;
            return true;
        }
        let last = ((composed.end / PAGE - composed.first_page) * PAGE) as usize;
        told.tail = pages[last..last + (composed.end % PAGE) as usize].to_vec();
        told.end = composed.end;
        true
    }
}

/// Writes as one record does. Memory has no records; a pool writes one record per write.
pub fn write_record(space: &Arc<dyn Space>, offset: u64, pages: &[u8]) {
    let mut channel = space.open().unwrap();
    let data = Bytes::from(pages.to_vec());
    let durable = false;
    let request = match space.size_bytes() {
        MEMORY_BYTES => Request::Transact {
            parts: vec![TransactionPart::Write { offset, data }],
            durable,
        },
        _ => Request::Write {
            offset,
            data,
            durable,
        },
    };
    channel.submit(Token(1), request);
    let mut done = Vec::new();
    channel.reap(&mut done);
    done.pop().unwrap().result.unwrap();
}
