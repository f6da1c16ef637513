//! The body of an error answer: a problem of RFC 9457, with the keys of earlier versions beside it.
//!
//! Invariant: a program of an earlier version finds `error`, `hint`, `code` and `epoch`, and a body of
//! an earlier version, which has only these, is read.

use crate::error_code::ErrorCode;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The media type of error answers.
pub const PROBLEM_JSON: &str = "application/problem+json";
/// The start of the `type` of every problem.
const TYPE_PREFIX: &str = "urn:pagemesh:error:";

/// An error answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Problem")]
pub struct ErrorBody {
    /// The error, for people.
    pub error: String,
    /// The way out.
    pub hint: String,
    /// The kind of the error, for programs.
    pub code: ErrorCode,
    /// The layout's current epoch, in an `epoch-conflict`.
    #[serde(default)]
    pub epoch: Option<u32>,
}

/// An error answer.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
struct Problem {
    /// `urn:pagemesh:error:` and the code.
    #[serde(rename = "type")]
    problem_type: String,
    /// The meaning of the code.
    title: &'static str,
    /// The HTTP status.
    status: u16,
    /// The error, for people.
    detail: String,
    /// The same text as `detail`, for programs of an earlier version.
    error: String,
    /// The way out.
    hint: String,
    /// The kind of the error, for programs.
    code: ErrorCode,
    /// The layout's current epoch, in an `epoch-conflict`.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u32>,
}

impl From<ErrorBody> for Problem {
    fn from(body: ErrorBody) -> Problem {
        Problem {
            problem_type: format!("{TYPE_PREFIX}{}", body.code.name()),
            title: body.code.title(),
            status: body.code.status(),
            detail: body.error.clone(),
            error: body.error,
            hint: body.hint,
            code: body.code,
            epoch: body.epoch,
        }
    }
}

impl PartialSchema for ErrorBody {
    fn schema() -> RefOr<Schema> {
        Problem::schema()
    }
}

impl ToSchema for ErrorBody {
    fn name() -> Cow<'static, str> {
        Problem::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Problem::schemas(schemas);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn problem_has_keys_of_earlier_versions() {
        let earlier =
            json!({"error": "too old", "hint": "read again", "code": "epoch-conflict", "epoch": 3});
        let body: ErrorBody = serde_json::from_value(earlier).expect("an earlier body");
        let written = serde_json::to_value(&body).expect("JSON");
        let wanted = json!({
            "type": "urn:pagemesh:error:epoch-conflict", "title": "The layout has another epoch", "status": 409,
            "detail": "too old", "error": "too old", "hint": "read again", "code": "epoch-conflict", "epoch": 3,
        });
        assert_eq!(written, wanted);
        let again: ErrorBody = serde_json::from_value(written).expect("a body of this version");
        assert_eq!(again, body);
    }
}
