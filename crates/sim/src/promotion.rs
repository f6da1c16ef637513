//! A copy that follows goes on alone: all bricks with an in-sync copy are gone, or out of
//! reach, and the manager promotes it.
//!
//! Faults end before that until the copy follows, as it rarely does among them. They come
//! back, and end once more until a client has read what the copy has. What was lost stays
//! so until faults set it right, or the history ends.

use crate::client::Client;
use crate::cluster::tell;
use crate::desk::follower;
use crate::dice::Dice;
use crate::house::Death;
use crate::life::Life;
use crate::network::Peer;
use crate::rest::STEPS_MAX;
use pagemesh_base::layout::{Layout, LegState};

/// Steps after which a promotion begins.
const STEPS_BEFORE_MAX: u64 = 2500;
/// Steps until the copy follows, and without an in-sync copy.
const FOLLOW_STEPS_MAX: u32 = 40_000;
/// Steps for which that is held up by changes.
const BUSY_STEPS_MAX: u32 = 2000;
const BEREFT_STEPS_MAX: u32 = 3000;
/// One step in so many lets time pass until the manager takes bricks for dead.
const WAITED: u64 = 40;
const WAIT_US_MAX: u64 = 1_000_000;
/// Steps for which the copy may lag first.
const LAG_STEPS_MAX: u64 = 200;

/// Who promotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// An operator, once the other bricks are dead.
    Hand,
    /// An operator who does not care.
    Force,
    /// The manager, for a client that asks again.
    Manager,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Stage {
    /// Nothing has happened yet.
    Waits(u32),
    /// The copy may be slow, for so many steps.
    Lags(u32),
    /// No in-sync copy is left.
    Bereft,
    /// A client is to attach, and to read all.
    Promoted,
    Over,
}

/// See [`Life::promote`].
pub(crate) struct Promotion {
    dice: Dice,
    way: Way,
    stage: Stage,
    steps: u32,
}

impl Promotion {
    pub(crate) fn new(mut dice: Dice) -> Promotion {
        Promotion {
            way: [Way::Hand, Way::Force, Way::Manager, Way::Manager][dice.roll(4) as usize],
            stage: Stage::Waits(dice.roll(STEPS_BEFORE_MAX) as u32),
            dice,
            steps: 0,
        }
    }

    /// Whether the manager may promote the copy by itself.
    pub(crate) fn is_automatic(&self) -> bool {
        self.way == Way::Manager
    }

    fn turn_to(&mut self, stage: Stage) {
        (self.stage, self.steps) = (stage, 0);
    }
}

impl Life {
    /// Whether a promotion is under way, so that nothing else may go wrong.
    pub(crate) fn is_bereft(&self) -> bool {
        let stage = self.promotion.as_ref().map(|it| it.stage);
        matches!(stage, Some(Stage::Bereft | Stage::Promoted))
    }

    /// What is out of reach is so for the next client, too.
    pub(crate) fn bereave_the_next(&mut self) {
        for house in &self.out_of_reach {
            let peer = Peer::Client(self.next_client);
            self.cluster.net().cut(peer, *house, true, true);
        }
    }

    /// A client has attached: it may be the first that goes on with a promoted copy.
    pub(crate) fn meet_promotion(&mut self, attachment: u32) {
        let promoted = self.desk.promoted();
        if self.plan.files {
            return;
        }
        if self.checker.last_cut() < promoted && promoted <= attachment {
            self.checker.cut(promoted, self.sectors);
        }
    }

    /// The next step of a promotion, if its time has come.
    pub(crate) fn promote(&mut self) -> Result<(), String> {
        let Some(mut promotion) = self.promotion.take() else {
            return Ok(());
        };
        // The manager may have done it by chance, and twice it cannot be.
        if promotion.stage < Stage::Promoted && self.desk.promoted() > 0 {
            promotion.turn_to(Stage::Promoted);
        }
        promotion.steps += 1;
        match promotion.stage {
            Stage::Waits(0) if self.siege.is_none() && self.ambush.is_none() => {
                self.let_lag(&mut promotion)?;
            }
            Stage::Waits(steps) => promotion.stage = Stage::Waits(steps.saturating_sub(1)),
            Stage::Lags(0) => self.bereave(&mut promotion),
            Stage::Lags(steps) => {
                self.submit()?;
                promotion.stage = Stage::Lags(steps - 1);
            }
            Stage::Bereft if promotion.steps > BEREFT_STEPS_MAX => {
                self.out_of_reach.clear();
                self.mend();
                promotion.turn_to(Stage::Over);
            }
            Stage::Bereft if promotion.dice.one_in(WAITED) => {
                let by = promotion.dice.micros(WAIT_US_MAX);
                self.pass(by);
                self.replace_copies(&promotion);
            }
            Stage::Bereft => {}
            Stage::Promoted => self.go_on_alone(&mut promotion),
            Stage::Over => {}
        }
        self.promotion = Some(promotion);
        Ok(())
    }

    fn followed(&self) -> Option<(usize, Layout)> {
        let layout = self.desk.manager()?.show(&self.name).ok()?.layout;
        let (copy, leg) = follower(&layout)?;
        (leg.state == LegState::Following).then_some((copy, layout.clone()))
    }

    /// All is made well until the copy follows, which may be slow.
    fn let_lag(&mut self, promotion: &mut Promotion) -> Result<(), String> {
        self.crowd = None;
        self.mend();
        let is_busy = promotion.dice.one_in(2);
        if promotion.dice.one_in(2) {
            // The copy was added last.
            let copies = self.plan.copies;
            let layout = self.layout()?;
            let house = self.houses_of(&layout, |it| it == copies)[0];
            tell!(self.cluster, "brick {house}, which is to follow, is slow");
            self.cluster.net().slow(house, true);
        }
        for step in 0..FOLLOW_STEPS_MAX {
            if self.followed().is_some() {
                let most = if is_busy { 4 } else { LAG_STEPS_MAX };
                let steps = promotion.dice.roll(most) as u32;
                promotion.turn_to(Stage::Lags(steps));
                return Ok(());
            }
            if is_busy && step < BUSY_STEPS_MAX && promotion.dice.one_in(4) {
                self.submit()?;
            }
            self.step()?;
            self.dismiss();
        }
        Err("a copy does not come to follow".into())
    }

    fn houses_of(&self, layout: &Layout, is_meant: impl Fn(usize) -> bool) -> Vec<usize> {
        let legs = layout.columns().flat_map(|column| column.legs.iter());
        let legs = legs.enumerate().filter(|(copy, _)| is_meant(*copy));
        let houses = legs.filter_map(|(_, leg)| self.cluster.house_of(leg.brick));
        houses.collect()
    }

    /// Takes every in-sync copy away: its brick dies, or is out of reach for all but
    /// the client that has the volume, which may go on.
    fn bereave(&mut self, promotion: &mut Promotion) {
        let followed = self.followed();
        let Some((copy, layout)) = followed.filter(|_| self.siege.is_none()) else {
            return promotion.turn_to(Stage::Waits(0));
        };
        self.ambush = None;
        self.crowd = None;
        self.desk.mend();
        if promotion.dice.one_in(2) {
            self.cluster.net().mend();
        }
        let follower = self.houses_of(&layout, |it| it == copy)[0];
        if let Some(running) = self.cluster.running(follower) {
            running.medium.light_out();
        }
        self.cluster.start(follower, None, false);
        self.desk.hear(follower);
        let is_cut_off = promotion.dice.one_in(3);
        for house in self.houses_of(&layout, |it| it != copy) {
            if is_cut_off {
                tell!(self.cluster, "brick {house} is out of reach for others");
                self.cluster.net().cut(Peer::Manager, house, true, true);
                self.out_of_reach.push(house);
            } else if promotion.dice.one_in(2) {
                self.cluster.kill(house, Death::Process);
            } else {
                self.cluster.kill(house, Death::Power);
            }
        }
        if promotion.dice.one_in(2) {
            while !self.clients.is_empty() {
                self.leave(0);
            }
        }
        promotion.turn_to(Stage::Bereft);
    }

    /// The volume is to go on with the copy.
    fn replace_copies(&mut self, promotion: &Promotion) {
        let Some((copy, _)) = self.followed() else {
            return;
        };
        match promotion.way {
            Way::Manager if self.clients.iter().all(|it| it.attachment > 0) => {
                self.enter_again(true);
            }
            Way::Manager => {}
            way => self.desk.promote(&self.name, copy, way == Way::Force),
        }
    }

    /// The next client attaches and reads all.
    fn go_on_alone(&mut self, promotion: &mut Promotion) {
        let promoted = self.desk.promoted();
        let is_next = |it: &Client| it.attachment == 0 || it.attachment >= promoted;
        if !self.clients.iter().any(is_next) {
            return self.enter();
        }
        let is_known = match self.plan.files {
            true => self.has_found_files(promoted),
            false if self.checker.last_cut() < promoted => return,
            false => !self.checker.awaits_reads(),
        };
        if is_known {
            tell!(self.cluster, "what the copy has is known");
            self.outcome.count(promotion.way.name(), 1);
            self.out_of_reach.clear();
            return promotion.turn_to(Stage::Over);
        }
        if self.plan.files {
            return;
        }
        let is_ready = |it: &Client| it.attachment >= promoted && it.is_idle() && !it.is_stopped();
        if let Some(at) = self.clients.iter().position(is_ready) {
            if self.clients[at].threads.is_empty() {
                return self.leave(at);
            }
            for part in self.parts() {
                self.read(at, 0, part);
            }
        }
    }

    /// A promotion that has begun comes to its end.
    pub(crate) fn until_promoted(&mut self) -> Result<(), String> {
        let stage = self.promotion.as_ref().map(|it| it.stage);
        if self.desk.promoted() == 0 || stage == Some(Stage::Over) {
            self.promotion = None;
            self.out_of_reach.clear();
            return Ok(());
        }
        for _ in 0..STEPS_MAX {
            self.promote()?;
            if self
                .promotion
                .as_ref()
                .is_none_or(|it| it.stage == Stage::Over)
            {
                return Ok(());
            }
            self.step()?;
        }
        Err("no client goes on with a promoted copy".into())
    }
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Hand => "copy promoted by hand",
            Way::Force => "copy promoted by force",
            Way::Manager => "copy promoted by the manager",
        }
    }
}
