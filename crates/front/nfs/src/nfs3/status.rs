//! The status of a procedure, and results that depend on it.

use crate::xdr::{Encode, Writer, wire_enum};
use bytes::Bytes;

wire_enum! {
    /// The reason that a procedure fails; RFC 1813 has the numbers.
    pub enum Status, "NFS status" {
        /// NFS3ERR_PERM: only the owner or a privileged caller may do this.
        Permission = 1,
        /// NFS3ERR_NOENT: there is no such name.
        NoEntry = 2,
        /// NFS3ERR_IO: the storage failed.
        Io = 5,
        /// NFS3ERR_NXIO: there is no such device.
        NoDevice = 6,
        /// NFS3ERR_ACCES: the mode bits do not allow it.
        Access = 13,
        /// NFS3ERR_EXIST: the name exists.
        Exists = 17,
        /// NFS3ERR_XDEV: two file systems are involved.
        CrossDevice = 18,
        /// NFS3ERR_NODEV: the device does not have the operation.
        DeviceUnsuitable = 19,
        /// NFS3ERR_NOTDIR: the file is no directory.
        NotDirectory = 20,
        /// NFS3ERR_ISDIR: the file is a directory.
        IsDirectory = 21,
        /// NFS3ERR_INVAL: an argument has no meaning.
        Invalid = 22,
        /// NFS3ERR_FBIG: the file would be too large.
        FileTooLarge = 27,
        /// NFS3ERR_NOSPC: the volume is full.
        NoSpace = 28,
        /// NFS3ERR_ROFS: the file system is read-only.
        ReadOnly = 30,
        /// NFS3ERR_MLINK: the file has too many names.
        TooManyLinks = 31,
        /// NFS3ERR_NAMETOOLONG: a name is too long.
        NameTooLong = 63,
        /// NFS3ERR_NOTEMPTY: the directory has entries.
        NotEmpty = 66,
        /// NFS3ERR_DQUOT: the caller's quota is used.
        Quota = 69,
        /// NFS3ERR_STALE: the file of the handle is gone.
        Stale = 70,
        /// NFS3ERR_REMOTE: the handle names a file of another server.
        Remote = 71,
        /// NFS3ERR_BADHANDLE: this server did not make the handle.
        BadHandle = 10001,
        /// NFS3ERR_NOT_SYNC: the guard of a SETATTR does not match.
        NotSynchronized = 10002,
        /// NFS3ERR_BAD_COOKIE: the cookie of a listing has expired.
        BadCookie = 10003,
        /// NFS3ERR_NOTSUPP: the server does not have the operation.
        NotSupported = 10004,
        /// NFS3ERR_TOOSMALL: no entry of a listing fits into the client's limit.
        TooSmall = 10005,
        /// NFS3ERR_SERVERFAULT: another fault of the server.
        ServerFault = 10006,
        /// NFS3ERR_BADTYPE: the server cannot make files of this type.
        BadType = 10007,
        /// NFS3ERR_JUKEBOX: the file is unavailable now; the client asks again.
        Jukebox = 10008,
    }
}

/// The number of the status of a success.
const OK: u32 = 0;

/// The result of a procedure: a status, and fields that depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer<T, F> {
    /// The procedure was executed.
    Done(T),
    /// The procedure failed; attributes may follow the status.
    Failed(Status, F),
}

impl<T: Encode, F: Encode> Encode for Answer<T, F> {
    fn encode(&self, writer: &mut Writer) {
        match self {
            Self::Done(result) => {
                writer.u32(OK);
                writer.value(result);
            }
            Self::Failed(status, attributes) => {
                writer.value(status);
                writer.value(attributes);
            }
        }
    }

    fn tail(&self) -> Bytes {
        match self {
            Self::Done(result) => result.tail(),
            Self::Failed(..) => Bytes::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_rfc() {
        let wanted = [
            1, 2, 5, 6, 13, 17, 18, 19, 20, 21, 22, 27, 28, 30, 31, 63, 66, 69, 70, 71, 10001,
            10002, 10003, 10004, 10005, 10006, 10007, 10008,
        ];
        let numbers: Vec<u32> = Status::ALL.iter().map(|status| status.number()).collect();
        assert_eq!(numbers, wanted);
        assert_eq!(Status::from_number(0), None);
        assert_eq!(Status::from_number(10005), Some(Status::TooSmall));
    }

    #[test]
    fn answer_starts_with_its_status() {
        let encoded = |answer: Answer<Option<()>, ()>| {
            let mut writer = Writer::new();
            writer.value(&answer);
            writer.into_bytes()
        };
        assert_eq!(encoded(Answer::Done(Some(()))), [0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(encoded(Answer::Failed(Status::Stale, ())), [0, 0, 0, 70]);
    }
}
