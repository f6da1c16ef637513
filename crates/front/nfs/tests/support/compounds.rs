//! A client of NFSv4.1: one session with one slot, and the operations that tests send.

use super::client::Encoder;
use super::decoder::Decoder;
use super::session::Session;

const NFS4: (u32, u32) = (100_003, 4);
const GETATTR: u32 = 9;
const GETFH: u32 = 10;
const READDIR: u32 = 26;
/// Bytes of the results before the first operation after SEQUENCE: their number, and the result of SEQUENCE.
const SEQUENCE_BYTES: usize = 4 + 8 + 36;
/// Bytes of the result of an operation without fields.
const RESULT_BYTES: usize = 8;

pub type StateId = [u32; 4];

/// An operation with fields of one word each.
pub fn op(number: u32, fields: &[u32]) -> Encoder {
    let mut out = Encoder::default();
    out.word(number);
    for field in fields {
        out.word(*field);
    }
    out
}

fn named(number: u32, name: &str) -> Encoder {
    let mut out = op(number, &[]);
    out.opaque(name.as_bytes());
    out
}

pub fn put_root() -> Encoder {
    op(24, &[])
}

pub fn put(handle: &[u8]) -> Encoder {
    let mut out = op(22, &[]);
    out.opaque(handle);
    out
}

pub fn lookup(name: &str) -> Encoder {
    named(15, name)
}

pub fn lookup_parent() -> Encoder {
    op(16, &[])
}

pub fn remove(name: &str) -> Encoder {
    named(28, name)
}

pub fn get_attributes(numbers: &[u32]) -> Encoder {
    let mut out = op(GETATTR, &[]);
    bitmap(&mut out, numbers);
    out
}

/// SETATTR with the anonymous stateid.
pub fn set_attributes(numbers: &[u32], values: &[u8]) -> Encoder {
    let mut out = op(34, &[0; 4]);
    bitmap(&mut out, numbers);
    out.opaque(values);
    out
}

/// READ with the anonymous stateid.
pub fn read(count: u32) -> Encoder {
    op(25, &[0, 0, 0, 0, 0, 0, count])
}

/// CREATE of a directory with attributes.
pub fn make_directory(name: &str, numbers: &[u32], values: &[u8]) -> Encoder {
    let mut out = op(6, &[2]);
    out.opaque(name.as_bytes());
    bitmap(&mut out, numbers);
    out.opaque(values);
    out
}

/// OPEN of a name, with the attributes of a guarded create.
pub fn open(name: &str, share: (u32, u32), create: Option<(&[u32], &[u8])>) -> Encoder {
    let mut out = op(18, &[0, share.0, share.1, 0, 0]);
    out.opaque(b"owner");
    match create {
        Some((numbers, values)) => {
            out.word(1).word(1);
            bitmap(&mut out, numbers);
            out.opaque(values);
        }
        None => {
            out.word(0);
        }
    }
    out.word(0).opaque(name.as_bytes());
    out
}

pub fn close(state: StateId) -> Encoder {
    op(4, &[&[0][..], &state].concat())
}

/// Appends a set of attributes.
pub fn bitmap(out: &mut Encoder, numbers: &[u32]) {
    let mut words = [0; 3];
    for number in numbers {
        words[*number as usize / 32] |= 1 << (number % 32);
    }
    out.word(3);
    for word in words {
        out.word(word);
    }
}

/// The numbers of a set of attributes.
fn numbers(decoder: &mut Decoder<'_>) -> Vec<u32> {
    let words: Vec<u32> = (0..decoder.word()).map(|_| decoder.word()).collect();
    let is_set = |number: &u32| words[*number as usize / 32] >> (number % 32) & 1 == 1;
    (0..32 * words.len() as u32).filter(is_set).collect()
}

/// Attributes of a reply: their numbers, and their values one behind the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values {
    pub numbers: Vec<u32>,
    pub bytes: Vec<u8>,
}

impl Values {
    fn decode(decoder: &mut Decoder<'_>) -> Values {
        Values {
            numbers: numbers(decoder),
            bytes: decoder.opaque().to_vec(),
        }
    }

    /// The first value, of 64 bits.
    #[track_caller]
    pub fn long(&self) -> u64 {
        Decoder(&self.bytes).long()
    }
}

/// A name of a listing, with its cookie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedName {
    pub cookie: u64,
    pub name: String,
    pub values: Values,
}

/// See the module.
pub struct Client4 {
    session: Session,
    id: [u32; 4],
    sequence: u32,
}

/// The status of a request, and its results.
fn compound(session: &mut Session, operations: &[Encoder]) -> (u32, Vec<u8>) {
    let mut arguments = Encoder::default();
    arguments.opaque(b"").word(1).word(operations.len() as u32);
    for operation in operations {
        arguments.0.extend(&operation.0);
    }
    let reply = session.exchange(NFS4, 1, &arguments.0).expect("a reply");
    let mut decoder = Decoder(&reply);
    let header: [u32; 4] = std::array::from_fn(|_| decoder.word());
    assert_eq!(header, [0; 4], "the call is accepted");
    let status = decoder.word();
    assert_eq!(decoder.opaque(), b"");
    (status, decoder.0.to_vec())
}

impl Client4 {
    /// A client that has no state to reclaim.
    pub fn new(session: Session, name: &str) -> Client4 {
        Client4::with_replies(session, name, 1 << 20)
    }

    /// A client. Replies of its session have at most so many bytes.
    pub fn with_replies(mut session: Session, name: &str, reply_bytes: u32) -> Client4 {
        let mut exchange = op(42, &[1, 2]);
        exchange.opaque(name.as_bytes()).word(0).word(0).word(0);
        let (status, results) = compound(&mut session, &[exchange]);
        assert_eq!(status, 0, "EXCHANGE_ID");
        let mut decoder = Decoder(&results[12..]);
        let client: [u32; 3] = std::array::from_fn(|_| decoder.word());
        let channel = [0, 1 << 20, reply_bytes, 4096, 32, 4, 0];
        let fields = [&client[..], &[0], &channel, &channel, &[0, 0]].concat();
        let (status, results) = compound(&mut session, &[op(43, &fields)]);
        assert_eq!(status, 0, "CREATE_SESSION");
        let mut decoder = Decoder(&results[12..]);
        let mut client = Client4 {
            session,
            id: std::array::from_fn(|_| decoder.word()),
            sequence: 0,
        };
        assert_eq!(client.call(vec![op(58, &[0])]).0, 0, "RECLAIM_COMPLETE");
        client
    }

    /// Sends a request; returns its status, and the results after SEQUENCE.
    pub fn call(&mut self, operations: Vec<Encoder>) -> (u32, Vec<u8>) {
        self.sequence += 1;
        let fields = [&self.id[..], &[self.sequence, 0, 0, 0]].concat();
        let mut all = vec![op(53, &fields)];
        all.extend(operations);
        let (status, results) = compound(&mut self.session, &all);
        (
            status,
            results.get(SEQUENCE_BYTES..).unwrap_or_default().to_vec(),
        )
    }

    /// The fields of the last one of operations; those before it have none.
    pub fn last(&mut self, operations: Vec<Encoder>) -> Result<Vec<u8>, u32> {
        let skipped = operations.len() * RESULT_BYTES;
        match self.call(operations) {
            (0, results) => Ok(results[skipped..].to_vec()),
            (status, _) => Err(status),
        }
    }

    /// Runs an operation on a file.
    pub fn on(&mut self, file: &[u8], operation: Encoder) -> Result<Vec<u8>, u32> {
        self.last(vec![put(file), operation])
    }

    fn handle(&mut self, mut operations: Vec<Encoder>) -> Result<Vec<u8>, u32> {
        operations.push(op(GETFH, &[]));
        let fields = self.last(operations)?;
        Ok(Decoder(&fields).opaque().to_vec())
    }

    /// The handle of a path from the root of all exports on.
    pub fn walk(&mut self, path: &[&str]) -> Result<Vec<u8>, u32> {
        let names = path.iter().map(|name| lookup(name));
        self.handle(std::iter::once(put_root()).chain(names).collect())
    }

    pub fn lookup(&mut self, directory: &[u8], name: &str) -> Result<Vec<u8>, u32> {
        self.handle(vec![put(directory), lookup(name)])
    }

    pub fn parent(&mut self, directory: &[u8]) -> Result<Vec<u8>, u32> {
        self.handle(vec![put(directory), lookup_parent()])
    }

    pub fn attributes(&mut self, file: &[u8], numbers: &[u32]) -> Result<Values, u32> {
        let fields = self.on(file, get_attributes(numbers))?;
        Ok(Values::decode(&mut Decoder(&fields)))
    }

    /// The stateid of an OPEN in a directory.
    pub fn open(
        &mut self,
        directory: &[u8],
        name: &str,
        share: (u32, u32),
        create: Option<(&[u32], &[u8])>,
    ) -> Result<StateId, u32> {
        let fields = self.on(directory, open(name, share, create))?;
        let mut decoder = Decoder(&fields);
        Ok(std::array::from_fn(|_| decoder.word()))
    }

    pub fn read(&mut self, file: &[u8], count: u32) -> Result<Vec<u8>, u32> {
        let fields = self.on(file, read(count))?;
        Ok(Decoder(&fields[4..]).opaque().to_vec())
    }

    /// A whole listing, in parts of a few entries.
    pub fn list(&mut self, directory: &[u8], numbers: &[u32]) -> Result<Vec<ListedName>, u32> {
        let (mut all, mut cookie, mut verifier) = (Vec::new(), 0_u64, 0_u64);
        loop {
            let mut list = op(READDIR, &[]);
            list.long(cookie).long(verifier).word(400).word(400);
            bitmap(&mut list, numbers);
            let fields = self.on(directory, list)?;
            let mut decoder = Decoder(&fields);
            verifier = decoder.long();
            while decoder.word() == 1 {
                cookie = decoder.long();
                let name = String::from_utf8(decoder.opaque().to_vec());
                all.push(ListedName {
                    cookie,
                    name: name.expect("a name"),
                    values: Values::decode(&mut decoder),
                });
            }
            if decoder.word() == 1 {
                return Ok(all);
            }
        }
    }

    pub fn names(&mut self, directory: &[u8]) -> Result<Vec<String>, u32> {
        let listed = self.list(directory, &[])?;
        Ok(listed.into_iter().map(|it| it.name).collect())
    }
}
