//! Contents of files: READ, WRITE, COMMIT and READLINK.

use crate::handle::HandleBytes;
use crate::limits::TRANSFER_BYTES_MAX;
use crate::nfs3::attributes::{Attributes, ChangeAttributes};
use crate::nfs3::status::Answer;
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError, wire_enum};
use bytes::Bytes;

/// The target of a symbolic link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadSymlink<'a> {
    /// The attributes of the link.
    pub attributes: Option<Attributes>,
    /// The target.
    pub target: &'a [u8],
}

impl Encode for ReadSymlink<'_> {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.opaque(self.target);
    }
}

/// The result of READLINK.
pub type ReadSymlinkReply<'a> = Answer<ReadSymlink<'a>, Option<Attributes>>;

/// The arguments of READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes; at most [`TRANSFER_BYTES_MAX`], also if the client asks for more. A
    /// reply may have fewer bytes than the client wants.
    pub count: u32,
}

impl<'a> Decode<'a> for ReadArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            file: HandleBytes::decode(reader)?,
            offset: reader.u64()?,
            count: reader.u32()?.min(TRANSFER_BYTES_MAX),
        })
    }
}

/// Data of a file. The reply sends it without a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadData {
    /// The attributes of the file.
    pub attributes: Option<Attributes>,
    /// Whether the data ends at the end of the file.
    pub is_end: bool,
    /// The data, of at most the bytes that the client asks for.
    pub data: Bytes,
}

impl Encode for ReadData {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.length(self.data.len());
        writer.bool(self.is_end);
        writer.length(self.data.len());
    }

    fn tail(&self) -> Bytes {
        self.data.clone()
    }
}

/// The result of READ.
pub type ReadReply = Answer<ReadData, Option<Attributes>>;

wire_enum! {
    /// The durability of written data at the reply (`stable_how`).
    pub enum Durability, "durability of a WRITE" {
        /// The server may lose the data until a COMMIT; then its verifier changes.
        Unstable = 0,
        /// The data is durable, and the metadata that reads need.
        DataSync = 1,
        /// The data and all metadata are durable.
        FileSync = 2,
    }
}

/// A number that changes when the server may have lost unstable data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteVerifier(pub [u8; 8]);

impl Encode for WriteVerifier {
    fn encode(&self, writer: &mut Writer) {
        writer.fixed(&self.0);
    }
}

/// The arguments of WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The first byte.
    pub offset: u64,
    /// The least durability of the reply.
    pub durability: Durability,
    /// The data, of at most [`TRANSFER_BYTES_MAX`].
    pub data: &'a [u8],
}

impl<'a> Decode<'a> for WriteArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        let file = HandleBytes::decode(reader)?;
        let (offset, counted) = (reader.u64()?, reader.u32()?);
        let durability = Durability::decode(reader)?;
        let what = "data of a WRITE";
        let data = reader.opaque(what, TRANSFER_BYTES_MAX as usize)?;
        let sent = data.len();
        if u32::try_from(sent) != Ok(counted) {
            return Err(XdrError::Contradiction {
                what,
                counted,
                sent,
            });
        }
        Ok(Self {
            file,
            offset,
            durability,
            data,
        })
    }
}

/// The effect of a WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenData {
    /// The attributes of the file.
    pub attributes: ChangeAttributes,
    /// The number of bytes written.
    pub count: u32,
    /// The durability; not less than the client asks for.
    pub durability: Durability,
    /// The verifier from before the WRITE was submitted.
    pub verifier: WriteVerifier,
}

impl Encode for WrittenData {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.u32(self.count);
        writer.value(&self.durability);
        writer.value(&self.verifier);
    }
}

/// The result of WRITE.
pub type WriteReply = Answer<WrittenData, ChangeAttributes>;

/// The arguments of COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitArguments<'a> {
    /// The file.
    pub file: HandleBytes<'a>,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes; 0 for all up to the end of the file.
    pub count: u32,
}

impl<'a> Decode<'a> for CommitArguments<'a> {
    fn decode(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            file: HandleBytes::decode(reader)?,
            offset: reader.u64()?,
            count: reader.u32()?,
        })
    }
}

/// The effect of a COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommittedData {
    /// The attributes of the file.
    pub attributes: ChangeAttributes,
    /// The verifier from after the flush.
    pub verifier: WriteVerifier,
}

impl Encode for CommittedData {
    fn encode(&self, writer: &mut Writer) {
        writer.value(&self.attributes);
        writer.value(&self.verifier);
    }
}

/// The result of COMMIT.
pub type CommitReply = Answer<CommittedData, ChangeAttributes>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs3::status::Status;
    use crate::rpc::Reply;
    use crate::testing::{
        attributes, decode_error, decoded, encoded, encoded_with_tail, some_attributes, words,
    };

    #[test]
    fn read_is_decoded_and_bounded() {
        let bytes = words(&[4, 0x0909_0909, 1, 2, 4096]);
        let wanted = ReadArguments {
            file: HandleBytes(&[9; 4]),
            offset: 0x1_0000_0002,
            count: 4096,
        };
        assert_eq!(decoded::<ReadArguments<'_>>(&bytes), wanted);
        let bytes = words(&[0, 0, 0, u32::MAX]);
        let arguments: ReadArguments<'_> = decoded(&bytes);
        assert_eq!(arguments.count, TRANSFER_BYTES_MAX);
    }

    #[test]
    fn read_data_is_sent_without_a_copy() {
        let data = Bytes::from_static(b"hello");
        let reply = ReadReply::Done(ReadData {
            attributes: Some(attributes()),
            is_end: true,
            data: data.clone(),
        });
        let fields = words(&[&[0][..], &some_attributes(), &[5, 1, 5]].concat());
        assert_eq!(encoded(&reply), fields);
        let reply = Reply::success(7, &reply);
        let [_, tail, padding] = reply.parts();
        assert_eq!(tail.as_ptr(), data.as_ptr());
        assert_eq!((tail, padding), (&b"hello"[..], &[0; 3][..]));
        let failed = ReadReply::Failed(Status::IsDirectory, None);
        assert_eq!(encoded_with_tail(&failed), words(&[21, 0]));
    }

    #[test]
    fn write_is_decoded_without_a_copy() {
        let fields = words(&[4, 0x0909_0909, 1, 2, 5, 1, 5]);
        let bytes = [&fields[..], b"hello\0\0\0"].concat();
        let arguments: WriteArguments<'_> = decoded(&bytes);
        let wanted = WriteArguments {
            file: HandleBytes(&[9; 4]),
            offset: 0x1_0000_0002,
            durability: Durability::DataSync,
            data: b"hello",
        };
        assert_eq!(arguments, wanted);
        assert_eq!(arguments.data.as_ptr(), bytes[28..].as_ptr());
    }

    #[test]
    fn contradictory_write_is_refused() {
        for counted in [0, 4, 6, u32::MAX] {
            let fields = words(&[0, 0, 0, counted, 0, 5]);
            let bytes = [&fields[..], b"hello\0\0\0"].concat();
            let error = XdrError::Contradiction {
                what: "data of a WRITE",
                counted,
                sent: 5,
            };
            assert_eq!(decode_error::<WriteArguments<'_>>(&bytes), error);
        }
        let unknown = decode_error::<WriteArguments<'_>>(&words(&[0, 0, 0, 0, 3, 0]));
        assert!(matches!(unknown, XdrError::Enumeration { value: 3, .. }));
        let len = TRANSFER_BYTES_MAX + 1;
        let long = decode_error::<WriteArguments<'_>>(&words(&[0, 0, 0, len, 0, len]));
        assert!(matches!(long, XdrError::TooLong { .. }));
    }

    #[test]
    fn written_and_committed_data_is_encoded() {
        let attributes_after = ChangeAttributes {
            before: None,
            after: Some(attributes()),
        };
        let verifier = WriteVerifier([1, 2, 3, 4, 5, 6, 7, 8]);
        let reply = WriteReply::Done(WrittenData {
            attributes: attributes_after,
            count: 4096,
            durability: Durability::FileSync,
            verifier,
        });
        let after = some_attributes();
        let rest = [4096, 2, 0x0102_0304, 0x0506_0708];
        let wanted = [&[0, 0][..], &after, &rest].concat();
        assert_eq!(encoded(&reply), words(&wanted));

        let reply = CommitReply::Done(CommittedData {
            attributes: attributes_after,
            verifier,
        });
        let wanted = [&[0, 0][..], &after, &rest[2..]].concat();
        assert_eq!(encoded(&reply), words(&wanted));
        let failed = CommitReply::Failed(Status::Io, ChangeAttributes::default());
        assert_eq!(encoded(&failed), words(&[5, 0, 0]));
    }

    #[test]
    fn commit_is_decoded() {
        let bytes = words(&[0, 1, 2, 0]);
        let wanted = CommitArguments {
            file: HandleBytes(b""),
            offset: 0x1_0000_0002,
            count: 0,
        };
        assert_eq!(decoded::<CommitArguments<'_>>(&bytes), wanted);
    }

    #[test]
    fn target_is_encoded() {
        let reply = ReadSymlinkReply::Done(ReadSymlink {
            attributes: None,
            target: b"a/b",
        });
        assert_eq!(encoded(&reply), words(&[0, 0, 3, 0x612f_6200]));
        let failed = ReadSymlinkReply::Failed(Status::Invalid, None);
        assert_eq!(encoded(&failed), words(&[22, 0]));
    }
}
