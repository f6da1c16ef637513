//! The kinds of errors, as programs see them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of an error, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorCode {
    /// The request is invalid.
    BadRequest,
    /// The client did not prove that it knows the key or a valid token.
    Unauthorized,
    /// The role of the client does not permit the call.
    Forbidden,
    /// The client sent too many wrong tokens.
    RateLimited,
    /// The named thing does not exist.
    NotFound,
    /// The path does not take this method.
    WrongMethod,
    /// The request is too long.
    TooLarge,
    /// The body is not JSON.
    NotJson,
    /// The name is taken.
    Exists,
    /// The thing is in use, or is being changed.
    InUse,
    /// The thing has changed since the state that `If-Match` names.
    ChangedMeanwhile,
    /// The first call with this `Idempotency-Key` still runs.
    StillRunning,
    /// Another call had this `Idempotency-Key`.
    KeyReused,
    /// The layout has another epoch than the expected one.
    EpochConflict,
    /// Another client has attached.
    Fenced,
    /// No brick has room.
    NoRoom,
    /// A brick refused or did not answer.
    BrickFailed,
    /// The manager has too many requests at once.
    Overloaded,
    /// The request took too long; its work may or may not be done.
    TimedOut,
    /// The manager itself failed.
    Internal,
}

impl ErrorCode {
    /// The HTTP status of the code.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            ErrorCode::BadRequest => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::WrongMethod => 405,
            ErrorCode::ChangedMeanwhile => 412,
            ErrorCode::TooLarge => 413,
            ErrorCode::NotJson => 415,
            ErrorCode::Exists
            | ErrorCode::InUse
            | ErrorCode::StillRunning
            | ErrorCode::EpochConflict
            | ErrorCode::Fenced => 409,
            ErrorCode::KeyReused => 422,
            ErrorCode::RateLimited => 429,
            ErrorCode::Internal => 500,
            ErrorCode::BrickFailed => 502,
            ErrorCode::Overloaded => 503,
            ErrorCode::TimedOut => 504,
            ErrorCode::NoRoom => 507,
        }
    }
}

impl ErrorCode {
    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ErrorCode::BadRequest => "bad-request",
            ErrorCode::Unauthorized => "unauthorized",
            ErrorCode::Forbidden => "forbidden",
            ErrorCode::RateLimited => "rate-limited",
            ErrorCode::NotFound => "not-found",
            ErrorCode::WrongMethod => "wrong-method",
            ErrorCode::TooLarge => "too-large",
            ErrorCode::NotJson => "not-json",
            ErrorCode::Exists => "exists",
            ErrorCode::InUse => "in-use",
            ErrorCode::EpochConflict => "epoch-conflict",
            ErrorCode::ChangedMeanwhile => "changed-meanwhile",
            ErrorCode::StillRunning => "still-running",
            ErrorCode::KeyReused => "key-reused",
            ErrorCode::Fenced => "fenced",
            ErrorCode::NoRoom => "no-room",
            ErrorCode::BrickFailed => "brick-failed",
            ErrorCode::Overloaded => "overloaded",
            ErrorCode::TimedOut => "timed-out",
            ErrorCode::Internal => "internal",
        }
    }

    /// The meaning in words, the same for every error of the code.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            ErrorCode::BadRequest => "The request is invalid",
            ErrorCode::Unauthorized => "The request carries no valid key or token",
            ErrorCode::Forbidden => "The role does not permit the call",
            ErrorCode::RateLimited => "Too many wrong tokens",
            ErrorCode::NotFound => "The named thing does not exist",
            ErrorCode::WrongMethod => "The path does not take this method",
            ErrorCode::TooLarge => "The request is too long",
            ErrorCode::NotJson => "The body is not JSON",
            ErrorCode::Exists => "The name is taken",
            ErrorCode::InUse => "The present state does not permit it",
            ErrorCode::EpochConflict => "The layout has another epoch",
            ErrorCode::ChangedMeanwhile => "The thing has changed meanwhile",
            ErrorCode::StillRunning => "The first call with this key still runs",
            ErrorCode::KeyReused => "Another call had this key",
            ErrorCode::Fenced => "Another client has attached",
            ErrorCode::NoRoom => "There is no room",
            ErrorCode::BrickFailed => "A brick failed",
            ErrorCode::Overloaded => "Too many requests at once",
            ErrorCode::TimedOut => "The request took too long",
            ErrorCode::Internal => "The manager failed",
        }
    }
}
