//! The combined results of many histories, and whether their coverage suffices.

use crate::scenario::HistoryReport;

/// Minimum of histories for the coverage check; fewer need not cover every event.
const HISTORIES_MIN: u64 = 500;
/// The same for histories of direct clients, which take longer.
const DIRECT_HISTORIES_MIN: u64 = 100;
/// The same for histories with snapshots.
const SNAPSHOT_HISTORIES_MIN: u64 = 100;
/// Minimum average of acknowledged requests in a history.
const ACKNOWLEDGED_MIN: u64 = 100;
/// The same where all histories have disks: a disk that fails ends its brick.
const DISK_ACKNOWLEDGED_MIN: u64 = 50;
/// The search may skip less than one sector in this many.
const SEARCHED_PER_SKIPPED: u64 = 1000;

/// Events that histories must cover.
const COMMON_EVENTS: &[&str] = &[
    "second brick failed",
    "answers of the manager lost",
    "bit flipped",
    "brick killed",
    "brick killed inside an operation",
    "client killed",
    "client stopped",
    "connection broken",
    "copy promoted by force",
    "copy promoted by an operator",
    "copy promoted by the manager",
    "death in recovery",
    "long wait",
    "manager killed",
    "manager killed inside a commit",
    "manager out of reach",
    "manager restarted",
    "messages corrupted",
    "messages delayed",
    "messages lost",
    "messages repeated",
    "one-way partition",
    "page unreadable",
    "partition",
    "pool scrubbed",
    "power lost",
    "power lost everywhere",
    "power lost inside an operation",
    "power of the manager lost",
    "reads hedged",
    "replies overtaken",
    "second client",
    "takeover of an isolated client",
    "slot above the leaves flipped",
    "slot of a page flipped",
    "slow brick",
    "volume scrubbed",
    "write lost",
    "write misdirected",
];

/// Further events of histories with requests to the volume itself.
const BLOCK_EVENTS: &[&str] = &[
    "change lost with a promotion",
    "channel closed",
    "channel stalled",
    "connection severed",
    "hot page",
    "durable change kept by a promotion",
    "requests without room",
    "recovery of writes interrupted",
    "transaction acknowledged",
    "transaction of unknown outcome",
    "transaction recovered as a whole",
    "transaction without an answer happened",
    "transaction without an answer vanished",
];

/// Further events of histories with disks. Histories with requests to the volume itself have some.
const DISK_EVENTS: &[&str] = &[
    DISK_HISTORIES,
    "bit of a disk flipped",
    "disk FLUSH failed",
    "disk failed",
    "disk flushed",
    "disk request hung",
    "disk request overtaken",
    "disk write failed",
    "disk write torn by a death",
    "error of a disk",
    "page loaded from a disk",
    "page of a disk unreadable",
    "sector of a disk lost with its power",
    "slow disk",
    "unflushed changes lost their copies",
];
/// Counts the histories with disks.
const DISK_HISTORIES: &str = "histories with disks";
/// Minimum of histories for the coverage check if all have disks.
const DISK_HISTORIES_MIN: u64 = 100;

/// Events of histories with snapshots; of the common events they need only some. The first one tells such a history.
const SNAPSHOT_EVENTS: &[&str] = &[
    "cut done",
    "brick killed",
    "client killed",
    "clone deleted",
    "clone read",
    "cut voided by a change of legs",
    "death in recovery",
    "manager died between the steps of a snapshot",
    "manager killed inside a commit",
    "partition",
    "power lost everywhere",
    "second client",
    "snapshot cloned",
    "snapshot committed",
    "snapshot deleted",
    "snapshot given up",
    "snapshot prepared by the manager",
    "snapshot read",
    "snapshot read on a copy that was away",
];

/// Further events of histories with requests to files.
const FILE_EVENTS: &[&str] = &[
    "file system made",
    "file system mounted again",
    "operation failed",
    "operation without an answer done",
    "operation without an answer partly done",
    "operation without an answer undone",
    "operations lost with a promotion",
];

/// Events of histories with direct clients; of the common events they need only some.
const DIRECT_CLIENT_EVENTS: &[&str] = &[
    "direct client wrote",
    "brick killed",
    "brick killed inside an operation",
    "brick killed after it retired first",
    "client killed",
    "client stopped",
    "death in recovery",
    "file system made",
    "file system mounted again",
    "direct client appended",
    "direct client failed",
    "direct client killed inside an operation",
    "direct client read",
    "direct client sent to the kernel",
    "direct client wrote for a replica",
    "mount read with direct clients",
    "mount wrote with direct clients",
    "partition",
    "power lost everywhere",
    "row of a dead direct client cleared",
    "second client",
    "takeover of an isolated client",
];

impl HistoryReport {
    /// Adds the result of another history.
    pub fn add(&mut self, other: HistoryReport) {
        self.histories += other.histories;
        self.digest = self.digest.rotate_left(1) ^ other.digest;
        self.acknowledged += other.acknowledged;
        self.failed += other.failed;
        self.messages += other.messages;
        self.sectors_searched += other.sectors_searched;
        self.sectors_skipped += other.sectors_skipped;
        self.pages_repaired += other.pages_repaired;
        self.simulated_time += other.simulated_time;
        for (fault, count) in other.event_counts {
            self.count(fault, count);
        }
    }

    pub(crate) fn count(&mut self, name: &'static str, times: u64) {
        if times > 0 {
            *self.event_counts.entry(name).or_default() += times;
        }
    }

    /// The missing events. Too few histories need not cover every event: then none is missing.
    #[must_use]
    pub fn missing_events(&self) -> Vec<String> {
        let mut missing = vec![];
        let has_guests = self.event_counts.contains_key(DIRECT_CLIENT_EVENTS[0]);
        let has_snapshots = self.event_counts.contains_key(SNAPSHOT_EVENTS[0]);
        let disks = self.event_counts.get(DISK_HISTORIES).copied();
        let all_have_disks = disks.is_some_and(|disks| disks >= self.histories);
        let least = match (has_guests, all_have_disks) {
            _ if has_snapshots => SNAPSHOT_HISTORIES_MIN,
            (true, _) => DIRECT_HISTORIES_MIN,
            (false, true) => DISK_HISTORIES_MIN,
            (false, false) => HISTORIES_MIN,
        };
        if self.histories < least {
            return missing;
        }
        let has_files = self.event_counts.contains_key(FILE_EVENTS[0]);
        if (!has_files || has_guests)
            && self.sectors_skipped * SEARCHED_PER_SKIPPED >= self.sectors_searched
        {
            let (given_up, sectors) = (self.sectors_skipped, self.sectors_searched);
            missing.push(format!("{given_up} of {sectors} sectors were not searched"));
        }
        let acknowledged_min = match all_have_disks {
            true => DISK_ACKNOWLEDGED_MIN,
            false => ACKNOWLEDGED_MIN,
        };
        if self.acknowledged < acknowledged_min * self.histories {
            let (acknowledged, histories) = (self.acknowledged, self.histories);
            missing.push(format!(
                "{acknowledged} requests acknowledged in {histories} histories"
            ));
        }
        const NONE: &[&str] = &[];
        let (faults, others, disks) = match (has_guests, has_files) {
            _ if has_snapshots => (NONE, SNAPSHOT_EVENTS, NONE),
            (true, _) => (NONE, DIRECT_CLIENT_EVENTS, NONE),
            (false, true) => (COMMON_EVENTS, FILE_EVENTS, NONE),
            (false, false) if all_have_disks => (NONE, NONE, DISK_EVENTS),
            (false, false) => (COMMON_EVENTS, BLOCK_EVENTS, DISK_EVENTS),
        };
        let never = faults.iter().chain(others).chain(disks);
        let never = never.filter(|it| !self.event_counts.contains_key(*it));
        missing.extend(never.map(|fault| format!("never: {fault}")));
        // A damaged page of a disk is mostly read from the cache, so repairs are rare there.
        if self.pages_repaired == 0 && !has_guests && !all_have_disks && !has_snapshots {
            missing.push("never: page repaired".into());
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_report() -> HistoryReport {
        let mut enough = HistoryReport {
            histories: HISTORIES_MIN,
            acknowledged: HISTORIES_MIN * ACKNOWLEDGED_MIN,
            sectors_searched: 10 * SEARCHED_PER_SKIPPED,
            sectors_skipped: 1,
            pages_repaired: 1,
            ..HistoryReport::default()
        };
        let musts = COMMON_EVENTS.iter().chain(BLOCK_EVENTS).chain(DISK_EVENTS);
        musts.for_each(|fault| enough.count(fault, 1));
        enough
    }

    #[track_caller]
    fn check(spoil: impl FnOnce(&mut HistoryReport), missing: &str) {
        let mut outcome = full_report();
        spoil(&mut outcome);
        assert_eq!(outcome.missing_events(), [missing]);
    }

    #[test]
    fn missing_events_are_reported() {
        assert_eq!(full_report().missing_events(), [""; 0]);
        check(|it| it.pages_repaired = 0, "never: page repaired");
        check(
            |it| {
                it.event_counts.remove("takeover of an isolated client");
            },
            "never: takeover of an isolated client",
        );
        check(
            |it| {
                let musts = DIRECT_CLIENT_EVENTS
                    .iter()
                    .filter(|it| **it != "direct client read");
                musts.for_each(|fault| it.count(fault, 1));
                it.pages_repaired = 0;
            },
            "never: direct client read",
        );
        check(
            |it| it.sectors_skipped = 10,
            "10 of 10000 sectors were not searched",
        );
        check(
            |it| it.acknowledged -= 1,
            "49999 requests acknowledged in 500 histories",
        );
    }
}
