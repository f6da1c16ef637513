//! The wait of a new mount for the client that has the file system.
//!
//! umount(2) returns as soon as the kernel has sent the dirty pages of mapped files. The mounting process then still
//! stores them. A mount that attached the volume meanwhile would fence that process, and the pages would be
//! lost. So a mount first asks the manager for the holder and its signs of life.
//!
//! | holder | this mount |
//! |---|---|
//! | none | attaches |
//! | its process has ended on this machine | attaches |
//! | without a sign of life for `SILENCE_LIMIT` (10 s) | attaches |
//! | attached, and has never reported for `CONNECT_SILENCE_LIMIT` (60 s) | attaches |
//! | ending: the kernel no longer has its mount | waits up to `ENDING_LIMIT` (120 s), then attaches |
//! | serves programs | is refused, attaches with `--force`, or waits with `--standby` |
//!
//! A live holder cannot report while the manager or the network stalls. So its silence counts only if the manager
//! has answered this mount for `WATCH_MIN` (8 s), without a new sign meanwhile. A manager that does not answer for `ENDING_LIMIT` ends
//! the wait with an error, but not the wait of a standby.
//!
//! A holder may have lost its mount after its last sign. So the second sign after the first look
//! counts, see [`life_signs`](super::life_signs). Invariant: the manager refuses the attach if the holder is another one by then.
//!
//! A process that receives snapshots takes a volume over from an earlier receiver by the same rules.

use crate::process_identity::ProcessIdentity;
use crate::service;
use crate::standby::StandbyState;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_manage::wire::{Attachment, HolderStatus};
use pagemesh_manage::{
    HEARTBEAT_TIMEOUT, ManagerClient, ManagerError, SIGN_INTERVAL, SILENCE_LIMIT,
};
use std::time::{Duration, Instant};

/// Limit of the wait for a holder that stores its data. It is longer than the time-outs of requests to
/// unreachable bricks and an unreachable manager.
const ENDING_LIMIT: Duration = Duration::from_secs(120);
/// The silence limit of a holder that has not reported yet: it may wait for unreachable bricks.
const CONNECT_SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// Time for a report to arrive.
const REPORT_MARGIN: Duration = Duration::from_secs(3);
/// Answers of the manager must cover this time before a holder counts as silent. A live holder reports within it,
/// even if its last report failed just before.
const WATCH_MIN: Duration = SIGN_INTERVAL
    .saturating_add(HEARTBEAT_TIMEOUT)
    .saturating_add(REPORT_MARGIN);
/// Longest time between two answers of a manager that does not stall. It is shorter than the time-out of a report.
const ANSWER_GAP_MAX: Duration = Duration::from_secs(2);
/// Interval of queries for the holder.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The same of a standby, as long as the holder serves. It is shorter than `ANSWER_GAP_MAX`.
const STANDBY_INTERVAL: Duration = Duration::from_secs(1);
/// Signs of life that prove that the holder serves programs.
const SIGNS_TO_SERVE: u64 = 2;
/// The attachment of a volume that no client has attached.
const NO_ATTACHMENT: EpochNumber = EpochNumber(0);

/// The state of a holder, as a mount judges it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HolderState {
    /// Its process has ended on this machine.
    Ended,
    /// It gave no sign of life for a while.
    Silent,
    /// It stores data.
    Ending,
    /// It has been ending for too long.
    EndingTooLong,
    /// It may serve programs.
    Unknown,
    /// It serves programs.
    Serving,
}

/// The decision about a holder that serves programs.
pub enum ServingHolder {
    /// The wait ends with this error.
    Refuse(anyhow::Error),
    /// The attach fences the holder.
    Fence,
    /// This process waits until the holder ends or is silent.
    Await,
}

/// A time in which the manager answered, and the holder gave no sign.
struct QuietTime {
    /// The number of its signs.
    count: u64,
    since: Instant,
    /// The last answer of the manager.
    answered_at: Instant,
}

/// The words of messages, by the use of the volume.
pub struct HolderWords {
    /// What the holder has done to the volume: `mounted`.
    pub done: &'static str,
    /// This process: `this mount`.
    pub this: &'static str,
}

/// The words of a mount.
pub const MOUNT_WORDS: HolderWords = HolderWords {
    done: "mounted",
    this: "this mount",
};

/// The observation of one holder.
struct HolderWatch {
    holder: Attachment,
    /// The number of its signs at the first look.
    signs_before: u64,
    /// None before the first look, and after a query without an answer.
    quiet: Option<QuietTime>,
    /// The first look that found it ending.
    ending_since: Option<Instant>,
    announced: Option<HolderState>,
}

impl HolderWatch {
    fn new(holder: &Attachment, status: &HolderStatus) -> HolderWatch {
        HolderWatch {
            holder: holder.clone(),
            signs_before: status.sign.map_or(0, |sign| sign.count),
            quiet: None,
            ending_since: None,
            announced: None,
        }
    }

    fn judge(&mut self, status: &HolderStatus, has_ended: bool, now: Instant) -> HolderState {
        let (count, ending) = status.sign.map_or((0, false), |it| (it.count, it.ending));
        // A restarted manager counts again.
        self.signs_before = self.signs_before.min(count);
        let is_silent = self.is_silent(status, now);
        match (ending, is_silent) {
            _ if has_ended => HolderState::Ended,
            (_, true) => HolderState::Silent,
            (true, _) => {
                let since = *self.ending_since.get_or_insert(now);
                match now.duration_since(since) >= ENDING_LIMIT {
                    true => HolderState::EndingTooLong,
                    false => HolderState::Ending,
                }
            }
            _ if count >= self.signs_before + SIGNS_TO_SERVE => HolderState::Serving,
            _ => HolderState::Unknown,
        }
    }

    /// Whether the holder gave no sign for a while, although it could report.
    fn is_silent(&mut self, status: &HolderStatus, now: Instant) -> bool {
        let count = status.sign.map_or(0, |sign| sign.count);
        let known = self.quiet.as_ref().filter(|quiet| {
            quiet.count == count && now.duration_since(quiet.answered_at) <= ANSWER_GAP_MAX
        });
        let since = known.map_or(now, |quiet| quiet.since);
        self.quiet = Some(QuietTime {
            count,
            since,
            answered_at: now,
        });
        // A restarted manager knows no sign, and counts from its start.
        let has_never_reported = status.sign.is_some_and(|sign| sign.count == 0);
        let limit = match has_never_reported {
            true => CONNECT_SILENCE_LIMIT,
            false => SILENCE_LIMIT,
        };
        Duration::from_micros(status.silent_us) >= limit && now.duration_since(since) >= WATCH_MIN
    }

    /// The manager did not answer a query, and may not have answered a report either.
    fn record_no_answer(&mut self) {
        self.quiet = None;
    }

    /// Reports each state once.
    fn announce(
        &mut self,
        name: &VolumeName,
        state: HolderState,
        words: &HolderWords,
        attaches: bool,
    ) {
        if self.announced.replace(state) == Some(state) {
            return;
        }
        let client = &self.holder.client;
        let HolderWords { done, this } = words;
        let text = match state {
            HolderState::Ended => {
                format!("note: {client} had {done} {name} and has ended; {this} takes over")
            }
            HolderState::Silent => format!(
                "note: {client} had {done} {name} and gives no sign of life; {this} fences it"
            ),
            HolderState::Ending => format!(
                "note: {client} has unmounted {name} and still stores its data; waiting up to {} s",
                ENDING_LIMIT.as_secs()
            ),
            HolderState::EndingTooLong => format!(
                "warning: {client} has unmounted {name} and has not stored its data within {} s; this \
                 mount fences it, and stores into mapped files that were not synced may be lost",
                ENDING_LIMIT.as_secs()
            ),
            HolderState::Unknown => format!("note: {client} has {name}; waiting for a sign of it"),
            HolderState::Serving if attaches => {
                format!("note: {client} serves {name}; {this} fences it")
            }
            HolderState::Serving => {
                format!("note: {client} serves {name}; {this} waits until it ends or is silent")
            }
        };
        eprintln!("{text}");
        service::notify_status(&text);
    }
}

/// Waits until the volume may be attached, in pauses until `pause` says that this process shall end. Returns the attachment that ends
/// by the attach; none if this process shall end. `decide` is asked about a holder that serves programs. `standby` waits for a manager
/// that does not answer, without an end.
pub fn await_holder(
    manager: &ManagerClient,
    name: &VolumeName,
    (words, standby): (&HolderWords, Option<&StandbyState>),
    decide: impl Fn(&Attachment) -> ServingHolder,
    pause: impl Fn(Duration) -> bool,
) -> anyhow::Result<Option<EpochNumber>> {
    let here = ProcessIdentity::own();
    // A manager that restarts answers again within this time.
    let mut until = Instant::now() + ENDING_LIMIT;
    let mut watch: Option<HolderWatch> = None;
    let mut pause_time = POLL_INTERVAL;
    loop {
        match manager.holder(name) {
            Ok(status) => {
                until = Instant::now() + ENDING_LIMIT;
                standby.inspect(|it| it.record_answer());
                let Some(holder) = &status.attached else {
                    standby.inspect(|it| it.begin_takeover(None));
                    return Ok(Some(NO_ATTACHMENT));
                };
                let known = watch.take().filter(|it| it.holder.epoch == holder.epoch);
                let watch =
                    watch.insert(known.unwrap_or_else(|| HolderWatch::new(holder, &status)));
                let has_ended = has_ended(holder, here.as_ref());
                let state = watch.judge(&status, has_ended, Instant::now());
                let (attaches, interval) = match state {
                    HolderState::Ending | HolderState::Unknown => (false, POLL_INTERVAL),
                    HolderState::Serving => match decide(holder) {
                        ServingHolder::Refuse(refusal) => return Err(refusal),
                        ServingHolder::Fence => (true, POLL_INTERVAL),
                        ServingHolder::Await => (false, STANDBY_INTERVAL),
                    },
                    _ => (true, POLL_INTERVAL),
                };
                watch.announce(name, state, words, attaches);
                if attaches {
                    standby.inspect(|it| it.begin_takeover(holder.process.as_deref()));
                    return Ok(Some(holder.epoch));
                }
                pause_time = interval;
            }
            Err(cause @ ManagerError::Unreachable { .. })
                if standby.is_some() || (watch.is_some() && Instant::now() < until) =>
            {
                watch.iter_mut().for_each(HolderWatch::record_no_answer);
                if let Some(standby) = standby {
                    standby.record_no_answer(&cause);
                    pause_time = STANDBY_INTERVAL;
                }
            }
            Err(cause) => return Err(cause.into()),
        }
        if pause(pause_time) {
            return Ok(None);
        }
    }
}

fn has_ended(holder: &Attachment, here: Option<&ProcessIdentity>) -> bool {
    let process = holder.process.as_deref().map(str::parse::<ProcessIdentity>);
    match (process, here) {
        (Some(Ok(process)), Some(here)) => process.has_ended(here),
        _ => false,
    }
}

/// The error of a mount about a file system that another process serves.
pub fn mount_refusal(name: &VolumeName, holder: &Attachment) -> anyhow::Error {
    anyhow::anyhow!(
        "the file system {name} is mounted by {}; unmount it there, or take it over with --force: \
         programs on that mount then get errors, and their stores into mapped files that were not \
         synced are lost",
        holder.client
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_manage::wire::HolderSign;

    fn status(count: u64, ending: bool, silent: Duration) -> HolderStatus {
        HolderStatus {
            attached: Some(Attachment {
                client: "host:7".into(),
                epoch: EpochNumber(3),
                since_unix_s: 0,
                process: None,
            }),
            sign: Some(HolderSign { count, ending }),
            silent_us: silent.as_micros() as u64,
        }
    }

    fn watch_from(status: &HolderStatus) -> HolderWatch {
        HolderWatch::new(status.attached.as_ref().expect("a holder"), status)
    }

    /// Judges once a second. Returns the last state.
    fn watch_for(
        watch: &mut HolderWatch,
        status: &HolderStatus,
        from: Instant,
        seconds: u64,
    ) -> HolderState {
        let mut state = watch.judge(status, false, from);
        for second in 1..=seconds {
            state = watch.judge(status, false, from + Duration::from_secs(second));
        }
        state
    }

    #[test]
    fn holder_serves_after_second_sign_since_first_look() {
        let now = Instant::now();
        let heard = |count| status(count, false, Duration::ZERO);
        let mut watch = watch_from(&heard(7));
        // The holder may have sent the next sign before it was unmounted.
        for (count, expected) in [
            (7, HolderState::Unknown),
            (8, HolderState::Unknown),
            (9, HolderState::Serving),
        ] {
            assert_eq!(watch.judge(&heard(count), false, now), expected, "{count}");
        }
        // A restarted manager counts again.
        let mut watch = watch_from(&heard(7));
        assert_eq!(watch.judge(&heard(1), false, now), HolderState::Unknown);
        assert_eq!(watch.judge(&heard(3), false, now), HolderState::Serving);
    }

    #[test]
    fn ending_holder_is_waited_for_up_to_a_limit() {
        let now = Instant::now();
        let ending = |count| status(count, true, Duration::ZERO);
        let mut watch = watch_from(&ending(5));
        assert_eq!(watch.judge(&ending(5), false, now), HolderState::Ending);
        let almost = now + ENDING_LIMIT - Duration::from_millis(1);
        assert_eq!(watch.judge(&ending(60), false, almost), HolderState::Ending);
        let late = now + ENDING_LIMIT;
        let state = watch.judge(&ending(61), false, late);
        assert_eq!(state, HolderState::EndingTooLong);
        assert_eq!(watch.judge(&ending(61), true, now), HolderState::Ended);
    }

    #[test]
    fn silent_or_ended_holder_is_replaced() {
        let now = Instant::now();
        let silent = status(5, true, SILENCE_LIMIT);
        let mut watch = watch_from(&silent);
        let state = watch_for(&mut watch, &silent, now, WATCH_MIN.as_secs());
        assert_eq!(state, HolderState::Silent);
        let heard = status(5, false, Duration::ZERO);
        assert_eq!(watch.judge(&heard, true, now), HolderState::Ended);
    }

    #[test]
    fn silence_counts_only_while_manager_answers() {
        let silent = status(5, false, SILENCE_LIMIT * 3);
        let (mut watch, almost) = (watch_from(&silent), WATCH_MIN.as_secs() - 1);
        let from = Instant::now();
        let state = watch_for(&mut watch, &silent, from, almost);
        assert_eq!(state, HolderState::Unknown);
        watch.record_no_answer();
        let from = from + WATCH_MIN;
        let state = watch_for(&mut watch, &silent, from, almost);
        assert_eq!(state, HolderState::Unknown, "after no answer");
        let from = from + WATCH_MIN + ANSWER_GAP_MAX;
        let state = watch_for(&mut watch, &silent, from, almost);
        assert_eq!(state, HolderState::Unknown, "after a late answer");
        let silent = status(6, false, SILENCE_LIMIT * 3);
        let from = from + WATCH_MIN;
        let state = watch_for(&mut watch, &silent, from, almost);
        assert_eq!(state, HolderState::Unknown, "after a sign");
        let state = watch.judge(&silent, false, from + WATCH_MIN);
        assert_eq!(state, HolderState::Silent);
    }

    #[test]
    fn holder_without_a_report_is_waited_for_longer() {
        let from = Instant::now();
        let silent = status(0, false, CONNECT_SILENCE_LIMIT - Duration::from_secs(1));
        let mut watch = watch_from(&silent);
        let state = watch_for(&mut watch, &silent, from, WATCH_MIN.as_secs());
        assert_eq!(state, HolderState::Unknown);
        let silent = status(0, false, CONNECT_SILENCE_LIMIT);
        let state = watch.judge(&silent, false, from + WATCH_MIN);
        assert_eq!(state, HolderState::Silent);
    }

    #[test]
    fn standby_outlasts_a_manager_that_does_not_answer() {
        // The port is free again, so nothing answers.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let address = listener.local_addr().expect("an address");
        drop(listener);
        let key = pagemesh_base::key::Key::from_bytes([1; 32]);
        let manager = ManagerClient::new(&format!("http://{address}"), &key).expect("a client");
        let name: VolumeName = "files".parse().expect("a name");
        let wait = |standby| {
            let pauses = std::cell::Cell::new(0);
            let pause = |_| {
                pauses.set(pauses.get() + 1);
                pauses.get() == 3
            };
            let decide = |_: &Attachment| ServingHolder::Await;
            let waited = await_holder(&manager, &name, (&MOUNT_WORDS, standby), decide, pause);
            (waited, pauses.get())
        };
        let standby = StandbyState::default();
        standby.set_waiting(true);
        let (waited, pauses) = wait(Some(&standby));
        assert_eq!((waited.expect("no error"), pauses), (None, 3));
        let silence = standby.figures(Instant::now()).manager_silence;
        assert!(silence > Duration::ZERO);
        assert!(wait(None).0.is_err(), "another process does not wait");
    }
}
