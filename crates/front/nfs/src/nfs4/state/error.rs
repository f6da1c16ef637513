//! The errors of state operations.

/// An error of NFSv4.1; the value of a variant is its number on the wire (RFC 8881 section 15.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u32)]
pub enum StateError {
    /// NFS4ERR_PERM.
    #[error("another principal made the record of the client")]
    Perm = 1,
    /// NFS4ERR_NOENT.
    #[error("the client has no confirmed record to update")]
    NoEnt = 2,
    /// NFS4ERR_INVAL.
    #[error("an argument has a value that the operation does not allow")]
    Inval = 22,
    /// NFS4ERR_NOSPC: CREATE_SESSION finds no memory for a further session.
    #[error("the server keeps as many sessions as its limits allow; destroy one first")]
    NoSpc = 28,
    /// NFS4ERR_TOOSMALL.
    #[error("a channel is too small for any request")]
    TooSmall = 10005,
    /// NFS4ERR_DELAY: a limit is reached, or the same request is in progress. Try again later.
    #[error("the server cannot do it now; try again later")]
    Delay = 10008,
    /// NFS4ERR_LOCKED.
    #[error("an open of another client denies the access")]
    Locked = 10012,
    /// NFS4ERR_GRACE.
    #[error("clients may only reclaim state at this time; try again after the grace period")]
    Grace = 10013,
    /// NFS4ERR_SHARE_DENIED.
    #[error("an open of another owner conflicts with the share mode")]
    ShareDenied = 10015,
    /// NFS4ERR_CLID_INUSE.
    #[error("another principal uses the client id")]
    ClidInUse = 10017,
    /// NFS4ERR_STALE_CLIENTID.
    #[error("the server has no such client; send EXCHANGE_ID")]
    StaleClientId = 10022,
    /// NFS4ERR_STALE_STATEID.
    #[error("the stateid is of an earlier instance of the server")]
    StaleStateId = 10023,
    /// NFS4ERR_OLD_STATEID.
    #[error("the stateid has an earlier sequence number than its state")]
    OldStateId = 10024,
    /// NFS4ERR_BAD_STATEID.
    #[error("the stateid names no state of this client and file")]
    BadStateId = 10025,
    /// NFS4ERR_NOT_SAME.
    #[error("the verifier of the client differs")]
    NotSame = 10027,
    /// NFS4ERR_NO_GRACE.
    #[error("the grace period is over, or the client has completed its reclaims")]
    NoGrace = 10033,
    /// NFS4ERR_RECLAIM_BAD.
    #[error("the client had no state before the restart of the server")]
    ReclaimBad = 10034,
    /// NFS4ERR_RECLAIM_CONFLICT.
    #[error("another client has reclaimed conflicting state")]
    ReclaimConflict = 10035,
    /// NFS4ERR_LOCKS_HELD.
    #[error("the stateid still holds an open or locks")]
    LocksHeld = 10037,
    /// NFS4ERR_OPENMODE.
    #[error("the file is not open for this access")]
    OpenMode = 10038,
    /// NFS4ERR_BADSESSION.
    #[error("the server has no such session")]
    BadSession = 10052,
    /// NFS4ERR_BADSLOT.
    #[error("the session has no such slot")]
    BadSlot = 10053,
    /// NFS4ERR_COMPLETE_ALREADY.
    #[error("the client has completed its reclaims before")]
    CompleteAlready = 10054,
    /// NFS4ERR_SEQ_MISORDERED.
    #[error("the sequence number is neither the next one nor that of a repeated request")]
    SeqMisordered = 10063,
    /// NFS4ERR_REQ_TOO_BIG.
    #[error("the request is larger than the session allows")]
    ReqTooBig = 10065,
    /// NFS4ERR_REP_TOO_BIG.
    #[error("the reply is larger than the session allows")]
    RepTooBig = 10066,
    /// NFS4ERR_REP_TOO_BIG_TO_CACHE.
    #[error("the reply is larger than the session can keep for a repeated request")]
    RepTooBigToCache = 10067,
    /// NFS4ERR_RETRY_UNCACHED_REP.
    #[error("the request is a repeated one, and its reply was not kept")]
    RetryUncachedRep = 10068,
    /// NFS4ERR_TOO_MANY_OPS.
    #[error("the request has more operations than the session allows")]
    TooManyOps = 10070,
    /// NFS4ERR_ENCR_ALG_UNSUPP: the state protection SP4_SSV.
    #[error("the server supports no secret state verifier")]
    EncrAlgUnsupp = 10079,
    /// NFS4ERR_CLIENTID_BUSY.
    #[error("the client still has sessions, opens or locks")]
    ClientIdBusy = 10074,
    /// NFS4ERR_SEQ_FALSE_RETRY.
    #[error("the sequence number is that of another request")]
    SeqFalseRetry = 10076,
    /// NFS4ERR_BAD_HIGH_SLOT.
    #[error("the highest slot of the request is not in the session")]
    BadHighSlot = 10077,
}

impl StateError {
    /// The number on the wire.
    #[must_use]
    pub fn code(self) -> u32 {
        self as u32
    }
}
