//! A manager and bricks as child processes, for `up` and for benchmarks.
//!
//! Invariants: children exit with this process, however it ends, because they watch their standard
//! input. A child that exits is restarted, at most once per pause.

pub mod dir;

use crate::memory_budget::MemoryBudget;
use crate::service;
use crate::shutdown::Shutdown;
use crate::{key, output};
use anyhow::{Context, bail};
use pagemesh_base::key::Key;
use pagemesh_brick::file::{NewPool, Preallocation};
use pagemesh_brick::resource_limits;
use pagemesh_manage::ManagerClient;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Minimum time between two starts of one child.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// Limit of the start of the cluster.
const READY_LIMIT: Duration = Duration::from_secs(30);
/// Interval of checks for its readiness.
const READY_PAUSE: Duration = Duration::from_millis(20);
/// Pools in memory should leave this fraction of the machine's memory (one quarter) to programs.
const MEMORY_RESERVE_DIVISOR: u64 = 4;
/// Limit of the exit of the children.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A supervised child process.
struct SupervisedChild {
    name: String,
    arguments: Vec<String>,
    log: PathBuf,
    /// Length of the log before the child's last start.
    log_offset: usize,
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
        // Only this process may tell the service manager about its state.
        .env_remove(service::SOCKET_ENV)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        // A signal of the terminal reaches this process alone, which ends its children in its own order.
        .process_group(0)
        .spawn()
        .context("cannot start a child process")?;
    Ok((child, from))
}

impl SupervisedChild {
    fn start(name: &str, arguments: Vec<String>, dir: &Path) -> anyhow::Result<SupervisedChild> {
        let log = dir.join(format!("{name}.log"));
        let (child, log_from) = spawn(&arguments, &log)?;
        Ok(SupervisedChild {
            name: name.into(),
            arguments,
            log,
            log_offset: log_from,
            child,
            started: Instant::now(),
        })
    }

    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Restarts the child if it has exited, or returns the earliest time of the restart.
    fn restart_if_ended(&mut self) -> Option<Instant> {
        let end = match self.child.try_wait() {
            Ok(None) => return None,
            Ok(Some(status)) => status.to_string(),
            Err(cause) => format!("with an unknown status: {cause}"),
        };
        let due = self.started + RESTART_PAUSE;
        if Instant::now() < due {
            return Some(due);
        }
        eprintln!(
            "{} ended ({end}), its last message: {}; starting it again",
            self.name,
            self.last_log_line()
        );
        self.started = Instant::now();
        match spawn(&self.arguments, &self.log) {
            Ok((child, from)) => {
                (self.child, self.log_offset) = (child, from);
                None
            }
            Err(cause) => {
                eprintln!("{} was not started: {cause:#}", self.name);
                Some(self.started + RESTART_PAUSE)
            }
        }
    }

    /// The output of the child since its last start.
    fn output(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text.get(self.log_offset..).unwrap_or_default().to_owned()
    }

    /// The last line of the log.
    fn last_log_line(&self) -> String {
        let text = self.output();
        let last = text.lines().next_back().unwrap_or("it said nothing");
        format!("{last}; see {}", self.log.display())
    }

    /// Waits for a line with this start; returns the rest of the line.
    fn await_line(&mut self, start: &str, ending: &Shutdown) -> anyhow::Result<String> {
        let until = Instant::now() + READY_LIMIT;
        loop {
            let said = self.output();
            let whole = said
                .lines()
                .filter(|line| said.contains(&format!("{line}\n")));
            if let Some(rest) = whole.filter_map(|line| line.strip_prefix(start)).next() {
                return Ok(rest.to_owned());
            }
            if !self.is_running() {
                bail!("{} did not start: {}", self.name, self.last_log_line());
            }
            if Instant::now() > until {
                bail!("{} is not ready: {}", self.name, self.last_log_line());
            }
            if ending.wait_for(READY_PAUSE) {
                bail!("ended before it was ready");
            }
        }
    }
}

/// The plan of a cluster.
pub struct ClusterPlan<'a> {
    /// Directory of keys, logs, sockets and the manager's store.
    pub dir: &'a Path,
    /// Directory of the pools.
    pub pools: &'a Path,
    /// Number of bricks.
    pub bricks: u32,
    /// Number of bricks, from the first on, that clients may map.
    pub mapped: u32,
    /// Bytes of each new pool.
    pub size_bytes: u64,
    /// Sessions that each new pool can serve; none: by its size.
    pub sessions: Option<u32>,
    /// Allocation of each new pool that is a plain file.
    pub preallocation: Preallocation,
    /// Memory of each brick for the data pages of a pool on a disk.
    pub memory_budget: MemoryBudget,
    /// The manager's address; port 0 takes a free one.
    pub listen: &'a str,
}

/// The running children; dropping it ends them.
pub struct Cluster {
    children: Vec<SupervisedChild>,
    /// The URL of the manager.
    pub url: String,
    /// The cluster key.
    pub key: Key,
}

impl Cluster {
    /// Creates missing pools, starts a manager and bricks, and waits until all are ready.
    pub fn start(plan: &ClusterPlan<'_>, ending: &Shutdown) -> anyhow::Result<Cluster> {
        make_pools(plan)?;
        eprintln!("starting a manager and {} bricks", plan.bricks);
        let key_path = plan.dir.join("key");
        let key = key::find_or_create(&key_path)?;
        let mut cluster = Cluster {
            children: Vec::new(),
            url: String::new(),
            key,
        };
        let first =
            SupervisedChild::start("manager", manager_arguments(plan, &key_path), plan.dir)?;
        cluster.children.push(first);
        cluster.url = cluster.children[0].await_line("ready ", ending)?;
        // A restarted manager must listen where bricks and clients know it.
        let found = cluster.url.trim_start_matches("http://");
        let again = ClusterPlan {
            listen: found,
            ..*plan
        };
        cluster.children[0].arguments = manager_arguments(&again, &key_path);
        for number in 1..=plan.bricks {
            let arguments = brick_arguments(plan, number, &cluster.url, &key_path);
            let kept = SupervisedChild::start(&format!("brick-{number}"), arguments, plan.dir)?;
            cluster.children.push(kept);
        }
        for brick in &mut cluster.children[1..] {
            brick.await_line("ready ", ending)?;
        }
        cluster.await_alive(plan.bricks as usize, ending)?;
        Ok(cluster)
    }

    fn await_alive(&self, bricks: usize, ending: &Shutdown) -> anyhow::Result<()> {
        let client = ManagerClient::new(&self.url, &self.key)?;
        let until = Instant::now() + READY_LIMIT;
        loop {
            let alive = client.status()?.bricks_alive;
            if alive >= bricks {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the manager has heartbeats of {alive} of {bricks} bricks; see the logs");
            }
            if ending.wait_for(READY_PAUSE) {
                bail!("ended before it was ready");
            }
        }
    }

    /// Restarts exited children. Returns the earliest time at which a child that exited too soon
    /// may restart.
    pub fn supervise(&mut self) -> Option<Instant> {
        let kept = self.children.iter_mut();
        kept.filter_map(SupervisedChild::restart_if_ended).min()
    }

    /// The process ids: the manager's, then the bricks'.
    pub fn pids(&self) -> Vec<u32> {
        self.children.iter().map(|kept| kept.child.id()).collect()
    }

    /// The process ids of the bricks.
    pub fn brick_pids(&self) -> Vec<u32> {
        self.pids().split_off(1)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Stop the bricks before the manager, so that they shut down orderly.
        for kept in self.children.iter_mut().rev() {
            drop(kept.child.stdin.take());
        }
        let until = Instant::now() + END_LIMIT;
        for kept in &mut self.children {
            while kept.is_running() {
                if Instant::now() > until {
                    eprintln!("{} does not end; killing it", kept.name);
                    // This fails only if the child has exited meanwhile.
                    let _ = kept.child.kill();
                    let _ = kept.child.wait();
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// The pool of a brick, counted from 1.
pub fn pool_path(pools: &Path, number: u32) -> PathBuf {
    pools.join(format!("brick-{number}.pool"))
}

/// Creates the missing pools: all of them or none.
fn make_pools(plan: &ClusterPlan<'_>) -> anyhow::Result<()> {
    let paths = (1..=plan.bricks).map(|number| pool_path(plan.pools, number));
    let missing: Vec<PathBuf> = paths.filter(|path| !path.exists()).collect();
    let bytes = plan.size_bytes.saturating_mul(missing.len() as u64);
    let (pools, count) = (plan.pools.display(), missing.len());
    resource_limits::check_pools(plan.pools, bytes).with_context(|| {
        format!(
            "no room for {count} pools in {pools}; use fewer --bricks, a smaller --size, or a disk"
        )
    })?;
    warn_of_low_memory(plan.pools, bytes);
    if count > 0 {
        let size = output::bytes(plan.size_bytes);
        eprintln!("making {count} pools of {size} in {pools}");
    }
    let bar = crate::output::progress("allocating pools");
    bar.set_length(bytes);
    for (at, path) in missing.iter().enumerate() {
        let before = at as u64 * plan.size_bytes;
        let mut progress = |done, _| bar.set_position(before + done);
        let new = NewPool {
            sessions: plan.sessions,
            preallocation: plan.preallocation,
            ..NewPool::of_size(plan.size_bytes)
        };
        let made = pagemesh_brick::file::create_with(path, new, &mut progress);
        if let Err(cause) = made {
            // The new pools are empty, and would block a retry with another size.
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

/// Warns if pools in memory leave too little memory to programs.
fn warn_of_low_memory(pools: &Path, bytes: u64) {
    let Some((all, available)) =
        resource_limits::machine_memory().filter(|_| resource_limits::is_memory(pools))
    else {
        return;
    };
    let left = available.saturating_sub(bytes);
    if left < all / MEMORY_RESERVE_DIVISOR {
        eprintln!(
            "warning: with these pools {} of the {} of memory are left for programs and caches; \
             the kernel ends programs when there is none. Use fewer --bricks, a smaller --size, \
             or a disk",
            output::bytes(left),
            output::bytes(all)
        );
    }
}

fn path_text(path: &Path) -> String {
    path.display().to_string()
}

fn manager_arguments(plan: &ClusterPlan<'_>, key: &Path) -> Vec<String> {
    let store = path_text(&plan.dir.join("manager.redb"));
    let arguments = [
        "manager",
        "--until-stdin-ends",
        "--store",
        &store,
        "--listen",
        plan.listen,
        "--key",
        &path_text(key),
    ];
    arguments.map(str::to_owned).to_vec()
}

fn brick_arguments(plan: &ClusterPlan<'_>, number: u32, url: &str, key: &Path) -> Vec<String> {
    let name = format!("brick-{number}");
    let arguments = [
        "brick",
        "--until-stdin-ends",
        "--pool",
        &path_text(&pool_path(plan.pools, number)),
        "--default-name",
        &name,
        "--domain",
        &name,
        "--manager",
        url,
        "--key",
        &path_text(key),
        "--memory-budget",
        &plan.memory_budget.to_string(),
    ];
    let mut arguments = arguments.map(str::to_owned).to_vec();
    if number <= plan.mapped {
        let socket = plan.dir.join(format!("{name}.sock"));
        arguments.extend(["--map".to_owned(), path_text(&socket)]);
    }
    arguments
}
