//! A brick's heartbeats to the manager, by a thread of their own: they may wait for a thread that is stuck at a device.

use crate::commands::brick::device_reports;
use crate::commands::brick::tier_reports::{self, SentCounts};
use crate::service;
use crate::shutdown::Waker;
use anyhow::bail;
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::slice::BrickControl;
use pagemesh_brick::brick::Brick;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::tier::SlicePages;
use pagemesh_manage::wire::{
    self, BrickDevices, BrickRegistration, BrickScrub, ErrorCode, ScrubRequest,
};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_pmem::Media;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Interval of heartbeats to a manager that did not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of heartbeats while a change of the pool's devices is being carried out.
const CHANGE_INTERVAL: Duration = Duration::from_millis(200);

/// The thread that keeps a brick registered.
pub struct RegistrarThread {
    stop: Sender<()>,
    /// Why it has ended.
    pub ended: Receiver<anyhow::Result<()>>,
    thread: JoinHandle<()>,
}

impl RegistrarThread {
    /// Wakes the main thread when it ends.
    pub fn start<M: Media + Send + Sync + 'static>(
        registrar: Registrar<M>,
        waker: Waker,
    ) -> anyhow::Result<RegistrarThread> {
        let (stop, stopped) = mpsc::channel();
        let (tell, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("registrar".into());
        let thread = thread.spawn(move || {
            // The receiver is gone if the brick was abandoned.
            let _ = tell.send(registrar.serve(&stopped));
            waker.wake();
        })?;
        Ok(RegistrarThread {
            stop,
            ended,
            thread,
        })
    }

    /// Waits for the heartbeat that is being sent.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the thread that sends heartbeats panicked");
        }
    }
}

/// The state of scrubs, as reported to people and to the manager.
pub(super) fn scrub_report(status: &ScrubStatus, fulfilled: Option<Uuid>) -> BrickScrub {
    BrickScrub {
        state: match status.state {
            ScrubState::Off => wire::ScrubState::Off,
            ScrubState::Waiting => wire::ScrubState::Waiting,
            ScrubState::Running => wire::ScrubState::Running,
        },
        passes: status.passes,
        progress_percent: status.percent,
        next_in_ms: status.next_in.map(|time| time.as_millis() as u64),
        pass: status.pass,
        last: status.last.map(|(last, _)| last),
        ended_ms_ago: status.last.map(|(_, ago)| ago.as_millis() as u64),
        corrected: status.corrected,
        fulfilled,
    }
}

/// Whether the manager refuses a heartbeat because another brick has the name.
fn is_name_taken(cause: &ManagerError) -> bool {
    matches!(cause, ManagerError::Refused { code, .. } if *code == ErrorCode::Exists)
}

/// Keeps a brick registered with the manager.
pub struct Registrar<M> {
    pub brick: Arc<Brick<M>>,
    pub manager: ManagerClient,
    pub address: String,
    pub map_socket: Option<String>,
    pub domain: String,
    /// The name that the user chose.
    pub name: Option<BrickName>,
    /// The name for a brick that has none.
    pub default_name: BrickName,
    /// The name in the manager's first answer. It does not change while the brick runs.
    pub registered_name: Arc<OnceLock<BrickName>>,
}

impl<M: Media + Send + Sync + 'static> Registrar<M> {
    fn registration(
        &self,
        fulfilled: Option<Uuid>,
        devices: BrickDevices,
        counts: Option<&[SlicePages]>,
    ) -> anyhow::Result<BrickRegistration> {
        let status = self.brick.status()?;
        let scrubs = self.brick.scrub_status(Instant::now());
        Ok(BrickRegistration {
            brick: status.brick,
            name: Some(self.name.as_ref().unwrap_or(&self.default_name).clone()),
            name_is_default: self.name.is_none(),
            address: self.address.clone(),
            map_socket: self.map_socket.clone(),
            domain: self.domain.clone(),
            durability: status.durability.parse()?,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            incarnation: status.incarnation,
            sessions: status.sessions,
            scrub: Some(scrub_report(&scrubs, fulfilled)),
            devices: Some(devices),
            tier: tier_reports::report(&self.brick),
            tier_pages: counts.map(tier_reports::wire_counts),
        })
    }

    /// Registers the brick, reports that it is ready, and keeps it registered until a stop or a pool failure.
    fn serve(&self, stopped: &Receiver<()>) -> anyhow::Result<()> {
        let mut past = PastHeartbeats {
            was_answered: true,
            fulfilled: None,
            counts: SentCounts::default(),
        };
        // The manager may refuse the name of a new brick: before users and scripts take it for ready.
        let is_first = self.registered_name.get().is_none();
        let mut interval = self.send_heartbeat(&mut past)?;
        if is_first {
            println!("ready brick {} {}", self.brick.id(), self.address);
        }
        service::notify_ready(&format!("brick {} at {}", self.brick.id(), self.address));
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            interval = self.send_heartbeat(&mut past)?;
        }
        Ok(())
    }

    /// Sends one heartbeat, and carries out the request in its answer. Returns the time to the next.
    fn send_heartbeat(&self, past: &mut PastHeartbeats) -> anyhow::Result<Duration> {
        if self.brick.has_failed() {
            bail!("the pool failed; see the log, then start the brick again to recover it");
        }
        let (devices, is_changing) = device_reports::report(&self.brick);
        let counts = past.counts.due(&self.brick, Instant::now());
        let sent = counts.as_ref().map(|it| it.as_slice());
        let registration = self.registration(past.fulfilled, devices, sent)?;
        let answer = self.manager.heartbeat(&registration);
        if self.brick.has_failed() {
            // A request in the answer is for the brick that takes its place.
            bail!("the pool failed; see the log, then start the brick again to recover it");
        }
        let was_answered = std::mem::replace(&mut past.was_answered, answer.is_ok());
        let reply = match answer {
            Ok(reply) => reply,
            // The user chose a wrong name for a new brick. Once registered, a brick goes on
            // serving.
            Err(cause) if is_name_taken(&cause) && self.registered_name.get().is_none() => {
                bail!("{cause}")
            }
            Err(cause) => {
                if was_answered {
                    tracing::warn!(%cause, "cannot send a heartbeat");
                }
                return Ok(RETRY_INTERVAL);
            }
        };
        past.counts.note(counts, Instant::now());
        if !was_answered {
            tracing::info!("the manager answers heartbeats again");
        }
        if let Some(name) = &reply.name {
            self.note_name(name);
        }
        if let Some(request) = reply.scrub.filter(|it| past.fulfilled != Some(it.id)) {
            self.apply_scrub_request(request);
            past.fulfilled = Some(request.id);
        }
        let is_asked = !reply.devices.is_empty();
        device_reports::apply(&self.brick, reply.devices);
        if let Some(tiers) = reply.tiers {
            tier_reports::apply(&self.brick, tiers);
        }
        let interval = Duration::from_millis(reply.interval_ms.max(10));
        Ok(match is_changing || is_asked {
            true => interval.min(CHANGE_INTERVAL),
            false => interval,
        })
    }

    /// Takes the name in the first answer.
    fn note_name(&self, name: &BrickName) {
        if self.registered_name.set(name.clone()).is_err() {
            return;
        }
        tracing::info!(%name, "registered");
        if let Some(asked) = self.name.as_ref().filter(|asked| *asked != name) {
            tracing::warn!(%name, %asked, "this brick keeps its name: another brick has the one of --name");
        }
    }

    fn apply_scrub_request(&self, request: ScrubRequest) {
        let now = Instant::now();
        if request.stop {
            self.brick.stop_scrub(now);
        } else {
            self.brick.start_scrub(now);
        }
    }
}

/// The state that heartbeats leave to the next.
struct PastHeartbeats {
    /// Whether the manager answered the last one; true before the first.
    was_answered: bool,
    /// The scrub request carried out last. The manager repeats a request until the brick reports it.
    fulfilled: Option<Uuid>,
    /// The counts of pages by slice that it has got.
    counts: SentCounts,
}
