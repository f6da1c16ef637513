//! The states of one file by owner: its opens and lock states.
//!
//! Most files have one open. It needs no memory beside the entry of the file.

use super::ids::{OwnerNo, StateNo};
use std::collections::BTreeMap;

/// See the module.
#[derive(Debug)]
pub(super) enum OwnerStates {
    One(Option<(OwnerNo, StateNo)>),
    Many(BTreeMap<OwnerNo, StateNo>),
}

impl Default for OwnerStates {
    fn default() -> Self {
        Self::One(None)
    }
}

impl OwnerStates {
    pub(super) fn get(&self, owner: OwnerNo) -> Option<StateNo> {
        match self {
            Self::One(one) => one.filter(|it| it.0 == owner).map(|it| it.1),
            Self::Many(states) => states.get(&owner).copied(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::One(one) => one.is_none(),
            Self::Many(states) => states.is_empty(),
        }
    }

    /// Adds the state of an owner without one.
    pub(super) fn insert(&mut self, owner: OwnerNo, state: StateNo) {
        match self {
            Self::One(one @ None) => *one = Some((owner, state)),
            Self::One(Some(first)) => *self = Self::Many([*first, (owner, state)].into()),
            Self::Many(states) => {
                states.insert(owner, state);
            }
        }
    }

    pub(super) fn remove(&mut self, owner: OwnerNo) {
        match self {
            Self::One(one) => *one = one.filter(|it| it.0 != owner),
            Self::Many(states) => {
                states.remove(&owner);
            }
        }
    }

    /// The states, in the order of their owners.
    pub(super) fn iter(&self) -> impl Iterator<Item = StateNo> {
        let (one, many) = match self {
            Self::One(one) => (*one, None),
            Self::Many(states) => (None, Some(states)),
        };
        let many = many.into_iter().flat_map(|states| states.values().copied());
        one.map(|it| it.1).into_iter().chain(many)
    }
}
