//! Pages of lists: limits, and the `Link` header with the next page (RFC 8288).

use crate::client::query_text;
use crate::fault::Fault;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::header::LINK;

/// Entries of the longest page.
pub const PAGE_MAX: usize = 1000;

/// Checks a requested number of entries.
pub(super) fn check_limit(asked: Option<usize>) -> Result<Option<usize>, Fault> {
    match asked {
        Some(0) => Err(limit_error()),
        Some(limit) if limit > PAGE_MAX => Err(limit_error()),
        limit => Ok(limit),
    }
}

fn limit_error() -> Fault {
    Fault::invalid_field(
        format!("a page has 1 to {PAGE_MAX} entries"),
        "name a limit in this range, and follow the Link header",
    )
}

/// The header with the address of the next page: `path` with the given of these parameters.
pub(super) fn next_page(path: &str, parameters: &[(&str, Option<String>)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let link = format!("<{path}?{}>; rel=\"next\"", query_text(parameters));
    if let Ok(link) = HeaderValue::from_str(&link) {
        headers.insert(LINK, link);
    }
    headers
}

/// The JSON name of an enumeration's value, as queries have it.
pub(super) fn json_name(value: &impl serde::Serialize) -> String {
    let json = serde_json::to_value(value).unwrap_or_default();
    json.as_str().unwrap_or_default().to_owned()
}
