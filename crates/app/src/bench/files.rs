//! What is measured on mounts of a scratch cluster.

use crate::args::{self, Measure};
use crate::bench::{Daemon, ROOM_BYTES, Scratch};
use crate::files;
use anyhow::Context;
use pagemesh_base::layout::{Leg, LegState, VolumeName};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::many_files::{self, MountInfo, Mounter};
use pagemesh_bench::mirror::{self, MountPlace};
use pagemesh_bench::report::Report;
use pagemesh_bench::{database, metadata, sqlite};
use pagemesh_manage::wire::{AttachReplica, ChooseReplica, VolumeDetail};
use std::error::Error;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of a file system.
const FILES_BYTES: u64 = 512 << 20;
/// And of one for a database.
const DATABASE_BYTES: u64 = 1 << 30;
/// Of a file system beside the files that are counted, and for each of those: an inode,
/// a name, and directories that are not full.
const MANY_BYTES: u64 = 64 << 20;
const BYTES_PER_FILE: u64 = 600;
const MIB: u64 = 1 << 20;
/// Of the files of one number of jobs that are reached directly.
const DIRECT_BYTES: u64 = 512 << 20;
/// That serve a mount whose files are reached directly.
const DIRECT_THREADS: usize = 4;
/// How long a copy of an empty file system may take to follow: its client asks for its
/// layout when it attaches.
const FOLLOW_LIMIT: Duration = Duration::from_secs(30);
const FOLLOW_LOOK: Duration = Duration::from_millis(100);

/// How a mount is served.
#[derive(Clone, Copy)]
pub struct Serving {
    /// Threads.
    pub threads: usize,
    /// How requests come from the kernel.
    pub fuse: args::Fuse,
    /// Whether the kernel caches no pages of files.
    pub direct_io: bool,
}

impl Serving {
    pub fn auto(threads: usize) -> Serving {
        let fuse = args::Fuse::Auto;
        Serving {
            threads,
            fuse,
            direct_io: false,
        }
    }

    fn args(self) -> Vec<String> {
        let (threads, fuse) = (self.threads.to_string(), self.fuse.name().to_owned());
        let mut args = vec!["--threads".into(), threads, "--fuse".into(), fuse];
        args.extend(self.direct_io.then(|| "--direct-io".into()));
        args
    }
}

/// A mount; while it is there, so is the process that serves it.
pub type Served = (Daemon, MountPlace);

impl Scratch {
    /// Makes a file system of so many copies; gives its durability class.
    fn make_files(&self, name: &str, copies: usize, size_bytes: u64) -> anyhow::Result<String> {
        let wish = files::wish(&name.parse()?, size_bytes, copies);
        let made = files::make(&self.client(), args::Transport::Auto, &wish)?;
        self.make_mount_dir(name)?;
        Ok(made.volume.info.durability.to_string())
    }

    /// Mounts it there with a process of its own.
    pub fn serve_files(
        &self,
        name: &str,
        dir: &Path,
        transport: &str,
        serving: Serving,
    ) -> anyhow::Result<(Daemon, PathBuf)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["mount", name])
            .arg(dir)
            .args(["--transport", transport])
            .args(serving.args())
            .args(["--manager", &self.cluster.url])
            .arg("--key")
            .arg(self.dir.path().join("key"));
        if is_root() {
            command.arg("--allow-other");
        }
        let (daemon, dir) = Daemon::start(command)?;
        Ok((daemon, dir.into()))
    }

    /// Makes a file system and mounts it.
    pub fn mount(
        &self,
        name: &str,
        copies: usize,
        transport: &str,
        wish: &Wish,
    ) -> anyhow::Result<Served> {
        let class = self.make_files(name, copies, wish.size_bytes)?;
        self.serve(name, transport, class, wish)
    }

    fn serve(
        &self,
        name: &str,
        transport: &str,
        class: String,
        wish: &Wish,
    ) -> anyhow::Result<Served> {
        let (daemon, dir) =
            self.serve_files(name, &self.mount_dir(name), transport, wish.serving)?;
        let mut pids = self.cluster.brick_pids();
        pids.push(daemon.0.id());
        let place = MountPlace {
            name: name.into(),
            class,
            dir,
            pids,
            prefix: vec![],
        };
        Ok((daemon, place))
    }

    /// The same with one copy and one that follows, over TCP if a brick is only reached
    /// so. Waits until it does.
    pub fn mount_followed(&self, name: &str, wish: &Wish) -> anyhow::Result<Served> {
        let class = self.make_files(name, 2, wish.size_bytes)?;
        let (client, volume) = (self.manager()?, name.parse::<VolumeName>()?);
        let made = client.volume(&volume)?;
        let legs = |detail: &VolumeDetail| detail.layout.segments[0].columns[0].legs.clone();
        let is_near = |leg: &Leg| {
            made.bricks
                .get(&leg.brick)
                .is_some_and(|at| at.map_socket.is_some())
        };
        let copy = legs(&made)
            .iter()
            .position(|leg| !is_near(leg))
            .unwrap_or(1);
        let far = ChooseReplica {
            copy,
            force: false,
            expected: None,
        };
        client.detach_replica(&volume, far)?;
        let follows = AttachReplica {
            asynchronous: true,
            ..AttachReplica::default()
        };
        client.attach_replica(&volume, follows)?;
        let served = self.serve(name, "auto", class, wish)?;
        let until = Instant::now() + FOLLOW_LIMIT;
        while legs(&client.volume(&volume)?)[1].state != LegState::Following {
            anyhow::ensure!(Instant::now() < until, "no copy follows {name}");
            std::thread::sleep(FOLLOW_LOOK);
        }
        Ok(served)
    }

    /// What does nothing, mounted.
    fn mount_null(&self, serving: Serving) -> anyhow::Result<Served> {
        let dir = self.make_mount_dir("null")?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["bench", "null"])
            .args(serving.args())
            .arg(dir);
        let (daemon, dir) = Daemon::start(command)?;
        let place = MountPlace {
            name: "null".into(),
            class: "none".into(),
            dir: dir.into(),
            pids: vec![daemon.0.id()],
            prefix: vec![],
        };
        Ok((daemon, place))
    }

    pub fn make_mount_dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.mount_dir(name);
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    pub fn mount_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("mnt-{name}"))
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// What mounts of a comparison have in common.
pub struct Wish {
    /// Bytes of a file system.
    pub size_bytes: u64,
    /// How they are served.
    pub serving: Serving,
}

/// Clusters with room for the mounts of a comparison.
struct Clusters {
    near: Scratch,
    /// With only one brick on this machine, as it were.
    apart: Scratch,
}

impl Clusters {
    fn start(measure: &Measure, size_bytes: u64) -> anyhow::Result<Clusters> {
        let near = Scratch::sized(measure, 2, 2, 4 * size_bytes + ROOM_BYTES)?;
        let apart = Scratch::sized(measure, 2, 1, 2 * size_bytes + ROOM_BYTES)?;
        Ok(Clusters { near, apart })
    }

    /// One copy, two, two of which one is reached over TCP, and two of which both are;
    /// and one with a second that follows, over `map` and over TCP.
    fn mount(&self, wish: &Wish) -> anyhow::Result<[Served; 6]> {
        Ok([
            self.near.mount("unmirrored", 1, "map", wish)?,
            self.near.mount("map", 2, "map", wish)?,
            self.apart.mount("map-tcp", 2, "auto", wish)?,
            self.near.mount("tcp", 2, "tcp", wish)?,
            self.near.mount_followed("map-async", wish)?,
            self.apart.mount_followed("tcp-async", wish)?,
        ])
    }
}

/// Latency of synchronous writes against throughput.
pub fn mirror(
    measure: &Measure,
    options: &mirror::MirrorOptions,
    serving: Serving,
) -> anyhow::Result<Report> {
    let wish = Wish {
        size_bytes: FILES_BYTES,
        serving,
    };
    let clusters = Clusters::start(measure, wish.size_bytes)?;
    let null = clusters.near.mount_null(serving)?;
    let served = [null].into_iter().chain(clusters.mount(&wish)?);
    let (_daemons, mut places): (Vec<Daemon>, Vec<MountPlace>) = served.unzip();
    let mapped = places.iter().find(|place| place.name == "map");
    let direct = mapped.context("there is a mount over map")?.clone();
    places.push(MountPlace {
        name: "map, directly".into(),
        prefix: direct_prefix()?,
        ..direct
    });
    // Each number of jobs has files of its own, and there must be room for what is not
    // yet freed.
    let options = mirror::MirrorOptions {
        size_bytes: FILES_BYTES * 3 / 4 / options.jobs.len() as u64,
        ..options.clone()
    };
    let glusterfs = match is_root() {
        true => Some(FilePeer::glusterfs(FILES_BYTES)?),
        false => {
            eprintln!("GlusterFS is left out: it needs root");
            None
        }
    };
    let peer = glusterfs.as_ref().map(FilePeer::mount_place);
    let mut report = mirror::run_mirror(&places, peer.as_ref(), &options)?;
    report.add_note(format!(
        "mounts are served by {} threads each, --fuse {}{}",
        serving.threads,
        serving.fuse.name(),
        if serving.direct_io {
            " --direct-io"
        } else {
            ""
        }
    ));
    Ok(report)
}

/// What runs a program on the direct path.
fn direct_prefix() -> anyhow::Result<Vec<String>> {
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    Ok([own, "exec", "--"].map(String::from).to_vec())
}

/// What a program costs whose threads reach the pools themselves, beside the same on a tmpfs.
pub fn direct(measure: &Measure, options: &mirror::MirrorOptions) -> anyhow::Result<Report> {
    // What fits into a cache is no measure of memory.
    let files_bytes = DIRECT_BYTES * options.jobs.len() as u64;
    let size_bytes = files_bytes + DIRECT_BYTES / 2;
    let near = Near::start(measure, size_bytes, 2)?;
    // Over TCP writes go through the kernel.
    let apart = Scratch::sized(measure, 2, 1, size_bytes + ROOM_BYTES)?;
    let wish = Wish {
        size_bytes,
        serving: Serving::auto(DIRECT_THREADS),
    };
    let (_daemon, mut far) = apart.mount("map-tcp", 2, "auto", &wish)?;
    far.prefix = direct_prefix()?;
    let by_kernel = MountPlace {
        name: "map, by the kernel".into(),
        prefix: vec![],
        ..near.places[1].clone()
    };
    let places = [&near.places[..], &[far, by_kernel]].concat();
    let options = mirror::MirrorOptions {
        size_bytes: DIRECT_BYTES,
        ..options.clone()
    };
    Ok(mirror::run_mirror(&places, Some(&near.tmpfs), &options)?)
}

/// A cluster on this machine with file systems that are reached directly, of one copy and of
/// two, and a directory in memory like theirs.
struct Near {
    places: Vec<MountPlace>,
    tmpfs: MountPlace,
    // In the order of their end.
    _daemons: Vec<Daemon>,
    _memory: tempfile::TempDir,
    scratch: Scratch,
}

impl Near {
    /// With room for so many file systems on each brick.
    fn start(measure: &Measure, size_bytes: u64, count: u64) -> anyhow::Result<Near> {
        let wish = Wish {
            size_bytes,
            serving: Serving::auto(DIRECT_THREADS),
        };
        let scratch = Scratch::sized(measure, 2, 2, count * size_bytes + ROOM_BYTES)?;
        let (one, mut unmirrored) = scratch.mount("unmirrored", 1, "map", &wish)?;
        let (other, mut mirrored) = scratch.mount("map", 2, "map", &wish)?;
        unmirrored.prefix = direct_prefix()?;
        mirrored.prefix = direct_prefix()?;
        let memory = tempfile::tempdir_in(scratch.pools.path())?;
        let tmpfs = MountPlace::unserved("tmpfs", memory.path());
        Ok(Near {
            places: vec![unmirrored, mirrored],
            tmpfs,
            _daemons: vec![one, other],
            _memory: memory,
            scratch,
        })
    }

    /// A further file system of two copies, for who goes through the kernel.
    fn mount_for_kernel(&mut self, size_bytes: u64) -> anyhow::Result<()> {
        let wish = Wish {
            size_bytes,
            serving: Serving::auto(DIRECT_THREADS),
        };
        let (daemon, mut place) = self.scratch.mount("kernel", 2, "map", &wish)?;
        place.name = "map, by the kernel".into();
        self._daemons.push(daemon);
        self.places.push(place);
        Ok(())
    }
}

/// Inserts of SQLite.
pub fn sqlite(measure: &Measure, options: &sqlite::SqliteOptions) -> anyhow::Result<Report> {
    let mut near = Near::start(measure, FILES_BYTES, 3)?;
    near.mount_for_kernel(FILES_BYTES)?;
    let places = [&near.places[..], &[near.tmpfs.clone()]].concat();
    Ok(sqlite::run_sqlite(&places, options)?)
}

/// A database whose server reaches its files directly.
pub fn direct_database(
    measure: &Measure,
    options: &database::DatabaseOptions,
) -> anyhow::Result<Report> {
    anyhow::ensure!(
        is_root(),
        "PostgreSQL is given another user; run it as root"
    );
    let mut near = Near::start(measure, DATABASE_BYTES, 3)?;
    near.mount_for_kernel(DATABASE_BYTES)?;
    let scratch = &near.scratch;
    // PostgreSQL is another user.
    for dir in [scratch.dir.path(), scratch.pools.path(), &near.tmpfs.dir] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let places = near.places.iter().chain([&near.tmpfs]);
    let places = places.map(|place| database::DatabasePlace {
        name: place.name.clone(),
        class: place.class.clone(),
        dir: place.dir.clone(),
        standby: None,
        prefix: place.prefix.clone(),
    });
    Ok(database::run_database(
        &places.collect::<Vec<_>>(),
        options,
    )?)
}

/// What a copy costs that follows over TCP, where programs reach the files themselves: one
/// program that writes at a quarter of the rate that it could, beside the same with one copy.
pub fn followed(measure: &Measure, options: &mirror::MirrorOptions) -> anyhow::Result<Report> {
    let wish = Wish {
        size_bytes: DIRECT_BYTES * 3 / 2,
        serving: Serving::auto(DIRECT_THREADS),
    };
    let near = Scratch::sized(measure, 1, 1, wish.size_bytes + ROOM_BYTES)?;
    let apart = Scratch::sized(measure, 2, 1, wish.size_bytes + ROOM_BYTES)?;
    let (_unmirrored, mut alone) = near.mount("unmirrored", 1, "map", &wish)?;
    let (_followed, mut followed) = apart.mount_followed("tcp-async", &wish)?;
    let by_kernel = MountPlace {
        name: "tcp-async, by the kernel".into(),
        ..followed.clone()
    };
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    let prefix: Vec<String> = [own, "exec", "--"].map(String::from).to_vec();
    alone.prefix.clone_from(&prefix);
    followed.prefix = prefix;
    let options = mirror::MirrorOptions {
        size_bytes: DIRECT_BYTES,
        ..options.clone()
    };
    let most = mirror::saturating_iops(&followed, &options)?;
    anyhow::ensure!(most > 0.0, "nothing was written to {}", followed.name);
    let options = mirror::MirrorOptions {
        rate_iops: Some((most / 4.0) as u32),
        ..options
    };
    let mut report = mirror::run_mirror(&[alone, followed, by_kernel], None, &options)?;
    let name = "tcp-async".parse::<VolumeName>()?;
    let leg = &apart.manager()?.volume(&name)?.layout.segments[0].columns[0].legs[1];
    anyhow::ensure!(
        leg.state == LegState::Following,
        "the copy does not follow any more"
    );
    report.add_note(format!(
        "without O_SYNC; one program that writes to tcp-async without a pause does {most:.0} \
         writes/s; here it may do a quarter of them"
    ));
    Ok(report)
}

/// Small files made and removed.
pub fn metadata(
    measure: &Measure,
    options: &metadata::MetadataOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    anyhow::ensure!(is_root(), "GlusterFS and ext4 need root; run it as root");
    let wish = Wish {
        size_bytes: FILES_BYTES,
        serving: Serving::auto(threads),
    };
    let clusters = Clusters::start(measure, wish.size_bytes)?;
    let served = clusters.mount(&wish)?.into_iter();
    let (_daemons, places): (Vec<Daemon>, Vec<MountPlace>) = served.unzip();
    let peers = [
        FilePeer::glusterfs(FILES_BYTES)?,
        FilePeer::ext4_sync(FILES_BYTES)?,
    ];
    let peers = peers.each_ref().map(FilePeer::mount_place);
    Ok(metadata::run_metadata(&places, &peers, options)?)
}

/// Databases on mounts.
pub fn database(
    measure: &Measure,
    options: &database::DatabaseOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    let wish = Wish {
        size_bytes: DATABASE_BYTES,
        serving: Serving::auto(threads),
    };
    let clusters = Clusters::start(measure, wish.size_bytes)?;
    // PostgreSQL is another user.
    for dir in [
        &clusters.near.dir,
        &clusters.near.pools,
        &clusters.apart.dir,
    ] {
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711))?;
    }
    let (mut _daemons, mut places) = (vec![], vec![]);
    for (daemon, place) in clusters.mount(&wish)? {
        _daemons.push(daemon);
        places.push(database::DatabasePlace {
            name: place.name,
            class: place.class,
            dir: place.dir,
            standby: None,
            prefix: vec![],
        });
    }
    let pools = clusters.near.pools.path();
    let [first, second] = ["first", "second"].map(|name| pools.join(name));
    std::fs::create_dir(&first)?;
    std::fs::create_dir(&second)?;
    places.push(database::DatabasePlace {
        name: "its own replication".into(),
        class: "none".into(),
        dir: first,
        standby: Some(second),
        prefix: vec![],
    });
    Ok(database::run_database(&places, options)?)
}

/// File systems with many files.
pub fn many(
    measure: &Measure,
    options: &many_files::ManyFilesOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    let size_bytes = (MANY_BYTES + options.files * BYTES_PER_FILE).next_multiple_of(MIB);
    let trees = options.per_directory.len() as u64;
    let scratch = Scratch::sized(measure, 2, 2, size_bytes * trees + ROOM_BYTES)?;
    let mut mounts = Mounts {
        scratch: &scratch,
        size_bytes,
        threads,
        class: String::new(),
        current: None,
    };
    let mut report = many_files::run_many_files(&mut mounts, options)?;
    report.class = mounts.class;
    Ok(report)
}

/// Mirrored mounts, one at a time.
struct Mounts<'a> {
    scratch: &'a Scratch,
    size_bytes: u64,
    threads: usize,
    class: String,
    current: Option<Daemon>,
}

impl Mounts<'_> {
    fn mount(&mut self, name: &str) -> anyhow::Result<MountInfo> {
        // Dropped, it unmounts in order.
        drop(self.current.take());
        if !self.scratch.mount_dir(name).exists() {
            self.class = self.scratch.make_files(name, 2, self.size_bytes)?;
        }
        let start = Instant::now();
        let serving = Serving::auto(self.threads);
        let dir = self.scratch.mount_dir(name);
        let (daemon, dir) = self.scratch.serve_files(name, &dir, "map", serving)?;
        let (took, pid) = (start.elapsed(), daemon.0.id());
        self.current = Some(daemon);
        Ok(MountInfo {
            dir,
            mount_time: took,
            pid,
        })
    }
}

impl Mounter for Mounts<'_> {
    fn mount(&mut self, name: &str) -> Result<MountInfo, Box<dyn Error + Send + Sync>> {
        Mounts::mount(self, name).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn resident_bytes(&mut self, pid: u32) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mappings = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        Ok(resident_bytes(&mappings, self.scratch.pools.path()))
    }
}

/// What a process has in memory without what is mapped below `pools`, proc(5): for each
/// mapping a line of its range, its flags and its file, and lines of figures.
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
    fn pools_do_not_count_as_memory_of_a_process() {
        let text = "5500-5600 r-xp 00000000 fe:00 1234 /usr/bin/pagemesh\nSize: 9 kB\nRss: 8 kB\n\
            7f00-7f10 rw-s 00000000 00:2a 12 /mnt/huge/x/pools/1.pool\nSize: 4096 kB\nRss: 4096 kB\n\
            7f20-7f30 rw-p 00000000 00:00 0\nRss: 20 kB\nVmFlags: rd wr\n";
        assert_eq!(resident_bytes(text, Path::new("/mnt/huge/x")), 28 * 1024);
    }
}
