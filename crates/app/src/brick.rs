//! `pagemesh brick`: opens a pool, serves it, and tells the manager that it is
//! there.

use crate::args;
use crate::ending::Ending;
use crate::export::listen_address;
use crate::key;
use anyhow::{Context, bail};
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::BrickControl;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::service::BrickService;
use pagemesh_fabric::{map, tcp};
use pagemesh_manage::Client;
use pagemesh_manage::wire::{self, BrickRegistration, BrickScrub, ScrubFound, ScrubWish};
use pagemesh_store::scrub::ScrubReport;
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How often a manager that did not answer is told again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Runs a brick until it is told to end.
pub fn run(args: &args::Brick) -> anyhow::Result<()> {
    let Some(pool) = &args.pool else {
        bail!("no pool is named; name it with --pool");
    };
    let key = key::find(args.client.key.as_deref(), &args.client.manager)?;
    let manager = Client::new(&args.client.manager, &key)?;
    let ending = Ending::listen(args.until_stdin_ends)?;
    let listen = listen_address(&args.listen)?;
    // Before anything takes time: without a listener the signal would end us.
    let asked = Signals::new([SIGUSR1, SIGUSR2]).context("cannot listen for signals")?;
    let (brick, keeper, recovered) = match args.sparse {
        false => Brick::open(pool)?,
        true => Brick::open_sparse(pool)?,
    };
    brick.plan_scrubs(args.scrub_every.0, Instant::now());
    let obeys = Arc::downgrade(&brick);
    std::thread::Builder::new()
        .name("status".into())
        .spawn(move || obey(asked, &obeys))?;
    tracing::info!(?recovered, pool = %pool.display(), "recovered");
    let served = Arc::new(BrickService(brick.clone()));
    let tcp = tcp::TcpServer::bind(listen, key, served.clone(), tcp::ServerOptions::default())?;
    let map = match &args.map {
        Some(path) => Some(map::MapServer::bind(&absolute(path)?, served)?),
        None => None,
    };
    let told = Registrar {
        brick: &brick,
        manager,
        address: args
            .advertise
            .clone()
            .unwrap_or_else(|| tcp.address().to_string()),
        map_socket: map.as_ref().map(|map| map.path().display().to_string()),
        domain: args.domain.clone().unwrap_or_else(host_name),
    };
    println!("ready brick {} {}", brick.id(), told.address);
    let ended = told.keep_telling(&ending);
    drop(map);
    if let Err(left) = tcp.stop() {
        tracing::warn!(%left, "ending with open connections");
    }
    keeper.stop();
    ended
}

/// Does what signals ask for.
fn obey(mut asked: Signals, brick: &Weak<Brick>) {
    for signal in asked.forever() {
        let Some(brick) = brick.upgrade() else {
            return;
        };
        let now = Instant::now();
        let status = brick.scrub_status(now);
        match (signal, status.state) {
            (SIGUSR2, ScrubState::Running) => brick.stop_scrub(now),
            (SIGUSR2, _) => brick.start_scrub(now),
            _ => tell_scrubs(brick.id(), &status),
        }
    }
}

/// Writes what is known of scrubs to standard output.
fn tell_scrubs(brick: BrickId, status: &ScrubStatus) {
    let line = serde_json::json!({"brick": brick, "scrub": told_scrubs(status, None)});
    if let Err(cause) = writeln!(std::io::stdout().lock(), "{line}") {
        tracing::warn!(%cause, "the status was not written");
    }
}

/// What is known of scrubs, as it is told to people and to the manager.
fn told_scrubs(status: &ScrubStatus, fulfilled: Option<Uuid>) -> BrickScrub {
    let found = |found: ScrubReport| ScrubFound {
        checked: found.checked,
        superblocks: found.superblocks,
        records: found.records,
        left_behind: found.skipped_journals,
        in_flight: found.in_flight,
        bitmap_lines: found.bitmap_lines,
        objects: found.objects,
        slots: found.slots,
        mended: found.corrected(),
        damaged: found.damaged,
    };
    BrickScrub {
        state: match status.state {
            ScrubState::Off => wire::ScrubState::Off,
            ScrubState::Waiting => wire::ScrubState::Waiting,
            ScrubState::Running => wire::ScrubState::Running,
        },
        passes: status.passes,
        progress_percent: status.percent,
        next_in_ms: status.next_in.map(|time| time.as_millis() as u64),
        pass: status.pass.map(found),
        last: status.last.map(|(last, _)| found(last)),
        ended_ms_ago: status.last.map(|(_, ago)| ago.as_millis() as u64),
        mended: status.corrected,
        fulfilled,
    }
}

fn absolute(path: &Path) -> anyhow::Result<std::path::PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))
}

/// What this machine calls itself.
pub fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    match name.is_empty() {
        true => "localhost".into(),
        false => name,
    }
}

/// Keeps a brick registered.
struct Registrar<'a> {
    brick: &'a Brick,
    manager: Client,
    address: String,
    map_socket: Option<String>,
    domain: String,
}

impl Registrar<'_> {
    fn registration(&self, fulfilled: Option<Uuid>) -> anyhow::Result<BrickRegistration> {
        let status = self.brick.status()?;
        let scrubs = self.brick.scrub_status(Instant::now());
        Ok(BrickRegistration {
            brick: status.brick,
            address: self.address.clone(),
            map_socket: self.map_socket.clone(),
            domain: self.domain.clone(),
            durability: status.durability.parse()?,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            incarnation: status.incarnation,
            sessions: status.sessions,
            scrub: Some(told_scrubs(&scrubs, fulfilled)),
        })
    }

    fn fulfil(&self, wish: ScrubWish) {
        let now = Instant::now();
        match wish.stop {
            true => self.brick.stop_scrub(now),
            false => self.brick.start_scrub(now),
        }
    }

    /// Sends heartbeats until the end is told or the pool fails.
    fn keep_telling(&self, ending: &Ending) -> anyhow::Result<()> {
        let mut was_heard = true;
        // The manager repeats a wish until it hears that it is fulfilled.
        let mut fulfilled = None;
        loop {
            if self.brick.has_failed() {
                bail!("the pool failed; see the log, then start the brick again to recover it");
            }
            let told = self.manager.heartbeat(&self.registration(fulfilled)?);
            match &told {
                Err(cause) if was_heard => tracing::warn!(%cause, "no heartbeat"),
                Ok(_) if !was_heard => tracing::info!("heartbeats are heard again"),
                _ => {}
            }
            was_heard = told.is_ok();
            let wish = told.as_ref().ok().and_then(|reply| reply.scrub);
            if let Some(wish) = wish.filter(|wish| fulfilled != Some(wish.id)) {
                self.fulfil(wish);
                fulfilled = Some(wish.id);
            }
            let interval = told.map_or(RETRY_INTERVAL, |reply| {
                Duration::from_millis(reply.interval_ms.max(10))
            });
            if ending.within(interval) {
                return Ok(());
            }
        }
    }
}
