//! File systems with many files.

use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::MountServing;
use crate::commands::bench::scratch::{ChildDaemon, SPARE_BYTES, ScratchCluster};
use clap::Args;
use pagemesh_bench::many_files::{ManyFilesOptions, MountInfo, Mounter, run_many_files};
use pagemesh_bench::report::Report;
use std::error::Error;
use std::path::Path;
use std::time::Instant;

/// Bytes of a file system apart from the counted files, and bytes of each of those: an inode, a
/// name, and partly filled directories.
const MANY_FILES_BYTES: u64 = 64 << 20;
const BYTES_PER_FILE: u64 = 600;
const MIB: u64 = 1 << 20;

/// A file system with many files: its mount time and memory, and whether find(1) lists all
/// files.
#[derive(Args)]
pub struct ManyArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of files of a tree.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=4_000_000))]
    pub files: u64,
    /// Files per directory; each value makes a tree.
    #[arg(long, value_delimiter = ',', default_values_t = [1000, 1_000_000], value_parser = clap::value_parser!(u64).range(1..))]
    pub per_directory: Vec<u64>,
    /// Number of server threads of the mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
}

/// Runs the benchmark.
pub fn run(args: &ManyArgs) -> anyhow::Result<Report> {
    let options = ManyFilesOptions {
        rounds: args.measure.rounds,
        files: args.files,
        per_directory: args.per_directory.clone(),
        class: String::new(),
    };
    let size_bytes = (MANY_FILES_BYTES + options.files * BYTES_PER_FILE).next_multiple_of(MIB);
    let trees = options.per_directory.len() as u64;
    let scratch =
        ScratchCluster::with_pools(&args.measure, 2, 2, size_bytes * trees + SPARE_BYTES)?;
    let mut mounts = SequentialMounts {
        scratch: &scratch,
        size_bytes,
        threads: args.threads,
        class: String::new(),
        current: None,
    };
    let mut report = run_many_files(&mut mounts, &options)?;
    report.class = mounts.class;
    Ok(report)
}

/// Mirrored mounts, one at a time.
struct SequentialMounts<'a> {
    scratch: &'a ScratchCluster,
    size_bytes: u64,
    threads: usize,
    class: String,
    current: Option<ChildDaemon>,
}

impl SequentialMounts<'_> {
    fn mount(&mut self, name: &str) -> anyhow::Result<MountInfo> {
        // Drop the current mount first, so that it unmounts in order.
        drop(self.current.take());
        if !self.scratch.mount_dir(name).exists() {
            self.class = self.scratch.create_file_system(name, 2, self.size_bytes)?;
        }
        let start = Instant::now();
        let serving = MountServing::auto(self.threads);
        let dir = self.scratch.mount_dir(name);
        let (daemon, dir) = self.scratch.start_mount(name, &dir, "map", serving)?;
        let (took, pid) = (start.elapsed(), daemon.0.id());
        self.current = Some(daemon);
        Ok(MountInfo {
            dir,
            mount_time: took,
            pid,
        })
    }
}

impl Mounter for SequentialMounts<'_> {
    fn mount(&mut self, name: &str) -> Result<MountInfo, Box<dyn Error + Send + Sync>> {
        SequentialMounts::mount(self, name).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn resident_bytes(&mut self, pid: u32) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mappings = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        Ok(resident_bytes(&mappings, self.scratch.pools.path()))
    }
}

/// Resident bytes of a process without mappings below `pools`, from proc(5) smaps: each mapping has
/// a line with range, flags and file, and lines of values.
fn resident_bytes(mappings: &str, pools: &Path) -> u64 {
    let mut counts = true;
    let mut kib = 0;
    for line in mappings.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if counts => {
                kib += words.next().and_then(|it| it.parse().ok()).unwrap_or(0);
            }
            Some(word) if !word.ends_with(':') => {
                counts = !words.any(|word| Path::new(word).starts_with(pools));
            }
            _ => {}
        }
    }
    kib * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_pools_are_not_process_memory() {
        let text = "5500-5600 r-xp 00000000 fe:00 1234 /usr/bin/pagemesh\nSize: 9 kB\nRss: 8 kB\n\
            7f00-7f10 rw-s 00000000 00:2a 12 /mnt/huge/x/pools/1.pool\nSize: 4096 kB\nRss: 4096 kB\n\
            7f20-7f30 rw-p 00000000 00:00 0\nRss: 20 kB\nVmFlags: rd wr\n";
        assert_eq!(resident_bytes(text, Path::new("/mnt/huge/x")), 28 * 1024);
    }
}
