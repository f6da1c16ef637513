//! OPEN, CLOSE and OPEN_DOWNGRADE.
//!
//! OPEN checks the limits of state, finds or makes the file, checks the permissions of its caller, and then asks the
//! state for the share reservation. The pin of the file is taken before, and kept while an open exists. A size of 0 in an
//! unchecked create truncates an existing file only after its reservation is granted.

use super::attributes::creation;
use super::compound::Compound;
use super::handles::{CurrentFile, checked_name};
use super::names::encode_change;
use super::{Done, Fault, HeldPin, encode_state_id};
use crate::nfs3::names::FileName;
use crate::nfs4::arguments::WireStateid;
use crate::nfs4::arguments::open::{Claim, Close, OpenArguments, OpenDowngrade, OpenHow};
use crate::nfs4::attributes::{AttributeChange, SETTABLE, SETTABLE_BY_EXCLUSIVE};
use crate::nfs4::bitmap::Bitmap;
use crate::nfs4::state::{ClientId, FileKey, IoAccess, OpenArgs, OpenGrant, ShareBits, StateId};
use crate::nfs4::status::Status;
use crate::service::Target;
use crate::service::snapshots::View;
use crate::xdr::Writer;
use pagemesh_fs::{AccessMask, CreateMode, FsError, InodeKind, SetAttributes, Wcc};
use rustix::io::Errno;
use std::sync::Arc;

/// OPEN4_RESULT_LOCKTYPE_POSIX: locks are split and merged as in POSIX.
const RESULT_POSIX_LOCKS: u32 = 4;
/// The sequence number of a stateid that no request has changed yet.
const FIRST_SEQUENCE: u32 = 1;
/// The bits of `share_access` without the requests about delegations (RFC 8881, section 18.16.1).
const ACCESS_BITS: u32 = 0xff;
/// The request for a delegation, and the bits that modify it.
const WANT_BITS: u32 = 0xff00;
const WANT_FLAG_BITS: u32 = 0x3_0000;
const WANT_CANCEL: u32 = 0x0500;
/// OPEN_DELEGATE_NONE and OPEN_DELEGATE_NONE_EXT.
const NO_DELEGATION: u32 = 0;
const NO_DELEGATION_WITH_REASON: u32 = 3;
/// The reasons WND4_NOT_WANTED and WND4_RESOURCE.
const NOT_WANTED: u32 = 0;
const RESOURCE: u32 = 2;
const WANT_NO_DELEGATION: u32 = 0x0400;
/// Attempts of a create while other clients make and remove its name.
const CREATE_ATTEMPTS: u32 = 8;

/// The file of an OPEN.
struct OpenedFile<'a> {
    target: Target<'a>,
    kind: InodeKind,
    /// The attributes of the directory.
    directory: Option<Wcc>,
    /// Whether this request has made it.
    is_new: bool,
    /// The attributes that the create has set.
    set: Bitmap,
    /// Whether the size is set to 0 after the reservation.
    is_truncated: bool,
}

/// The access and the denied access of an OPEN.
fn share_bits(access: u32, deny: u32) -> Result<(ShareBits, ShareBits), Fault> {
    let known = ACCESS_BITS | WANT_BITS | WANT_FLAG_BITS;
    let access_bits = ShareBits::new(access & ACCESS_BITS);
    let wanted_delegation = access & WANT_BITS;
    match (access_bits, ShareBits::new(deny)) {
        (Some(bits), Some(deny))
            if bits != ShareBits::NONE
                && access & !known == 0
                && wanted_delegation <= WANT_CANCEL =>
        {
            Ok((bits, deny))
        }
        _ => Err(Status::Invalid.into()),
    }
}

impl<'a> Compound<'a> {
    /// Checks the stateid of a READ, WRITE or change of the size.
    pub(super) fn check_io(&self, target: &Target<'_>, id: WireStateid, access: IoAccess) -> Done {
        let (client, stateid) = (self.client_id()?, self.resolved(id)?);
        self.service.nfs4.call(|locked, now| {
            let file = locked.key(target.export.volume, target.state_file());
            locked.state.check_io(client, stateid, file, access, now)
        })?;
        // An expired client may have lost its state to this access.
        match stateid.is_anonymous() {
            true => self.store_list(target),
            false => Ok(()),
        }
    }

    pub(super) fn open(&mut self, it: &OpenArguments<'_>, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let (access, deny) = share_bits(it.access, it.deny)?;
        let is_reclaim = matches!(it.claim, Claim::Previous { .. });
        if let CurrentFile::File(place) = self.place()? {
            self.check_open(place, client, it)?;
        }
        let opened = self.opened_file(it)?;
        if opened.kind != InodeKind::File {
            return Err(match opened.kind {
                InodeKind::Directory => Status::IsDirectory.into(),
                InodeKind::Symlink => Status::Symlink.into(),
                _ => Status::WrongType.into(),
            });
        }
        let is_by_name = matches!(it.claim, Claim::Name(_));
        opened.check_access(access, is_by_name)?;
        // A denial of writes holds for this truncation only if the open has it, as with the server of Linux.
        if opened.is_truncated && !access.contains(ShareBits::WRITE) {
            return Err(Status::Invalid.into());
        }
        let grant = self.reserve(&opened, it, (access, deny), is_reclaim)?;
        // The records of expired clients that have made way.
        let stored = self.store_list(&opened.target);
        let truncated = match opened.is_truncated {
            true => stored.and_then(|()| opened.truncate()),
            false => stored,
        };
        if let Err(fault) = truncated {
            self.withdraw(&opened, grant.stateid);
            return Err(fault);
        }
        encode_state_id(grant.stateid, out);
        opened.encode(it.access, out);
        self.current = Some(CurrentFile::File(opened.target));
        self.stateids.set(grant.stateid);
        Ok(())
    }

    /// Checks that the client may get state in the file system of a place now. It is in the stable list there then. An open that may
    /// make a file also needs room: a refusal after the create would leave the file.
    fn check_open(&self, place: &Target<'_>, client: ClientId, it: &OpenArguments<'_>) -> Done {
        self.prepare_list(place);
        let is_reclaim = matches!(it.claim, Claim::Previous { .. });
        let may_create = !matches!(it.how, OpenHow::NoCreate);
        self.service.nfs4.call(|locked, now| {
            let export = locked.key(place.export.volume, place.id).export;
            locked.state.check_open(client, export, is_reclaim, now)?;
            match may_create {
                true => locked.state.check_new_open(client, it.owner.0),
                false => Ok(()),
            }
        })?;
        self.store_list(place)
    }

    /// Finds or makes the file.
    fn opened_file(&self, it: &OpenArguments<'_>) -> Result<OpenedFile<'a>, Fault> {
        match (it.claim, &it.how) {
            (Claim::Delegation, _) => Err(Status::NotSupported.into()),
            (Claim::Name(name), OpenHow::NoCreate) => self.found_file(name),
            (Claim::Name(name), how) => self.created_file(name, how),
            (Claim::Handle | Claim::Previous { .. }, OpenHow::NoCreate) => {
                let target = self.file_or(Status::IsDirectory)?.clone();
                let kind = target.kind()?;
                Ok(OpenedFile::existing(target, kind, None))
            }
            (Claim::Handle | Claim::Previous { .. }, _) => Err(Status::Invalid.into()),
        }
    }

    fn found_file(&self, name: FileName<'_>) -> Result<OpenedFile<'a>, Fault> {
        let directory = match self.place()? {
            CurrentFile::File(directory) => directory,
            CurrentFile::Pseudo(_) => {
                return Err(self
                    .found(name)
                    .map_or_else(|fault| fault, |_| Status::IsDirectory.into()));
            }
        };
        let (target, kind) = directory.child(checked_name(name)?)?;
        let wcc = Wcc {
            before: None,
            after: directory.fs.attr_of(directory.id).ok(),
        };
        Ok(OpenedFile::existing(target, kind, Some(wcc)))
    }

    fn created_file(&self, name: FileName<'_>, how: &OpenHow<'_>) -> Result<OpenedFile<'a>, Fault> {
        let directory = self.changed_file()?;
        let name = checked_name(name)?;
        directory.check_new_name(name).map_err(Status::from)?;
        let identities = &*self.service.nfs4.identities;
        let decode = |attributes, allowed| AttributeChange::decode(attributes, allowed, identities);
        let (mode, change, set) = match how {
            OpenHow::NoCreate => return Err(Status::Invalid.into()),
            OpenHow::Unchecked(attributes) | OpenHow::Guarded(attributes) => {
                let change = decode(attributes, SETTABLE)?;
                (CreateMode::Guarded, change, attributes.attributes)
            }
            OpenHow::Exclusive(verifier) => {
                let change = AttributeChange::default();
                (CreateMode::Exclusive(**verifier), change, Bitmap::default())
            }
            OpenHow::ExclusiveWithAttributes(verifier, attributes) => {
                let change = decode(attributes, SETTABLE_BY_EXCLUSIVE)?;
                let mode = CreateMode::Exclusive(**verifier);
                (mode, change, attributes.attributes)
            }
        };
        let (attrs, acls) = creation(&change, false, directory.options.user(self.peer.credential))?;
        let is_unchecked = matches!(how, OpenHow::Unchecked(_));
        for _ in 0..CREATE_ATTEMPTS {
            match directory.made(name, mode, &attrs, set) {
                Err(Fault::Status(Status::Exists)) if is_unchecked => {}
                Err(fault) => return Err(fault),
                Ok(made) => {
                    if let Some(acls) = acls {
                        made.target.set_acls(acls)?;
                    }
                    return Ok(made);
                }
            }
            match self.found_file(FileName(name)) {
                Err(Fault::Status(Status::NoEntry)) => {}
                Ok(mut opened) => {
                    opened.is_truncated = change.size_bytes == Some(0);
                    if opened.is_truncated {
                        opened.set = Bitmap::of(&[crate::nfs4::bitmap::attribute::SIZE]);
                    }
                    return Ok(opened);
                }
                Err(fault) => return Err(fault),
            }
        }
        Err(Status::Delay.into())
    }

    /// Closes an open that its client never heard of. An earlier open of the same owner stays.
    fn withdraw(&self, opened: &OpenedFile<'_>, stateid: StateId) {
        let Ok(client) = self.client_id() else {
            return;
        };
        let target = &opened.target;
        self.service.nfs4.call(|locked, _| {
            let file = locked.key(target.export.volume, target.state_file());
            if stateid.seqid == FIRST_SEQUENCE {
                // It fails only if the client has ended meanwhile.
                let _ = locked.state.close(client, stateid, file);
                locked.handle_events();
            }
        });
    }

    /// Asks for the share reservation, and keeps the pin of the file. A snapshot keeps its files anyway.
    fn reserve(
        &self,
        opened: &OpenedFile<'_>,
        it: &OpenArguments<'_>,
        (access, deny): (ShareBits, ShareBits),
        is_reclaim: bool,
    ) -> Result<OpenGrant, Fault> {
        let client = self.client_id()?;
        let target = &opened.target;
        let pin = match target.view {
            View::Live => Some(target.pin()?),
            View::Directory | View::Snapshot(_) => None,
        };
        let grant = self.service.nfs4.call(|locked, now| {
            let file: FileKey = locked.key(target.export.volume, target.state_file());
            let args = OpenArgs {
                client,
                owner: it.owner.0,
                file,
                access,
                deny,
                is_reclaim,
                is_new_file: opened.is_new,
            };
            let grant = locked.state.open(&args, now);
            // The last open of the same file may have ended in this call, before the new one.
            locked.handle_events();
            let export = Arc::clone(&target.export);
            let held = pin.map(|pin| HeldPin { pin, export });
            match held {
                Some(held) if grant.is_ok() && !locked.pins.contains_key(&file) => {
                    locked.pins.insert(file, held);
                }
                held => locked.unused.extend(held),
            }
            grant
        })?;
        Ok(grant)
    }

    pub(super) fn close(&mut self, it: &Close, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let target = self.file_or(Status::IsDirectory)?;
        let stateid = self.resolved(it.stateid)?;
        self.service.nfs4.call(|locked, _| {
            let file = locked.key(target.export.volume, target.state_file());
            locked.state.close(client, stateid, file)
        })?;
        target.export.drop_unused_pins();
        // RFC 8881, section 18.2.4: the result is the invalid stateid.
        self.stateids.set(StateId::INVALID);
        encode_state_id(StateId::INVALID, out);
        Ok(())
    }

    pub(super) fn open_downgrade(&mut self, it: &OpenDowngrade, out: &mut Writer) -> Done {
        let client = self.client_id()?;
        let target = self.file_or(Status::IsDirectory)?;
        let stateid = self.resolved(it.stateid)?;
        let (access, deny) = share_bits(it.access, it.deny)?;
        let stateid = self.service.nfs4.call(|locked, _| {
            let file = locked.key(target.export.volume, target.state_file());
            let state = &mut locked.state;
            state.open_downgrade(client, stateid, file, access, deny)
        })?;
        self.stateids.set(stateid);
        encode_state_id(stateid, out);
        Ok(())
    }
}

impl<'a> Target<'a> {
    /// A new file of this directory, or the one of the same exclusive create.
    fn made(
        &self,
        name: &[u8],
        mode: CreateMode,
        attrs: &SetAttributes,
        set: Bitmap,
    ) -> Result<OpenedFile<'a>, Fault> {
        let fs = &self.export.fs;
        let reply = fs.create_at(self.id, name, mode, attrs, &self.caller);
        match reply.result {
            Ok(created) => Ok(OpenedFile {
                target: self.with(&created.attr),
                kind: created.attr.kind,
                directory: Some(reply.wcc),
                is_new: created.is_new,
                set,
                is_truncated: false,
            }),
            Err(FsError::Posix(Errno::NOTDIR)) => Err(self.not_a_directory(&reply.wcc)),
            Err(error) => Err(self.report(&error).into()),
        }
    }

    fn not_a_directory(&self, wcc: &Wcc) -> Fault {
        match wcc.after.as_ref().map(|attr| attr.kind) {
            Some(InodeKind::Symlink) => Status::Symlink.into(),
            _ => Status::NotDirectory.into(),
        }
    }
}

impl<'a> OpenedFile<'a> {
    fn existing(target: Target<'a>, kind: InodeKind, directory: Option<Wcc>) -> Self {
        Self {
            target,
            kind,
            directory,
            is_new: false,
            set: Bitmap::default(),
            is_truncated: false,
        }
    }

    /// Checks the permissions. The mode does not bind the maker of a new file, and an owner with a handle,
    /// as with the server of Linux: the maker of a file of mode 0444 reclaims its open after a restart.
    fn check_access(&self, access: ShareBits, is_by_name: bool) -> Done {
        let target = &self.target;
        let is_write = access.contains(ShareBits::WRITE);
        if is_write && target.is_read_only() {
            return Err(Status::ReadOnly.into());
        }
        if self.is_new {
            return Ok(());
        }
        let fs = &target.fs;
        let failed = |error| Fault::from(target.report(&error));
        if !is_by_name && fs.attr_of(target.id).map_err(failed)?.uid == target.caller.uid() {
            return Ok(());
        }
        let mut wanted = 0;
        if access.contains(ShareBits::READ) {
            wanted |= AccessMask::READ.0;
        }
        if is_write {
            wanted |= AccessMask::MODIFY.0;
        }
        // A program that may be executed may be read, as READ allows it.
        let asked = AccessMask(wanted | AccessMask::EXECUTE.0);
        let mask = fs.access_mask(target.id, &target.caller, asked);
        let (mut granted, _) = mask.map_err(failed)?;
        if granted.0 & AccessMask::EXECUTE.0 != 0 {
            granted.0 |= AccessMask::READ.0;
        }
        match wanted & !granted.0 {
            0 => Ok(()),
            _ => Err(Status::Access.into()),
        }
    }

    fn truncate(&self) -> Done {
        self.target.set(&AttributeChange {
            size_bytes: Some(0),
            ..AttributeChange::default()
        })
    }

    /// Appends the fields after the stateid.
    fn encode(&self, access: u32, out: &mut Writer) {
        encode_change(&self.directory.clone().unwrap_or_default(), out);
        out.u32(RESULT_POSIX_LOCKS);
        out.value(&self.set);
        match access & WANT_BITS {
            0 => out.u32(NO_DELEGATION),
            wanted_delegation => {
                out.u32(NO_DELEGATION_WITH_REASON);
                match wanted_delegation {
                    WANT_NO_DELEGATION | WANT_CANCEL => out.u32(NOT_WANTED),
                    _ => {
                        out.u32(RESOURCE);
                        // No signal will follow.
                        out.bool(false);
                    }
                }
            }
        }
    }
}
