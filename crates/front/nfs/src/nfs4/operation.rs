//! The operations of COMPOUND, with the numbers of RFC 8881, section 16.2.3 (`nfs_opnum4`).

use crate::xdr::wire_enum;

wire_enum! {
    /// An operation of minor version 1. Later minor versions have more.
    pub enum Operation, "operation" {
        /// The rights of the caller.
        Access = 3,
        /// Ends an open.
        Close = 4,
        /// Makes unstable writes durable.
        Commit = 5,
        /// Makes a file that is not regular.
        Create = 6,
        /// Not supported: there are no delegations.
        DelegationPurge = 7,
        /// Returns a delegation.
        DelegationReturn = 8,
        /// Reads attributes.
        GetAttributes = 9,
        /// Reads the current file handle.
        GetHandle = 10,
        /// Gives the saved file a name in the current directory.
        Link = 11,
        /// Locks a range.
        Lock = 12,
        /// Tests for a lock.
        TestLock = 13,
        /// Unlocks a range.
        Unlock = 14,
        /// Goes to the file of a name.
        Lookup = 15,
        /// Goes to the parent.
        LookupParent = 16,
        /// Continues if attributes differ.
        VerifyDifferent = 17,
        /// Opens a file, and perhaps makes it.
        Open = 18,
        /// Not supported: there are no named attributes.
        OpenAttributeDirectory = 19,
        /// Not in minor version 1.
        OpenConfirm = 20,
        /// Reduces the access of an open.
        OpenDowngrade = 21,
        /// Sets the current file handle.
        PutHandle = 22,
        /// As [`Operation::PutRootHandle`].
        PutPublicHandle = 23,
        /// Sets the current file handle to the root of all exports.
        PutRootHandle = 24,
        /// Reads data.
        Read = 25,
        /// Lists a directory.
        ReadDirectory = 26,
        /// Reads the target of a symbolic link.
        ReadSymlink = 27,
        /// Removes a name.
        Remove = 28,
        /// Renames from the saved to the current directory.
        Rename = 29,
        /// Not in minor version 1.
        Renew = 30,
        /// Sets the current file handle to the saved one.
        RestoreHandle = 31,
        /// Saves the current file handle.
        SaveHandle = 32,
        /// The security flavors of a name.
        SecurityInfo = 33,
        /// Changes attributes.
        SetAttributes = 34,
        /// Not in minor version 1.
        SetClientId = 35,
        /// Not in minor version 1.
        SetClientIdConfirm = 36,
        /// Continues if attributes are equal.
        Verify = 37,
        /// Writes data.
        Write = 38,
        /// Not in minor version 1.
        ReleaseLockOwner = 39,
        /// Changes the back channel.
        BackchannelControl = 40,
        /// Binds a connection to a session.
        BindConnection = 41,
        /// Begins or confirms a client.
        ExchangeId = 42,
        /// Begins a session.
        CreateSession = 43,
        /// Ends a session.
        DestroySession = 44,
        /// Forgets a state.
        FreeStateid = 45,
        /// Not supported: there are no delegations.
        GetDirectoryDelegation = 46,
        /// Not supported: there is no pNFS.
        GetDeviceInfo = 47,
        /// Not supported: there is no pNFS.
        GetDeviceList = 48,
        /// Not supported: there is no pNFS.
        LayoutCommit = 49,
        /// Not supported: there is no pNFS.
        LayoutGet = 50,
        /// Not supported: there is no pNFS.
        LayoutReturn = 51,
        /// The security flavors of a directory.
        SecurityInfoNoName = 52,
        /// Orders the requests of a session.
        Sequence = 53,
        /// Not supported: state is protected by no keys.
        SetSsv = 54,
        /// Asks for the status of states.
        TestStateid = 55,
        /// Not supported: there are no delegations.
        WantDelegation = 56,
        /// Ends a client.
        DestroyClientId = 57,
        /// Ends the reclaims of a client.
        ReclaimComplete = 58,
        /// No operation has this number.
        Illegal = 10044,
    }
}

impl Operation {
    /// Whether a request may have only this operation, without SEQUENCE (RFC 8881, section 2.10.6.1).
    #[must_use]
    pub const fn is_sessionless(self) -> bool {
        matches!(
            self,
            Self::ExchangeId
                | Self::CreateSession
                | Self::DestroySession
                | Self::DestroyClientId
                | Self::BindConnection
        )
    }

    /// Whether minor version 1 demands NFS4ERR_NOTSUPP, or this server does not have it.
    #[must_use]
    pub const fn is_unsupported(self) -> bool {
        matches!(
            self,
            Self::DelegationPurge
                | Self::OpenAttributeDirectory
                | Self::OpenConfirm
                | Self::Renew
                | Self::SetClientId
                | Self::SetClientIdConfirm
                | Self::ReleaseLockOwner
                | Self::GetDirectoryDelegation
                | Self::GetDeviceInfo
                | Self::GetDeviceList
                | Self::LayoutCommit
                | Self::LayoutGet
                | Self::LayoutReturn
                | Self::SetSsv
                | Self::WantDelegation
        )
    }
}
