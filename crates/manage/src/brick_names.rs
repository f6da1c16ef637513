//! Names of bricks: which brick a request names, how messages name a brick, and which name a brick
//! gets.
//!
//! Invariants: no two known bricks have one name, dead bricks included. Layouts, the store's keys
//! and requests to bricks use ids only, so a brick keeps its slices under a new name.

use crate::fault::Fault;
use crate::manager::{BRICKS_MAX, BrickState, ManagerState};
use crate::wire::BrickRegistration;
use pagemesh_base::brick_name::{BrickLabel, BrickName, BrickRef};
use pagemesh_base::layout::BrickId;

impl ManagerState {
    /// How messages name a brick.
    pub(crate) fn label(&self, id: BrickId) -> BrickLabel {
        let known = self.bricks.get(&id);
        known.map_or(BrickLabel { id, name: None }, |it| it.record.label())
    }

    /// The brick that a request names.
    ///
    /// # Errors
    /// When there is none, or several have a UUID that starts with the given digits.
    pub(crate) fn find_brick(&self, asked: &BrickRef) -> Result<&BrickState, Fault> {
        let exact = match asked {
            BrickRef::Id(id) => self.bricks.get(id),
            BrickRef::Name(name) => self.brick_named(name),
        };
        if let Some(brick) = exact {
            return Ok(brick);
        }
        let bricks = self.bricks.values();
        let mut similar = bricks.filter(|it| asked.is_short_id_of(it.record.brick));
        match (similar.next(), similar.next()) {
            (None, _) => Err(Fault::NoSuchBrick(asked.clone())),
            (Some(brick), None) => Ok(brick),
            (Some(_), Some(_)) => Err(Fault::BrickAmbiguous(asked.clone())),
        }
    }

    /// The same, to change it.
    pub(crate) fn find_brick_mut(&mut self, asked: &BrickRef) -> Result<&mut BrickState, Fault> {
        let id = self.find_brick(asked)?.record.brick;
        let brick = self.bricks.get_mut(&id);
        brick.ok_or_else(|| Fault::NoSuchBrick(asked.clone()))
    }

    fn brick_named(&self, name: &BrickName) -> Option<&BrickState> {
        let mut bricks = self.bricks.values();
        bricks.find(|brick| brick.record.name.as_ref() == Some(name))
    }

    /// The name of a brick after its registration: the name that it asks for, else its present one.
    /// A brick without a name that only proposes a default gets the first free one of `NAME`,
    /// `NAME-2`, `NAME-3`, …
    ///
    /// A brick that is known keeps its present name if another one has the name that it asks for:
    /// refused heartbeats would make a serving brick count as dead, and a replica behind it could be
    /// promoted.
    ///
    /// # Errors
    /// When the brick is new and another one has the name that it asks for.
    pub(crate) fn assign_name(
        &self,
        registration: &BrickRegistration,
    ) -> Result<Option<BrickName>, Fault> {
        let known = self.bricks.get(&registration.brick);
        let present = known.and_then(|brick| brick.record.name.as_ref());
        let Some(asked) = &registration.name else {
            return Ok(present.cloned());
        };
        if registration.name_is_default {
            return Ok(Some(
                present.map_or_else(|| self.free_name(asked), Clone::clone),
            ));
        }
        if present == Some(asked) {
            return Ok(present.cloned());
        }
        match self.brick_named(asked) {
            None => Ok(Some(asked.clone())),
            Some(_) if known.is_some() => Ok(present.cloned()),
            Some(holder) => Err(Fault::BrickNameTaken {
                name: asked.clone(),
                holder: holder.record.brick,
                address: holder.record.address.clone(),
            }),
        }
    }

    fn free_name(&self, wanted: &BrickName) -> BrickName {
        // One of the numbers may give the wanted name itself.
        let numbered = (2..=BRICKS_MAX + 2).map(|number| wanted.with_number(number));
        let mut names = std::iter::once(wanted.clone()).chain(numbered);
        let free = names.find(|name| self.brick_named(name).is_none());
        free.expect("there are more numbers than bricks")
    }
}
