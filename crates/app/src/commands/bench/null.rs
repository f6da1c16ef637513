//! `pagemesh bench null`: a mount of a null file system.

use crate::args::{FuseTransport, thread_count_parser};
use crate::commands::mount::end::{UnmountSequence, serve_until_end};
use crate::commands::mount::serve::{check_dir, fuse_caching, fuse_transport};
use crate::shutdown::Shutdown;
use clap::Args;
use pagemesh_fuse::{MountFlags, MountOptions};
use std::path::PathBuf;

/// Mount a file system that discards all writes.
#[derive(Args)]
pub struct NullMountArgs {
    /// Mount point: an existing directory.
    pub dir: PathBuf,
    /// Number of server threads.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: FuseTransport,
    /// Let idle processors sleep while the mount is busy. Otherwise the processors poll, if this
    /// process may open /dev/cpu_dma_latency; that is faster, but needs more power.
    #[arg(long)]
    pub no_keep_awake: bool,
    /// Keep files out of the kernel's page cache.
    #[arg(long)]
    pub direct_io: bool,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Mounts a null file system, in the same way as `pagemesh mount`.
pub fn run(args: &NullMountArgs) -> anyhow::Result<()> {
    let dir = check_dir(&args.dir)?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let options = MountOptions {
        source: "nothing".into(),
        threads: args.threads,
        allow_other: false,
        flags: MountFlags::default(),
        transport: fuse_transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: fuse_caching(args.direct_io),
        shows_snapshots: false,
        is_shared: false,
    };
    let mounted = pagemesh_fuse::mount_null(&dir, &options)?;
    println!("ready {}", dir.display());
    let end = UnmountSequence {
        unmounter: mounted.unmounter(),
        dir: &dir,
        device: None,
        is_urgent: || false,
        before_cut: || {},
        before_exit: || {},
    };
    serve_until_end(move || Ok(mounted.serve()?), &end, &ending)
}
