//! The handshake as a state machine: bytes in, bytes and steps out.
//!
//! It handles one option at a time, so that an answer is sent before the next option is read. It
//! does no I/O, opens no space, and keeps at most one option of a client's bytes. It answers a
//! request for something that the client may not have. Bytes that are not the protocol are a
//! [`ProtocolViolation`] and end the connection.

use crate::exports::{Export, Exports};
use crate::limits::PREFERRED_BYTES;
use crate::limits::{NAME_BYTES_MAX, OPTION_BYTES_MAX, OPTIONS_MAX, PAYLOAD_BYTES_MAX};
use crate::wire::{self, answer, export_flag, handshake, info, option};
use crate::wire::{take_u16, take_u32, take_u64};
use std::sync::Arc;

/// Bytes of an option before its data.
const OPTION_HEADER_BYTES: usize = 16;
/// Bytes of input that the machine may be given at once.
pub const INPUT_BYTES_MAX: usize = OPTION_HEADER_BYTES + OPTION_BYTES_MAX;
/// Zeroes after the answer to `EXPORT_NAME`, unless both ends omit them.
const PADDING_BYTES: usize = 124;

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolViolation {
    #[error("the client's flags {0:#x} are unknown")]
    ClientFlags(u32),
    #[error("an option starts with {0:#x}, which is no option")]
    OptionMagic(u64),
    #[error("option {0} has {1} bytes of data; at most {OPTION_BYTES_MAX} are allowed")]
    OptionLength(u32, u32),
    #[error("more than {OPTIONS_MAX} options without choosing an export")]
    TooManyOptions,
    #[error("there is no export of the requested name, and the option has no error answer")]
    NoSuchExport,
    #[error("a request starts with invalid bytes")]
    RequestMagic,
    #[error("a write of {0} bytes; at most {PAYLOAD_BYTES_MAX} are allowed")]
    WriteLength(u32),
}

/// The next step.
pub enum NegotiationStep {
    /// Send the output, then read more.
    More,
    /// An option was answered; send the output, then call `step` again.
    Again,
    /// Open the export and report the result to [`Negotiation::finish_open`].
    Open(Arc<Export>),
    /// The client is done; send the output, then close.
    Close,
}

/// The negotiated options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiatedOptions {
    /// The size that the client got; it holds for the whole connection.
    pub size_bytes: u64,
    pub read_only: bool,
    pub has_structured_replies: bool,
    /// Whether `base:allocation` was chosen.
    pub has_allocation_context: bool,
}

/// The option that waits for an export to be opened.
enum PendingOpen {
    Go { wanted: Vec<u16> },
    ExportName,
}

/// See the module.
pub struct Negotiation {
    exports: Exports,
    has_client_flags: bool,
    omits_padding: bool,
    has_structured_replies: bool,
    /// The export for which `base:allocation` was chosen.
    context_export: Option<String>,
    pending_open: Option<(PendingOpen, Arc<Export>)>,
    option_count: u32,
}

impl Negotiation {
    pub fn new(exports: Exports) -> Self {
        Self {
            exports,
            has_client_flags: false,
            omits_padding: false,
            has_structured_replies: false,
            context_export: None,
            pending_open: None,
            option_count: 0,
        }
    }

    /// The server's greeting.
    pub fn greet(&self, out: &mut Vec<u8>) {
        out.extend(wire::GREETING_MAGIC.to_be_bytes());
        out.extend(wire::OPTION_MAGIC.to_be_bytes());
        out.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    }

    /// Consumes at most one message from the front of `input`.
    pub fn step(
        &mut self,
        input: &mut Vec<u8>,
        out: &mut Vec<u8>,
    ) -> Result<NegotiationStep, ProtocolViolation> {
        if !self.has_client_flags {
            let Some((flags, _)) = take_u32(input) else {
                return Ok(NegotiationStep::More);
            };
            self.accept_flags(flags)?;
            input.drain(..4);
            return Ok(NegotiationStep::Again);
        }
        let Some((kind, len)) = option_header(input)? else {
            return Ok(NegotiationStep::More);
        };
        let end = OPTION_HEADER_BYTES + len;
        if input.len() < end {
            return Ok(NegotiationStep::More);
        }
        self.option_count += 1;
        if self.option_count > OPTIONS_MAX {
            return Err(ProtocolViolation::TooManyOptions);
        }
        let step = self.answer_option(kind, &input[OPTION_HEADER_BYTES..end], out);
        input.drain(..end);
        step
    }

    fn accept_flags(&mut self, flags: u32) -> Result<(), ProtocolViolation> {
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(ProtocolViolation::ClientFlags(flags));
        }
        self.omits_padding = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.has_client_flags = true;
        Ok(())
    }

    fn answer_option(
        &mut self,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<NegotiationStep, ProtocolViolation> {
        match kind {
            option::EXPORT_NAME => {
                let export = self
                    .exports
                    .find(data)
                    .ok_or(ProtocolViolation::NoSuchExport)?;
                self.pending_open = Some((PendingOpen::ExportName, Arc::clone(&export)));
                return Ok(NegotiationStep::Open(export));
            }
            option::ABORT => {
                put_answer(out, kind, answer::ACK, &[]);
                return Ok(NegotiationStep::Close);
            }
            option::LIST => self.list_exports(data, out),
            option::INFO | option::GO => return Ok(self.answer_info(kind, data, out)),
            option::STRUCTURED_REPLY => {
                if data.is_empty() {
                    self.has_structured_replies = true;
                    put_answer(out, kind, answer::ACK, &[]);
                } else {
                    put_refusal(out, kind, answer::ERR_INVALID, "this option takes no data");
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.choose_context(kind, data, out);
            }
            _ => put_refusal(out, kind, answer::ERR_UNSUPPORTED, "unknown option"),
        }
        Ok(NegotiationStep::Again)
    }

    fn list_exports(&self, data: &[u8], out: &mut Vec<u8>) {
        if !data.is_empty() {
            put_refusal(
                out,
                option::LIST,
                answer::ERR_INVALID,
                "this option takes no data",
            );
            return;
        }
        for export in self.exports.all() {
            let name = export.name.as_bytes();
            let mut entry = Vec::with_capacity(4 + name.len());
            put_text(&mut entry, name);
            entry.extend(export.options.description.as_bytes());
            put_answer(out, option::LIST, answer::SERVER, &entry);
        }
        put_answer(out, option::LIST, answer::ACK, &[]);
    }

    fn answer_info(&mut self, kind: u32, data: &[u8], out: &mut Vec<u8>) -> NegotiationStep {
        let Some((name, wanted)) = parse_info(data) else {
            put_refusal(out, kind, answer::ERR_INVALID, "malformed option");
            return NegotiationStep::Again;
        };
        let Some(export) = self.exports.find(name) else {
            put_refusal(out, kind, answer::ERR_UNKNOWN, &unknown_export(name));
            return NegotiationStep::Again;
        };
        if kind == option::GO {
            self.pending_open = Some((PendingOpen::Go { wanted }, Arc::clone(&export)));
            return NegotiationStep::Open(export);
        }
        let session = self.negotiated_options(&export, export.space.size_bytes());
        put_info(out, kind, &export, &session, &wanted);
        NegotiationStep::Again
    }

    fn choose_context(&mut self, kind: u32, data: &[u8], out: &mut Vec<u8>) {
        let setting = kind == option::SET_META_CONTEXT;
        if setting {
            self.context_export = None;
        }
        let Some((name, queries)) = parse_context(data) else {
            put_refusal(out, kind, answer::ERR_INVALID, "malformed option");
            return;
        };
        if setting && !self.has_structured_replies {
            let why = "negotiate structured replies first";
            put_refusal(out, kind, answer::ERR_INVALID, why);
            return;
        }
        let Some(export) = self.exports.find(name) else {
            put_refusal(out, kind, answer::ERR_UNKNOWN, &unknown_export(name));
            return;
        };
        let all = !setting && queries.is_empty();
        let matches = |query: &&[u8]| {
            *query == wire::BASE_ALLOCATION.as_bytes() || (!setting && *query == b"base:")
        };
        if all || queries.iter().any(matches) {
            let id = if setting { wire::BASE_ALLOCATION_ID } else { 0 };
            let mut context = id.to_be_bytes().to_vec();
            context.extend(wire::BASE_ALLOCATION.as_bytes());
            put_answer(out, kind, answer::META_CONTEXT, &context);
            if setting {
                self.context_export = Some(export.name.clone());
            }
        }
        put_answer(out, kind, answer::ACK, &[]);
    }

    fn negotiated_options(&self, export: &Export, size_bytes: u64) -> NegotiatedOptions {
        NegotiatedOptions {
            size_bytes,
            read_only: export.options.read_only,
            has_structured_replies: self.has_structured_replies,
            has_allocation_context: self.context_export.as_ref() == Some(&export.name),
        }
    }

    /// Ends a [`NegotiationStep::Open`]: returns the session, or none if it is refused. Then the
    /// client may go on choosing.
    pub fn finish_open(
        &mut self,
        result: Result<u64, OpenRefusal>,
        out: &mut Vec<u8>,
    ) -> Result<Option<NegotiatedOptions>, ProtocolViolation> {
        let Some((opening, export)) = self.pending_open.take() else {
            return Ok(None);
        };
        match (opening, result) {
            (PendingOpen::Go { wanted }, Ok(size_bytes)) => {
                let session = self.negotiated_options(&export, size_bytes);
                put_info(out, option::GO, &export, &session, &wanted);
                Ok(Some(session))
            }
            (PendingOpen::Go { .. }, Err(refusal)) => {
                let (kind, why) = match refusal {
                    OpenRefusal::Policy(why) => (answer::ERR_POLICY, why),
                    OpenRefusal::Permanent(why) => (answer::ERR_SHUTDOWN, why),
                    OpenRefusal::Unavailable(why) => (answer::ERR_UNKNOWN, why),
                };
                put_refusal(out, option::GO, kind, &why);
                Ok(None)
            }
            (PendingOpen::ExportName, Ok(size_bytes)) => {
                let session = self.negotiated_options(&export, size_bytes);
                out.extend(size_bytes.to_be_bytes());
                out.extend(export_flags(&session).to_be_bytes());
                if !self.omits_padding {
                    out.extend([0; PADDING_BYTES]);
                }
                Ok(Some(session))
            }
            (PendingOpen::ExportName, Err(_)) => Err(ProtocolViolation::NoSuchExport),
        }
    }
}

/// Why an existing export cannot be opened.
#[derive(Clone, Debug)]
pub enum OpenRefusal {
    /// A limit.
    Policy(String),
    /// The space will never serve this server's clients again.
    Permanent(String),
    /// The space cannot be opened.
    Unavailable(String),
}

fn option_header(input: &[u8]) -> Result<Option<(u32, usize)>, ProtocolViolation> {
    let Some((magic, rest)) = take_u64(input) else {
        return Ok(None);
    };
    if magic != wire::OPTION_MAGIC {
        return Err(ProtocolViolation::OptionMagic(magic));
    }
    let Some((kind, rest)) = take_u32(rest) else {
        return Ok(None);
    };
    let Some((len, _)) = take_u32(rest) else {
        return Ok(None);
    };
    if len as usize > OPTION_BYTES_MAX {
        return Err(ProtocolViolation::OptionLength(kind, len));
    }
    Ok(Some((kind, len as usize)))
}

fn take_text(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = take_u32(data)?;
    rest.split_at_checked(len as usize)
}

fn parse_info(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let (name, rest) = take_text(data)?;
    let (count, mut rest) = take_u16(rest)?;
    if rest.len() != usize::from(count) * 2 {
        return None;
    }
    let mut wanted = Vec::new();
    while let Some((kind, after)) = take_u16(rest) {
        // An answer is given once, however often the client requests it.
        if !wanted.contains(&kind) && kind <= info::BLOCK_SIZE {
            wanted.push(kind);
        }
        rest = after;
    }
    Some((name, wanted))
}

fn parse_context(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (name, rest) = take_text(data)?;
    let (count, mut rest) = take_u32(rest)?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Each takes at least four bytes, so the loop ends with the data.
        let (query, after) = take_text(rest)?;
        queries.push(query);
        rest = after;
    }
    rest.is_empty().then_some((name, queries))
}

fn export_flags(session: &NegotiatedOptions) -> u16 {
    let mut flags = export_flag::HAS_FLAGS
        | export_flag::SEND_FLUSH
        | export_flag::SEND_FUA
        | export_flag::CAN_MULTI_CONN;
    if session.read_only {
        flags |= export_flag::READ_ONLY;
    } else {
        flags |=
            export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES | export_flag::SEND_FAST_ZERO;
    }
    if session.has_structured_replies {
        flags |= export_flag::SEND_DF;
    }
    flags
}

fn put_info(
    out: &mut Vec<u8>,
    kind: u32,
    export: &Export,
    session: &NegotiatedOptions,
    wanted: &[u16],
) {
    let mut about = info::EXPORT.to_be_bytes().to_vec();
    about.extend(session.size_bytes.to_be_bytes());
    about.extend(export_flags(session).to_be_bytes());
    put_answer(out, kind, answer::INFO, &about);

    let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
    sizes.extend(1u32.to_be_bytes());
    sizes.extend(PREFERRED_BYTES.to_be_bytes());
    sizes.extend(PAYLOAD_BYTES_MAX.to_be_bytes());
    put_answer(out, kind, answer::INFO, &sizes);

    for (what, text) in [
        (info::NAME, &export.name),
        (info::DESCRIPTION, &export.options.description),
    ] {
        if wanted.contains(&what) {
            let mut told = what.to_be_bytes().to_vec();
            told.extend(text.as_bytes());
            put_answer(out, kind, answer::INFO, &told);
        }
    }
    put_answer(out, kind, answer::ACK, &[]);
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text);
}

fn put_answer(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(wire::OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    put_text(out, data);
}

fn put_refusal(out: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    put_answer(out, option, kind, why.as_bytes());
}

/// Refuses an option that is too long; the connection ends after it.
pub fn put_length_refusal(out: &mut Vec<u8>, option: u32) {
    put_refusal(out, option, answer::ERR_TOO_BIG, "the option is too long");
}

fn unknown_export(name: &[u8]) -> String {
    if name.is_empty() {
        return "there is no default export; name one".into();
    }
    let shown = &name[..name.len().min(NAME_BYTES_MAX)];
    format!("there is no export '{}'", shown.escape_ascii())
}
