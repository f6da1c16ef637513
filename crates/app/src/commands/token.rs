//! `pagemesh token`: creates, lists and revokes tokens of the manager's API.

use crate::args::{Interval, ManagerArgs};
use crate::client::manager_client;
use crate::output::{self, json_word, table};
use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::access::{TokenName, TokenRole};
use pagemesh_manage::wire::{CreateToken, TokenInfo};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Create, list and revoke tokens of the manager's API.
#[derive(Subcommand)]
pub enum TokenCommand {
    Create(CreateArgs),
    /// List the tokens, without the tokens themselves.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Revoke a token: the manager refuses the next request with it.
    Revoke {
        /// Name or id of the token.
        token: String,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// The role of a token. Each may do everything that those before it may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// Read everything but tokens.
    Viewer,
    /// Also create, grow and delete volumes, change replicas, start scrubs, drain devices, detach.
    Operator,
    /// Also make tokens, forget bricks and add devices.
    Admin,
}

impl From<RoleArg> for TokenRole {
    fn from(role: RoleArg) -> TokenRole {
        match role {
            RoleArg::Viewer => TokenRole::Viewer,
            RoleArg::Operator => TokenRole::Operator,
            RoleArg::Admin => TokenRole::Admin,
        }
    }
}

/// Create a token. It is shown once: the manager stores its hash only.
#[derive(Args)]
pub struct CreateArgs {
    /// Name of the token; lists and events show it.
    #[arg(long)]
    pub name: TokenName,
    /// Rights of the token.
    #[arg(long, value_enum)]
    pub role: RoleArg,
    /// Time until the token expires, as `12h` or `30d`, or `never`.
    #[arg(long, default_value = "never", value_name = "TIME")]
    pub expires: Interval,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Creates, lists and revokes tokens.
pub fn run(command: &TokenCommand) -> anyhow::Result<()> {
    match command {
        TokenCommand::Create(args) => create(args),
        TokenCommand::List { client: args } => {
            let tokens = manager_client(args)?.tokens()?;
            output::print(args.output, &tokens, || token_table(&tokens))
        }
        TokenCommand::Revoke {
            token,
            client: args,
        } => {
            let client = manager_client(args)?;
            let found = find(&client, token)?;
            client.revoke_token(found.id)?;
            output::print(args.output, &found, || format!("{} is revoked", found.name))
        }
    }
}

fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let request = CreateToken {
        name: args.name.clone(),
        role: args.role.into(),
        expires_s: args.expires.0.map(|life| life.as_secs()),
    };
    let created = manager_client(&args.client)?.create_token(&request)?;
    eprintln!("keep the token of {}: it is not shown again", args.name);
    output::print(args.client.output, &created, || created.token.clone())
}

/// The token of a name or an id. A name is never an id.
fn find(client: &ManagerClient, wanted: &str) -> anyhow::Result<TokenInfo> {
    let id = Uuid::parse_str(wanted).ok();
    let tokens = client.tokens()?.into_iter();
    let mut found = tokens.filter(|it| it.name.as_str() == wanted || Some(it.id) == id);
    let Some(token) = found.next() else {
        bail!("there is no token of this name or id; list what there is with: pagemesh token list");
    };
    Ok(token)
}

fn token_table(tokens: &[TokenInfo]) -> String {
    let now_unix_s = now_unix_s();
    let rows = tokens.iter().map(|token| {
        vec![
            token.name.to_string(),
            json_word(&token.role),
            age(now_unix_s, token.created_unix_s),
            life(token, now_unix_s),
            token.id.to_string(),
        ]
    });
    table(&["NAME", "ROLE", "CREATED", "EXPIRES", "ID"], rows)
}

fn age(now_unix_s: u64, then_unix_s: u64) -> String {
    format!("{} ago", time(now_unix_s.saturating_sub(then_unix_s)))
}

fn life(token: &TokenInfo, now_unix_s: u64) -> String {
    match token.expires_unix_s {
        _ if token.expired => "expired".into(),
        None => "never".into(),
        Some(at) => format!("in {}", time(at.saturating_sub(now_unix_s))),
    }
}

/// A time for people, in its largest whole unit.
fn time(seconds: u64) -> String {
    let units = [(24 * 3600, "d"), (3600, "h"), (60, "m")];
    let unit = units.into_iter().find(|(length, _)| seconds >= *length);
    let (length, name) = unit.unwrap_or((1, "s"));
    format!("{}{name}", seconds / length)
}

#[expect(clippy::disallowed_methods, reason = "for people")]
fn now_unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_largest_unit() {
        let shown = [0, 59, 60, 3599, 3600, 86_399, 86_400, 30 * 86_400].map(time);
        assert_eq!(shown, ["0s", "59s", "1m", "59m", "1h", "23h", "1d", "30d"]);
    }
}
