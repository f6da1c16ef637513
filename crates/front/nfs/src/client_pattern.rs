//! The clients of a rule: one address, a network, or all.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientPattern {
    /// Every address, of IPv4 and IPv6.
    All,
    /// The addresses with these first bits. A prefix of 32 bits (IPv4) or 128 bits (IPv6) is one host.
    Network {
        /// The first address.
        address: IpAddr,
        /// The number of bits that count.
        prefix_bits: u8,
    },
}

/// Why a word is no pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientPatternError {
    /// The word is no address.
    #[error(
        "{0:?} is no address. Names of hosts are not looked up, so that no name server decides about \
         access: write an address, a network such as 10.0.0.0/8, or `*` for all clients"
    )]
    NotAnAddress(String),
    /// The part after the slash is no length of a prefix.
    #[error("{0:?} is no number of bits; write a number from 0 to {1} after the slash")]
    PrefixBits(String, u8),
    /// The address has bits behind the prefix.
    #[error("{address} has bits behind its prefix; write {network}, or {address} for one host")]
    HostBits {
        /// The address as it is written.
        address: IpAddr,
        /// The network that it is in.
        network: ClientPattern,
    },
    /// The network is of IPv4, and is written as one of IPv6.
    #[error("{0} is a network of IPv4 in IPv6; write it as a network of IPv4")]
    MappedNetwork(IpAddr),
}

fn address_bits(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

/// The address with all bits behind the prefix cleared.
fn masked(address: IpAddr, prefix_bits: u8) -> IpAddr {
    let bits: u32 = prefix_bits.into();
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32u32.saturating_sub(bits));
            Ipv4Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128u32.saturating_sub(bits));
            Ipv6Addr::from_bits(address.to_bits() & mask.unwrap_or(0)).into()
        }
    }
}

impl ClientPattern {
    /// The pattern that a word names: `*`, `ADDRESS`, or `ADDRESS/BITS`.
    ///
    /// # Errors
    /// If it names none.
    pub fn parse(word: &str) -> Result<Self, ClientPatternError> {
        if word == "*" {
            return Ok(Self::All);
        }
        let (address, bits) = match word.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (word, None),
        };
        let parsed: Result<IpAddr, _> = address.parse();
        let address = parsed.map_err(|_| ClientPatternError::NotAnAddress(word.into()))?;
        match bits {
            None => Ok(Self::host(address)),
            Some(bits) => Self::network(address, bits),
        }
    }

    /// One address. A client of IPv4 that arrives at a socket of IPv6 is one of IPv4.
    #[must_use]
    pub fn host(address: IpAddr) -> Self {
        let address = address.to_canonical();
        let prefix_bits = address_bits(address);
        Self::Network {
            address,
            prefix_bits,
        }
    }

    fn network(address: IpAddr, bits: &str) -> Result<Self, ClientPatternError> {
        if address.to_canonical() != address {
            return Err(ClientPatternError::MappedNetwork(address));
        }
        let most = address_bits(address);
        let is_number = !bits.is_empty() && bits.bytes().all(|byte| byte.is_ascii_digit());
        let prefix_bits = bits.parse().ok().filter(|it| is_number && *it <= most);
        let prefix_bits = prefix_bits.ok_or(ClientPatternError::PrefixBits(bits.into(), most))?;
        let network = Self::Network {
            address: masked(address, prefix_bits),
            prefix_bits,
        };
        match masked(address, prefix_bits) == address {
            true => Ok(network),
            false => Err(ClientPatternError::HostBits { address, network }),
        }
    }

    /// Whether the pattern has the address.
    #[must_use]
    pub fn matches(self, client: IpAddr) -> bool {
        let client = client.to_canonical();
        match self {
            Self::All => true,
            Self::Network {
                address,
                prefix_bits,
            } => address.is_ipv4() == client.is_ipv4() && masked(client, prefix_bits) == address,
        }
    }

    /// The rank among the rules of an export: the rule with the highest one decides.
    #[must_use]
    pub fn specificity(self) -> u8 {
        match self {
            Self::All => 0,
            Self::Network { prefix_bits, .. } => prefix_bits + 1,
        }
    }
}

impl fmt::Display for ClientPattern {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => formatter.write_str("*"),
            Self::Network {
                address,
                prefix_bits,
            } if *prefix_bits == address_bits(*address) => write!(formatter, "{address}"),
            Self::Network {
                address,
                prefix_bits,
            } => write!(formatter, "{address}/{prefix_bits}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pattern(word: &str) -> ClientPattern {
        ClientPattern::parse(word).expect("a pattern")
    }

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn networks_match_their_addresses() {
        let check = |word, client, wanted| {
            let found = pattern(word).matches(address(client));
            assert_eq!(found, wanted, "{word} {client}");
        };
        check("*", "10.1.2.3", true);
        check("*", "fd00::1", true);
        check("10.1.2.3", "10.1.2.3", true);
        check("10.1.2.3", "10.1.2.4", false);
        check("10.1.2.3", "::ffff:10.1.2.3", true);
        check("::ffff:10.1.2.3", "10.1.2.3", true);
        check("10.0.0.0/8", "10.255.0.1", true);
        check("10.0.0.0/8", "11.0.0.1", false);
        check("0.0.0.0/0", "11.0.0.1", true);
        check("0.0.0.0/0", "fd00::1", false);
        check("::/0", "10.0.0.1", false);
        check("fd00:1::/32", "fd00:1:2::3", true);
        check("fd00:1::/32", "fd00:2::3", false);
        check("fd00::1/128", "fd00::1", true);
        check("10.0.0.1/32", "10.0.0.1", true);
    }

    #[test]
    fn unusable_words_have_their_cause() {
        use ClientPatternError as Error;
        let check = |word: &str, wanted| assert_eq!(ClientPattern::parse(word), Err(wanted));
        for word in ["", "host", "*.example.org", "@group", "10.0.0", "host/8"] {
            check(word, Error::NotAnAddress(word.into()));
        }
        for bits in ["", "33", "-1", "+8", "255.0.0.0", "8/8"] {
            let word = format!("10.0.0.0/{bits}");
            check(&word, Error::PrefixBits(bits.into(), 32));
        }
        check("fd00::/129", Error::PrefixBits("129".into(), 128));
        let host_bits = Error::HostBits {
            address: address("10.1.0.0"),
            network: pattern("10.0.0.0/8"),
        };
        check("10.1.0.0/8", host_bits);
        let mapped = Error::MappedNetwork(address("::ffff:10.0.0.0"));
        check("::ffff:10.0.0.0/104", mapped);
    }

    proptest! {
        #[test]
        fn written_pattern_is_read_again(bits in any::<u128>(), is_short: bool, prefix in 0u8..=128) {
            let (address, prefix) = match is_short {
                true => (IpAddr::V4(Ipv4Addr::from_bits(bits as u32)), prefix.min(32)),
                false => (IpAddr::V6(Ipv6Addr::from_bits(bits)), prefix),
            };
            let address = address.to_canonical();
            let prefix = prefix.min(address_bits(address));
            let network = masked(address, prefix);
            if network.to_canonical() == network {
                let read = pattern(&format!("{network}/{prefix}"));
                prop_assert!(read.matches(address));
                prop_assert_eq!(pattern(&read.to_string()), read);
            }
        }
    }
}
