//! `pagemesh pool device`: the devices of the pool of a running brick, over the manager.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, bytes};
use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::units::Size;
use pagemesh_manage::wire::{
    AddDevice, BrickDevice, DeviceList, DeviceRequestInfo, DeviceRequestState, DeviceState,
    ErrorCode,
};
use pagemesh_manage::{ManagerClient, ManagerError};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The interval of looks at the state of a request.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);
/// How long the manager may not answer while a command waits: it may be restarted meanwhile.
const OUTAGE_LIMIT: Duration = Duration::from_secs(60);

/// List, add and drain the devices of the pool of a running brick.
#[derive(Subcommand)]
pub enum DeviceCommand {
    /// List the devices of a pool, with the progress of drains, and with errors since the start of the brick.
    List {
        /// Name or UUID of the brick.
        brick: BrickRef,
        #[command(flatten)]
        client: ManagerArgs,
    },
    Add(AddArgs),
    Drain(DrainArgs),
}

/// Add a block device or a new file to a pool, while its brick runs. The pool then also uses its room.
///
/// The first disk behind a pool in memory makes the pool a tier: the brick ends its connections and opens the pool again, as at a
/// restart, and clients wait for it or go on with other copies.
///
/// Data loss: everything on the block device is lost. A device that is mounted, or that holds a pool or a device of a pool,
/// is refused.
#[derive(Args)]
pub struct AddArgs {
    /// Name or UUID of the brick.
    pub brick: BrickRef,
    /// Absolute path of a block device, or of a file that does not exist yet, on the host of the brick.
    pub path: PathBuf,
    /// Bytes to use, at least 2M; by default all of a block device. A file needs a size.
    #[arg(long)]
    pub size: Option<Size>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Move all data off a device, and remove it from its pool, while the brick runs. The other devices need room for the
/// data. The drain continues after a restart of the brick.
#[derive(Args)]
pub struct DrainArgs {
    /// Name or UUID of the brick.
    pub brick: BrickRef,
    /// UUID of the device, the first digits of it, or its path.
    pub device: String,
    /// Cancel the drain: the pool uses the device again. Data that has moved stays where it is.
    #[arg(long, conflicts_with = "wait")]
    pub cancel: bool,
    /// Wait until the device has left the pool.
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result of a change, for programs.
#[derive(Serialize)]
struct DeviceOutcome {
    device: Uuid,
    path: Option<String>,
    state: &'static str,
}

/// Lists or changes the devices of a pool.
pub fn run(command: &DeviceCommand) -> anyhow::Result<()> {
    match command {
        DeviceCommand::List { brick, client } => {
            let devices = manager_client(client)?.devices(brick.clone())?.devices;
            output::print(client.output, &devices, || device_table(&devices))
        }
        DeviceCommand::Add(args) => add(args),
        DeviceCommand::Drain(args) => drain(args),
    }
}

fn add(args: &AddArgs) -> anyhow::Result<()> {
    let brick = WatchedBrick::new(&args.client, &args.brick)?;
    let path = args.path.to_str();
    let path = path.context("the path is not UTF-8; use a link with another name")?;
    let request = AddDevice {
        path: path.to_owned(),
        size_bytes: args.size.map(|size| size.0),
    };
    let asked = brick.manager.add_device(args.brick.clone(), &request)?;
    let ended = brick.wait_for(&asked, &format!("adding {path}"))?;
    let device = ended.device.context("the brick names no device")?;
    let added = DeviceOutcome {
        device,
        path: Some(request.path.clone()),
        state: "active",
    };
    output::print(args.client.output, &added, || {
        format!("added {path} as device {device}")
    })
}

fn drain(args: &DrainArgs) -> anyhow::Result<()> {
    let brick = WatchedBrick::new(&args.client, &args.brick)?;
    let list = brick.manager.devices(args.brick.clone())?;
    let device = find_device(&list.devices, &args.device)?.clone();
    let (id, name) = (device.device, device_name(&device));
    let manager = &brick.manager;
    let asked = manager.drain_device(args.brick.clone(), id, args.cancel)?;
    brick.wait_for(&asked, &format!("waiting for the brick of {name}"))?;
    let state = match (args.cancel, args.wait) {
        (true, _) => "active",
        (false, false) => "draining",
        (false, true) => {
            brick.wait_until_drained(&device)?;
            "removed"
        }
    };
    let outcome = DeviceOutcome {
        device: id,
        path: device.path,
        state,
    };
    output::print(args.client.output, &outcome, || match state {
        "active" => format!("cancelled the drain of {name}; the pool uses it again"),
        "removed" => format!("{name} holds no data any more and has left the pool"),
        _ => format!(
            "{} of {name} move to other devices; show the progress with: pagemesh pool device list {}",
            bytes(device.used_bytes),
            args.brick
        ),
    })
}

/// The device that an argument names.
fn find_device<'d>(devices: &'d [BrickDevice], name: &str) -> anyhow::Result<&'d BrickDevice> {
    let is_named = |device: &&BrickDevice| {
        device.path.as_deref() == Some(name)
            || !name.is_empty() && device.device.to_string().starts_with(name)
    };
    let mut found = devices.iter().filter(is_named);
    match (found.next(), found.next()) {
        (Some(device), None) => Ok(device),
        (None, _) => {
            bail!("the pool has no device {name}; `pagemesh pool device list` shows its devices")
        }
        (Some(_), Some(_)) => bail!("several devices are named {name}; write the whole UUID"),
    }
}

fn device_name(device: &BrickDevice) -> String {
    let id = device.device.to_string();
    device.path.clone().unwrap_or(id)
}

/// A brick, while a command waits for its devices.
struct WatchedBrick {
    manager: ManagerClient,
    brick: BrickRef,
}

impl WatchedBrick {
    fn new(client: &ManagerArgs, brick: &BrickRef) -> anyhow::Result<WatchedBrick> {
        Ok(WatchedBrick {
            manager: manager_client(client)?,
            brick: brick.clone(),
        })
    }

    /// The devices. None while the manager or the brick does not answer; an error if that lasts.
    fn look(&self, answered: &mut Instant) -> anyhow::Result<Option<DeviceList>> {
        let is_over = answered.elapsed() >= OUTAGE_LIMIT;
        match self.manager.devices(self.brick.clone()) {
            Ok(list) if list.alive => {
                *answered = Instant::now();
                Ok(Some(list))
            }
            Ok(_) if is_over => bail!(
                "the brick {} is dead; start it again, and a drain continues",
                self.brick
            ),
            Ok(_) => Ok(None),
            // A restarted manager does not know the devices before the next heartbeat.
            Err(ManagerError::Refused {
                code: ErrorCode::BrickFailed,
                ..
            }) if !is_over => Ok(None),
            Err(ManagerError::Unreachable { .. }) if !is_over => Ok(None),
            Err(cause) => Err(cause.into()),
        }
    }

    /// Waits until the brick has carried out a request.
    fn wait_for(&self, asked: &DeviceRequestInfo, what: &str) -> anyhow::Result<DeviceRequestInfo> {
        let spinner = ProgressBar::new_spinner();
        spinner.set_message(what.to_owned());
        let mut answered = Instant::now();
        loop {
            spinner.tick();
            if let Some(list) = self.look(&mut answered)? {
                let found = list.requests.into_iter().find(|it| it.id == asked.id);
                let Some(found) = found else {
                    bail!(
                        "the manager was restarted and has forgotten the request; look at the devices with \
                         `pagemesh pool device list {}`, and repeat the command if nothing has changed",
                        self.brick
                    );
                };
                match found.state {
                    DeviceRequestState::Pending => {}
                    DeviceRequestState::Done => {
                        spinner.finish_and_clear();
                        return Ok(found);
                    }
                    DeviceRequestState::Failed => {
                        spinner.finish_and_clear();
                        bail!(found.error.unwrap_or_else(|| "the brick refused it".into()));
                    }
                }
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Waits until a device has left the pool.
    fn wait_until_drained(&self, device: &BrickDevice) -> anyhow::Result<()> {
        let name = device_name(device);
        let bar = output::progress(&format!("draining {name}"));
        bar.set_length(device.used_bytes);
        let (mut answered, mut last_problem) = (Instant::now(), None);
        loop {
            if let Some(list) = self.look(&mut answered)? {
                let found = list
                    .devices
                    .into_iter()
                    .find(|it| it.device == device.device);
                let Some(found) = found else {
                    bar.finish_and_clear();
                    return Ok(());
                };
                let is_leaving = found.state == DeviceState::Draining || found.drain.is_some();
                if !is_leaving {
                    bail!("the drain of {name} was cancelled");
                }
                bar.set_position(device.used_bytes.saturating_sub(found.used_bytes));
                let problem = found.drain.and_then(|drain| drain.problem);
                if let Some(problem) = problem.as_ref().filter(|_| problem != last_problem) {
                    bar.suspend(|| eprintln!("the drain does not proceed: {problem}"));
                }
                last_problem = problem;
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// The devices as a table.
fn device_table(devices: &[BrickDevice]) -> String {
    let rows = devices.iter().map(|device| {
        vec![
            device.device.to_string(),
            device.path.clone().unwrap_or_else(|| "-".into()),
            bytes(device.used_bytes),
            bytes(device.size_bytes),
            state_text(device),
            errors_text(device),
        ]
    });
    output::table(
        &["device", "path", ">used", ">size", "state", "errors"],
        rows,
    )
}

/// The errors of a device that its brick has survived since it started.
fn errors_text(device: &BrickDevice) -> String {
    match device.last_error_s {
        None => device.errors.to_string(),
        Some(age_s) => format!("{}, last {} ago", device.errors, output::age(age_s)),
    }
}

/// The state of a device, with the progress of its drain.
pub fn state_text(device: &BrickDevice) -> String {
    let state = device.state.name();
    match &device.drain {
        None if device.is_first => format!("{state}, first"),
        None => state.to_owned(),
        Some(drain) => match &drain.problem {
            Some(problem) => format!("{state}, does not proceed: {problem}"),
            None => format!(
                "{state}, {} left, {}/s",
                bytes(drain.left_bytes),
                bytes(drain.bytes_per_s)
            ),
        },
    }
}
