//! The search for the highest rate that a server holds: steps by a factor up or down, and then halves of the interval.
//!
//! Both parts are pure. The caller measures rounds of each rate that [`RateSearch::next_rate`] names, and a [`PointVote`]
//! decides on the rate by the majority of its rounds. A round in which the generator was late says nothing about the server: it
//! is repeated. If that goes on, the rate is an upper end of the search but no limit of the server.

/// Rates of one search at most.
pub const STEPS_MAX: u32 = 24;
/// The lowest rate that a search tries.
pub const RATE_MIN: f64 = 10.0;
/// The highest.
pub const RATE_MAX: f64 = 2_000_000.0;

/// The result of a round, and of all rounds of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateVerdict {
    /// The server held the rate.
    Held,
    /// The server did not.
    Missed,
    /// The generator was late.
    Void,
}

/// The rounds of one rate.
#[derive(Clone, Copy, Debug)]
pub struct PointVote {
    rounds: usize,
    held: usize,
    missed: usize,
    void: usize,
}

impl PointVote {
    /// A vote of this many rounds. Void rounds are repeated as often.
    #[must_use]
    pub fn new(rounds: usize) -> PointVote {
        PointVote {
            rounds: rounds.max(1),
            held: 0,
            missed: 0,
            void: 0,
        }
    }

    /// Counts a round.
    pub fn record(&mut self, round: RateVerdict) {
        match round {
            RateVerdict::Held => self.held += 1,
            RateVerdict::Missed => self.missed += 1,
            RateVerdict::Void => self.void += 1,
        }
    }

    /// The verdict, as soon as further rounds cannot change it; none: another round is needed.
    #[must_use]
    pub fn verdict(&self) -> Option<RateVerdict> {
        let majority = self.rounds / 2 + 1;
        if self.held >= majority {
            Some(RateVerdict::Held)
        } else if self.missed > self.rounds - majority {
            Some(RateVerdict::Missed)
        } else if self.void > self.rounds {
            Some(RateVerdict::Void)
        } else {
            None
        }
    }
}

/// The reason that a search found no higher rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchLimit {
    /// The server held no higher one.
    Server,
    /// The generator was late at the next higher one, so the rate that was found is a lower bound.
    Generator,
    /// The search has ended at [`RATE_MAX`] or after [`STEPS_MAX`] rates, so it is a lower bound.
    Search,
}

/// A search.
#[derive(Clone, Copy, Debug)]
pub struct RateSearch {
    start: f64,
    /// The factor from one rate to the next, until one is held and one is not.
    factor: f64,
    /// The search ends when the lowest rate that was not held is at most this much above the best one.
    precision: f64,
    held: Option<f64>,
    /// The lowest rate that was not held, and its verdict.
    ended: Option<(f64, RateVerdict)>,
    steps: u32,
}

impl RateSearch {
    /// A search from this rate. A factor of 2 and a precision of 0.05 are usual.
    #[must_use]
    pub fn new(start: f64, factor: f64, precision: f64) -> RateSearch {
        RateSearch {
            start: start.clamp(RATE_MIN, RATE_MAX),
            factor: factor.max(1.01),
            precision: precision.max(0.001),
            held: None,
            ended: None,
            steps: 0,
        }
    }

    /// The next rate to measure; none: the search is over.
    #[must_use]
    pub fn next_rate(&self) -> Option<f64> {
        if self.steps >= STEPS_MAX {
            return None;
        }
        match (self.held, self.ended) {
            (None, None) => Some(self.start),
            (Some(held), None) => (held < RATE_MAX).then(|| (held * self.factor).min(RATE_MAX)),
            (None, Some((ended, _))) => {
                (ended > RATE_MIN).then(|| (ended / self.factor).max(RATE_MIN))
            }
            (Some(held), Some((ended, _))) => {
                let is_open = ended / held > 1.0 + self.precision;
                is_open.then(|| (held * ended).sqrt())
            }
        }
    }

    /// Notes the verdict on a rate.
    pub fn record(&mut self, rate: f64, verdict: RateVerdict) {
        self.steps += 1;
        match verdict {
            RateVerdict::Held => self.held = Some(self.held.map_or(rate, |held| held.max(rate))),
            _ if self.ended.is_none_or(|(ended, _)| rate <= ended) => {
                self.ended = Some((rate, verdict));
            }
            _ => {}
        }
    }

    /// The highest rate that was held.
    #[must_use]
    pub fn best(&self) -> Option<f64> {
        self.held
    }

    /// The reason that there is no higher one.
    #[must_use]
    pub fn limit(&self) -> SearchLimit {
        match (self.held, self.ended) {
            (_, Some((_, RateVerdict::Void))) => SearchLimit::Generator,
            (None, Some(_)) => SearchLimit::Server,
            // The factor alone has not found the limit yet.
            (Some(held), Some((ended, _))) if ended / held <= self.factor * 1.001 => {
                SearchLimit::Server
            }
            _ => SearchLimit::Search,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RateVerdict::{Held, Missed, Void};

    /// Searches with this server. Returns the search.
    fn search(start: f64, server: impl Fn(f64) -> RateVerdict) -> RateSearch {
        let mut search = RateSearch::new(start, 2.0, 0.05);
        while let Some(rate) = search.next_rate() {
            search.record(rate, server(rate));
        }
        search
    }

    fn below(limit: f64) -> impl Fn(f64) -> RateVerdict {
        move |rate| if rate <= limit { Held } else { Missed }
    }

    #[test]
    fn search_finds_the_limit_from_both_sides() {
        for (start, limit) in [(1000.0, 20_000.0), (50_000.0, 3000.0), (1000.0, 1000.0)] {
            let found = search(start, below(limit));
            let best = found.best().expect("a rate");
            assert!(best <= limit && best * 1.06 > limit, "{best} of {limit}");
            assert!(found.steps < 20, "{}", found.steps);
            assert_eq!(found.limit(), SearchLimit::Server);
        }
    }

    #[test]
    fn search_without_a_limit_ends() {
        let endless = search(1000.0, below(f64::MAX));
        assert_eq!(endless.best(), Some(RATE_MAX));
        assert_eq!(endless.limit(), SearchLimit::Search);
        let nothing = search(1000.0, below(0.0));
        assert_eq!(nothing.best(), None);
        assert_eq!(nothing.limit(), SearchLimit::Server);
    }

    #[test]
    fn late_generator_leaves_a_lower_bound() {
        let found = search(1000.0, |rate| if rate <= 7000.0 { Held } else { Void });
        let best = found.best().expect("a rate");
        assert!(best <= 7000.0 && best * 1.06 > 7000.0, "{best}");
        assert_eq!(found.limit(), SearchLimit::Generator);
        // The server's limit is below the first void rate, and is found.
        let found = search(1000.0, |rate| match rate {
            rate if rate <= 5000.0 => Held,
            rate if rate <= 7000.0 => Missed,
            _ => Void,
        });
        assert_eq!(found.limit(), SearchLimit::Server);
    }

    #[test]
    fn void_start_goes_down_to_a_valid_rate() {
        let found = search(8000.0, |rate| if rate <= 1500.0 { Held } else { Void });
        assert!(found.best().expect("a rate") > 1400.0);
        assert_eq!(found.limit(), SearchLimit::Generator);
    }

    fn vote(rounds: &[RateVerdict]) -> Option<RateVerdict> {
        let mut vote = PointVote::new(5);
        for (at, round) in rounds.iter().enumerate() {
            assert_eq!(vote.verdict(), None, "{at} rounds decide");
            vote.record(*round);
        }
        vote.verdict()
    }

    #[test]
    fn majority_of_rounds_decides() {
        assert_eq!(vote(&[Held, Held, Held]), Some(Held));
        assert_eq!(vote(&[Missed, Held, Missed, Held, Held]), Some(Held));
        assert_eq!(vote(&[Missed, Held, Missed, Held, Missed]), Some(Missed));
        assert_eq!(vote(&[Held, Held]), None);
    }

    #[test]
    fn void_rounds_are_repeated_a_bounded_number_of_times() {
        assert_eq!(vote(&[Void, Held, Void, Held, Void, Held]), Some(Held));
        assert_eq!(vote(&[Void; 5]), None);
        assert_eq!(vote(&[Void; 6]), Some(Void));
        assert_eq!(
            vote(&[Held, Held, Void, Void, Void, Void, Void, Void]),
            Some(Void)
        );
        let mut even = PointVote::new(4);
        (0..2).for_each(|_| even.record(Missed));
        assert_eq!(even.verdict(), Some(Missed), "no majority can hold it");
    }
}
