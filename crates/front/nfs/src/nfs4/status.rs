//! The status of an operation, with the numbers of RFC 8881, section 15.1.

use crate::nfs3::status::Status as Nfs3Status;
use crate::xdr::{XdrError, wire_enum};

/// The number of the status of a success.
pub const OK: u32 = 0;

wire_enum! {
    /// The reason that an operation fails.
    pub enum Status, "NFSv4 status" {
        /// NFS4ERR_PERM: only the owner or a privileged caller may do this.
        Permission = 1,
        /// NFS4ERR_NOENT: there is no such name.
        NoEntry = 2,
        /// NFS4ERR_IO: the storage failed.
        Io = 5,
        /// NFS4ERR_NXIO: there is no such device.
        NoDevice = 6,
        /// NFS4ERR_ACCESS: the mode bits do not allow it.
        Access = 13,
        /// NFS4ERR_EXIST: the name exists.
        Exists = 17,
        /// NFS4ERR_XDEV: two file systems are involved.
        CrossDevice = 18,
        /// NFS4ERR_NOTDIR: the file is no directory.
        NotDirectory = 20,
        /// NFS4ERR_ISDIR: the file is a directory.
        IsDirectory = 21,
        /// NFS4ERR_INVAL: an argument has no meaning.
        Invalid = 22,
        /// NFS4ERR_FBIG: the file would be too large.
        FileTooLarge = 27,
        /// NFS4ERR_NOSPC: the volume is full.
        NoSpace = 28,
        /// NFS4ERR_ROFS: the file system is read-only.
        ReadOnly = 30,
        /// NFS4ERR_MLINK: the file has too many names.
        TooManyLinks = 31,
        /// NFS4ERR_NAMETOOLONG: a name is too long.
        NameTooLong = 63,
        /// NFS4ERR_NOTEMPTY: the directory has entries.
        NotEmpty = 66,
        /// NFS4ERR_DQUOT: the caller's quota is used.
        Quota = 69,
        /// NFS4ERR_STALE: the file of the handle is gone.
        Stale = 70,
        /// NFS4ERR_BADHANDLE: this server did not make the handle.
        BadHandle = 10001,
        /// NFS4ERR_BAD_COOKIE: the cookie of a listing has expired.
        BadCookie = 10003,
        /// NFS4ERR_NOTSUPP: the server does not have the operation.
        NotSupported = 10004,
        /// NFS4ERR_TOOSMALL: no entry fits into the client's limit.
        TooSmall = 10005,
        /// NFS4ERR_SERVERFAULT: another fault of the server.
        ServerFault = 10006,
        /// NFS4ERR_BADTYPE: CREATE makes no files of this type.
        BadType = 10007,
        /// NFS4ERR_DELAY: the client asks again later.
        Delay = 10008,
        /// NFS4ERR_SAME: NVERIFY found equal attributes.
        Same = 10009,
        /// NFS4ERR_DENIED: another owner has a lock of the range.
        Denied = 10010,
        /// NFS4ERR_EXPIRED: the lease of the state has expired.
        Expired = 10011,
        /// NFS4ERR_LOCKED: a lock or a share reservation denies the access.
        Locked = 10012,
        /// NFS4ERR_GRACE: only reclaims are accepted for some time.
        Grace = 10013,
        /// NFS4ERR_SHARE_DENIED: another open denies the access.
        ShareDenied = 10015,
        /// NFS4ERR_CLID_INUSE: another principal has the client id.
        ClientIdInUse = 10017,
        /// NFS4ERR_NOFILEHANDLE: no current file handle is set.
        NoFileHandle = 10020,
        /// NFS4ERR_MINOR_VERS_MISMATCH: the server has another minor version.
        MinorVersionMismatch = 10021,
        /// NFS4ERR_STALE_CLIENTID: the server does not know the client.
        StaleClientId = 10022,
        /// NFS4ERR_STALE_STATEID: the state belongs to an earlier run of the server.
        StaleStateid = 10023,
        /// NFS4ERR_OLD_STATEID: the state has a newer sequence number.
        OldStateid = 10024,
        /// NFS4ERR_BAD_STATEID: there is no such state.
        BadStateid = 10025,
        /// NFS4ERR_BAD_SEQID: a sequence number is wrong.
        BadSequence = 10026,
        /// NFS4ERR_NOT_SAME: VERIFY found different attributes, or a verifier has changed.
        NotSame = 10027,
        /// NFS4ERR_LOCK_RANGE: the range covers a part of a lock.
        LockRange = 10028,
        /// NFS4ERR_SYMLINK: the file is a symbolic link.
        Symlink = 10029,
        /// NFS4ERR_RESTOREFH: no saved file handle is set.
        RestoreHandle = 10030,
        /// NFS4ERR_ATTRNOTSUPP: the server does not have the attribute.
        AttributeNotSupported = 10032,
        /// NFS4ERR_NO_GRACE: reclaims are not accepted now.
        NoGrace = 10033,
        /// NFS4ERR_RECLAIM_BAD: the client has nothing to reclaim.
        ReclaimBad = 10034,
        /// NFS4ERR_RECLAIM_CONFLICT: another client has reclaimed conflicting state.
        ReclaimConflict = 10035,
        /// NFS4ERR_BADXDR: arguments are malformed.
        BadXdr = 10036,
        /// NFS4ERR_LOCKS_HELD: a file has locks.
        LocksHeld = 10037,
        /// NFS4ERR_OPENMODE: the open does not have this access.
        OpenMode = 10038,
        /// NFS4ERR_BADOWNER: there is no such user or group.
        BadOwner = 10039,
        /// NFS4ERR_BADCHAR: a name has a byte that no name may have.
        BadCharacter = 10040,
        /// NFS4ERR_BADNAME: the name is reserved.
        BadName = 10041,
        /// NFS4ERR_BAD_RANGE: the range of a lock is not supported.
        BadRange = 10042,
        /// NFS4ERR_LOCK_NOTSUPP: a lock cannot change its type in place.
        LockNotSupported = 10043,
        /// NFS4ERR_OP_ILLEGAL: there is no such operation.
        IllegalOperation = 10044,
        /// NFS4ERR_DEADLOCK: the lock would wait for itself.
        Deadlock = 10045,
        /// NFS4ERR_FILE_OPEN: an open file blocks the operation.
        FileOpen = 10046,
        /// NFS4ERR_ADMIN_REVOKED: an administrator has revoked the state.
        AdminRevoked = 10047,
        /// NFS4ERR_CB_PATH_DOWN: the server cannot call the client.
        CallbackPathDown = 10048,
        /// NFS4ERR_BADSESSION: there is no such session.
        BadSession = 10052,
        /// NFS4ERR_BADSLOT: the session has no such slot.
        BadSlot = 10053,
        /// NFS4ERR_COMPLETE_ALREADY: the client has completed its reclaims before.
        CompleteAlready = 10054,
        /// NFS4ERR_CONN_NOT_BOUND_TO_SESSION: the connection does not belong to the session.
        ConnectionNotBound = 10055,
        /// NFS4ERR_SEQ_MISORDERED: the sequence number of the slot is unexpected.
        SequenceMisordered = 10063,
        /// NFS4ERR_SEQUENCE_POS: SEQUENCE is not the first operation.
        SequencePosition = 10064,
        /// NFS4ERR_REQ_TOO_BIG: the request is longer than the session allows.
        RequestTooBig = 10065,
        /// NFS4ERR_REP_TOO_BIG: the reply would be longer than the session allows.
        ReplyTooBig = 10066,
        /// NFS4ERR_REP_TOO_BIG_TO_CACHE: the reply would be longer than a slot keeps.
        ReplyTooBigToCache = 10067,
        /// NFS4ERR_RETRY_UNCACHED_REP: the slot has not kept the reply.
        RetryUncachedReply = 10068,
        /// NFS4ERR_UNSAFE_COMPOUND: the client could not recover from a lost reply.
        UnsafeCompound = 10069,
        /// NFS4ERR_TOO_MANY_OPS: the request has too many operations.
        TooManyOperations = 10070,
        /// NFS4ERR_OP_NOT_IN_SESSION: the operation needs a SEQUENCE before it.
        NotInSession = 10071,
        /// NFS4ERR_HASH_ALG_UNSUPP: the server has none of the hash algorithms.
        HashUnsupported = 10072,
        /// NFS4ERR_CLIENTID_BUSY: the client has state.
        ClientIdBusy = 10074,
        /// NFS4ERR_SEQ_FALSE_RETRY: a retry differs from its first request.
        FalseRetry = 10076,
        /// NFS4ERR_BAD_HIGH_SLOT: the highest slot is less than the slot.
        BadHighSlot = 10077,
        /// NFS4ERR_DEADSESSION: the session is ending.
        DeadSession = 10078,
        /// NFS4ERR_ENCR_ALG_UNSUPP: the server has none of the encryption algorithms.
        EncryptionUnsupported = 10079,
        /// NFS4ERR_NOT_ONLY_OP: the operation must be alone in its request.
        NotOnlyOperation = 10081,
        /// NFS4ERR_WRONG_CRED: the state belongs to another principal.
        WrongCredential = 10082,
        /// NFS4ERR_WRONG_TYPE: the operation does not fit the type of the file.
        WrongType = 10083,
    }
}

impl From<XdrError> for Status {
    fn from(_: XdrError) -> Self {
        Self::BadXdr
    }
}

/// The file-system part of both versions has the same reasons.
impl From<Nfs3Status> for Status {
    fn from(status: Nfs3Status) -> Self {
        match status {
            Nfs3Status::Permission => Self::Permission,
            Nfs3Status::NoEntry => Self::NoEntry,
            Nfs3Status::Io => Self::Io,
            Nfs3Status::NoDevice => Self::NoDevice,
            Nfs3Status::Access => Self::Access,
            Nfs3Status::Exists => Self::Exists,
            Nfs3Status::CrossDevice => Self::CrossDevice,
            Nfs3Status::DeviceUnsuitable | Nfs3Status::Invalid => Self::Invalid,
            Nfs3Status::NotDirectory => Self::NotDirectory,
            Nfs3Status::IsDirectory => Self::IsDirectory,
            Nfs3Status::FileTooLarge => Self::FileTooLarge,
            Nfs3Status::NoSpace => Self::NoSpace,
            Nfs3Status::ReadOnly => Self::ReadOnly,
            Nfs3Status::TooManyLinks => Self::TooManyLinks,
            Nfs3Status::NameTooLong => Self::NameTooLong,
            Nfs3Status::NotEmpty => Self::NotEmpty,
            Nfs3Status::Quota => Self::Quota,
            Nfs3Status::Stale => Self::Stale,
            Nfs3Status::BadHandle => Self::BadHandle,
            Nfs3Status::BadCookie => Self::BadCookie,
            Nfs3Status::NotSupported => Self::NotSupported,
            Nfs3Status::TooSmall => Self::TooSmall,
            Nfs3Status::BadType => Self::BadType,
            Nfs3Status::Jukebox => Self::Delay,
            Nfs3Status::Remote | Nfs3Status::NotSynchronized | Nfs3Status::ServerFault => {
                Self::ServerFault
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_of_nfsv3_keep_their_numbers() {
        for status in Nfs3Status::ALL {
            let number = Status::from(*status).number();
            let is_own_number = matches!(
                status,
                Nfs3Status::DeviceUnsuitable | Nfs3Status::Remote | Nfs3Status::NotSynchronized
            );
            assert!(is_own_number || number == status.number(), "{status:?}");
        }
    }
}
