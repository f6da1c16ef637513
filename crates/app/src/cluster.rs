//! A manager and bricks as child processes of this one: what `up` runs and
//! what measurements use.
//!
//! Invariants: children end with this process, however it ends, because they
//! watch their standard input; a child that ends is started again, at most
//! once per pause.

use crate::ending::Ending;
use crate::{key, output};
use anyhow::{Context, bail};
use pagemesh_base::key::Key;
use pagemesh_brick::resource_limits;
use pagemesh_manage::Client;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The shortest time between two starts of one child.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// How long the cluster has to get ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// How often to look whether it is.
const READY_PAUSE: Duration = Duration::from_millis(20);
/// Pools in memory should leave one part of so many of the machine's.
const MEMORY_LEFT_MIN: u64 = 4;
/// How long children have to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A process that is kept running.
struct Kept {
    name: String,
    arguments: Vec<String>,
    log: PathBuf,
    /// Where its log began when it was started.
    log_from: usize,
    child: Child,
    started: Instant,
}

fn spawn(arguments: &[String], log: &Path) -> anyhow::Result<(Child, usize)> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let from = log.metadata()?.len() as usize;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start a child process")?;
    Ok((child, from))
}

impl Kept {
    fn start(name: &str, arguments: Vec<String>, dir: &Path) -> anyhow::Result<Kept> {
        let log = dir.join(format!("{name}.log"));
        let (child, log_from) = spawn(&arguments, &log)?;
        Ok(Kept {
            name: name.into(),
            arguments,
            log,
            log_from,
            child,
            started: Instant::now(),
        })
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Starts it again if it ended, or says when that may be done.
    fn restart_if_ended(&mut self) -> Option<Instant> {
        let end = match self.child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => status.to_string(),
            Err(cause) => format!("nobody knows how: {cause}"),
        };
        let due = self.started + RESTART_PAUSE;
        if Instant::now() < due {
            return Some(due);
        }
        eprintln!(
            "{} ended ({end}), and said last: {}; starting it again",
            self.name,
            self.last_words()
        );
        self.started = Instant::now();
        match spawn(&self.arguments, &self.log) {
            Ok((child, from)) => {
                (self.child, self.log_from) = (child, from);
                None
            }
            Err(cause) => {
                eprintln!("{} was not started: {cause:#}", self.name);
                Some(self.started + RESTART_PAUSE)
            }
        }
    }

    /// What it has said since it was started.
    fn said(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.get(self.log_from..).unwrap_or_default().to_owned()
    }

    /// The last line of its log.
    fn last_words(&self) -> String {
        let text = self.said();
        let last = text.lines().next_back().unwrap_or("it said nothing");
        format!("{last}; see {}", self.log.display())
    }

    /// Waits until it says a line that starts so; gives the rest of the line.
    fn await_line(&mut self, start: &str, ending: &Ending) -> anyhow::Result<String> {
        let until = Instant::now() + READY_LIMIT;
        loop {
            let said = self.said();
            let whole = said
                .lines()
                .filter(|line| said.contains(&format!("{line}\n")));
            if let Some(rest) = whole.filter_map(|line| line.strip_prefix(start)).next() {
                return Ok(rest.to_owned());
            }
            if !self.is_running() {
                bail!("{} did not start: {}", self.name, self.last_words());
            }
            if Instant::now() > until {
                bail!("{} is not ready: {}", self.name, self.last_words());
            }
            if ending.within(READY_PAUSE) {
                bail!("ended before it was ready");
            }
        }
    }
}

/// What a cluster is to be.
pub struct Plan<'a> {
    /// Where keys, logs, sockets and the manager's store are.
    pub dir: &'a Path,
    /// Where the pools are.
    pub pools: &'a Path,
    /// How many bricks.
    pub bricks: u32,
    /// How many of them, from the first on, clients may map.
    pub mapped: u32,
    /// Bytes of each new pool.
    pub size_bytes: u64,
    /// The manager's address; port 0 takes a free one.
    pub listen: &'a str,
}

/// Children; dropping it ends them.
pub struct Cluster {
    children: Vec<Kept>,
    /// The manager's.
    pub url: String,
    /// The cluster's.
    pub key: Key,
}

impl Cluster {
    /// Starts a manager and bricks, makes pools that are not there, and waits
    /// until all are ready.
    pub fn start(plan: &Plan<'_>, ending: &Ending) -> anyhow::Result<Cluster> {
        make_pools(plan)?;
        eprintln!("starting a manager and {} bricks", plan.bricks);
        let key_path = plan.dir.join("key");
        let key = key::find_or_create(&key_path)?;
        let mut cluster = Cluster {
            children: Vec::new(),
            url: String::new(),
            key,
        };
        let first = Kept::start("manager", manager(plan, &key_path), plan.dir)?;
        cluster.children.push(first);
        cluster.url = cluster.children[0].await_line("ready ", ending)?;
        // Started again, it must be where bricks and clients know it.
        let found = cluster.url.trim_start_matches("http://");
        let again = Plan {
            listen: found,
            ..*plan
        };
        cluster.children[0].arguments = manager(&again, &key_path);
        for number in 1..=plan.bricks {
            let arguments = brick(plan, number, &cluster.url, &key_path);
            let kept = Kept::start(&format!("brick-{number}"), arguments, plan.dir)?;
            cluster.children.push(kept);
        }
        for brick in &mut cluster.children[1..] {
            brick.await_line("ready ", ending)?;
        }
        cluster.await_alive(plan.bricks as usize, ending)?;
        Ok(cluster)
    }

    fn await_alive(&self, bricks: usize, ending: &Ending) -> anyhow::Result<()> {
        let client = Client::new(&self.url, &self.key)?;
        let until = Instant::now() + READY_LIMIT;
        loop {
            let alive = client.status()?.bricks_alive;
            if alive >= bricks {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the manager hears {alive} of {bricks} bricks; see the logs");
            }
            if ending.within(READY_PAUSE) {
                bail!("ended before it was ready");
            }
        }
    }

    /// Starts children again that ended. Those that ended too soon are left
    /// until the moment that it returns.
    pub fn tend(&mut self) -> Option<Instant> {
        let kept = self.children.iter_mut();
        kept.filter_map(Kept::restart_if_ended).min()
    }

    /// The processes: the manager's, then the bricks'.
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(|kept| kept.child.id()).collect()
    }

    /// The processes of the bricks.
    pub fn brick_pids(&self) -> Vec<u32> {
        self.pids().split_off(1)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Bricks before the manager, so that they end in peace.
        for kept in self.children.iter_mut().rev() {
            drop(kept.child.stdin.take());
        }
        let until = Instant::now() + END_LIMIT;
        for kept in &mut self.children {
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

fn pool_path(pools: &Path, number: u32) -> PathBuf {
    pools.join(format!("brick-{number}.pool"))
}

/// Makes the pools that are not there: all of them or none.
fn make_pools(plan: &Plan<'_>) -> anyhow::Result<()> {
    let paths = (1..=plan.bricks).map(|number| pool_path(plan.pools, number));
    let missing: Vec<PathBuf> = paths.filter(|path| !path.exists()).collect();
    let bytes = plan.size_bytes.saturating_mul(missing.len() as u64);
    let (pools, count) = (plan.pools.display(), missing.len());
    resource_limits::check_pools(plan.pools, bytes).with_context(|| {
        format!(
            "no room for {count} pools in {pools}; use fewer --bricks, a smaller --size, or a disk"
        )
    })?;
    warn_of_little_memory(plan.pools, bytes);
    if count > 0 {
        let size = output::bytes(plan.size_bytes);
        eprintln!("making {count} pools of {size} in {pools}");
    }
    let bar = crate::volume::progress("allocating pools");
    bar.set_length(bytes);
    for (at, path) in missing.iter().enumerate() {
        let before = at as u64 * plan.size_bytes;
        let mut progress = |done, _| bar.set_position(before + done);
        let made =
            pagemesh_brick::file::create_with_class(path, plan.size_bytes, None, &mut progress);
        if let Err(cause) = made {
            // They are empty, and in the way of another size.
            for made in &missing[..at] {
                let _ = std::fs::remove_file(made);
            }
            return Err(cause.into());
        }
        bar.set_position(before + plan.size_bytes);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Says so when pools in memory leave little of it to programs.
fn warn_of_little_memory(pools: &Path, bytes: u64) {
    let Some((all, available)) =
        resource_limits::machine_memory().filter(|_| resource_limits::is_memory(pools))
    else {
        return;
    };
    let left = available.saturating_sub(bytes);
    if left < all / MEMORY_LEFT_MIN {
        eprintln!(
            "warning: with these pools {} of the {} of memory are left for programs and caches; \
             the kernel ends programs when there is none. Use fewer --bricks, a smaller --size, \
             or a disk",
            output::bytes(left),
            output::bytes(all)
        );
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn manager(plan: &Plan<'_>, key: &Path) -> Vec<String> {
    let store = text(&plan.dir.join("manager.redb"));
    let arguments = [
        "manager",
        "--until-stdin-ends",
        "--store",
        &store,
        "--listen",
        plan.listen,
        "--key",
        &text(key),
    ];
    arguments.map(str::to_owned).to_vec()
}

fn brick(plan: &Plan<'_>, number: u32, url: &str, key: &Path) -> Vec<String> {
    let name = format!("brick-{number}");
    let arguments = [
        "brick",
        "--until-stdin-ends",
        "--pool",
        &text(&pool_path(plan.pools, number)),
        "--domain",
        &name,
        "--manager",
        url,
        "--key",
        &text(key),
    ];
    let mut arguments = arguments.map(str::to_owned).to_vec();
    if number <= plan.mapped {
        let socket = plan.dir.join(format!("{name}.sock"));
        arguments.extend(["--map".to_owned(), text(&socket)]);
    }
    arguments
}
