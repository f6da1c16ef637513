//! Dates in UTC, without leap seconds, as `time_t` counts them.
//!
//! The algorithms are those of H. Hinnant, chrono-Compatible Low-Level Date Algorithms (`civil_from_days`, `days_from_civil`). Days are
//! counted from 0000-03-01, so that a leap day is the last of its year.

/// Seconds of a day.
pub(crate) const DAY_S: u64 = 86_400;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: u64 = 719_468;
/// Days of 400 years.
const ERA_DAYS: u64 = 146_097;
/// The first second of the year 10000. Later times count as this one.
const UNIX_S_MAX: u64 = 253_402_300_800;

/// A date and a time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CivilTime {
    pub year: u64,
    /// From 1 on.
    pub month: u64,
    /// From 1 on.
    pub day: u64,
    /// Seconds of the day.
    pub second: u64,
}

impl CivilTime {
    pub(crate) fn from_unix(unix_s: u64) -> CivilTime {
        let unix_s = unix_s.min(UNIX_S_MAX - 1);
        let days = unix_s / DAY_S + EPOCH_DAYS;
        let (era, of_era) = (days / ERA_DAYS, days % ERA_DAYS);
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let from_march = (5 * of_year + 2) / 153;
        let month = if from_march < 10 {
            from_march + 3
        } else {
            from_march - 9
        };
        CivilTime {
            year: year + era * 400 + u64::from(month <= 2),
            month,
            day: of_year - (153 * from_march + 2) / 5 + 1,
            second: unix_s % DAY_S,
        }
    }

    /// Seconds since 1970; none for a date that no calendar has, or one before 1970.
    pub(crate) fn to_unix(self) -> Option<u64> {
        let CivilTime {
            year,
            month,
            day,
            second,
        } = self;
        if !(1970..10_000).contains(&year) || !(1..=12).contains(&month) || second >= DAY_S {
            return None;
        }
        let from_march = if month > 2 { month - 3 } else { month + 9 };
        let year_of = year - u64::from(month <= 2);
        let (era, of_era) = (year_of / 400, year_of % 400);
        let of_year = (153 * from_march + 2) / 5 + day.checked_sub(1)?;
        let days = era * ERA_DAYS + of_era * 365 + of_era / 4 - of_era / 100 + of_year;
        let unix_s = (days.checked_sub(EPOCH_DAYS)?) * DAY_S + second;
        // A day beyond the end of its month is the day of another month.
        (CivilTime::from_unix(unix_s) == self).then_some(unix_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_dates_are_right() {
        for (unix_s, (year, month, day)) in [
            (0, (1970, 1, 1)),
            (951_782_400, (2000, 2, 29)),
            (1_709_164_800, (2024, 2, 29)),
            (1_735_689_599, (2024, 12, 31)),
            (4_107_542_400, (2100, 3, 1)),
        ] {
            let found = CivilTime::from_unix(unix_s);
            assert_eq!((found.year, found.month, found.day), (year, month, day));
        }
        let no_day = CivilTime {
            year: 2023,
            month: 2,
            day: 29,
            second: 0,
        };
        assert_eq!(no_day.to_unix(), None);
        CivilTime::from_unix(u64::MAX);
    }

    proptest! {
        #[test]
        fn dates_and_seconds_are_inverse(unix_s in 0..UNIX_S_MAX) {
            prop_assert_eq!(CivilTime::from_unix(unix_s).to_unix(), Some(unix_s));
        }
    }
}
