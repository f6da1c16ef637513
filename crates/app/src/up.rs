//! `pagemesh up`: a manager and bricks as child processes, kept running.
//!
//! Invariants: children end with this process, however it ends, because they
//! watch their standard input; one directory is used by one `up` at a time;
//! a child that ends is started again, at most once per pause.

use crate::args;
use crate::ending::Ending;
use crate::key;
use crate::output::bytes;
use anyhow::{Context, bail};
use pagemesh_base::key::Key;
use pagemesh_manage::Client;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How often children are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// The shortest time between two starts of one child.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// How long the cluster has to get ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// How long children have to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A process that is kept running.
struct Kept {
    name: String,
    arguments: Vec<String>,
    log: PathBuf,
    child: Child,
    started: Instant,
}

fn spawn(arguments: &[String], log: &Path) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start a child process")
}

impl Kept {
    fn start(name: &str, arguments: Vec<String>, dir: &Path) -> anyhow::Result<Kept> {
        let log = dir.join(format!("{name}.log"));
        let child = spawn(&arguments, &log)?;
        Ok(Kept {
            name: name.into(),
            arguments,
            log,
            child,
            started: Instant::now(),
        })
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn restart_if_ended(&mut self) {
        if self.is_running() || self.started.elapsed() < RESTART_PAUSE {
            return;
        }
        eprintln!(
            "{} ended ({}); starting it again",
            self.name,
            self.last_words()
        );
        self.started = Instant::now();
        match spawn(&self.arguments, &self.log) {
            Ok(child) => self.child = child,
            Err(cause) => eprintln!("{} was not started: {cause:#}", self.name),
        }
    }

    /// The last line of its log.
    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last = text.lines().next_back().unwrap_or("no output");
        format!("{last}; see {}", self.log.display())
    }
}

/// All children; dropping it ends them.
struct Children(Vec<Kept>);

impl Drop for Children {
    fn drop(&mut self) {
        // Bricks before the manager, so that they end in peace.
        for kept in self.0.iter_mut().rev() {
            drop(kept.child.stdin.take());
        }
        let until = Instant::now() + END_LIMIT;
        for kept in &mut self.0 {
            while kept.is_running() {
                if Instant::now() > until {
                    eprintln!("{} does not end; killing it", kept.name);
                    // Fails only if it has ended meanwhile.
                    let _ = kept.child.kill();
                    let _ = kept.child.wait();
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Runs a cluster until it is told to end.
pub fn run(args: &args::Up) -> anyhow::Result<()> {
    let ending = Ending::listen(args.until_stdin_ends)?;
    let dir = std::path::absolute(&args.dir)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let _lock = lock(&dir)?;
    let pools = pools_dir(&dir, args)?;
    make_pools(&pools, args)?;
    let key_path = dir.join("key");
    let key = key::find_or_create(&key_path)?;
    let url = format!("http://{}", args.listen);
    check_free(&args.listen)?;
    let mut children = start(&dir, &pools, &key_path, &url, args)?;
    let client = Client::new(&url, &key)?;
    await_ready(&mut children, &client, args.bricks, &ending)?;
    let user_key = share_key(&url, &key);
    println!("ready {url}");
    greet(&dir, &url, user_key.is_some(), args);
    while !ending.within(LOOK_INTERVAL) {
        children.0.iter_mut().for_each(Kept::restart_if_ended);
    }
    println!("ending; the data stays in {}", dir.display());
    Ok(())
}

fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => bail!(
            "another pagemesh up runs on {}; end it, or name another directory with --dir",
            dir.display()
        ),
        Err(cause) => Err(cause).with_context(|| format!("cannot lock {}", path.display())),
    }
}

fn check_free(listen: &str) -> anyhow::Result<()> {
    match std::net::TcpListener::bind(listen) {
        Ok(_) => Ok(()),
        Err(cause) => bail!("cannot listen on {listen}: {cause}; choose another with --listen"),
    }
}

/// Where the pools are: the directory itself, or for memory pools one on a
/// tmpfs that a link in the directory leads to.
fn pools_dir(dir: &Path, args: &args::Up) -> anyhow::Result<PathBuf> {
    let link = dir.join("pools");
    if let Ok(target) = link.read_link() {
        // After a restart of the machine the memory is gone, and so is it.
        std::fs::create_dir_all(&target)
            .with_context(|| format!("cannot make {}", target.display()))?;
        return Ok(target);
    }
    let has_pools = dir.join("brick-1.pool").exists();
    let Some(tmpfs) = args.memory.as_ref().filter(|_| !has_pools) else {
        return Ok(dir.to_owned());
    };
    let target = tmpfs.join(format!("pagemesh-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&target).with_context(|| format!("cannot make {}", target.display()))?;
    std::os::unix::fs::symlink(&target, &link)
        .with_context(|| format!("cannot make {}", link.display()))?;
    Ok(target)
}

fn pool_path(pools: &Path, number: u32) -> PathBuf {
    pools.join(format!("brick-{number}.pool"))
}

fn make_pools(pools: &Path, args: &args::Up) -> anyhow::Result<()> {
    let missing: Vec<PathBuf> = (1..=args.bricks)
        .map(|number| pool_path(pools, number))
        .filter(|path| !path.exists())
        .collect();
    let bar = crate::volume::progress("allocating pools");
    bar.set_length(args.size.0 * missing.len() as u64);
    for path in missing {
        pagemesh_brick::file::create(&path, args.size.0)?;
        bar.inc(args.size.0);
    }
    bar.finish_and_clear();
    Ok(())
}

fn start(
    dir: &Path,
    pools: &Path,
    key: &Path,
    url: &str,
    args: &args::Up,
) -> anyhow::Result<Children> {
    let text = |path: &Path| path.display().to_string();
    let manager = [
        "manager",
        "--until-stdin-ends",
        "--store",
        &text(&dir.join("manager.redb")),
        "--listen",
        &args.listen,
        "--key",
        &text(key),
    ];
    let manager = manager.map(str::to_owned).to_vec();
    let mut children = Children(vec![Kept::start("manager", manager, dir)?]);
    for number in 1..=args.bricks {
        let name = format!("brick-{number}");
        let brick = [
            "brick",
            "--until-stdin-ends",
            "--pool",
            &text(&pool_path(pools, number)),
            "--map",
            &text(&dir.join(format!("{name}.sock"))),
            "--domain",
            &name,
            "--manager",
            url,
            "--key",
            &text(key),
        ];
        let brick = brick.map(str::to_owned).to_vec();
        children.0.push(Kept::start(&name, brick, dir)?);
    }
    Ok(children)
}

fn await_ready(
    children: &mut Children,
    client: &Client,
    bricks: u32,
    ending: &Ending,
) -> anyhow::Result<()> {
    let until = Instant::now() + READY_LIMIT;
    loop {
        let alive = client.status().map_or(0, |status| status.bricks_alive);
        if alive >= bricks as usize {
            return Ok(());
        }
        for kept in &mut children.0 {
            if !kept.is_running() {
                bail!("{} did not start: {}", kept.name, kept.last_words());
            }
        }
        if Instant::now() > until {
            bail!("only {alive} of {bricks} bricks are ready; see the logs");
        }
        if ending.within(Duration::from_millis(20)) {
            bail!("ended before it was ready");
        }
    }
}

/// Gives the user's other commands the key of this address.
fn share_key(url: &str, key: &Key) -> Option<PathBuf> {
    let path = key::default_path(url).ok()?;
    match key::store(&path, key) {
        Ok(()) => Some(path),
        Err(cause) => {
            tracing::warn!(%cause, "other commands will not find the key by themselves");
            None
        }
    }
}

fn greet(dir: &Path, url: &str, key_is_shared: bool, args: &args::Up) {
    let mut set = String::new();
    if url != "http://127.0.0.1:7070" {
        set += &format!("  export PAGEMESH_MANAGER={url}\n");
    }
    if !key_is_shared {
        set += &format!("  export PAGEMESH_KEY={}\n", dir.join("key").display());
    }
    println!(
        "\n{} bricks of {} run in {}; Ctrl-C ends them. In another terminal, try:\n\n{set}  \
         pagemesh status\n  \
         pagemesh volume create demo --size 256M\n  \
         pagemesh export nbd demo --socket /tmp/demo.sock\n  \
         qemu-img info 'nbd+unix:///demo?socket=/tmp/demo.sock'\n",
        args.bricks,
        bytes(args.size.0),
        dir.display()
    );
}
