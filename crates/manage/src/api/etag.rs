//! Entity tags (RFC 9110, section 8.8.3) of volumes, bricks and lists.
//!
//! A tag of one thing has two parts, `"RECORD.VIEW"`. RECORD names the stored state, VIEW the whole
//! answer. `If-None-Match` compares both. `If-Match` compares RECORD only: a heartbeat or a dead
//! brick must not fail a change that an operator has decided on.

use crate::call::{RecordTag, etag_text, hash};
use crate::idempotency::CreateAnswer;
use crate::wire::VolumeDetail;
use axum::Json;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::IntoParams;

/// The header with the known state, for the OpenAPI document.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it describes the header; `tagged_with` reads it")]
pub(super) struct IfNoneMatchHeader {
    /// The `ETag` of an earlier answer; 304 if it is still current. Several are separated by commas.
    #[param(rename = "If-None-Match")]
    if_none_match: Option<String>,
}

/// The answer with one thing; 304 if the client has it. `view` is the answer without its ages.
pub(super) fn tagged(
    request: &HeaderMap,
    record: RecordTag,
    view: &impl Serialize,
    answer: impl Serialize,
) -> Response {
    tagged_with(request, etag_text(record, view), answer)
}

/// The answer with a volume.
pub(super) fn tagged_volume(
    request: &HeaderMap,
    record: RecordTag,
    detail: VolumeDetail,
) -> Response {
    tagged_with(request, detail.etag(record), detail)
}

/// The answer to a call that created something.
pub(super) fn created<T: Serialize>(answer: CreateAnswer<T>) -> Response {
    let mut response = (StatusCode::CREATED, Json(answer.reply)).into_response();
    if let Ok(tag) = HeaderValue::from_str(&answer.etag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// The answer with a list; 304 if the client has it. `view` is the list without its ages.
pub(super) fn tagged_list(
    request: &HeaderMap,
    view: &impl Serialize,
    answer: impl Serialize,
) -> Response {
    tagged_with(request, format!("\"{:016x}\"", hash(view)), answer)
}

fn tagged_with(request: &HeaderMap, tag: String, answer: impl Serialize) -> Response {
    let given = request.get_all(header::IF_NONE_MATCH).iter();
    let given = given.filter_map(|value| value.to_str().ok());
    let mut given = given.flat_map(|value| value.split(','));
    let has = given.any(|it| it.trim().trim_start_matches("W/") == tag);
    let mut response = match has {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => Json(answer).into_response(),
    };
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}
