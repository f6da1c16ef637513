//! What many histories came to, and whether that is enough to trust them.

use crate::life::Outcome;

/// Histories that must have met every fault, all together; fewer prove nothing.
const HISTORIES_MIN: u64 = 500;
/// The same of histories of guests, which take longer.
const GUESTS_HISTORIES_MIN: u64 = 100;
/// Requests that a history has acknowledged on average, at least.
const ACKNOWLEDGED_MIN: u64 = 100;
/// One sector in so many may be given up by the search.
const SEARCHED_PER_GIVEN_UP: u64 = 1000;

/// What must happen in histories.
const FAULTS: &[&str] = &[
    "a brick fails beside a damaged one",
    "answers of the manager lost",
    "bit flipped",
    "brick killed",
    "brick killed inside an operation",
    "client killed",
    "client stopped",
    "connection broken",
    "copy promoted by force",
    "copy promoted by hand",
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
    "siege",
    "slot above the leaves flipped",
    "slot of a page flipped",
    "slow brick",
    "volume scrubbed",
    "write lost",
    "write misdirected",
];

/// And where requests are made to the volume itself.
const OF_BLOCKS: &[&str] = &[
    "change lost with a promotion",
    "channel closed",
    "channel stalled",
    "connection severed",
    "crowd",
    "durable change kept by a promotion",
    "requests without room",
    "settling interrupted",
    "transaction acknowledged",
    "transaction of unknown outcome",
    "transaction settled as a whole",
    "transaction without an answer happened",
    "transaction without an answer vanished",
];

/// And where they are made to files.
const OF_FILES: &[&str] = &[
    "file system made",
    "file system mounted again",
    "operation failed",
    "operation without an answer done",
    "operation without an answer partly done",
    "operation without an answer undone",
    "operations lost with a promotion",
];

/// And, of the others only some, where guests reach the files.
const OF_GUESTS: &[&str] = &[
    "guest wrote",
    "brick killed",
    "brick killed inside an operation",
    "brick killed that cleaned up first",
    "client killed",
    "client stopped",
    "death in recovery",
    "file system made",
    "file system mounted again",
    "guest appended",
    "guest failed",
    "guest killed inside an operation",
    "guest read",
    "guest sent to the kernel",
    "guest wrote for a copy that follows",
    "mount read beside guests",
    "mount wrote beside guests",
    "partition",
    "power lost everywhere",
    "row of a dead guest cleared",
    "second client",
    "siege",
];

impl Outcome {
    /// Adds what another history came to.
    pub fn add(&mut self, other: Outcome) {
        self.histories += other.histories;
        self.digest = self.digest.rotate_left(1) ^ other.digest;
        self.acknowledged += other.acknowledged;
        self.failed += other.failed;
        self.messages += other.messages;
        self.sectors += other.sectors;
        self.given_up += other.given_up;
        self.repaired += other.repaired;
        self.time += other.time;
        for (fault, count) in other.faults {
            self.count(fault, count);
        }
    }

    pub(crate) fn count(&mut self, name: &'static str, times: u64) {
        if times > 0 {
            *self.faults.entry(name).or_default() += times;
        }
    }

    /// What did not happen and should have. Few histories may not have met
    /// everything: nothing is missing then.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let mut missing = vec![];
        let has_guests = self.faults.contains_key(OF_GUESTS[0]);
        let least = match has_guests {
            true => GUESTS_HISTORIES_MIN,
            false => HISTORIES_MIN,
        };
        if self.histories < least {
            return missing;
        }
        let has_files = self.faults.contains_key(OF_FILES[0]);
        if (!has_files || has_guests) && self.given_up * SEARCHED_PER_GIVEN_UP >= self.sectors {
            let (given_up, sectors) = (self.given_up, self.sectors);
            missing.push(format!("{given_up} of {sectors} sectors were not searched"));
        }
        if self.acknowledged < ACKNOWLEDGED_MIN * self.histories {
            let (acknowledged, histories) = (self.acknowledged, self.histories);
            missing.push(format!(
                "{acknowledged} requests acknowledged in {histories} histories"
            ));
        }
        let (faults, others) = match (has_guests, has_files) {
            (true, _) => (&[] as &[&str], OF_GUESTS),
            (false, true) => (FAULTS, OF_FILES),
            (false, false) => (FAULTS, OF_BLOCKS),
        };
        let never = faults.iter().chain(others);
        let never = never.filter(|it| !self.faults.contains_key(*it));
        missing.extend(never.map(|fault| format!("never: {fault}")));
        if self.repaired == 0 && !has_guests {
            missing.push("never: page repaired".into());
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enough() -> Outcome {
        let mut enough = Outcome {
            histories: HISTORIES_MIN,
            acknowledged: HISTORIES_MIN * ACKNOWLEDGED_MIN,
            sectors: 10 * SEARCHED_PER_GIVEN_UP,
            given_up: 1,
            repaired: 1,
            ..Outcome::default()
        };
        let musts = FAULTS.iter().chain(OF_BLOCKS);
        musts.for_each(|fault| enough.count(fault, 1));
        enough
    }

    #[track_caller]
    fn check(spoil: impl FnOnce(&mut Outcome), missing: &str) {
        let mut outcome = enough();
        spoil(&mut outcome);
        assert_eq!(outcome.missing(), [missing]);
    }

    #[test]
    fn what_did_not_happen_is_missed() {
        assert_eq!(enough().missing(), [""; 0]);
        check(|it| it.repaired = 0, "never: page repaired");
        check(
            |it| {
                it.faults.remove("siege");
            },
            "never: siege",
        );
        check(
            |it| {
                let musts = OF_GUESTS.iter().filter(|it| **it != "guest read");
                musts.for_each(|fault| it.count(fault, 1));
                it.repaired = 0;
            },
            "never: guest read",
        );
        check(
            |it| it.given_up = 10,
            "10 of 10000 sectors were not searched",
        );
        check(
            |it| it.acknowledged -= 1,
            "49999 requests acknowledged in 500 histories",
        );
    }
}
