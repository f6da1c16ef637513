//! Names of bricks for people, and the ways to name a brick in a request.
//!
//! The UUID of its pool identifies a brick; layouts and the wire use only that. A name is unique in
//! the cluster, may change when the brick restarts, and is never mistaken for a UUID.

use crate::layout::{BadVolumeName, BrickId, NAME_BYTES_MAX, check_name};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

/// Digits of a UUID that stand for a brick without a name.
pub const SHORT_ID_DIGITS: usize = 8;

/// The name of a brick, by the rules of [`crate::layout::VolumeName`]; never a UUID.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BrickName(String);

/// Why a text is not the name of a brick.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBrickName {
    /// It breaks the rules of all names.
    #[error(transparent)]
    Name(#[from] BadVolumeName),
    /// It would be read as the UUID of a brick.
    #[error("'{0}' looks like a UUID; choose a name that does not")]
    LooksLikeId(String),
}

impl BrickName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A valid name from a host name: other characters become dashes.
    #[must_use]
    pub fn from_host_name(host: &str) -> BrickName {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let plain = |c| if allowed(c) { c } else { '-' };
        let text: String = host.chars().map(plain).collect();
        let text = text.trim_start_matches(['.', '-']);
        let text = &text[..text.len().min(NAME_BYTES_MAX)];
        match BrickName::from_str(text) {
            Ok(name) => name,
            Err(BadBrickName::LooksLikeId(id)) => BrickName(format!("host-{id}")),
            Err(BadBrickName::Name(_)) => BrickName("localhost".into()),
        }
    }

    /// The name with `-number` behind it, shortened to fit.
    #[must_use]
    pub fn with_number(&self, number: usize) -> BrickName {
        let suffix = format!("-{number}");
        let len = self.0.len().min(NAME_BYTES_MAX - suffix.len());
        BrickName(format!("{}{suffix}", &self.0[..len]))
    }
}

impl TryFrom<String> for BrickName {
    type Error = BadBrickName;

    fn try_from(text: String) -> Result<BrickName, BadBrickName> {
        if Uuid::parse_str(&text).is_ok() {
            return Err(BadBrickName::LooksLikeId(text));
        }
        check_name(&text)?;
        Ok(BrickName(text))
    }
}

impl FromStr for BrickName {
    type Err = BadBrickName;

    fn from_str(text: &str) -> Result<BrickName, BadBrickName> {
        BrickName::try_from(text.to_owned())
    }
}

impl From<BrickName> for String {
    fn from(name: BrickName) -> String {
        name.0
    }
}

impl fmt::Display for BrickName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A brick in a request: its UUID, its name, or the first digits of the UUID that stand for a brick
/// without a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum BrickRef {
    /// By the UUID of its pool.
    Id(BrickId),
    /// By its name, or by the first digits of its UUID.
    Name(BrickName),
}

impl BrickRef {
    /// Whether the text could be the first digits of this UUID. A name takes precedence.
    #[must_use]
    pub fn is_short_id_of(&self, id: BrickId) -> bool {
        let BrickRef::Name(name) = self else {
            return false;
        };
        let digits = name.as_str().replace('-', "").to_ascii_lowercase();
        digits.len() >= SHORT_ID_DIGITS && id.0.simple().to_string().starts_with(&digits)
    }
}

impl From<BrickId> for BrickRef {
    fn from(id: BrickId) -> BrickRef {
        BrickRef::Id(id)
    }
}

impl TryFrom<String> for BrickRef {
    type Error = BadBrickName;

    fn try_from(text: String) -> Result<BrickRef, BadBrickName> {
        match Uuid::parse_str(&text) {
            Ok(id) => Ok(BrickRef::Id(BrickId(id))),
            Err(_) => BrickName::try_from(text).map(BrickRef::Name),
        }
    }
}

impl FromStr for BrickRef {
    type Err = BadBrickName;

    fn from_str(text: &str) -> Result<BrickRef, BadBrickName> {
        BrickRef::try_from(text.to_owned())
    }
}

impl From<BrickRef> for String {
    fn from(brick: BrickRef) -> String {
        brick.to_string()
    }
}

impl fmt::Display for BrickRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BrickRef::Id(id) => id.fmt(f),
            BrickRef::Name(name) => name.fmt(f),
        }
    }
}

/// A brick in a message for people: its name, or the first digits of its UUID if it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrickLabel {
    /// The UUID of its pool.
    pub id: BrickId,
    /// Its name, if it has one.
    pub name: Option<BrickName>,
}

impl fmt::Display for BrickLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => name.fmt(f),
            None => f.write_str(&self.id.0.simple().to_string()[..SHORT_ID_DIGITS]),
        }
    }
}

/// The names of some bricks, to label them in messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BrickNames(BTreeMap<BrickId, BrickName>);

impl BrickNames {
    /// How messages name a brick.
    #[must_use]
    pub fn label(&self, id: BrickId) -> BrickLabel {
        let name = self.0.get(&id).cloned();
        BrickLabel { id, name }
    }
}

impl FromIterator<(BrickId, BrickName)> for BrickNames {
    fn from_iter<I: IntoIterator<Item = (BrickId, BrickName)>>(names: I) -> BrickNames {
        BrickNames(names.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3fa85f64-5717-4562-b3fc-2c963f66afa6";

    #[test]
    fn brick_names_are_plain_and_never_ids() {
        for good in ["brick-1", "db_2.rack", "3fa85f64", "deadbeef-2"] {
            assert!(good.parse::<BrickName>().is_ok(), "{good}");
        }
        let simple = ID.replace('-', "");
        let long = "x".repeat(NAME_BYTES_MAX + 1);
        for bad in [
            "",
            "-x",
            ".",
            "a b",
            "a/b",
            "a\n",
            "a\u{1b}[1m",
            "é",
            ID,
            &simple,
            &long,
        ] {
            assert!(bad.parse::<BrickName>().is_err(), "{bad:?}");
            let json = serde_json::to_string(bad).expect("a string");
            assert!(serde_json::from_str::<BrickName>(&json).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn host_name_becomes_valid_brick_name() {
        let long = "h".repeat(NAME_BYTES_MAX + 7);
        let named = [
            ("node-1.rack", "node-1.rack"),
            ("-a b\n", "a-b-"),
            ("", "localhost"),
            ("...", "localhost"),
            (ID, &format!("host-{ID}")),
            (&long, &long[..NAME_BYTES_MAX]),
        ];
        for (host, name) in named {
            let found = BrickName::from_host_name(host);
            assert_eq!(found.as_str(), name);
            assert_eq!(found.as_str().parse(), Ok(found.clone()));
        }
    }

    #[test]
    fn numbered_name_stays_within_limit() {
        let name = |text: &str| text.parse::<BrickName>().expect("a name");
        assert_eq!(name("db").with_number(2), name("db-2"));
        let longest = "x".repeat(NAME_BYTES_MAX);
        let numbered = name(&longest).with_number(1024);
        assert_eq!(numbered.as_str().len(), NAME_BYTES_MAX);
        assert!(numbered.as_str().ends_with("x-1024"));
    }

    #[test]
    fn brick_is_named_by_id_name_or_first_digits() {
        let id = BrickId(Uuid::parse_str(ID).expect("a UUID"));
        assert_eq!(ID.parse(), Ok(BrickRef::Id(id)));
        assert!(matches!("brick-1".parse(), Ok(BrickRef::Name(_))));
        assert!("a b".parse::<BrickRef>().is_err());
        let is_short = |text: &str| {
            text.parse::<BrickRef>()
                .expect("a brick")
                .is_short_id_of(id)
        };
        assert!(is_short("3fa85f64") && is_short("3FA85F64-5717"));
        assert!(!is_short("3fa85f6") && !is_short("3fa85f65") && !is_short(ID));
        let label = |name: Option<&str>| {
            let name = name.map(|name| name.parse().expect("a name"));
            BrickLabel { id, name }.to_string()
        };
        assert_eq!(label(None), "3fa85f64");
        assert_eq!(label(Some("db")), "db");
    }
}
