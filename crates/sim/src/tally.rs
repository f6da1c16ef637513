//! What many histories came to, and whether that is enough to trust them.

use crate::life::Outcome;

/// Histories that must have met every fault, all together; fewer prove nothing.
const HISTORIES_MIN: u64 = 500;
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
    "channel closed",
    "channel stalled",
    "change lost with a promotion",
    "client killed",
    "client stopped",
    "connection broken",
    "connection severed",
    "copy promoted by force",
    "copy promoted by hand",
    "copy promoted by the manager",
    "crowd",
    "death in recovery",
    "durable change kept by a promotion",
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
    "requests without room",
    "second client",
    "settling interrupted",
    "siege",
    "slot above the leaves flipped",
    "slot of a page flipped",
    "slow brick",
    "transaction acknowledged",
    "transaction of unknown outcome",
    "transaction settled as a whole",
    "transaction without an answer happened",
    "transaction without an answer vanished",
    "volume scrubbed",
    "write lost",
    "write misdirected",
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
        if self.histories < HISTORIES_MIN {
            return missing;
        }
        if self.given_up * SEARCHED_PER_GIVEN_UP >= self.sectors {
            let (given_up, sectors) = (self.given_up, self.sectors);
            missing.push(format!("{given_up} of {sectors} sectors were not searched"));
        }
        if self.acknowledged < ACKNOWLEDGED_MIN * self.histories {
            let (acknowledged, histories) = (self.acknowledged, self.histories);
            missing.push(format!(
                "{acknowledged} requests acknowledged in {histories} histories"
            ));
        }
        let never = FAULTS.iter().filter(|it| !self.faults.contains_key(*it));
        missing.extend(never.map(|fault| format!("never: {fault}")));
        if self.repaired == 0 {
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
        FAULTS.iter().for_each(|fault| enough.count(fault, 1));
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
            |it| it.given_up = 10,
            "10 of 10000 sectors were not searched",
        );
        check(
            |it| it.acknowledged -= 1,
            "49999 requests acknowledged in 500 histories",
        );
    }
}
