//! Names of owners over NFSv4.1: the option `--idmap-domain`.

use anyhow::Context;
use pagemesh_nfs::Nfs4Options;
use pagemesh_nfs::nfs4::named_identities::{
    DomainError, NamedIdentities, check_domain, system_names,
};
use std::sync::Arc;

/// Checks a domain of the command line.
pub fn parse_domain(text: &str) -> Result<String, DomainError> {
    check_domain(text)?;
    Ok(text.into())
}

/// The options of NFSv4.1. Without a domain, owners are numbers.
pub fn options(domain: Option<&str>) -> anyhow::Result<Nfs4Options> {
    let Some(domain) = domain else {
        return Ok(Nfs4Options::default());
    };
    let identities = NamedIdentities::new(domain, Box::new(system_names))
        .context("cannot name owners over NFSv4.1")?;
    Ok(Nfs4Options {
        identities: Arc::new(identities),
        ..Nfs4Options::default()
    })
}
