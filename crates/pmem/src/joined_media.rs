//! Several mapped devices as one medium, for checks of a pool without a brick.

use crate::map_error::MapError;
use crate::mapped_media::MappedMedia;
use crate::media::{FenceProof, Media, UnfencedStores};
use crate::unreadable::PATTERN;
use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::poison::lock;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use std::ops::Range;
use std::sync::Mutex;

/// Mapped devices, each at its first byte.
pub struct JoinedMedia {
    /// First bytes, lengths of heads, and devices, in rising order. The first begins at byte 0.
    devices: Vec<(usize, usize, MappedMedia)>,
    /// Ranges of failed devices.
    absent: Mutex<Vec<Range<usize>>>,
}

impl JoinedMedia {
    /// A medium of one device.
    #[must_use]
    pub fn new(first: MappedMedia) -> JoinedMedia {
        JoinedMedia {
            devices: vec![(0, 0, first)],
            absent: Mutex::default(),
        }
    }

    /// Adds a device at a byte that no other device has. Readers verify its bytes behind the first `head_len`.
    pub fn join(&mut self, first_byte: usize, head_len: usize, device: MappedMedia) {
        device.tolerate_unreadable(head_len);
        self.devices.push((first_byte, head_len, device));
        self.devices.sort_by_key(|(start, ..)| *start);
    }

    /// The first device.
    #[must_use]
    pub fn first(&self) -> &MappedMedia {
        &self.devices[0].2
    }

    /// Private mappings of all devices.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn overlay(&self) -> Result<JoinedMedia, MapError> {
        let mut joined = JoinedMedia::new(self.first().overlay()?);
        for (start, head_len, device) in &self.devices[1..] {
            joined.join(*start, *head_len, device.overlay()?);
        }
        joined.absent = Mutex::new(lock(&self.absent).clone());
        Ok(joined)
    }

    /// The device with a byte, and its own byte. None if the device is absent.
    #[track_caller]
    fn device(&self, offset: usize) -> Option<(&MappedMedia, usize)> {
        let number = self.devices.partition_point(|(start, ..)| *start <= offset);
        let (start, _, device) = &self.devices[number - 1];
        let at = offset - start;
        let is_there = at < device.len_bytes() || !self.is_absent(offset);
        is_there.then_some((device, at))
    }

    fn is_absent(&self, offset: usize) -> bool {
        lock(&self.absent)
            .iter()
            .any(|bytes| bytes.contains(&offset))
    }
}

impl Media for JoinedMedia {
    fn len_bytes(&self) -> usize {
        let ends = self
            .devices
            .iter()
            .map(|(start, _, it)| start + it.len_bytes());
        let absent = lock(&self.absent);
        let absent = absent.iter().map(|bytes| bytes.end).max();
        ends.chain(absent).max().unwrap_or(0)
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        match self.device(offset) {
            Some((device, at)) => device.read(at, into),
            None => {
                for (byte, at) in into.iter_mut().zip(offset..) {
                    *byte = PATTERN.to_le_bytes()[at % 8];
                }
            }
        }
    }

    fn load(&self, offset: usize) -> u64 {
        let device = self.device(offset);
        device.map_or(PATTERN, |(device, at)| device.load(at))
    }

    fn store(&self, offset: usize, word: u64) {
        if let Some((device, at)) = self.device(offset) {
            device.store(at, word);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        if let Some((device, at)) = self.device(offset) {
            device.write(at, bytes);
        }
    }

    fn prepare_stores(&self, offset: usize, len: usize) {
        if let Some((device, at)) = self.device(offset) {
            device.prepare_stores(at, len.min(device.len_bytes() - at));
        }
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        let (device, at) = self.device(offset).ok_or(PATTERN)?;
        device.compare_exchange(at, old, new)
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        match self.device(offset) {
            Some((device, at)) => device.stream_line(at, line),
            None => UnfencedStores(()),
        }
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        let targets = targets
            .iter()
            .filter_map(|(media, offset)| media.device(*offset));
        match &targets.collect::<Vec<_>>()[..] {
            [] => (PageChecksums::of(page), UnfencedStores(())),
            targets => MappedMedia::stream_page(targets, page),
        }
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        match self.device(offset) {
            Some((device, at)) => device.flush(at, len),
            None => UnfencedStores(()),
        }
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.first().fence(stores)
    }

    fn tolerate_unreadable(&self, from: usize) {
        self.first().tolerate_unreadable(from);
    }

    fn is_unreadable(&self, offset: usize) -> bool {
        let device = self.device(offset);
        device.is_none_or(|(device, at)| device.is_unreadable(at))
    }

    fn unreadable_pages(&self) -> Vec<usize> {
        let of_device = |(start, _, device): &(usize, usize, MappedMedia)| {
            let pages = device.unreadable_pages();
            pages.into_iter().map(|at| start + at).collect::<Vec<_>>()
        };
        self.devices.iter().flat_map(of_device).collect()
    }

    fn attach_absent(&self, bytes: Range<usize>) -> Result<(), MapError> {
        let mut absent = lock(&self.absent);
        if !absent.contains(&bytes) {
            absent.push(bytes);
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), MapError> {
        self.devices
            .iter()
            .try_for_each(|(.., device)| device.sync())
    }
}
