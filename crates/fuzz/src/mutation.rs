//! One input becomes another.

use crate::Random;

/// Changes made to one input, at most.
const CHANGES_MAX: usize = 4;
/// Bytes inserted, removed or repeated at once, mostly.
const RUN_BYTES: usize = 16;

/// Numbers at which decoders err.
const EDGES: [u64; 18] = [
    0,
    1,
    2,
    7,
    8,
    63,
    64,
    127,
    128,
    255,
    4095,
    4096,
    0x7fff,
    0xffff,
    1 << 20,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 63,
];

pub(crate) fn mutate(input: &mut Vec<u8>, other: &[u8], bytes_max: usize, random: &mut Random) {
    for _ in 0..=random.below(CHANGES_MAX) {
        change(input, other, random);
    }
    input.truncate(bytes_max);
}

fn change(input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(input.len());
    let run = range(input.len(), random);
    match random.below(11) {
        0 => flip(input, at, random),
        1 => set(input, at, random.draw() as u8),
        2 | 3 => put(input, at, random),
        4 => add(input, at, random),
        5 => {
            let bytes: Vec<u8> = (0..random.below(RUN_BYTES))
                .map(|_| random.draw() as u8)
                .collect();
            input.splice(at..at, bytes);
        }
        6 => drop(input.drain(run)),
        7 => {
            let again = input[run.clone()].to_vec();
            input.splice(run.start..run.start, again);
        }
        8 => {
            let theirs = &other[range(other.len(), random)];
            for (to, from) in input.iter_mut().skip(at).zip(theirs) {
                *to = *from;
            }
        }
        9 => {
            let theirs = &other[range(other.len(), random)];
            input.splice(at..at, theirs.iter().copied());
        }
        _ => input.truncate(at),
    }
}

/// A range within `len`, mostly a short one.
fn range(len: usize, random: &mut Random) -> std::ops::Range<usize> {
    let start = random.below(len + 1);
    let most = len - start;
    let count = match random.below(4) {
        0 => random.below(most + 1),
        _ => random.below(RUN_BYTES + 1).min(most),
    };
    start..start + count
}

fn flip(input: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = input.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn set(input: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = input.get_mut(at) {
        *byte = value;
    }
}

/// Puts an edge, or the number just below or above, as 1, 2, 4 or 8 bytes of
/// either order; fields lie at multiples of their size more often than not.
fn put(input: &mut [u8], at: usize, random: &mut Random) {
    let width = 1 << random.below(4);
    let at = match random.below(4) {
        0 => at,
        _ => at / width * width,
    };
    let near = random.choose(&[0, 1, u64::MAX]);
    let value = random.choose(&EDGES).wrapping_add(*near);
    let little = value.to_le_bytes();
    let big = value.to_be_bytes();
    let bytes = match random.below(2) {
        0 => &little[..width],
        _ => &big[8 - width..],
    };
    for (to, from) in input.iter_mut().skip(at).zip(bytes) {
        *to = *from;
    }
}

fn add(input: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = input.get_mut(at) {
        let by = random.below(33) as u8;
        *byte = byte.wrapping_add(by).wrapping_sub(16);
    }
}
