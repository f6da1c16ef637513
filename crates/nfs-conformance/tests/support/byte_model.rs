//! The bytes of a file as RFC 1813, section 4.8 (and RFC 8881, section 18.32) promise them to a client
//! that keeps all data without a COMMIT.

use anyhow::{Result, ensure};

pub type Verifier = [u8; 8];

#[derive(Clone)]
struct Byte {
    now: u8,
    /// The verifier of the UNSTABLE write of this byte.
    verifier: Option<Verifier>,
    /// Values that a crash may bring back. A stable byte has none.
    older: Vec<u8>,
}

const ZERO: Byte = Byte {
    now: 0,
    verifier: None,
    older: Vec::new(),
};

/// See the module.
#[derive(Default)]
pub struct ByteModel {
    bytes: Vec<Byte>,
    /// Bytes that the file has after any crash.
    stable_len: usize,
    /// A crash may have lost unstable bytes, and the client has not written them again.
    is_doubtful: bool,
}

impl ByteModel {
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub fn write(&mut self, offset: u64, data: &[u8], unstable: Option<Verifier>) {
        let start = offset as usize;
        let end = start + data.len();
        self.bytes.resize(self.bytes.len().max(end), ZERO);
        for (byte, value) in self.bytes[start..end].iter_mut().zip(data) {
            match unstable {
                Some(_) if !byte.older.contains(&byte.now) => byte.older.push(byte.now),
                Some(_) => {}
                None => byte.older.clear(),
            }
            byte.now = *value;
            byte.verifier = unstable;
        }
        if unstable.is_none() {
            self.stable_len = self.stable_len.max(end);
        }
    }

    pub fn set_size(&mut self, size: u64) {
        self.bytes.resize(size as usize, ZERO);
        self.stable_len = size as usize;
    }

    /// Returns the data that the client must write again.
    pub fn commit(&mut self, verifier: Verifier) -> Vec<(u64, Vec<u8>)> {
        let mut lost: Vec<(u64, Vec<u8>)> = Vec::new();
        for (at, byte) in self.bytes.iter_mut().enumerate() {
            if byte.verifier == Some(verifier) {
                byte.verifier = None;
                byte.older.clear();
            }
            if byte.verifier.is_none() {
                continue;
            }
            match lost.last_mut() {
                Some((start, data)) if *start as usize + data.len() == at => data.push(byte.now),
                _ => lost.push((at as u64, vec![byte.now])),
            }
        }
        if lost.is_empty() {
            self.stable_len = self.bytes.len();
            self.is_doubtful = false;
        }
        lost
    }

    pub fn crash(&mut self) {
        let is_dirty = self.bytes.iter().any(|byte| byte.verifier.is_some());
        self.is_doubtful |= is_dirty;
    }

    pub fn check_read(&self, offset: u64, count: u32, data: &[u8], is_end: bool) -> Result<()> {
        let start = self.bytes.len().min(offset as usize);
        let end = self.bytes.len().min(start + count as usize);
        let wanted = &self.bytes[start..end];
        let least = match self.is_doubtful {
            true => self.stable_len.clamp(start, end) - start,
            false => wanted.len(),
        };
        let len = data.len();
        ensure!(
            least <= len && len <= wanted.len(),
            "{len} bytes at {offset} instead of {least} to {}: acknowledged data is lost",
            wanted.len()
        );
        for (at, (value, byte)) in data.iter().zip(wanted).enumerate() {
            let is_old = self.is_doubtful && byte.older.contains(value);
            ensure!(
                *value == byte.now || is_old,
                "byte {} is {value} instead of {}: acknowledged data is lost",
                start + at,
                byte.now
            );
        }
        let is_past = offset + u64::from(count) >= self.len();
        ensure!(
            self.is_doubtful || is_end == is_past,
            "wrong end of the file"
        );
        Ok(())
    }
}
