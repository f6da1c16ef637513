//! Requests to a space that wait for their ends, with several changes in flight.

use anyhow::{Context, bail};
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Extent, Reply, Request, Space, Token};
use pagemesh_base::wait;

/// Changes in flight: enough to keep each leg busy, and a few MiB.
pub const CHANGES_MAX: usize = 16;
/// Reads in flight.
const READS_MAX: usize = 16;
/// Bytes of one request that clears a range.
const CLEAR_BYTES_MAX: u64 = 256 << 20;

/// A channel of a space. Its caller waits.
pub struct SpaceIo {
    channel: Box<dyn Channel>,
    completions: Vec<Completion>,
    in_flight: usize,
    last: u64,
}

impl SpaceIo {
    /// Opens a channel.
    pub fn open(space: &dyn Space) -> anyhow::Result<SpaceIo> {
        Ok(SpaceIo {
            channel: space.open()?,
            completions: Vec::new(),
            in_flight: 0,
            last: 0,
        })
    }

    /// Reads a range. No change is in flight.
    pub fn read(&mut self, offset: u64, len: u32) -> anyhow::Result<Vec<u8>> {
        match self.ask(Request::Read { offset, len })? {
            Reply::Data(data) => Ok(data),
            _ => bail!("an answer without data"),
        }
    }

    /// Reads ranges, several at once. No change is in flight.
    pub fn read_all(&mut self, ranges: &[(u64, u32)]) -> anyhow::Result<Vec<Vec<u8>>> {
        let mut read: Vec<Vec<u8>> = vec![Vec::new(); ranges.len()];
        let first = self.last + 1;
        let mut started = 0;
        let mut ended = 0;
        while ended < ranges.len() {
            while started < ranges.len() && self.in_flight < READS_MAX {
                let (offset, len) = ranges[started];
                self.submit(Request::Read { offset, len });
                started += 1;
            }
            let (token, reply) = self.wait_for_next()?;
            let index = token.0.checked_sub(first).map(|index| index as usize);
            match (index.and_then(|index| read.get_mut(index)), reply) {
                (Some(part), Reply::Data(data)) => *part = data,
                _ => bail!("an answer to no read"),
            }
            ended += 1;
        }
        Ok(read)
    }

    /// The extents from the start of a range on: at least one. No change is in flight.
    pub fn extents(&mut self, offset: u64, len: u64) -> anyhow::Result<Vec<Extent>> {
        match self.ask(Request::Extents { offset, len })? {
            Reply::Extents(extents) if extents.iter().any(|it| it.len > 0) => Ok(extents),
            _ => bail!("an answer without extents"),
        }
    }

    /// Starts a write, after the end of an earlier one if too many are in flight.
    pub fn write(&mut self, offset: u64, data: Vec<u8>) -> anyhow::Result<()> {
        let (data, durable) = (Bytes::from(data), false);
        self.change(Request::Write {
            offset,
            data,
            durable,
        })
    }

    /// Starts to make a range read as zeroes.
    pub fn clear(&mut self, offset: u64, len: u64) -> anyhow::Result<()> {
        let end = offset + len;
        let mut offset = offset;
        while offset < end {
            let len = CLEAR_BYTES_MAX.min(end - offset);
            self.change(Request::WriteZeroes {
                offset,
                len,
                durable: false,
            })?;
            offset += len;
        }
        Ok(())
    }

    /// Waits for all changes.
    pub fn wait(&mut self) -> anyhow::Result<()> {
        while self.in_flight > 0 {
            self.wait_for_one()?;
        }
        Ok(())
    }

    /// Waits for all changes, and makes them durable.
    pub fn flush(&mut self) -> anyhow::Result<()> {
        self.wait()?;
        self.ask(Request::Flush).map(drop)
    }

    fn change(&mut self, request: Request) -> anyhow::Result<()> {
        while self.in_flight >= CHANGES_MAX {
            self.wait_for_one()?;
        }
        self.submit(request);
        Ok(())
    }

    fn ask(&mut self, request: Request) -> anyhow::Result<Reply> {
        self.submit(request);
        self.wait_for_one()
    }

    fn submit(&mut self, request: Request) {
        self.last += 1;
        self.in_flight += 1;
        self.channel.submit(Token(self.last), request);
    }

    /// The reply of any request.
    fn wait_for_one(&mut self) -> anyhow::Result<Reply> {
        Ok(self.wait_for_next()?.1)
    }

    /// The next reply, and the request that it is for.
    fn wait_for_next(&mut self) -> anyhow::Result<(Token, Reply)> {
        loop {
            if let Some(completion) = self.completions.pop() {
                self.in_flight -= 1;
                return Ok((completion.token, completion.result?));
            }
            self.channel.reap(&mut self.completions);
            if self.completions.is_empty() {
                let mut fds = Vec::new();
                self.channel.poll_fds(&mut fds);
                wait::until_readable(&fds, self.channel.deadline())
                    .context("cannot wait for the volume")?;
            }
        }
    }
}
