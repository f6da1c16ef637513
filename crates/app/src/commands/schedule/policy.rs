//! The policy of a schedule on the command line.

use crate::args::Interval;
use anyhow::{anyhow, bail};
use clap::Args;
use pagemesh_manage::parse_label;
use pagemesh_manage::schedules::Retention;
use pagemesh_manage::wire::{SchedulePolicy, ScheduleTarget};
use std::str::FromStr;

/// The volumes of a schedule, and how many snapshots stay.
#[derive(Args)]
pub struct PolicyArgs {
    /// Volume or file system, or a pattern of names in quotes, as `db-*`; may be repeated.
    #[arg(long = "volume", value_name = "VOLUME")]
    volumes: Vec<String>,
    /// Label of volumes, as `env=prod`; may be repeated. The schedule is for each volume that one of these options names.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    labels: Vec<String>,
    /// Frequent snapshots that stay.
    #[arg(long, value_name = "N")]
    frequent: Option<u32>,
    /// Minutes between two frequent snapshots; 15 by default.
    #[arg(long, value_name = "N")]
    frequent_minutes: Option<u32>,
    /// Hourly snapshots that stay.
    #[arg(long, value_name = "N")]
    hourly: Option<u32>,
    /// Daily snapshots that stay.
    #[arg(long, value_name = "N")]
    daily: Option<u32>,
    /// Weekly snapshots that stay.
    #[arg(long, value_name = "N")]
    weekly: Option<u32>,
    /// Monthly snapshots that stay.
    #[arg(long, value_name = "N")]
    monthly: Option<u32>,
    /// Yearly snapshots that stay.
    #[arg(long, value_name = "N")]
    yearly: Option<u32>,
    /// Start of the names of the snapshots; the name of the schedule by default.
    #[arg(long)]
    prefix: Option<String>,
    /// Age of the newest snapshot from which on the health is `warning`, as `90m`; by default twice the time between two.
    #[arg(long, value_name = "TIME")]
    warn_after: Option<Interval>,
    /// Age of the newest snapshot from which on the health is `critical`; by default four times that time.
    #[arg(long, value_name = "TIME")]
    critical_after: Option<Interval>,
    /// Whether the manager carries the schedule out.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    enabled: Option<bool>,
    /// Whether it deletes snapshots.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    prune: Option<bool>,
    /// Whether the snapshots of all its volumes, at most 16, show one moment. Without one of them none is made.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    group: Option<bool>,
    /// Cluster for `schedule replicate`, as `backup=http://HOST:7070`; `http://HOST:7070/PREFIX` puts a prefix before the names
    /// of its volumes. May be repeated; at an update they replace all.
    #[arg(long = "target", value_name = "NAME=URL")]
    targets: Vec<TargetArg>,
    /// No target any more.
    #[arg(long, conflicts_with = "targets")]
    no_targets: bool,
}

/// A target of replication.
#[derive(Clone, Debug)]
struct TargetArg(ScheduleTarget);

impl FromStr for TargetArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<TargetArg> {
        let Some((name, url)) = text.split_once('=') else {
            bail!("'{text}' names no target; write NAME=http://HOST:7070");
        };
        let name = name.parse();
        let name = name.map_err(|cause| anyhow!("'{text}' names no target: {cause}"))?;
        let host_at = url.find("://").map_or(0, |at| at + 3);
        let (manager, volume_prefix) = match url[host_at..].split_once('/') {
            Some((host, prefix)) => (&url[..host_at + host.len()], prefix),
            None => (url, ""),
        };
        Ok(TargetArg(ScheduleTarget {
            name,
            manager: manager.to_owned(),
            volume_prefix: volume_prefix.to_owned(),
        }))
    }
}

impl PolicyArgs {
    /// The policy after these changes.
    pub fn applied_to(&self, before: Option<SchedulePolicy>) -> anyhow::Result<SchedulePolicy> {
        let mut policy = before.unwrap_or(SchedulePolicy {
            prefix: None,
            volumes: vec![],
            retention: Retention::default(),
            frequent_minutes: None,
            warn_after_s: None,
            critical_after_s: None,
            enabled: true,
            prune: true,
            group: false,
            targets: vec![],
        });
        if let Some(bad) = self.labels.iter().find(|text| parse_label(text).is_none()) {
            bail!("'{bad}' is no label; write KEY=VALUE, as env=prod");
        }
        if !self.volumes.is_empty() || !self.labels.is_empty() {
            policy.volumes = [self.volumes.clone(), self.labels.clone()].concat();
        }
        let Retention {
            frequent,
            hourly,
            daily,
            weekly,
            monthly,
            yearly,
        } = &mut policy.retention;
        let counts = [
            (frequent, self.frequent),
            (hourly, self.hourly),
            (daily, self.daily),
            (weekly, self.weekly),
            (monthly, self.monthly),
            (yearly, self.yearly),
        ];
        let mut is_other_time = self.frequent_minutes.is_some();
        for (count, wanted) in counts {
            if let Some(wanted) = wanted {
                is_other_time |= (*count > 0) != (wanted > 0);
                *count = wanted;
            }
        }
        if is_other_time {
            // The ages follow the time between two snapshots, unless they are named.
            (policy.warn_after_s, policy.critical_after_s) = (None, None);
        }
        let seconds = |it: Interval| it.0.map_or(u64::MAX, |it| it.as_secs());
        policy.warn_after_s = self.warn_after.map(seconds).or(policy.warn_after_s);
        policy.critical_after_s = self.critical_after.map(seconds).or(policy.critical_after_s);
        policy.frequent_minutes = self.frequent_minutes.or(policy.frequent_minutes);
        policy.prefix = self.prefix.clone().or(policy.prefix);
        policy.enabled = self.enabled.unwrap_or(policy.enabled);
        policy.prune = self.prune.unwrap_or(policy.prune);
        policy.group = self.group.unwrap_or(policy.group);
        if self.no_targets || !self.targets.is_empty() {
            policy.targets = self.targets.iter().map(|it| it.0.clone()).collect();
        }
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_a_name_and_an_address() {
        let parse = |text: &str| text.parse::<TargetArg>().map(|it| it.0);
        let plain = parse("b=http://host:7070").unwrap();
        assert_eq!(
            (plain.manager.as_str(), plain.volume_prefix.as_str()),
            ("http://host:7070", "")
        );
        let prefixed = parse("b=http://host:7070/site-").unwrap();
        assert_eq!(prefixed.manager, "http://host:7070");
        assert_eq!(prefixed.volume_prefix, "site-");
        for bad in ["b", "=http://host", "a b=http://host"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
