//! Bricks: heartbeats, the list, and forgetting.

use crate::device_book::DeviceBook;
use crate::devices::check_devices;
use crate::events::{EventDraft, device_drafts, scrub_drafts};
use crate::fault::Fault;
use crate::figure_history::FigureSubject;
use crate::manager::{
    BRICKS_MAX, BrickState, HEARTBEAT_INTERVAL, LastHeartbeat, Manager, ManagerState,
};
use crate::records::BrickRecord;
use crate::store::StoreWrite;
use crate::tiers::{TierReport, policies_to_send};
use crate::wire::{
    BrickDevices, BrickInfo, BrickRegistration, BrickScrub, HeartbeatReply, ScrubBrick,
    ScrubRequest,
};
use pagemesh_base::brick_name::{BrickLabel, BrickName, BrickRef};
use pagemesh_base::layout::{BrickId, NAME_BYTES_MAX, SliceId};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Bytes of the longest address: a DNS name (RFC 1035, section 2.3.4), a
/// colon and a port.
const ADDRESS_BYTES_MAX: usize = 255 + 1 + 5;
/// Bytes of the longest unix socket path that `sockaddr_un` holds.
const SOCKET_BYTES_MAX: usize = 107;
/// The manager stores the used bytes when they change by this part of the capacity. A commit with
/// every heartbeat would keep disks awake needlessly.
const USED_STEP: u64 = 64;

impl Manager {
    /// Registers a brick, or renews its registration.
    ///
    /// # Errors
    /// When the registration breaks rules, another living brick has the same id, the brick serves
    /// an older copy of its pool, or the store fails.
    pub fn heartbeat(&self, registration: BrickRegistration) -> Result<HeartbeatReply, Fault> {
        check_registration(&registration)?;
        let mut book = self.state();
        let name = book.assign_name(&registration)?;
        if let Some(asked) = registration.name_kept_from(name.as_ref()) {
            let brick = book.label(registration.brick);
            tracing::warn!(%brick, name = %asked, "the brick keeps its name: another brick has this one");
        }
        let known = book.bricks.get(&registration.brick);
        let devices = registration.devices.clone().map(BrickDevices::cleaned);
        let tier = TierReport::new(&registration);
        let (record, seen) = self.split_registration(registration, name, known);
        if known.is_none() && book.bricks.len() >= BRICKS_MAX {
            return Err(Fault::TooMany {
                what: "bricks",
                most: BRICKS_MAX,
            });
        }
        if let Some(brick) = known {
            check_not_outdated(&brick.record, &record)?;
            self.check_not_duplicate(brick, &record)?;
            log_changes(&brick.record, &record);
        }
        let changed = known.is_none_or(|brick| needs_commit(&brick.record, &record));
        let mut drafts = heartbeat_drafts(known, &record, seen.scrub, devices.as_ref());
        if known.is_none() {
            drafts.push(EventDraft::brick_joined(&record));
        }
        if changed || !drafts.is_empty() {
            self.feed.mark_brick(record.brick);
        }
        if changed {
            self.commit(&mut book, &[StoreWrite::PutBrick(&record)], drafts)?;
        } else if let Err(error) = self.commit(&mut book, &[], drafts) {
            // A brick whose heartbeat is refused counts as dead, and serves all the same.
            tracing::error!(%error, "cannot store the events of a heartbeat");
        }
        Ok(self.record_heartbeat(&mut book, record, seen, (devices, tier)))
    }

    /// Handles a heartbeat that changes nothing and needs no lock wait, so that the server need not
    /// wake a thread. Returns `None` for any other heartbeat.
    pub(crate) fn heartbeat_if_unchanged(
        &self,
        registration: &BrickRegistration,
    ) -> Option<HeartbeatReply> {
        let mut book = self.try_state()?;
        let name = book.assign_name(registration).ok()?;
        let known = book.bricks.get(&registration.brick)?;
        let (record, seen) = self.split_registration(registration.clone(), name, Some(known));
        let devices = registration.devices.clone().map(BrickDevices::cleaned);
        let drafts = heartbeat_drafts(Some(known), &record, seen.scrub, devices.as_ref());
        if needs_commit(&known.record, &record) || !drafts.is_empty() {
            return None;
        }
        Some(self.record_heartbeat(
            &mut book,
            record,
            seen,
            (devices, TierReport::new(registration)),
        ))
    }

    fn split_registration(
        &self,
        registration: BrickRegistration,
        name: Option<BrickName>,
        known: Option<&BrickState>,
    ) -> (BrickRecord, LastHeartbeat) {
        let seen = LastHeartbeat {
            received_at: self.clock.elapsed(),
            sessions: registration.sessions,
            scrub: registration.scrub,
        };
        let reported_lost = known.is_some_and(|brick| brick.record.reported_lost);
        (to_record(registration, name, reported_lost), seen)
    }

    fn record_heartbeat(
        &self,
        book: &mut ManagerState,
        record: BrickRecord,
        seen: LastHeartbeat,
        (devices, tier): (Option<BrickDevices>, TierReport),
    ) -> HeartbeatReply {
        let id = record.brick;
        let known = book.bricks.get(&id);
        let was_alive = known.is_some_and(|brick| self.is_alive(brick));
        let was_logged_alive = known.is_some_and(|brick| brick.logged_alive);
        let fulfilled = seen.scrub.and_then(|scrub| scrub.fulfilled);
        let request = known.and_then(|brick| brick.scrub_request);
        let request = request.filter(|request| fulfilled != Some(request.id));
        let scrub_actor = known.and_then(|brick| brick.scrub_actor.clone());
        let name = record.name.clone();
        let mut device_book = known.map_or_else(DeviceBook::default, |it| it.devices.clone());
        device_book.note_heartbeat(devices);
        let device_requests = device_book.pending();
        let reported = tier.tier;
        let brick = BrickState {
            record,
            last_heartbeat: Some(seen),
            scrub_request: request,
            scrub_actor: scrub_actor.filter(|_| request.is_some()),
            devices: device_book,
            tier: reported,
            tier_pages: tier.pages_after(known),
            logged_alive: was_logged_alive,
        };
        book.bricks.insert(id, brick);
        let tiers = reported.and_then(|tier| policies_to_send(book, id, &tier));
        self.set_living(&mut book.volumes, id, true);
        if !was_alive {
            self.brick_returned.notify_one();
        }
        HeartbeatReply {
            interval_ms: HEARTBEAT_INTERVAL.as_millis() as u64,
            dead_after_ms: self.settings.dead_after.as_millis() as u64,
            scrub: request,
            devices: device_requests,
            tiers,
            name,
        }
    }

    /// Asks a brick to start or stop a scrub of its pool. The answer to its next heartbeat carries
    /// the request; repeating the same request changes nothing.
    ///
    /// # Errors
    /// When there is no such brick, it is dead, or it reports no scrubs.
    pub fn scrub(
        &self,
        asked: impl Into<BrickRef>,
        ScrubBrick { stop }: ScrubBrick,
    ) -> Result<BrickInfo, Fault> {
        let mut book = self.state();
        let brick = book.find_brick_mut(&asked.into())?;
        let label = brick.record.label();
        self.check_brick_unchanged(&brick.record)?;
        if !self.is_alive(brick) {
            return Err(Fault::BrickDead(label));
        }
        if brick.last_heartbeat.is_none_or(|seen| seen.scrub.is_none()) {
            return Err(Fault::BrickCannotScrub(label));
        }
        if brick
            .scrub_request
            .is_none_or(|request| request.stop != stop)
        {
            let id = (self.settings.new_id)();
            brick.scrub_request = Some(ScrubRequest { id, stop });
            self.feed.mark_brick(brick.record.brick);
            brick.scrub_actor = Some(self.call.actor.to_string());
        }
        let brick = brick.clone();
        Ok(self.brick_info(&book, &book.provisioned(), &brick))
    }

    /// Refuses a second brick with the id of a living one. A brick that moved has opened its pool
    /// again, so its incarnation is higher; a copy of the pool has none that is higher.
    fn check_not_duplicate(&self, brick: &BrickState, record: &BrickRecord) -> Result<(), Fault> {
        let moved = brick.record.address != record.address;
        let later = record.incarnation > brick.record.incarnation;
        if moved && !later && self.is_alive(brick) {
            return Err(Fault::BrickDuplicate {
                brick: brick.record.label(),
                present: brick.record.address.clone(),
                asked: record.address.clone(),
            });
        }
        Ok(())
    }

    /// Every brick.
    #[must_use]
    pub fn bricks(&self) -> Vec<BrickInfo> {
        let book = self.state();
        let provisioned = book.provisioned();
        let info = |brick| self.brick_info(&book, &provisioned, brick);
        book.bricks.values().map(info).collect()
    }

    pub(crate) fn brick_info(
        &self,
        book: &ManagerState,
        provisioned: &BTreeMap<BrickId, (u64, usize)>,
        brick: &BrickState,
    ) -> BrickInfo {
        let promised = provisioned.get(&brick.record.brick);
        let (provisioned_bytes, slices) = promised.copied().unwrap_or_default();
        let record = brick.record.clone();
        let age = |seen: LastHeartbeat| self.clock.elapsed().saturating_sub(seen.received_at);
        BrickInfo {
            brick: record.brick,
            name: record.name,
            alive: self.is_alive(brick),
            heartbeat_age_ms: brick
                .last_heartbeat
                .map(|seen| age(seen).as_millis() as u64),
            address: record.address,
            map_socket: record.map_socket,
            domain: record.domain,
            durability: record.durability,
            capacity_bytes: record.capacity_bytes,
            used_bytes: record.used_bytes,
            provisioned_bytes,
            slices,
            pending_deletions: pending_deletes_on(book, record.brick),
            sessions: brick.last_heartbeat.map_or(0, |seen| seen.sessions),
            scrub: brick.last_heartbeat.and_then(|seen| seen.scrub),
            scrub_request: brick.scrub_request,
            devices: brick.devices.list(),
            tier: brick.tier,
        }
    }

    /// Forgets a brick that holds no slice of a volume. With `force` also a brick that holds slices
    /// of deleted volumes; those slices are forgotten too.
    ///
    /// # Errors
    /// When the brick is alive or holds slices.
    pub fn forget(&self, asked: impl Into<BrickRef>, force: bool) -> Result<(), Fault> {
        let mut book = self.state();
        let brick = book.find_brick(&asked.into())?;
        let (id, label) = (brick.record.brick, brick.record.label());
        self.check_brick_unchanged(&brick.record)?;
        check_holds_no_slices(&book, &label)?;
        if self.is_alive(brick) {
            return Err(Fault::BrickAlive(label));
        }
        let slices = pending_deletes_on(&book, id);
        if slices > 0 && !force {
            return Err(Fault::BrickHasPendingDeletes {
                brick: label,
                slices,
            });
        }
        let owed = deletes_on(&book, id);
        let mut writes: Vec<_> = owed
            .map(|&(b, s)| StoreWrite::RemovePendingDelete(b, s))
            .collect();
        writes.push(StoreWrite::RemoveBrick(id));
        let forgotten = EventDraft::brick_forgotten(&brick.record, &self.actor(), slices);
        self.commit(&mut book, &writes, vec![forgotten])?;
        book.pending_deletes.retain(|(brick, _), _| *brick != id);
        book.bricks.remove(&id);
        self.set_living(&mut book.volumes, id, false);
        self.feed.mark_brick(id);
        self.figures.remove(&FigureSubject::Brick(id));
        Ok(())
    }
}

/// Refuses a pool with a lower incarnation than the known one: it is an older copy, and lacks
/// writes that were acknowledged since.
fn check_not_outdated(known: &BrickRecord, asked: &BrickRecord) -> Result<(), Fault> {
    if asked.incarnation >= known.incarnation {
        return Ok(());
    }
    Err(Fault::BrickOutdated {
        brick: known.label(),
        known: known.incarnation,
        asked: asked.incarnation,
    })
}

/// Logs a changed name, class or domain. Existing slices stay on the brick, although volumes were
/// promised the old class or domain.
fn log_changes(known: &BrickRecord, asked: &BrickRecord) {
    let brick = known.label();
    if let Some(name) = asked.name.as_ref().filter(|_| known.name != asked.name) {
        tracing::info!(%brick, id = %known.brick, %name, "the brick has a new name");
    }
    if known.durability != asked.durability {
        let (from, to) = (known.durability, asked.durability);
        tracing::warn!(%brick, %from, %to, "the brick's durability class has changed; its volumes were promised the old one");
    }
    if known.domain != asked.domain {
        let (from, to) = (&known.domain, &asked.domain);
        tracing::warn!(%brick, from, to, "the brick's failure domain has changed; copies of its volumes may share one now");
    }
}

/// The events of a heartbeat of a brick.
fn heartbeat_drafts(
    known: Option<&BrickState>,
    record: &BrickRecord,
    scrub: Option<BrickScrub>,
    devices: Option<&BrickDevices>,
) -> Vec<EventDraft> {
    let before = known.and_then(|brick| brick.last_heartbeat?.scrub);
    let request = known.and_then(|brick| brick.scrub_request);
    let actor = known.and_then(|brick| brick.scrub_actor.as_deref());
    let mut drafts = scrub_drafts(record, before, scrub, (request, actor));
    if let (Some(known), Some(devices)) = (known, devices) {
        drafts.extend(device_drafts(record, &known.devices, devices));
    }
    drafts
}

fn pending_deletes_on(book: &ManagerState, id: BrickId) -> usize {
    let on_it = deletes_on(book, id);
    on_it
        .filter(|(_, slice)| !book.is_being_created(*slice))
        .count()
}

/// The pending deletes of a brick, also the ones of slices that are being created, without a walk
/// over other bricks' deletes.
fn deletes_on(book: &ManagerState, id: BrickId) -> impl Iterator<Item = &(BrickId, SliceId)> {
    let [first, last] = [Uuid::nil(), Uuid::max()].map(|slice| (id, SliceId(slice)));
    book.pending_deletes.range(first..=last).map(|(key, _)| key)
}

fn check_holds_no_slices(book: &ManagerState, label: &BrickLabel) -> Result<(), Fault> {
    let brick = label.id;
    let building = book.creating.iter();
    let built = building.filter(|(_, places)| places.iter().any(|place| place.brick == brick));
    let mut names: Vec<&str> = built.map(|(name, _)| name.as_str()).collect();
    names.extend(book.volumes.on_brick(brick).map(|name| name.as_str()));
    names.sort_unstable();
    names.dedup();
    if names.is_empty() {
        return Ok(());
    }
    Err(Fault::BrickInUse {
        brick: label.clone(),
        volumes: join_names(&names),
    })
}

/// The first few names, and the number of the others.
fn join_names(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..SHOWN].join(", ")),
    }
}

fn to_record(
    registration: BrickRegistration,
    name: Option<BrickName>,
    reported_lost: bool,
) -> BrickRecord {
    BrickRecord {
        brick: registration.brick,
        name,
        address: registration.address,
        map_socket: registration.map_socket,
        domain: registration.domain,
        durability: registration.durability,
        capacity_bytes: registration.capacity_bytes,
        used_bytes: registration.used_bytes,
        incarnation: registration.incarnation,
        reported_lost,
    }
}

/// Whether a heartbeat contains a change that must outlive the manager.
fn needs_commit(old: &BrickRecord, new: &BrickRecord) -> bool {
    let same_use = BrickRecord {
        used_bytes: old.used_bytes,
        ..new.clone()
    };
    let step = new.capacity_bytes / USED_STEP;
    same_use != *old || old.used_bytes.abs_diff(new.used_bytes) > step
}

fn check_registration(registration: &BrickRegistration) -> Result<(), Fault> {
    if !is_address(&registration.address) {
        return Err(Fault::invalid_field(
            format!("{:?} is not an address", registration.address),
            "write host:port, with a port from 1 to 65535",
        ));
    }
    if let Some(path) = &registration.map_socket
        && !(path.starts_with('/') && path.len() <= SOCKET_BYTES_MAX && is_plain(path))
    {
        return Err(Fault::invalid_field(
            format!("{path:?} is not the path of a socket"),
            "write an absolute path of at most 107 bytes",
        ));
    }
    let domain = &registration.domain;
    if domain.is_empty() || domain.len() > NAME_BYTES_MAX || !is_plain(domain) {
        return Err(Fault::invalid_field(
            format!("{domain:?} is not a failure domain"),
            "write 1 to 64 bytes without control characters",
        ));
    }
    if registration.capacity_bytes == 0 {
        return Err(Fault::invalid_field(
            "a brick without capacity can hold nothing",
            "say how many bytes slices can use",
        ));
    }
    registration.devices.as_ref().map_or(Ok(()), check_devices)
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
    use crate::manager::TrackedDelete;
    use crate::records::PendingDelete;
    use crate::slices::SliceLocation;

    #[test]
    fn pending_deletes_count_for_their_brick() {
        let mut book = ManagerState::default();
        let id = |number: u128| BrickId(Uuid::from_u128(number));
        let slices = [Uuid::nil(), Uuid::from_u128(5), Uuid::max()].map(SliceId);
        for (brick, count) in [(1, 3), (2, 0), (3, 1), (u128::MAX, 2)] {
            for slice in &slices[..count] {
                let pending = PendingDelete {
                    brick: id(brick),
                    slice: *slice,
                    uncertain: false,
                };
                let delete = TrackedDelete::new(pending);
                book.pending_deletes.insert((id(brick), *slice), delete);
            }
        }
        let building = SliceLocation {
            brick: id(1),
            slice: slices[1],
            bytes: 4096,
        };
        book.creating
            .insert("v".parse().expect("a name"), vec![building]);
        for (brick, owed, counted) in [(1, 3, 2), (2, 0, 0), (3, 1, 1), (u128::MAX, 2, 1)] {
            assert_eq!(deletes_on(&book, id(brick)).count(), owed);
            assert_eq!(pending_deletes_on(&book, id(brick)), counted);
        }
    }

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
