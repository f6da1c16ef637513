//! The limit of wrong tokens from an address.
//!
//! Invariants: a right token is never limited, so that an attacker cannot lock out an operator behind
//! the same address. The table has at most [`ADDRESSES_MAX`] addresses; while it is full, wrong
//! tokens of other addresses are limited at once.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// Wrong tokens that an address may send in a window and still learn that they are wrong.
pub const WRONG_TOKENS_MAX: u32 = 10;
/// The length of a window; it starts with the first wrong token.
pub const WRONG_TOKENS_WINDOW: Duration = Duration::from_secs(60);
/// Addresses in the table: about 300 KiB.
pub const ADDRESSES_MAX: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Window {
    since: Duration,
    count: u32,
}

impl Window {
    fn remaining(&self, now: Duration) -> Duration {
        (self.since + WRONG_TOKENS_WINDOW).saturating_sub(now)
    }
}

/// Too many wrong tokens came from an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongTokenError {
    /// The time until the window is over.
    pub remaining: Duration,
    /// Whether this one is the first too many.
    pub is_first: bool,
}

/// The wrong tokens of each address.
#[derive(Debug, Default)]
pub struct WrongTokens {
    windows: BTreeMap<IpAddr, Window>,
}

impl WrongTokens {
    /// Counts a wrong token from an address, at a time of the monotonic clock.
    ///
    /// # Errors
    /// When there were too many.
    pub fn count(&mut self, peer: IpAddr, now: Duration) -> Result<(), WrongTokenError> {
        let peer = network(peer);
        if !self.windows.contains_key(&peer) && self.windows.len() >= ADDRESSES_MAX {
            self.windows.retain(|_, it| !it.remaining(now).is_zero());
            if self.windows.len() >= ADDRESSES_MAX {
                let remaining = self.windows.values().map(|it| it.remaining(now));
                return Err(WrongTokenError {
                    remaining: remaining.min().unwrap_or(WRONG_TOKENS_WINDOW),
                    is_first: false,
                });
            }
        }
        let fresh = Window {
            since: now,
            count: 0,
        };
        let window = self.windows.entry(peer).or_insert(fresh);
        if window.remaining(now).is_zero() {
            *window = fresh;
        }
        window.count = window.count.saturating_add(1);
        if window.count > WRONG_TOKENS_MAX {
            return Err(WrongTokenError {
                remaining: window.remaining(now),
                is_first: window.count == WRONG_TOKENS_MAX + 1,
            });
        }
        Ok(())
    }

    /// Addresses in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.windows.len()
    }

    /// Whether the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.windows.is_empty()
    }
}

/// The unit that counts as one address. One subscriber has a whole /64 of IPv6.
pub(crate) fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let prefix = address.to_bits() & !u128::from(u64::MAX);
            Ipv6Addr::from_bits(prefix).into()
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(seconds: u64, is_first: bool) -> Result<(), WrongTokenError> {
        Err(WrongTokenError {
            remaining: Duration::from_secs(seconds),
            is_first,
        })
    }

    fn v4(number: u32) -> IpAddr {
        std::net::Ipv4Addr::from_bits(number).into()
    }

    #[test]
    fn eleventh_wrong_token_waits_for_window() {
        let mut wrong = WrongTokens::default();
        let s = Duration::from_secs;
        for second in 0..10 {
            assert_eq!(wrong.count(v4(1), s(second)), Ok(()));
        }
        assert_eq!(wrong.count(v4(1), s(10)), limited(50, true));
        assert_eq!(wrong.count(v4(1), s(59)), limited(1, false));
        assert_eq!(wrong.count(v4(2), s(59)), Ok(()));
        assert_eq!(wrong.count(v4(1), s(60)), Ok(()));
    }

    #[test]
    fn table_of_addresses_is_bounded() {
        let mut wrong = WrongTokens::default();
        for number in 0..ADDRESSES_MAX as u32 {
            assert_eq!(wrong.count(v4(number), Duration::ZERO), Ok(()));
        }
        let found = wrong.count(v4(u32::MAX), Duration::from_secs(1));
        assert_eq!(found, limited(59, false));
        assert_eq!(wrong.len(), ADDRESSES_MAX);
        assert_eq!(wrong.count(v4(7), Duration::from_secs(1)), Ok(()));
        assert_eq!(wrong.count(v4(u32::MAX), WRONG_TOKENS_WINDOW), Ok(()));
        assert_eq!(wrong.len(), 1);
    }

    #[test]
    fn subscriber_of_ipv6_counts_as_one() {
        let mut wrong = WrongTokens::default();
        for host in 0..10u16 {
            let peer = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, host, 0, 0, host);
            assert_eq!(wrong.count(peer.into(), Duration::ZERO), Ok(()));
        }
        let same = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 9, 9, 9, 9).into();
        assert!(wrong.count(same, Duration::ZERO).is_err());
        let other = Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 9, 9, 9, 9).into();
        assert!(wrong.count(other, Duration::ZERO).is_ok());
        let mapped = "::ffff:10.0.0.1".parse().expect("an address");
        assert!(wrong.count(mapped, Duration::ZERO).is_ok());
        assert_eq!(wrong.len(), 3);
    }
}
