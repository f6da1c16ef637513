//! The events of tokens. None has a token or a hash.

use crate::access::{TokenName, TokenRecord};
use crate::events::{EventDraft, EventKind, Severity, Subject, SubjectKind};
use crate::wire::TokenInfo;
use std::net::IpAddr;

fn subject(name: &TokenName) -> Subject {
    Subject {
        kind: SubjectKind::Token,
        name: name.to_string(),
    }
}

/// A token was created.
pub(super) fn created(record: &TokenRecord, actor: &str) -> EventDraft {
    let life = match record.expires_unix_s {
        None => "It does not expire.".to_owned(),
        Some(at) => {
            let life_s = at.saturating_sub(record.created_unix_s);
            format!("It expires in {life_s} s.")
        }
    };
    EventDraft {
        kind: EventKind::TokenCreated,
        severity: Severity::Info,
        subject: subject(&record.name),
        actor: actor.to_owned(),
        text: format!(
            "The token {} with the role {} was created. {life}",
            record.name,
            record.role.name()
        ),
    }
}

/// A token was revoked.
pub(super) fn revoked(token: &TokenInfo, actor: &str) -> EventDraft {
    EventDraft {
        kind: EventKind::TokenRevoked,
        severity: Severity::Info,
        subject: subject(&token.name),
        actor: actor.to_owned(),
        text: format!("The token {} was revoked.", token.name),
    }
}

/// An address has sent too many wrong tokens.
pub(super) fn login_refused(peer: IpAddr) -> EventDraft {
    let subject = Subject {
        kind: SubjectKind::Manager,
        name: "manager".to_owned(),
    };
    EventDraft {
        kind: EventKind::LoginRefused,
        severity: Severity::Warning,
        subject,
        actor: "manager".to_owned(),
        text: format!(
            "Too many wrong tokens came from {peer}; more of them are refused for a minute. Look for a program there \
             with an old token; if you know none, close the manager's port to that address."
        ),
    }
}
