//! A history whose mount has guests (RFD 021): they read and write files on the direct path
//! beside the mount's program, die where they are, and are cleaned up behind.
//!
//! Invariants: operations of the program leave these files alone. Every sector of them is a
//! register that guests and the mount read and write; what a dead guest was inside of is
//! open until its row is cleared.

mod crew;
pub(crate) mod guest;
mod log;
pub(crate) mod mount;

pub(crate) use crew::Crew;

use crate::checker::{Ending, Kind, SECTOR, fill};
use crate::cluster::{guard, tell};
use crate::dice::Dice;
use crate::house::Death;
use crate::life::Life;
use crate::mount::Job;
use crew::{Fallen, Tracked, Work};
use guest::{Deed, End, Shown};
use log::{APPEND_SECTORS_MAX, LOG_BYTES, Log};
use mount::{ALL_FILES, Ask, FILE_SECTORS, FILES, LOG, PAGES, Reply};
use pagemesh_direct::rows;
use pagemesh_volume::guests::{Segment, Wound};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

/// Tells the dice of guests from all others of a seed.
const GUESTING: u64 = 0x6775_6573_7469_6e67;
/// Guests of a mount.
const GUESTS: usize = 3;
/// A guest that may go on dies instead, once in so many times.
const DEADLY: u64 = 60;
/// A host that may hear of a dead guest does, once in so many times.
const HEARD: u64 = 30;
/// A brick that has cleaned up behind a dead guest before others dies soon, once in so
/// many times.
const AMBUSHED: u64 = 8;
/// So soon, in steps of guests.
const AMBUSH_STEPS: u64 = 60;
/// Crowds of guests at the end, and steps of each.
const CROWDS: u32 = 3;
const CROWD_STEPS: u32 = 150;
/// One operation in so many is of the file that gets longer.
const LOGGED: u64 = 4;
/// Sectors of a page.
const PAGE_SECTORS: u64 = 4096 / SECTOR;
/// Of both files.
const SECTORS: u64 = FILES as u64 * FILE_SECTORS;
/// The mount's own requests are those of a channel that no guest has.
const KERNEL: u32 = 1 << 20;

/// What a mount knows of its guests.
pub(crate) struct Hosting {
    pub(crate) segment: Arc<Segment>,
    boards: [Option<Shown>; ALL_FILES],
    /// Rows of the dead that are not cleared yet.
    wounded: Vec<Wounded>,
}

struct Wounded {
    fallen: Fallen,
    healed: Receiver<()>,
}

/// What is asked of the mount, and how the checker has it.
#[derive(Clone)]
pub(crate) struct Asked {
    file: usize,
    ask: Ask,
    operation: Option<Tracked>,
}

impl Asked {
    pub(crate) fn job(&self) -> Job {
        Job::Ask(self.file, self.ask.clone())
    }
}

pub(crate) struct Guests {
    dice: Dice,
    next: u32,
    value: u64,
    log: Log,
    /// Where a guest died last, that others look at it.
    died_at: Option<(usize, Range<u64>)>,
    /// Guests want these pages of each file; fewer than all meet more often.
    hot_pages: u64,
    /// A brick that dies after so many steps.
    ambushed: Option<(usize, u64)>,
    /// Nobody begins anything any more.
    is_over: bool,
    /// Nobody dies any more.
    is_well: bool,
}

impl Guests {
    pub(crate) fn new(seed: u64) -> (Guests, Crew) {
        let mut dice = Dice::new(seed ^ GUESTING);
        let crew = Crew::new(dice.word());
        let hot_pages = [1, 2, PAGES][dice.roll(3) as usize];
        let guests = Guests {
            dice,
            died_at: None,
            hot_pages,
            next: 0,
            value: 0,
            log: Log::default(),
            ambushed: None,
            is_over: false,
            is_well: false,
        };
        (guests, crew)
    }

    /// An append, and what it writes.
    fn append(&mut self, is_gradual: bool) -> (Tracked, Vec<u8>) {
        let (value, sectors) = (self.value(), 1 + self.dice.roll(APPEND_SECTORS_MAX));
        self.log.begin(value, sectors, is_gradual);
        (Tracked::Append(value), fill(value, sectors))
    }

    fn value(&mut self) -> u64 {
        self.value += 1;
        self.value
    }

    /// Some sectors of a file, often whole pages.
    fn range(&mut self) -> (usize, Range<u64>) {
        let file = self.dice.roll(FILES as u64) as usize;
        let start = self.dice.roll(self.hot_pages * PAGE_SECTORS);
        let (start, len) = match self.dice.one_in(2) {
            true => (start, 1 + self.dice.roll(PAGE_SECTORS)),
            false => {
                let pages = [1, 1, 1, 2, 3][self.dice.roll(5) as usize];
                (start / PAGE_SECTORS * PAGE_SECTORS, pages * PAGE_SECTORS)
            }
        };
        (file, start..(start + len).min(FILE_SECTORS))
    }
}

/// All that was appended.
fn log_read() -> Ask {
    Ask::Read(0, 2 * LOG_BYTES as u32)
}

/// As the checker counts them.
fn sectors(file: usize, own: &Range<u64>) -> Range<u64> {
    let first = file as u64 * FILE_SECTORS;
    first + own.start..first + own.end
}

impl Hosting {
    pub(crate) fn new(segment: Arc<Segment>) -> Hosting {
        Hosting {
            segment,
            boards: [const { None }; ALL_FILES],
            wounded: Vec::new(),
        }
    }
}

impl Life {
    fn guesting(&mut self) -> &mut Guests {
        self.guests.as_mut().expect("a history of guests")
    }

    /// A step of guests, or of those who clean up behind them.
    pub(crate) fn tend_guests(&mut self) -> Result<(), String> {
        if self.guests.is_none() {
            return Ok(());
        }
        self.spring_ambush();
        self.note_fallen()?;
        self.clear_rows()?;
        if !self.guesting().is_over {
            self.admit_guests();
        }
        let count = guard(&self.cluster.crew).guests.len();
        if count == 0 {
            return Ok(());
        }
        let at = self.guesting().dice.roll(count as u64) as usize;
        let ended = guard(&self.cluster.crew).take_ended(at);
        if let Some((work, end, must_call)) = ended {
            return self.end_work(at, &work, end, must_call);
        }
        let is_inside = guard(&self.cluster.crew).guests[at].work.is_some();
        if is_inside {
            let guests = self.guesting();
            if !guests.is_over && !guests.is_well && guests.dice.one_in(DEADLY) {
                self.kill_guest(at);
            } else {
                guard(&self.cluster.crew).go_on(at);
            }
            return Ok(());
        }
        self.begin_work(at)
    }

    fn kill_guest(&mut self, at: usize) {
        let number = guard(&self.cluster.crew).guests[at].number;
        let work = guard(&self.cluster.crew).guests[at].work.clone();
        self.guesting().died_at = work
            .filter(|work| work.file != LOG)
            .map(|work| (work.file, work.own));
        let bricks = guard(&self.cluster.crew).die(at);
        let picked = self.guesting().dice.pick(&bricks);
        tell!(self.cluster, "guest {number} dies");
        self.outcome.count("guest killed inside an operation", 1);
        let guests = self.guesting();
        if let Some(house) = picked
            && guests.ambushed.is_none()
            && guests.dice.one_in(AMBUSHED)
        {
            let steps = guests.dice.roll(AMBUSH_STEPS);
            guests.ambushed = Some((house, steps));
            self.cluster.rouse(house);
            self.cluster.rested();
            tell!(self.cluster, "brick {house} has cleaned up, and will die");
        }
    }

    /// What one leg has of a dead guest, and others have not, goes with its brick.
    fn spring_ambush(&mut self) {
        let guests = self.guesting();
        match guests.ambushed.take() {
            Some((_, 0)) if guests.is_over => {}
            Some((house, 0)) if self.siege.is_none() => {
                self.outcome.count("brick killed that cleaned up first", 1);
                self.cluster.kill(house, Death::Process);
            }
            Some((house, steps)) => {
                self.guesting().ambushed = Some((house, steps.saturating_sub(1)));
            }
            None => {}
        }
    }

    /// The mount has as many guests as it should.
    fn admit_guests(&mut self) {
        let Some(at) = self.hosting() else {
            return;
        };
        let client = &self.clients[at];
        let hosting = client.hosting.as_ref().expect("it lets guests in");
        let segment = Arc::clone(&hosting.segment);
        let mut crew = guard(&self.cluster.crew);
        let own = |guest: &&crew::Guest| guest.client == client.number;
        let mut rows: Vec<usize> = crew.guests.iter().filter(own).map(|it| it.row).collect();
        let living = rows.len();
        rows.extend(hosting.wounded.iter().map(|it| it.fallen.row));
        let fallen = crew.fallen.iter().filter(|it| it.client == client.number);
        rows.extend(fallen.map(|it| it.row));
        if living < GUESTS {
            let row = (0..).find(|row| !rows.contains(row)).expect("a row");
            let guests = self.guests.as_mut().expect("a history of guests");
            guests.next += 1;
            crew.admit(guests.next, client.number, row, segment);
        }
    }

    /// The client whose mount has guests.
    fn hosting(&self) -> Option<usize> {
        let hosts = |client: &crate::client::Client| {
            let program = client.program.as_ref();
            client.hosting.is_some() && program.is_some_and(|it| it.is_host())
        };
        self.clients.iter().position(hosts)
    }

    /// Guests of a client end what they have begun.
    pub(crate) fn orphan_guests(&mut self, client: u32) {
        for guest in &mut guard(&self.cluster.crew).guests {
            guest.is_orphan |= guest.client == client;
        }
    }

    /// All guests die, as when their machine loses its power.
    pub(crate) fn kill_guests(&mut self) {
        let mut crew = guard(&self.cluster.crew);
        while !crew.guests.is_empty() {
            crew.die(0);
        }
    }

    fn begin_work(&mut self, at: usize) -> Result<(), String> {
        let (client, is_orphan, number) = {
            let crew = guard(&self.cluster.crew);
            let guest = &crew.guests[at];
            (guest.client, guest.is_orphan, guest.number)
        };
        let host = self.clients.iter().position(|it| it.number == client);
        let Some(host) = host.filter(|_| !is_orphan) else {
            self.cluster.strip(at, true);
            return Ok(());
        };
        let picture = self.clients[host].driven.guest_picture();
        let has = guard(&self.cluster.crew).guests[at].picture.clone();
        let Some(picture) = picture else {
            return Ok(());
        };
        if has.as_ref() != Some(&picture) {
            if let Err(cause) = self.cluster.equip(at, picture) {
                tell!(self.cluster, "guest {number} has no legs: {cause}");
            }
            return Ok(());
        }
        let attachment = self.clients[host].attachment;
        let guests = self.guests.as_mut().expect("a history of guests");
        if guests.is_over || guests.dice.one_in(3) {
            return Ok(());
        }
        let (mut file, mut own) = guests.range();
        let looks = guests.died_at.is_some() && guests.dice.one_in(2);
        if let Some(at) = guests.died_at.clone().filter(|_| looks) {
            (file, own) = at;
        }
        let hosting = self.clients[host].hosting.as_ref().expect("its host");
        if guests.dice.one_in(LOGGED) {
            let Some(shown) = hosting.boards[LOG].clone() else {
                return Ok(());
            };
            let size = shown.board.size();
            let (operation, deed) = match size > LOG_BYTES || guests.dice.one_in(4) {
                true => {
                    // A shorter one would cut what is appended meanwhile.
                    let len = 2 * LOG_BYTES as usize;
                    (Tracked::LogRead(guests.log.now()), Deed::Read(0, len))
                }
                false => {
                    let (operation, data) = guests.append(false);
                    (operation, Deed::Write(None, data))
                }
            };
            tell!(self.cluster, "guest {number} begins {operation:?}");
            let work = Work {
                operation,
                file: LOG,
                own: 0..0,
                deed,
                ino: shown.ino,
            };
            guard(&self.cluster.crew).begin(at, shown, work);
            return Ok(());
        }
        let Some(shown) = hosting.boards[file].clone() else {
            return Ok(());
        };
        let offset = own.start * SECTOR;
        let (deed, kind) = match looks || guests.dice.one_in(3) {
            true => {
                let len = (own.end - own.start) * SECTOR;
                (Deed::Read(offset, len as usize), Kind::Read(vec![]))
            }
            false => {
                let value = guests.value();
                let data = fill(value, own.end - own.start);
                (Deed::Write(Some(offset), data), Kind::Write(value))
            }
        };
        let all = sectors(file, &own);
        tell!(self.cluster, "guest {number} begins {kind:?} of {all:?}");
        let operation = self.checker.begin(attachment, number, all, kind);
        let operation = Tracked::Sectors(operation);
        let work = Work {
            operation,
            file,
            own,
            deed,
            ino: shown.ino,
        };
        guard(&self.cluster.crew).begin(at, shown, work);
        Ok(())
    }

    fn end_work(
        &mut self,
        at: usize,
        work: &Work,
        end: End,
        must_call: bool,
    ) -> Result<(), String> {
        let (number, client, is_followed) = {
            let crew = guard(&self.cluster.crew);
            let guest = &crew.guests[at];
            let is_followed = guest.segment.ring().is_followed();
            (guest.number, guest.client, is_followed)
        };
        let host = self.clients.iter().position(|it| it.number == client);
        if let Some(host) = host.filter(|_| must_call) {
            self.clients[host].driven.call_shipping();
        }
        let operation = work.operation;
        match end {
            End::Read(data) => {
                tell!(self.cluster, "guest {number} has read");
                self.outcome.count("guest read", 1);
                self.note_read(operation, &data)
            }
            End::Written => {
                tell!(self.cluster, "guest {number} has written");
                self.outcome.count("guest wrote", 1);
                if is_followed {
                    self.outcome.count("guest wrote for a copy that follows", 1);
                }
                self.outcome.acknowledged += 1;
                if matches!(operation, Tracked::Append(_)) {
                    self.outcome.count("guest appended", 1);
                }
                self.note_end(operation, Ending::Done)
            }
            End::ByKernel | End::NoRoom => {
                let is_short = matches!(end, End::NoRoom);
                self.outcome.count("guest sent to the kernel", 1);
                if let Some(host) = host
                    && let Some(hosting) = &mut self.clients[host].hosting
                    && let Some(shown) = &hosting.boards[work.file]
                    && (is_short || shown.board.is_outdated())
                {
                    hosting.boards[work.file] = None;
                }
                self.refuse(operation)
            }
            End::Failed(cause) => {
                tell!(self.cluster, "guest {number} fails: {cause}");
                self.outcome.count("guest failed", 1);
                self.cluster.strip(at, false);
                self.refuse(operation)
            }
        }
    }

    /// Hosts hear of their dead.
    fn note_fallen(&mut self) -> Result<(), String> {
        let is_heard = self.guesting().is_over || self.guesting().dice.one_in(HEARD);
        let fallen = match is_heard {
            true => std::mem::take(&mut guard(&self.cluster.crew).fallen),
            false => return Ok(()),
        };
        let mut over = vec![];
        for fallen in fallen {
            let host = self.clients.iter_mut();
            let host = host
                .filter(|it| it.number == fallen.client)
                .find_map(|it| Some((&it.driven, it.hosting.as_mut()?)));
            let Some((driven, hosting)) = host else {
                continue;
            };
            let wound = Wound::of(fallen.segment.row(fallen.row));
            let Some(wound) = wound else {
                // It died with its row left: by now it is there or not.
                over.push(fallen.work.operation);
                continue;
            };
            let healed = driven.heal(fallen.row, wound);
            hosting.wounded.push(Wounded { fallen, healed });
        }
        over.into_iter()
            .try_for_each(|operation| self.note_end(operation, Ending::Decided))
    }

    /// An operation has ended.
    fn note_end(&mut self, operation: Tracked, ending: Ending) -> Result<(), String> {
        let log = &mut self.guests.as_mut().expect("it has some").log;
        match (operation, ending) {
            (Tracked::Sectors(number), _) => return self.checker.end(number, ending),
            (Tracked::Append(value), Ending::Done) => log.done(value),
            (Tracked::Append(value), _) => log.over(value),
            (Tracked::LogRead(_), _) => {}
        }
        Ok(())
    }

    /// A guest has left it to the kernel.
    fn refuse(&mut self, operation: Tracked) -> Result<(), String> {
        match operation {
            Tracked::Append(value) => {
                self.guesting().log.refused(value);
                Ok(())
            }
            operation => self.note_end(operation, Ending::Decided),
        }
    }

    fn note_read(&mut self, operation: Tracked, data: &[u8]) -> Result<(), String> {
        match operation {
            Tracked::Sectors(number) => self.checker.read(number, data),
            Tracked::LogRead(began) => self.guesting().log.read(began, data),
            Tracked::Append(_) => Err("an append has read".into()),
        }
    }

    /// Rows of the dead are cleared where all is alike again.
    fn clear_rows(&mut self) -> Result<(), String> {
        let mut over = vec![];
        for client in &mut self.clients {
            let Some(hosting) = &mut client.hosting else {
                continue;
            };
            let (mut cleared, mut wounded) = (vec![], vec![]);
            for one in std::mem::take(&mut hosting.wounded) {
                match one.healed.try_recv() {
                    Err(TryRecvError::Empty) => wounded.push(one),
                    // It is over, and nobody heals any more.
                    Err(TryRecvError::Disconnected) => {}
                    Ok(()) => cleared.push(one.fallen),
                }
            }
            if wounded.is_empty() && !cleared.is_empty() {
                self.guests.as_mut().expect("it has some").died_at = None;
            }
            hosting.wounded = wounded;
            for fallen in cleared {
                let shown = hosting.boards[fallen.work.file].as_ref();
                let shown = shown.filter(|shown| shown.ino == fallen.work.ino);
                let board = shown.map(|shown| &*shown.board);
                rows::clear(&fallen.segment, fallen.row, board);
                tell!(self.cluster, "row of guest {} is cleared", fallen.number);
                self.outcome.count("row of a dead guest cleared", 1);
                over.push(fallen.work.operation);
            }
        }
        over.into_iter()
            .try_for_each(|operation| self.note_end(operation, Ending::Decided))
    }

    /// Nobody is inside, and all is cleaned up.
    pub(crate) fn are_guests_calm(&self) -> bool {
        let crew = guard(&self.cluster.crew);
        let is_idle = crew.guests.iter().all(|guest| guest.work.is_none());
        let mut hosting = self.clients.iter().filter_map(|it| it.hosting.as_ref());
        is_idle && crew.fallen.is_empty() && hosting.all(|it| it.wounded.is_empty())
    }

    /// No guest begins anything any more.
    pub(crate) fn calm_guests(&mut self) {
        if let Some(guests) = &mut self.guests {
            guests.is_over = true;
        }
    }

    /// With all legs and nobody who dies, guests want the same page at once: what they did
    /// to it last, each leg has, and one that follows, too.
    pub(crate) fn rest_guests(&mut self) -> Result<(), String> {
        if self.guests.is_none() {
            return Ok(());
        }
        self.guesting().is_well = true;
        self.guesting().hot_pages = 1;
        for _ in 0..CROWDS {
            for file in 0..ALL_FILES {
                self.give_ask(Asked {
                    file,
                    ask: Ask::Show(file == LOG),
                    operation: None,
                })?;
                self.until_calm()?;
            }
            self.guesting().is_over = false;
            for _ in 0..CROWD_STEPS {
                self.step()?;
                self.tend_guests()?;
            }
            self.guesting().is_over = true;
            self.until_calm()?;
            self.compare_all_legs()?;
        }
        for file in 0..FILES {
            let len = (FILE_SECTORS * SECTOR) as u32;
            let (ask, kind) = (Ask::Read(0, len), Kind::Read(vec![]));
            let asked = self.asked(0, file, &(0..FILE_SECTORS), ask, kind);
            self.give_ask(asked)?;
            self.until_calm()?;
        }
        let operation = Tracked::LogRead(self.guesting().log.now());
        self.give_ask(Asked {
            file: LOG,
            ask: log_read(),
            operation: Some(operation),
        })?;
        self.until_calm()?;
        self.dismiss_guests();
        let searched = self.checker.check(SECTORS)?;
        (self.outcome.sectors, self.outcome.given_up) = (searched.sectors, searched.given_up);
        Ok(())
    }

    /// Guests go, with nothing begun.
    fn dismiss_guests(&mut self) {
        while !guard(&self.cluster.crew).guests.is_empty() {
            self.cluster.strip(0, true);
        }
    }

    /// What the mount is asked next about the files of its guests.
    pub(crate) fn ask(&mut self, at: usize) -> Option<Asked> {
        let client = &self.clients[at];
        let hosting = client.hosting.as_ref()?;
        let missing: Vec<usize> = (0..ALL_FILES)
            .filter(|&file| {
                let shown = hosting.boards[file].as_ref();
                shown.is_none_or(|shown| shown.board.is_outdated())
            })
            .collect();
        let guests = self.guests.as_mut()?;
        if let Some(file) = guests.dice.pick(&missing)
            && !guests.dice.one_in(4)
        {
            return Some(Asked {
                file,
                ask: Ask::Show(file == LOG && !guests.dice.one_in(4)),
                operation: None,
            });
        }
        if !guests.dice.one_in(2) {
            return None;
        }
        if guests.dice.one_in(LOGGED) {
            let size = hosting.boards[LOG].as_ref().map_or(0, |it| it.board.size());
            let (ask, operation) = match size > LOG_BYTES || guests.dice.one_in(2) {
                true => (log_read(), Tracked::LogRead(guests.log.now())),
                false => {
                    let (operation, data) = guests.append(true);
                    (Ask::Write(None, data), operation)
                }
            };
            return Some(Asked {
                file: LOG,
                ask,
                operation: Some(operation),
            });
        }
        let (file, own) = guests.range();
        let (offset, count) = (own.start * SECTOR, own.end - own.start);
        let (ask, kind) = match guests.dice.one_in(2) {
            true => {
                let len = (count * SECTOR) as u32;
                (Ask::Read(offset, len), Kind::Read(vec![]))
            }
            false => {
                let value = guests.value();
                (
                    Ask::Write(Some(offset), fill(value, count)),
                    Kind::Write(value),
                )
            }
        };
        Some(self.asked(at, file, &own, ask, kind))
    }

    fn asked(&mut self, at: usize, file: usize, own: &Range<u64>, ask: Ask, kind: Kind) -> Asked {
        let (number, attachment) = (self.clients[at].number, self.clients[at].attachment);
        let all = sectors(file, own);
        tell!(self.cluster, "client {number} begins {kind:?} of {all:?}");
        let operation = self.checker.begin(attachment, KERNEL + number, all, kind);
        Asked {
            file,
            ask,
            operation: Some(Tracked::Sectors(operation)),
        }
    }

    /// The mount has answered.
    pub(crate) fn hear_reply(
        &mut self,
        at: usize,
        asked: &Asked,
        reply: Reply,
    ) -> Result<(), String> {
        let operation = || asked.operation.expect("it was begun");
        match reply {
            Reply::Shown(shown) => {
                if let Some(hosting) = &mut self.clients[at].hosting {
                    hosting.boards[asked.file] = shown;
                }
                Ok(())
            }
            Reply::Data(data) => {
                self.outcome.count("mount read beside guests", 1);
                self.note_read(operation(), &data)
            }
            Reply::Done => {
                self.outcome.count("mount wrote beside guests", 1);
                self.note_end(operation(), Ending::Done)
            }
        }
    }
}
