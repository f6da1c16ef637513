//! What calls of `libpagemesh` cost.

use crate::args::Measure;
use crate::bench::files::{Serving, Wish};
use crate::bench::{ROOM_BYTES, Scratch};
use anyhow::Context;
use pagemesh::{File, PAGE_BYTES, Part};
use pagemesh_bench::calls::{BenchCall, CallOptions, run_calls};
use pagemesh_bench::report::Report;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes of the file: more than caches hold.
const FILE_BYTES: u64 = 256 << 20;
const PAGES: u64 = FILE_BYTES / PAGE_BYTES as u64;
/// That serve the mount.
const THREADS: usize = 4;
/// Of a write that is one of several places.
const PLACES: usize = 8;
/// How long after its making the file may not be on the direct path.
const TRIES_MAX: usize = 10_000;

/// A page that none of the last was, by multiplicative hashing.
fn place(number: u64) -> u64 {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % PAGES * PAGE_BYTES as u64
}

/// Pages that lie apart.
fn places(number: u64) -> [u64; PLACES] {
    let apart = FILE_BYTES / PLACES as u64;
    std::array::from_fn(|at| place(number) % apart + at as u64 * apart)
}

/// Measures.
pub fn run(measure: &Measure) -> anyhow::Result<Report> {
    let wish = Wish {
        size_bytes: FILE_BYTES * 3 / 2,
        serving: Serving::auto(THREADS),
    };
    let scratch = Scratch::sized(measure, 2, 2, 2 * wish.size_bytes + ROOM_BYTES)?;
    let (_daemon, mount) = scratch.mount("native", 2, "map", &wish)?;
    let path = mount.dir.join("file");
    let mut options = std::fs::OpenOptions::new();
    let made = options
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    let chunk = vec![1; 1 << 20];
    for at in (0..FILE_BYTES).step_by(chunk.len()) {
        made.write_all_at(&chunk, at)?;
    }
    let (file, kernel) = (File::open(&path)?, made);
    let is_shown = || Ok::<bool, pagemesh::Error>(!file.guard(0, 1)?.is_copy());
    let found = (0..TRIES_MAX).find_map(|_| match is_shown() {
        Ok(false) => None,
        shown => Some(shown),
    });
    found.context("the file is not on the direct path")??;
    let options = CallOptions {
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds) / 4,
        class: mount.class,
        title: "calls of libpagemesh, 4 KiB, two copies".into(),
    };
    Ok(run_calls(&mut calls(&file, &kernel), &options)?)
}

fn calls<'f>(file: &'f File, kernel: &'f std::fs::File) -> Vec<BenchCall<'f>> {
    let data = [7; PAGE_BYTES];
    let mut page = [0; PAGE_BYTES];
    let mut other = [0; PAGE_BYTES];
    vec![
        BenchCall {
            name: "write",
            run: Box::new(move |number| Ok(file.write_all_at(&data, place(number))?)),
        },
        BenchCall {
            name: "read",
            run: Box::new(move |number| Ok(file.read_exact_at(&mut page, place(number))?)),
        },
        BenchCall {
            name: "guard",
            run: Box::new(move |number| look(file, place(number), PAGE_BYTES)),
        },
        BenchCall {
            name: "guard of 8 pages",
            run: Box::new(move |number| {
                look(file, place(number) % (FILE_BYTES / 2), PLACES * PAGE_BYTES)
            }),
        },
        BenchCall {
            name: "atomic write of 2 pages",
            run: Box::new(move |number| write_apart(file, &places(number)[..2], &data)),
        },
        BenchCall {
            name: "atomic write of 8 pages",
            run: Box::new(move |number| write_apart(file, &places(number), &data)),
        },
        BenchCall {
            name: "persist",
            run: Box::new(move |_| Ok(file.persist()?)),
        },
        BenchCall {
            name: "write by the kernel",
            run: Box::new(move |number| kernel.write_all_at(&data, place(number))),
        },
        BenchCall {
            name: "read by the kernel",
            run: Box::new(move |number| kernel.read_exact_at(&mut other, place(number))),
        },
    ]
}

/// Begins a guard, takes a byte of each page, and ends it.
fn look(file: &File, offset: u64, len: usize) -> std::io::Result<()> {
    let guard = file.guard(offset, len)?;
    let mut byte = [0];
    for slice in guard.slices() {
        slice.copy_to(&mut byte);
        black_box(byte);
    }
    Ok(guard.finish()?)
}

fn write_apart(file: &File, places: &[u64], data: &[u8]) -> std::io::Result<()> {
    let mut parts = [Part::new(0, &[]); PLACES];
    for (part, place) in parts.iter_mut().zip(places) {
        *part = Part::new(*place, data);
    }
    Ok(file.write_atomic(&parts[..places.len()])?)
}
