//! The raw figure: the cost of two copies without any other work.
//!
//! Pages go to two mapped memories with non-temporal stores and one fence per page. Targets are
//! random, sources stay in the cache. The CRC32C of each page is computed, because the mapper does
//! so in the same pass. The measurement allocates, records and locks nothing, and takes no page
//! fault.

use crate::error::BenchError;
use crate::load::{Rng, SOURCE_BYTES, random_bytes};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MappedMedia, Media};
use std::fs::File;
use std::path::Path;

/// Copies random pages twice, each pair fenced.
pub trait RawCopies {
    /// Makes `count` pairs of copies.
    fn copy_pages(&mut self, count: u64);

    /// The memory's durability class.
    fn class(&self) -> String;
}

/// Two files of one directory, mapped and touched completely.
pub struct RawMemory {
    copies: [MappedMedia; 2],
    pages: u64,
    sources: Vec<[u8; PAGE_BYTES]>,
    random: Rng,
}

impl RawMemory {
    /// Maps two unnamed files of `bytes` each, whole pages, in `dir`. Use the directory of the
    /// pools, so that the memory is of the same kind.
    ///
    /// # Errors
    /// If the files cannot be created, or there is no room for them.
    pub fn create(dir: &Path, bytes: usize) -> Result<RawMemory, BenchError> {
        let mut random = Rng::new(7);
        let page = |_| {
            let bytes = random_bytes(&mut random, PAGE_BYTES);
            bytes.try_into().expect("as many bytes as a page has")
        };
        let sources: Vec<[u8; PAGE_BYTES]> = (0..SOURCE_BYTES / PAGE_BYTES).map(page).collect();
        let memory = RawMemory {
            copies: [map(dir, bytes)?, map(dir, bytes)?],
            pages: (bytes / PAGE_BYTES) as u64,
            sources,
            random,
        };
        for page in 0..memory.pages as usize {
            memory.copy(page, page, page);
        }
        Ok(memory)
    }

    #[inline]
    fn copy(&self, source: usize, left: usize, right: usize) -> u32 {
        let [first, second] = &self.copies;
        let targets = [(first, left * PAGE_BYTES), (second, right * PAGE_BYTES)];
        let source = &self.sources[source % self.sources.len()];
        let (sums, stores) = MappedMedia::stream_page(&targets, source);
        let _fenced = MappedMedia::fence_each(&[first, second], stores);
        sums.crc
    }
}

fn map(dir: &Path, bytes: usize) -> Result<MappedMedia, BenchError> {
    let cannot = || {
        let text = format!("make a file of {bytes} bytes in {}", dir.display());
        BenchError::system(text)
    };
    let file: File = tempfile::tempfile_in(dir).map_err(cannot())?;
    // Allocated, not only sized: a full file system gives an error here, and no SIGBUS later.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64)
        .map_err(|errno| cannot()(errno.into()))?;
    MappedMedia::new(file, bytes).map_err(|cause| BenchError::Map {
        path: dir.to_owned(),
        cause,
    })
}

impl RawCopies for RawMemory {
    fn copy_pages(&mut self, count: u64) {
        let mut crcs = 0;
        for _ in 0..count {
            let source = self.random.below(self.sources.len() as u64) as usize;
            let left = self.random.below(self.pages) as usize;
            let right = self.random.below(self.pages) as usize;
            crcs ^= self.copy(source, left, right);
        }
        std::hint::black_box(crcs);
    }

    fn class(&self) -> String {
        self.copies[0].durability().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_files_get_copies_of_sources() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut memory = RawMemory::create(dir.path(), 64 * PAGE_BYTES).expect("memory");
        memory.copy_pages(100);
        for side in &memory.copies {
            for page in 0..64 {
                let mut bytes = [0; PAGE_BYTES];
                side.read(page * PAGE_BYTES, &mut bytes);
                assert!(memory.sources.contains(&bytes), "page {page}");
            }
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("listed").count(), 0);
    }

    #[test]
    fn missing_directory_is_named() {
        let error = RawMemory::create(Path::new("/nonexistent/pagemesh"), 4096).err();
        let text = error.map(|e| e.to_string()).unwrap_or_default();
        assert!(text.contains("/nonexistent/pagemesh"), "{text}");
    }
}
