//! The contents that every block of a volume may have, according to its clients.
//!
//! A written block names its volume, its position and its change. So an older, a foreign or a torn
//! block is never mistaken for a correct one.

use crate::faults::nbd::{Command, NbdConnection};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

pub const BLOCK: usize = 4096;
/// Blocks of one read of [`BlockOracle::verify`].
const READ_BLOCKS: usize = 64;
/// Wrong blocks that are described; all are counted.
const DESCRIBED_MAX: usize = 8;

/// The state of a block after one change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// The number of the change; 0 is before the first.
    pub change: u64,
    /// Whether the block holds zeroes: discarded, zeroed, or never written.
    pub zero: bool,
}

/// The states of a block: the first one is durable, the later ones are possible.
pub struct BlockHistory {
    states: Vec<BlockState>,
}

impl BlockHistory {
    /// Adds the state of a change in flight.
    pub fn begin(&mut self, state: BlockState) {
        self.states.push(state);
    }

    /// Records that a change is durable, and drops all older states. Returns false if a read has
    /// already excluded the change.
    pub fn confirm(&mut self, change: u64) -> bool {
        let at = self.states.iter().position(|state| state.change == change);
        self.states.drain(..at.unwrap_or(0));
        at.is_some()
    }

    /// The newest possible change.
    pub fn newest(&self) -> u64 {
        self.states.last().map_or(0, |state| state.change)
    }
}

pub struct BlockOracle {
    seed: u64,
    blocks: Vec<Mutex<BlockHistory>>,
    changes: AtomicU64,
}

impl BlockOracle {
    /// An oracle of a volume that was never written.
    pub fn new(seed: u64, bytes: u64) -> BlockOracle {
        let states = vec![BlockState {
            change: 0,
            zero: true,
        }];
        let block = || {
            Mutex::new(BlockHistory {
                states: states.clone(),
            })
        };
        BlockOracle {
            seed,
            blocks: (0..bytes / BLOCK as u64).map(|_| block()).collect(),
            changes: AtomicU64::new(0),
        }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub fn block(&self, number: u64) -> MutexGuard<'_, BlockHistory> {
        poison::lock(&self.blocks[number as usize])
    }

    /// A number for a new change.
    pub fn next_change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The last number given.
    pub fn mark(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Bytes of the blocks that were changed after a mark.
    pub fn bytes_changed_since(&self, mark: u64) -> u64 {
        let changed = (0..self.len()).filter(|&number| self.block(number).newest() > mark);
        changed.count() as u64 * BLOCK as u64
    }

    /// The bytes of a block after a change.
    pub fn content(&self, block: u64, change: u64, into: &mut [u8]) {
        let mut rng = SplitMix64::new(self.seed ^ block.rotate_left(40) ^ change.rotate_left(8));
        let mut words = into.chunks_exact_mut(8);
        for (word, head) in words.by_ref().take(3).zip([change, block, self.seed]) {
            word.copy_from_slice(&head.to_le_bytes());
        }
        for word in words {
            word.copy_from_slice(&rng.next_u64().to_le_bytes());
        }
    }

    /// The state of a block by its contents, or the reason why no change wrote it.
    fn recognise(&self, number: u64, found: &[u8]) -> Result<BlockState, String> {
        if found.iter().all(|byte| *byte == 0) {
            return Ok(BlockState {
                change: 0,
                zero: true,
            });
        }
        let word = |at: usize| {
            let word = found[at * 8..].first_chunk().copied();
            u64::from_le_bytes(word.unwrap_or_default())
        };
        let (change, block, seed) = (word(0), word(1), word(2));
        if (block, seed) != (number, self.seed) {
            return Err(format!("holds block {block} of {seed:#x}, change {change}"));
        }
        let mut right = [0; BLOCK];
        self.content(number, change, &mut right);
        match right == *found {
            true => Ok(BlockState {
                change,
                zero: false,
            }),
            false => Err(format!("is torn, or mixed with change {change}")),
        }
    }

    /// Checks a block that was read. With `fix` its state becomes the only possible one.
    pub fn check(&self, number: u64, found: &[u8], fix: bool) -> Result<(), String> {
        let told = |what: String| {
            let states = self.block(number).states.clone();
            format!("block {number} {what}; it may be {states:?}")
        };
        let state = self.recognise(number, found).map_err(&told)?;
        let mut block = self.block(number);
        let same = |other: &&BlockState| match state.zero {
            true => other.zero,
            false => **other == state,
        };
        // Of several zero states the newest, so that no possible state is lost.
        let known = block.states.iter().rev().find(same).copied();
        let Some(known) = known else {
            drop(block);
            return Err(told(format!("is {state:?}")));
        };
        if fix {
            block.states = vec![known];
        }
        Ok(())
    }

    /// Reads and checks all blocks. No other client may write meanwhile.
    #[track_caller]
    pub fn verify(&self, socket: &Path, export: &str) {
        let mut wrong = vec![];
        let mut nbd =
            NbdConnection::connect(socket, export, true).expect("the export takes clients");
        let mut number = 0;
        while number < self.len() {
            let count = (READ_BLOCKS as u64).min(self.len() - number);
            let len = count * BLOCK as u64;
            let at = number * BLOCK as u64;
            let sent = nbd.send(number, (Command::Read, 0), at, len as u32, &[]);
            let reply = sent.and_then(|()| nbd.reply()).expect("an answer");
            assert_eq!(reply.errno, 0, "reading {len} bytes at {at}");
            for (at, found) in reply.data.chunks_exact(BLOCK).enumerate() {
                if let Err(what) = self.check(number + at as u64, found, true) {
                    wrong.push(what);
                }
            }
            number += count;
        }
        assert!(
            wrong.is_empty(),
            "seed {:#x}: {} blocks are wrong: {:#?}",
            self.seed,
            wrong.len(),
            &wrong[..wrong.len().min(DESCRIBED_MAX)]
        );
    }
}
