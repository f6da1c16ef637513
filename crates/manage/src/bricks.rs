//! Bricks: heartbeats, the list, and forgetting.

use crate::fault::Fault;
use crate::manager::{BRICKS_MAX, Book, Brick, HEARTBEAT_INTERVAL, Manager, Seen};
use crate::records::BrickRecord;
use crate::store::Write;
use crate::wire::{BrickInfo, BrickRegistration, HeartbeatReply, ScrubBrick, ScrubWish};
use pagemesh_base::layout::{BrickId, NAME_BYTES_MAX};
use std::collections::BTreeMap;

/// Bytes of the longest address: a DNS name (RFC 1035, section 2.3.4), a
/// colon and a port.
const ADDRESS_BYTES_MAX: usize = 255 + 1 + 5;
/// Bytes of the longest path of a unix socket: what `sockaddr_un` holds.
const SOCKET_BYTES_MAX: usize = 107;
/// Use is written down when it has changed by this part of the capacity: a
/// commit with every heartbeat would keep disks awake for nothing.
const USED_STEP: u64 = 64;

impl Manager {
    /// Registers a brick, or hears that it is still there.
    ///
    /// # Errors
    /// When the registration breaks rules, another living brick has the same
    /// id, it serves an older copy of its pool, or the store fails.
    pub fn heartbeat(&self, registration: BrickRegistration) -> Result<HeartbeatReply, Fault> {
        check(&registration)?;
        let (record, seen) = self.heard(registration);
        let mut book = self.book();
        let known = book.bricks.get(&record.brick);
        if known.is_none() && book.bricks.len() >= BRICKS_MAX {
            return Err(Fault::TooMany {
                what: "bricks",
                most: BRICKS_MAX,
            });
        }
        if let Some(brick) = known {
            refuse_an_older(&brick.record, &record)?;
            self.refuse_a_double(brick, &record)?;
            tell_changes(&brick.record, &record);
        }
        if known.is_none_or(|brick| is_news(&brick.record, &record)) {
            self.store.commit(&[Write::PutBrick(&record)])?;
        }
        Ok(self.take_down(&mut book, record, seen))
    }

    /// The same, if it tells nothing new and nothing must be waited for: no
    /// thread has to be woken for that. Nothing otherwise.
    pub(crate) fn repeated(&self, registration: &BrickRegistration) -> Option<HeartbeatReply> {
        let (record, seen) = self.heard(registration.clone());
        let mut book = self.book_unless_in_use()?;
        let known = book.bricks.get(&record.brick)?;
        if is_news(&known.record, &record) {
            return None;
        }
        Some(self.take_down(&mut book, record, seen))
    }

    fn heard(&self, registration: BrickRegistration) -> (BrickRecord, Seen) {
        let seen = Seen {
            at: self.clock.elapsed(),
            sessions: registration.sessions,
            scrub: registration.scrub,
        };
        (record(registration), seen)
    }

    fn take_down(&self, book: &mut Book, record: BrickRecord, seen: Seen) -> HeartbeatReply {
        let id = record.brick;
        let known = book.bricks.get(&id);
        let was_alive = known.is_some_and(|brick| self.is_alive(brick));
        let told_alive = known.is_some_and(|brick| brick.told_alive);
        let fulfilled = seen.scrub.and_then(|scrub| scrub.fulfilled);
        let wish = known.and_then(|brick| brick.wish);
        let wish = wish.filter(|wish| fulfilled != Some(wish.id));
        let brick = Brick {
            record,
            seen: Some(seen),
            wish,
            told_alive,
        };
        book.bricks.insert(id, brick);
        if !was_alive {
            self.returned.notify_one();
        }
        HeartbeatReply {
            interval_ms: HEARTBEAT_INTERVAL.as_millis() as u64,
            dead_after_ms: self.settings.dead_after.as_millis() as u64,
            scrub: wish,
        }
    }

    /// Asks a brick to begin or end a scrub of its pool. It hears of it with the
    /// answer to its next heartbeat; asking for the same again changes nothing.
    ///
    /// # Errors
    /// When there is no such brick, it is dead, or it tells nothing of scrubs.
    pub fn scrub(&self, id: BrickId, ScrubBrick { stop }: ScrubBrick) -> Result<BrickInfo, Fault> {
        let mut book = self.book();
        let brick = book.bricks.get_mut(&id).ok_or(Fault::NoSuchBrick(id))?;
        if !self.is_alive(brick) {
            return Err(Fault::BrickDead(id));
        }
        if brick.seen.is_none_or(|seen| seen.scrub.is_none()) {
            return Err(Fault::BrickTooOld(id));
        }
        if brick.wish.is_none_or(|wish| wish.stop != stop) {
            let id = (self.settings.new_id)();
            brick.wish = Some(ScrubWish { id, stop });
        }
        let brick = brick.clone();
        Ok(self.info(&book, &book.provisioned(), &brick))
    }

    /// A brick that moved has opened its pool anew; a copy of the pool has
    /// not, or not later.
    fn refuse_a_double(&self, brick: &Brick, record: &BrickRecord) -> Result<(), Fault> {
        let moved = brick.record.address != record.address;
        let later = record.incarnation > brick.record.incarnation;
        if moved && !later && self.is_alive(brick) {
            return Err(Fault::BrickTwice {
                brick: record.brick,
                present: brick.record.address.clone(),
                asked: record.address.clone(),
            });
        }
        Ok(())
    }

    /// Every brick.
    #[must_use]
    pub fn bricks(&self) -> Vec<BrickInfo> {
        let book = self.book();
        let provisioned = book.provisioned();
        let info = |brick| self.info(&book, &provisioned, brick);
        book.bricks.values().map(info).collect()
    }

    fn info(
        &self,
        book: &Book,
        provisioned: &BTreeMap<BrickId, (u64, usize)>,
        brick: &Brick,
    ) -> BrickInfo {
        let promised = provisioned.get(&brick.record.brick);
        let (provisioned_bytes, slices) = promised.copied().unwrap_or_default();
        let record = brick.record.clone();
        let age = |seen: Seen| self.clock.elapsed().saturating_sub(seen.at);
        BrickInfo {
            brick: record.brick,
            alive: self.is_alive(brick),
            heartbeat_age_ms: brick.seen.map(|seen| age(seen).as_millis() as u64),
            address: record.address,
            map_socket: record.map_socket,
            domain: record.domain,
            durability: record.durability,
            capacity_bytes: record.capacity_bytes,
            used_bytes: record.used_bytes,
            provisioned_bytes,
            slices,
            pending_deletions: owed(book, record.brick),
            sessions: brick.seen.map_or(0, |seen| seen.sessions),
            scrub: brick.seen.and_then(|seen| seen.scrub),
            scrub_wish: brick.wish,
        }
    }

    /// Forgets a brick that holds no slice of a volume. With `force` also one
    /// that still holds slices of deleted volumes: they are lost with it.
    ///
    /// # Errors
    /// When it is alive or holds slices.
    pub fn forget(&self, id: BrickId, force: bool) -> Result<(), Fault> {
        let mut book = self.book();
        let brick = book.bricks.get(&id).ok_or(Fault::NoSuchBrick(id))?;
        refuse_a_holder(&book, id)?;
        if self.is_alive(brick) {
            return Err(Fault::BrickAlive(id));
        }
        let slices = owed(&book, id);
        if slices > 0 && !force {
            return Err(Fault::BrickOwes { brick: id, slices });
        }
        let owed = book.doomed.keys().filter(|(brick, _)| *brick == id);
        let mut writes: Vec<_> = owed.map(|&(b, s)| Write::Pardon(b, s)).collect();
        writes.push(Write::RemoveBrick(id));
        self.store.commit(&writes)?;
        book.doomed.retain(|(brick, _), _| *brick != id);
        book.bricks.remove(&id);
        Ok(())
    }
}

/// A pool that was opened less often than the one known is an older copy of
/// it, and lacks writes that were acknowledged since.
fn refuse_an_older(known: &BrickRecord, asked: &BrickRecord) -> Result<(), Fault> {
    if asked.incarnation >= known.incarnation {
        return Ok(());
    }
    Err(Fault::BrickOlder {
        brick: known.brick,
        known: known.incarnation,
        asked: asked.incarnation,
    })
}

/// Slices that lie there keep lying there, though volumes were promised
/// another class or domain.
fn tell_changes(known: &BrickRecord, asked: &BrickRecord) {
    let brick = known.brick;
    if known.durability != asked.durability {
        let (from, to) = (known.durability, asked.durability);
        tracing::warn!(%brick, %from, %to, "the brick's durability class has changed; its volumes were promised the old one");
    }
    if known.domain != asked.domain {
        let (from, to) = (&known.domain, &asked.domain);
        tracing::warn!(%brick, from, to, "the brick's failure domain has changed; copies of its volumes may share one now");
    }
}

fn owed(book: &Book, id: BrickId) -> usize {
    let on_it = |&&(brick, slice): &&(BrickId, _)| brick == id && !book.is_building(slice);
    book.doomed.keys().filter(on_it).count()
}

fn refuse_a_holder(book: &Book, brick: BrickId) -> Result<(), Fault> {
    let building = book.building.iter();
    let built = building.filter(|(_, places)| places.iter().any(|place| place.brick == brick));
    let whole = book.volumes.iter().filter(|(_, volume)| {
        let segments = &volume.ledger.layout.segments;
        crate::manager::places(segments).any(|place| place.brick == brick)
    });
    let mut names: Vec<&str> = built.map(|(name, _)| name.as_str()).collect();
    names.extend(whole.map(|(name, _)| name.as_str()));
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Ok(());
    }
    Err(Fault::BrickHolds {
        brick,
        volumes: listed(&names),
    })
}

/// The first few names, and how many more.
fn listed(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

fn record(registration: BrickRegistration) -> BrickRecord {
    BrickRecord {
        brick: registration.brick,
        address: registration.address,
        map_socket: registration.map_socket,
        domain: registration.domain,
        durability: registration.durability,
        capacity_bytes: registration.capacity_bytes,
        used_bytes: registration.used_bytes,
        incarnation: registration.incarnation,
    }
}

/// Whether a heartbeat tells something that must outlive the manager.
fn is_news(old: &BrickRecord, new: &BrickRecord) -> bool {
    let same_use = BrickRecord {
        used_bytes: old.used_bytes,
        ..new.clone()
    };
    let step = new.capacity_bytes / USED_STEP;
    same_use != *old || old.used_bytes.abs_diff(new.used_bytes) > step
}

fn check(registration: &BrickRegistration) -> Result<(), Fault> {
    if !is_address(&registration.address) {
        return Err(Fault::bad(
            format!("{:?} is not an address", registration.address),
            "write host:port, with a port from 1 to 65535",
        ));
    }
    if let Some(path) = &registration.map_socket
        && !(path.starts_with('/') && path.len() <= SOCKET_BYTES_MAX && is_plain(path))
    {
        return Err(Fault::bad(
            format!("{path:?} is not the path of a socket"),
            "write an absolute path of at most 107 bytes",
        ));
    }
    let domain = &registration.domain;
    if domain.is_empty() || domain.len() > NAME_BYTES_MAX || !is_plain(domain) {
        return Err(Fault::bad(
            format!("{domain:?} is not a failure domain"),
            "write 1 to 64 bytes without control characters",
        ));
    }
    if registration.capacity_bytes == 0 {
        return Err(Fault::bad(
            "a brick without capacity can hold nothing",
            "say how many bytes slices can use",
        ));
    }
    Ok(())
}

fn is_plain(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let is_host = |host: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        match bracketed {
            Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
            None => !host.is_empty() && host.chars().all(allowed),
        }
    };
    text.len() <= ADDRESS_BYTES_MAX
        && is_host(host)
        && digits
        && port.parse::<u16>().is_ok_and(|port| port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in ["127.0.0.1:1", "[::1]:65535", "node-1.rack_2:7071"] {
            assert!(is_address(good), "{good}");
        }
        for bad in [
            "", ":1", "a", "a:", "a:0", "a:65536", "a:+1", "a b:1", "a\n:1", "::1:1", "[x]:1",
            "a/b:1",
        ] {
            assert!(!is_address(bad), "{bad:?}");
        }
    }
}
