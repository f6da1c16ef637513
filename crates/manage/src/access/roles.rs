//! The role that each route needs. It stands in the annotation of the route's handler, as the scope of
//! `security`, and so in the OpenAPI document, of which this table is made.
//!
//! Invariant: a route whose annotation states no role needs [`Role::Cluster`], the strongest. A test
//! finds such routes.

use super::identity::Role;
use axum::http::Method;
use serde_json::Value;
use std::collections::BTreeMap;

/// The security scheme whose scope is the role.
const SCHEME: &str = "token";

/// The rights that a route needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteRights {
    /// None: anyone may call it.
    Open,
    /// This role or a stronger one.
    Needs(Role),
}

/// The rights that each route needs, by path template and method.
#[derive(Clone, Debug, Default)]
pub struct RouteRoles(BTreeMap<String, BTreeMap<String, Option<RouteRights>>>);

impl RouteRoles {
    /// The table in an OpenAPI document.
    #[must_use]
    pub fn of_document(document: &Value) -> RouteRoles {
        let mut table = RouteRoles::default();
        let paths = document["paths"].as_object().into_iter().flatten();
        for (path, operations) in paths {
            for (method, operation) in operations.as_object().into_iter().flatten() {
                let rights = stated_rights(&operation["security"]);
                let methods = table.0.entry(path.clone()).or_default();
                methods.insert(method.to_uppercase(), rights);
            }
        }
        table
    }

    /// The rights that a request needs; `path` is the template that its path matches, if any.
    #[must_use]
    pub fn of_request(&self, method: &Method, path: Option<&str>) -> RouteRights {
        // Errors about unknown paths and methods are for every role.
        let weakest = RouteRights::Needs(Role::Viewer);
        let strongest = RouteRights::Needs(Role::Cluster);
        let Some(path) = path else {
            return weakest;
        };
        let Some(methods) = self.0.get(path) else {
            return strongest;
        };
        // A handler of GET answers HEAD, too.
        let method = if method == Method::HEAD {
            &Method::GET
        } else {
            method
        };
        match methods.get(method.as_str()) {
            // The existence of an open path is no secret: the server says which methods it takes.
            None if methods.values().all(|it| *it == Some(RouteRights::Open)) => RouteRights::Open,
            None => weakest,
            Some(stated) => stated.unwrap_or(strongest),
        }
    }

    /// Every route: method, path template, and the rights that its annotation states.
    pub fn routes(&self) -> impl Iterator<Item = (&str, &str, Option<RouteRights>)> {
        self.0.iter().flat_map(|(path, methods)| {
            let methods = methods.iter();
            methods.map(move |(method, rights)| (method.as_str(), path.as_str(), *rights))
        })
    }
}

/// The rights in the `security` of an operation: one empty requirement, or one role.
pub(crate) fn stated_rights(security: &Value) -> Option<RouteRights> {
    let [requirement] = security.as_array()?.as_slice() else {
        return None;
    };
    let schemes = requirement.as_object()?;
    if schemes.is_empty() {
        return Some(RouteRights::Open);
    }
    let [role] = schemes.get(SCHEME)?.as_array()?.as_slice() else {
        return None;
    };
    let role = Role::ALL.into_iter().find(|it| role == it.name())?;
    (schemes.len() == 1).then_some(RouteRights::Needs(role))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unclear_security_states_no_rights() {
        assert_eq!(stated_rights(&json!([{}])), Some(RouteRights::Open));
        let admin = Some(RouteRights::Needs(Role::Admin));
        assert_eq!(stated_rights(&json!([{"token": ["admin"]}])), admin);
        for unclear in [
            json!(null),
            json!([]),
            json!([{}, {}]),
            json!([{"token": []}]),
            json!([{"token": ["root"]}]),
            json!([{"token": ["viewer", "admin"]}]),
            json!([{"token": ["viewer"]}, {}]),
            json!([{"token": ["viewer"], "other": []}]),
            json!([{"other": ["viewer"]}]),
        ] {
            assert_eq!(stated_rights(&unclear), None, "{unclear}");
        }
    }

    #[test]
    fn route_without_role_needs_strongest() {
        let document = json!({"paths": {
            "/a": {"get": {}, "post": {"security": [{"token": ["viewer"]}]}},
            "/open": {"get": {"security": [{}]}},
            "/mixed": {"get": {"security": [{}]}, "post": {}},
        }});
        let table = RouteRoles::of_document(&document);
        let needs = |method, path| table.of_request(&method, path);
        let [viewer, cluster] = [Role::Viewer, Role::Cluster].map(RouteRights::Needs);
        assert_eq!(needs(Method::GET, Some("/a")), cluster);
        assert_eq!(needs(Method::HEAD, Some("/a")), cluster);
        assert_eq!(needs(Method::POST, Some("/a")), viewer);
        assert_eq!(needs(Method::PUT, Some("/a")), viewer);
        assert_eq!(needs(Method::GET, Some("/b")), cluster);
        assert_eq!(needs(Method::GET, None), viewer);
        assert_eq!(needs(Method::PUT, Some("/open")), RouteRights::Open);
        assert_eq!(needs(Method::PUT, Some("/mixed")), viewer);
    }
}
