//! Latency of `libpagemesh` calls.

use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{MountServing, MountSpec};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use anyhow::Context;
use pagemesh::{File, PAGE_BYTES, Part};
use pagemesh_bench::calls::{BenchCall, CallOptions, run_calls};
use pagemesh_bench::report::Report;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes of the file: more than CPU caches hold.
const FILE_BYTES: u64 = 256 << 20;
const PAGES: u64 = FILE_BYTES / PAGE_BYTES as u64;
/// Server threads of the mount.
const THREADS: usize = 4;
/// Pages of an atomic write to several places.
const ATOMIC_PAGES: usize = 8;
/// Limit of attempts to open a guard: a new file may not be on the direct path at once.
const GUARD_TRIES_MAX: usize = 10_000;

/// A page far from the recent ones, by multiplicative hashing.
fn page_offset(number: u64) -> u64 {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % PAGES * PAGE_BYTES as u64
}

/// Pages far apart from each other.
fn page_offsets(number: u64) -> [u64; ATOMIC_PAGES] {
    let apart = FILE_BYTES / ATOMIC_PAGES as u64;
    std::array::from_fn(|at| page_offset(number) % apart + at as u64 * apart)
}

/// Runs the benchmark.
pub fn run(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: FILE_BYTES * 3 / 2,
        serving: MountServing::auto(THREADS),
    };
    let scratch = ScratchCluster::with_pools(measure, 2, 2, 2 * wish.size_bytes + SPARE_BYTES)?;
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
    let found = (0..GUARD_TRIES_MAX).find_map(|_| match is_shown() {
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
    Ok(run_calls(&mut bench_calls(&file, &kernel), &options)?)
}

fn bench_calls<'f>(file: &'f File, kernel: &'f std::fs::File) -> Vec<BenchCall<'f>> {
    let data = [7; PAGE_BYTES];
    let mut page = [0; PAGE_BYTES];
    let mut other = [0; PAGE_BYTES];
    vec![
        BenchCall {
            name: "write",
            run: Box::new(move |number| Ok(file.write_all_at(&data, page_offset(number))?)),
        },
        BenchCall {
            name: "read",
            run: Box::new(move |number| Ok(file.read_exact_at(&mut page, page_offset(number))?)),
        },
        BenchCall {
            name: "guard",
            run: Box::new(move |number| read_guard(file, page_offset(number), PAGE_BYTES)),
        },
        BenchCall {
            name: "guard of 8 pages",
            run: Box::new(move |number| {
                read_guard(
                    file,
                    page_offset(number) % (FILE_BYTES / 2),
                    ATOMIC_PAGES * PAGE_BYTES,
                )
            }),
        },
        BenchCall {
            name: "atomic write of 2 pages",
            run: Box::new(move |number| {
                write_atomic_pages(file, &page_offsets(number)[..2], &data)
            }),
        },
        BenchCall {
            name: "atomic write of 8 pages",
            run: Box::new(move |number| write_atomic_pages(file, &page_offsets(number), &data)),
        },
        BenchCall {
            name: "persist",
            run: Box::new(move |_| Ok(file.persist()?)),
        },
        BenchCall {
            name: "write by the kernel",
            run: Box::new(move |number| kernel.write_all_at(&data, page_offset(number))),
        },
        BenchCall {
            name: "read by the kernel",
            run: Box::new(move |number| kernel.read_exact_at(&mut other, page_offset(number))),
        },
    ]
}

/// Opens a guard, reads a byte of each page, and closes the guard.
fn read_guard(file: &File, offset: u64, len: usize) -> std::io::Result<()> {
    let guard = file.guard(offset, len)?;
    let mut byte = [0];
    for slice in guard.slices() {
        slice.copy_to(&mut byte);
        black_box(byte);
    }
    Ok(guard.finish()?)
}

fn write_atomic_pages(file: &File, places: &[u64], data: &[u8]) -> std::io::Result<()> {
    let mut parts = [Part::new(0, &[]); ATOMIC_PAGES];
    for (part, place) in parts.iter_mut().zip(places) {
        *part = Part::new(*place, data);
    }
    Ok(file.write_atomic(&parts[..places.len()])?)
}
