//! Mutates one input into another.

use crate::Random;

/// Maximum number of changes to one input.
const CHANGES_MAX: usize = 4;
/// Usual maximum of bytes inserted, removed or repeated at once.
const RANGE_BYTES_MAX: usize = 16;

/// Boundary values at which decoders tend to fail.
const BOUNDARY_VALUES: [u64; 18] = [
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
        apply_mutation(input, other, random);
    }
    input.truncate(bytes_max);
}

fn apply_mutation(input: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(input.len());
    let run = random_range(input.len(), random);
    match random.below(11) {
        0 => flip_bit(input, at, random),
        1 => set_byte(input, at, random.draw() as u8),
        2 | 3 => put_boundary_value(input, at, random),
        4 => add_to_byte(input, at, random),
        5 => {
            let bytes: Vec<u8> = (0..random.below(RANGE_BYTES_MAX))
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
            let theirs = &other[random_range(other.len(), random)];
            for (to, from) in input.iter_mut().skip(at).zip(theirs) {
                *to = *from;
            }
        }
        9 => {
            let theirs = &other[random_range(other.len(), random)];
            input.splice(at..at, theirs.iter().copied());
        }
        _ => input.truncate(at),
    }
}

/// A range within `len`, usually a short one.
fn random_range(len: usize, random: &mut Random) -> std::ops::Range<usize> {
    let start = random.below(len + 1);
    let most = len - start;
    let count = match random.below(4) {
        0 => random.below(most + 1),
        _ => random.below(RANGE_BYTES_MAX + 1).min(most),
    };
    start..start + count
}

fn flip_bit(input: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = input.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn set_byte(input: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = input.get_mut(at) {
        *byte = value;
    }
}

/// Writes a boundary value, or one more or less, in 1, 2, 4 or 8 bytes of either byte order. Mostly
/// at a multiple of the width, as fields are.
fn put_boundary_value(input: &mut [u8], at: usize, random: &mut Random) {
    let width = 1 << random.below(4);
    let at = match random.below(4) {
        0 => at,
        _ => at / width * width,
    };
    let near = random.choose(&[0, 1, u64::MAX]);
    let value = random.choose(&BOUNDARY_VALUES).wrapping_add(*near);
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

fn add_to_byte(input: &mut [u8], at: usize, random: &mut Random) {
    if let Some(byte) = input.get_mut(at) {
        let by = random.below(33) as u8;
        *byte = byte.wrapping_add(by).wrapping_sub(16);
    }
}
