//! Orders of the manager to expire clients of an NFS server, and the answers to them.
//!
//! Invariants: an order is carried out once, although the manager gives it with each report until its answer. An answer stays until the
//! manager has taken it. Nothing here waits for a file system.

use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::{
    LostNfsState, NFS_ORDERS_MAX, Nfs4ClientId, NfsExpiry, NfsExpiryResult,
};
use pagemesh_nfs::nfs4::state::{ClientId, ExpiredState};
use pagemesh_nfs::{ExpiryProgress, Server};
use std::time::{Duration, Instant};

/// The pause between two looks at expiries in progress.
const LOOK_PAUSE: Duration = Duration::from_millis(100);
/// The answer comes after this time at the latest: the manager waits for a report and this time.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Answers that wait for a manager. The oldest ones go: their calls have ended.
const ANSWERS_MAX: usize = 64;

/// The part of a server that expires clients.
pub trait ExpiringServer {
    /// Begins an expiry; none if there is no such client.
    fn expire(&self, client: ClientId) -> Option<ExpiredState>;
    /// The progress of an expiry of a client in the lists of these file systems.
    fn progress(&self, client: ClientId, file_systems: &[u32]) -> ExpiryProgress;
}

impl ExpiringServer for Server {
    fn expire(&self, client: ClientId) -> Option<ExpiredState> {
        self.expire_client(client)
    }

    fn progress(&self, client: ClientId, file_systems: &[u32]) -> ExpiryProgress {
        self.expiry_progress(client, file_systems)
    }
}

/// See the module.
#[derive(Default)]
pub struct Expiries {
    begun: Vec<BegunExpiry>,
    /// The answers by volume, the oldest first.
    answers: Vec<(VolumeName, NfsExpiry)>,
    /// There are answers that no report had so far.
    has_new_answers: bool,
}

/// An expiry in progress.
struct BegunExpiry {
    volume: VolumeName,
    client: Nfs4ClientId,
    lost: LostNfsState,
    /// The file systems with lists that have the client.
    file_systems: Vec<u32>,
    until: Instant,
}

impl Expiries {
    /// Begins the orders for the server of a volume.
    pub fn begin(
        &mut self,
        server: &impl ExpiringServer,
        volume: &VolumeName,
        clients: &[Nfs4ClientId],
    ) {
        for client in clients {
            if self.begun.iter().any(|it| it.client == *client) {
                continue;
            }
            tracing::info!(%client, "an operator expires an NFS client");
            match server.expire(ClientId(client.0)) {
                Some(expired) => self.begun.push(BegunExpiry {
                    volume: volume.clone(),
                    client: *client,
                    lost: LostNfsState {
                        opens: expired.opens as u64,
                        locks: expired.ranges as u64,
                    },
                    file_systems: expired.file_systems,
                    until: Instant::now() + ANSWER_LIMIT,
                }),
                None => self.answer(volume.clone(), *client, NfsExpiryResult::Unknown),
            }
        }
    }

    /// The pause before the next look; none while there is no expiry.
    pub fn pause(&self) -> Option<Duration> {
        (!self.begun.is_empty()).then_some(LOOK_PAUSE)
    }

    /// Looks at the expiries in progress. Whether there are answers since the last look.
    pub fn look(&mut self, server: &impl ExpiringServer, now: Instant) -> bool {
        for expiry in std::mem::take(&mut self.begun) {
            let result = match server.progress(ClientId(expiry.client.0), &expiry.file_systems) {
                ExpiryProgress::Ended => NfsExpiryResult::Expired(expiry.lost),
                _ if now < expiry.until => {
                    self.begun.push(expiry);
                    continue;
                }
                ExpiryProgress::Running(requests) => NfsExpiryResult::Running(requests as u64),
                ExpiryProgress::Unwritten => NfsExpiryResult::Unwritten,
            };
            self.answer(expiry.volume, expiry.client, result);
        }
        std::mem::take(&mut self.has_new_answers)
    }

    fn answer(&mut self, volume: VolumeName, client: Nfs4ClientId, result: NfsExpiryResult) {
        tracing::info!(%client, ?result, "the order to expire an NFS client was carried out");
        if self.answers.len() >= ANSWERS_MAX {
            self.answers.remove(0);
        }
        self.answers.push((volume, NfsExpiry { client, result }));
        self.has_new_answers = true;
    }

    /// The answers for the manager about a volume.
    pub fn answers(&self, volume: &VolumeName) -> Vec<NfsExpiry> {
        let of_volume = self.answers.iter().filter(|(name, _)| name == volume);
        let answers = of_volume.map(|(_, answer)| *answer);
        answers.take(NFS_ORDERS_MAX).collect()
    }

    /// The manager has taken the first answers about a volume.
    pub fn answers_taken(&mut self, volume: &VolumeName, mut count: usize) {
        self.answers.retain(|(name, _)| {
            let is_taken = name == volume && count > 0;
            count -= usize::from(is_taken);
            !is_taken
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const CLIENT: Nfs4ClientId = Nfs4ClientId(7);
    const UNKNOWN: Nfs4ClientId = Nfs4ClientId(8);
    const LISTED_IN: u32 = 5;

    /// A server with one client, and the progress of its expiry.
    struct FakeServer {
        progress: RefCell<ExpiryProgress>,
        begun: RefCell<usize>,
    }

    impl FakeServer {
        fn new(progress: ExpiryProgress) -> FakeServer {
            FakeServer {
                progress: RefCell::new(progress),
                begun: RefCell::new(0),
            }
        }
    }

    impl ExpiringServer for FakeServer {
        fn expire(&self, client: ClientId) -> Option<ExpiredState> {
            *self.begun.borrow_mut() += 1;
            (client.0 == CLIENT.0).then_some(ExpiredState {
                opens: 2,
                ranges: 3,
                file_systems: vec![LISTED_IN],
            })
        }

        fn progress(&self, _: ClientId, file_systems: &[u32]) -> ExpiryProgress {
            assert_eq!(file_systems, [LISTED_IN]);
            *self.progress.borrow()
        }
    }

    fn home() -> VolumeName {
        "home".parse().unwrap()
    }

    fn results(expiries: &Expiries) -> Vec<NfsExpiryResult> {
        let answers = expiries.answers(&home());
        answers.iter().map(|it| it.result).collect()
    }

    #[test]
    fn repeated_order_is_carried_out_once() {
        let server = FakeServer::new(ExpiryProgress::Running(1));
        let mut expiries = Expiries::default();
        let now = Instant::now();
        for _ in 0..3 {
            expiries.begin(&server, &home(), &[CLIENT]);
            assert!(!expiries.look(&server, now) && expiries.pause().is_some());
        }
        assert_eq!(server.begun.take(), 1);
        *server.progress.borrow_mut() = ExpiryProgress::Unwritten;
        assert!(!expiries.look(&server, now));
        *server.progress.borrow_mut() = ExpiryProgress::Ended;
        assert!(expiries.look(&server, now));
        assert!(!expiries.look(&server, now) && expiries.pause().is_none());
        let (opens, locks) = (2, 3);
        let expired = NfsExpiryResult::Expired(LostNfsState { opens, locks });
        // The answer stays until the manager has taken it.
        assert_eq!(results(&expiries), [expired]);
        assert_eq!(results(&expiries), [expired]);
        assert_eq!(expiries.answers(&"other".parse().unwrap()), []);
        expiries.answers_taken(&home(), 1);
        assert_eq!(results(&expiries), []);
    }

    #[test]
    fn unknown_client_is_answered_at_once() {
        let server = FakeServer::new(ExpiryProgress::Ended);
        let mut expiries = Expiries::default();
        expiries.begin(&server, &home(), &[UNKNOWN]);
        assert!(expiries.look(&server, Instant::now()));
        assert_eq!(results(&expiries), [NfsExpiryResult::Unknown]);
    }

    #[test]
    fn long_expiry_is_answered_before_its_end() {
        for (progress, result) in [
            (ExpiryProgress::Running(4), NfsExpiryResult::Running(4)),
            (ExpiryProgress::Unwritten, NfsExpiryResult::Unwritten),
        ] {
            let server = FakeServer::new(progress);
            let mut expiries = Expiries::default();
            expiries.begin(&server, &home(), &[CLIENT]);
            let now = Instant::now();
            assert!(!expiries.look(&server, now));
            assert!(expiries.look(&server, now + ANSWER_LIMIT + LOOK_PAUSE));
            assert_eq!(results(&expiries), [result]);
        }
    }

    #[test]
    fn untaken_answers_are_bounded() {
        let server = FakeServer::new(ExpiryProgress::Ended);
        let mut expiries = Expiries::default();
        for number in 0..200 {
            let client = Nfs4ClientId(1000 + number);
            expiries.begin(&server, &home(), &[client]);
        }
        let answers = expiries.answers(&home());
        assert_eq!(answers.len(), NFS_ORDERS_MAX);
        let oldest = 1000 + 200 - ANSWERS_MAX as u64;
        assert_eq!(answers[0].client, Nfs4ClientId(oldest));
    }
}
