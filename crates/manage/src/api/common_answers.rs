//! The refusals that many calls share, in the OpenAPI document.
//!
//! Invariant: the document describes each of them once, as a component. An operation refers to it, unless the
//! annotation of its handler describes the status itself.

use crate::access::{Role, RouteRights, stated_rights};
use crate::error_code::ErrorCode;
use crate::wire::{ErrorBody, PROBLEM_JSON};
use axum::http::header::IF_MATCH;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::{Components, Content, Ref, RefOr, ResponseBuilder};

/// A refusal that many calls share.
struct CommonAnswer {
    code: ErrorCode,
    meaning: &'static str,
    /// The calls that may get it, in words.
    calls: &'static str,
    /// The same as a condition.
    applies: fn(&CallTraits) -> bool,
}

/// The properties of an operation by which it gets common answers.
struct CallTraits {
    /// The role that it needs, if any.
    role: Option<Role>,
    has_body: bool,
    has_parameters: bool,
    has_path_parameter: bool,
    has_if_match: bool,
}

const COMMON_ANSWERS: [CommonAnswer; 11] = [
    CommonAnswer {
        code: ErrorCode::BadRequest,
        meaning: "a part of the path, the query, a header or the body cannot be read or breaks a rule",
        calls: "calls with parameters or a body",
        applies: |it| it.role.is_some() && (it.has_body || it.has_parameters),
    },
    CommonAnswer {
        code: ErrorCode::Unauthorized,
        meaning: "the request has no valid credential",
        calls: "calls that need a role",
        applies: |it| it.role.is_some(),
    },
    CommonAnswer {
        code: ErrorCode::Forbidden,
        meaning: "the role of the credential is too weak",
        calls: "calls that need a stronger role than `viewer`",
        applies: |it| it.role > Some(Role::Viewer),
    },
    CommonAnswer {
        code: ErrorCode::NotFound,
        meaning: "the named thing or the path does not exist",
        calls: "calls with a parameter in the path",
        applies: |it| it.has_path_parameter,
    },
    CommonAnswer {
        code: ErrorCode::ChangedMeanwhile,
        meaning: "the thing has changed since the state that `If-Match` names",
        calls: "calls with `If-Match`",
        applies: |it| it.has_if_match,
    },
    CommonAnswer {
        code: ErrorCode::TooLarge,
        meaning: "the body is too long",
        calls: "all calls",
        applies: |_| true,
    },
    CommonAnswer {
        code: ErrorCode::NotJson,
        meaning: "the body has another `Content-Type` than `application/json`",
        calls: "calls with a body that need a role",
        applies: |it| it.role.is_some() && it.has_body,
    },
    CommonAnswer {
        code: ErrorCode::RateLimited,
        meaning: "the address has sent too many wrong tokens; `Retry-After` says when to try again",
        calls: "calls that need a role",
        applies: |it| it.role.is_some(),
    },
    CommonAnswer {
        code: ErrorCode::Internal,
        meaning: "the manager failed; its log has the reason",
        calls: "all calls",
        applies: |_| true,
    },
    CommonAnswer {
        code: ErrorCode::Overloaded,
        meaning: "the manager has too many requests at once",
        calls: "all calls",
        applies: |_| true,
    },
    CommonAnswer {
        code: ErrorCode::TimedOut,
        meaning: "the request took too long; its work may still be done",
        calls: "all calls",
        applies: |_| true,
    },
];

/// Describes the common answers as components.
pub(super) fn describe(components: &mut Components) {
    for answer in &COMMON_ANSWERS {
        let schema = Ref::from_schema_name(ErrorBody::name());
        let response = ResponseBuilder::new()
            .description(format!("{} ({})", answer.meaning, answer.calls))
            .content(PROBLEM_JSON, Content::new(Some(schema)));
        let name = answer.code.name().to_owned();
        components.responses.insert(name, response.build().into());
    }
}

/// Adds the common answers of an operation.
pub(super) fn add_to(operation: &mut Operation) {
    let traits = CallTraits::of(operation);
    for answer in &COMMON_ANSWERS {
        if (answer.applies)(&traits) {
            let responses = &mut operation.responses.responses;
            let reference = Ref::from_response_name(answer.code.name());
            responses
                .entry(answer.code.status().to_string())
                .or_insert(RefOr::Ref(reference));
        }
    }
}

impl CallTraits {
    fn of(operation: &Operation) -> CallTraits {
        let security = serde_json::to_value(&operation.security).unwrap_or(Value::Null);
        let role = match stated_rights(&security) {
            Some(RouteRights::Open) => None,
            Some(RouteRights::Needs(role)) => Some(role),
            None => Some(Role::Cluster),
        };
        let parameters = operation.parameters.as_deref().unwrap_or_default();
        // The annotations of handlers have no references to parameters.
        let parameters = parameters.iter().filter_map(|it| match it {
            RefOr::T(parameter) => Some(parameter),
            RefOr::Ref(_) => None,
        });
        CallTraits {
            role,
            has_body: operation.request_body.is_some(),
            has_parameters: parameters.clone().next().is_some(),
            has_path_parameter: parameters
                .clone()
                .any(|it| it.parameter_in == ParameterIn::Path),
            has_if_match: parameters
                .clone()
                .any(|it| it.name.eq_ignore_ascii_case(IF_MATCH.as_str())),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::api::document::document;
    use serde_json::{Value, json};

    /// The statuses of an operation, and these of them that refer to a common answer.
    fn statuses(document: &Value, path: &str, method: &str) -> (Vec<String>, Vec<String>) {
        let responses = &document["paths"][path][method]["responses"];
        let responses = responses.as_object().expect("responses");
        let shared = responses.iter().filter(|(_, it)| it["$ref"].is_string());
        let shared = shared.map(|(status, _)| status.clone());
        (responses.keys().cloned().collect(), shared.collect())
    }

    #[test]
    fn operations_refer_to_common_answers() {
        let document = document();
        let check = |method, path, all: &[&str], common: &[&str]| {
            let (found, shared) = statuses(&document, path, method);
            assert_eq!(found, all, "{method} {path}");
            assert_eq!(shared, common, "{method} {path}");
        };
        let open = ["200", "413", "500", "503", "504"];
        // Its annotation describes the answer 503 of a failed store.
        check("get", "/healthz", &open, &["413", "500", "504"]);
        let viewer = ["200", "401", "413", "429", "500", "503", "504"];
        check("get", "/api/v1/status", &viewer, &viewer[1..]);
        let grow = [
            "200", "400", "401", "403", "404", "409", "412", "413", "415", "429", "500", "502",
            "503", "504", "507",
        ];
        let common = [
            "401", "403", "412", "413", "415", "429", "500", "503", "504",
        ];
        check("post", "/api/v1/volumes/{name}/grow", &grow, &common);
        // The annotation of the login describes its own refusals.
        let login = ["200", "401", "403", "413", "429", "500", "503", "504"];
        let common = ["413", "500", "503", "504"];
        check("post", "/api/v1/login", &login, &common);
    }

    #[test]
    fn common_answers_are_problems() {
        let document = document();
        let shared = &document["components"]["responses"];
        let shared = shared.as_object().expect("responses");
        let problem = json!({"schema": {"$ref": "#/components/schemas/Error"}});
        for (code, answer) in shared {
            assert_eq!(
                answer["content"]["application/problem+json"], problem,
                "{code}"
            );
        }
        assert_eq!(shared.len(), super::COMMON_ANSWERS.len());
    }
}
