//! The shipped configuration, units and guide: docs/operations/install.md is executed as written.
//!
//! Each host of the guide is a network namespace with its own /etc, /var/lib and /run. The test
//! replaces only the installation of the package and systemctl, which runs the unit's ExecStart as
//! the unit's user.

use crate::support;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::daemon::Daemon;
use support::net::{Host, Net};
use support::skip::skip;
use support::{PAGEMESH, Pools, own_ip, program, write_key};

/// The limit of the guide for each host: the installation, and the first I/O.
const COMMANDS_MAX: usize = 7;
/// The hosts of the guide, with their places in the test's network.
const HOSTS: [(&str, Host); 3] = [
    ("10.0.0.1", Host::Manager),
    ("10.0.0.2", Host::Brick(0)),
    ("10.0.0.3", Host::Brick(1)),
];
/// Gives a command the directories of its host: `sh -c ENTER sh DIR NAME PROGRAM COMMAND...`.
const ENTER: &str = "set -e
for dir in etc var/lib run; do mount --bind \"$1/$dir\" \"/$dir\"; done
mount --bind \"$3\" /run/bin/pagemesh
printf %s \"$2\" > /proc/sys/kernel/hostname
shift 3
export PATH=/run/bin:/usr/sbin:/sbin:$PATH
exec \"$@\"";

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

/// The value of a key of a unit, as `User`.
fn unit_value(unit: &str, key: &str) -> Option<String> {
    let start = format!("{key}=");
    let line = unit.lines().find_map(|line| line.strip_prefix(&start));
    line.map(str::to_owned)
}

/// The text of a unit, and its instance, from a name as `pagemesh-brick@node-2`.
fn unit_of(name: &str) -> (String, String) {
    let (file, instance) = match name.split_once('@') {
        Some((start, instance)) => (format!("{start}@.service"), instance),
        None => (format!("{name}.service"), ""),
    };
    let unit = std::fs::read_to_string(repository("contrib/systemd").join(file)).unwrap();
    (unit, instance.to_owned())
}

/// The commands of the guide for three hosts: each with the address in the heading above it.
fn guide() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(repository("docs/operations/install.md")).unwrap();
    let (_, section) = text.split_once("\n## Three hosts\n").expect("a section");
    let section = section.split("\n## ").next().unwrap();
    let (mut commands, mut host, mut is_code) = (vec![], String::new(), false);
    for line in section.lines() {
        if let Some(heading) = line.strip_prefix("### ") {
            let address = heading
                .split_whitespace()
                .find(|word| word.starts_with("10."));
            let address = address.expect("the address of a host");
            host = address.trim_end_matches(':').to_owned();
        } else if line.starts_with("```") {
            is_code = !is_code;
        } else if is_code && !line.trim().is_empty() {
            commands.push((host.clone(), line.to_owned()));
        }
    }
    commands
}

/// The words that start a command as the user of a unit, with its capabilities.
fn become_user(unit: &str, user: &str) -> Vec<String> {
    let given = unit_value(unit, "AmbientCapabilities").unwrap_or_default();
    let names = given.to_lowercase().replace("cap_", "+");
    let set = ["-all", &names.replace(' ', ",")].join(",");
    let set = set.trim_end_matches(',');
    let mut words = vec!["setpriv".to_owned()];
    for kind in ["--bounding-set", "--inh-caps", "--ambient-caps"] {
        words.push(format!("{kind}={set}"));
    }
    words.extend(["--reuid", user, "--regid", user, "--clear-groups", "--"].map(str::to_owned));
    words
}

/// A machine of the guide.
struct Machine<'a> {
    net: &'a Net,
    host: Host,
    name: String,
    dir: PathBuf,
    daemons: Vec<Daemon>,
}

impl<'a> Machine<'a> {
    fn new(net: &'a Net, host: Host, address: &str, all: &Path) -> Machine<'a> {
        let dir = all.join(machine_name(address));
        for part in ["var/lib", "run/bin", "run/share", "run/pagemesh"] {
            std::fs::create_dir_all(dir.join(part)).unwrap();
        }
        std::fs::write(dir.join("run/bin/pagemesh"), "").unwrap();
        program::ok("cp", &["-a", "/etc", dir.join("etc").to_str().unwrap()]);
        for example in std::fs::read_dir(repository("contrib/config")).unwrap() {
            let example = example.unwrap();
            let copy = dir.join("run/share").join(example.file_name());
            std::fs::copy(example.path(), copy).unwrap();
        }
        Machine {
            net,
            host,
            name: machine_name(address),
            dir,
            daemons: vec![],
        }
    }

    /// A command on this machine, as root.
    fn command(&self, words: &[&str]) -> Command {
        let enter = self.net.enter(self.host);
        let mut command = Command::new(&enter[0]);
        command
            .args(&enter[1..])
            .args(["unshare", "--mount", "--uts", "sh", "-c", ENTER, "sh"])
            .arg(&self.dir)
            .args([&self.name, PAGEMESH])
            .args(words)
            .env_remove("PAGEMESH_KEY")
            .env_remove("PAGEMESH_MANAGER");
        command
    }

    fn ok(&self, words: &[&str]) -> String {
        let output = self.command(words).output().unwrap();
        program::succeeded(&format!("{}: {words:?}", self.name), output)
    }

    /// Creates the user and the directories, as the package does.
    fn install_package(&self) {
        let script = repository("contrib/deb/postinst");
        self.ok(&["sh", script.to_str().unwrap(), "configure", ""]);
        let owner = self.ok(&["stat", "-c", "%U %a", "/var/lib/pagemesh"]);
        assert_eq!(owner, "pagemesh 750\n");
        // The runtime directory is the service manager's.
        self.ok(&["chown", "pagemesh:pagemesh", "/run/pagemesh"]);
    }

    /// Runs the ExecStart of a unit as its user, and waits until it is ready.
    fn start_unit(&mut self, name: &str) {
        let (unit, instance) = unit_of(name);
        let start = unit_value(&unit, "ExecStart").expect("a command");
        let start = start.replace("%i", &instance);
        let mut words: Vec<&str> = start.split(' ').collect();
        assert_eq!(words[0], "/usr/bin/pagemesh");
        words[0] = "/run/bin/pagemesh";
        words.push("--until-stdin-ends");
        let drop = unit_value(&unit, "User").map(|user| become_user(&unit, &user));
        let drop = drop.unwrap_or_default();
        words.splice(0..0, drop.iter().map(String::as_str));
        let started = Daemon::start(self.command(&words), &self.dir, name, 1);
        let daemon = started.unwrap_or_else(|ended| panic!("{name} did not start: {ended:?}"));
        self.daemons.push(daemon);
    }

    /// Runs a command of the guide.
    fn follow(&mut self, line: &str) {
        if line.starts_with("apt install ") {
            self.install_package();
        } else if let Some(units) = line.strip_prefix("systemctl enable --now ") {
            for unit in units.split(' ') {
                self.start_unit(unit);
            }
        } else {
            self.ok(&["sh", "-c", line]);
        }
    }
}

/// The name of the machine with an address, and of its directory.
fn machine_name(address: &str) -> String {
    let (_, number) = address.rsplit_once('.').expect("an address");
    format!("host-{number}")
}

/// The same command with the addresses of the test's network.
fn readdressed(line: &str) -> String {
    let replace = |line: String, (address, host): &(&str, Host)| line.replace(address, &host.ip());
    HOSTS.iter().fold(line.to_owned(), replace)
}

/// A command of the guide with the addresses, paths and sizes of the test.
fn adapted(line: &str, all: &Path) -> String {
    let dir = all.join(machine_name(HOSTS[0].0)).join("etc/pagemesh");
    let remote = format!("scp {}:/etc/pagemesh/{{key,client.toml}}", HOSTS[0].0);
    let dir = dir.display();
    let line = line.replace(&remote, &format!("cp {dir}/key {dir}/client.toml"));
    let line = line.replace("/usr/share/pagemesh/", "/run/share/");
    readdressed(&line.replace("64G", "64M").replace("40G", "32M"))
}

/// The number of legs that are in sync in a volume's description.
fn in_sync_legs(shown: &Value) -> usize {
    match shown {
        Value::Object(fields) => {
            let is_leg = fields.contains_key("slice") && fields["state"] == "in-sync";
            usize::from(is_leg) + fields.values().map(in_sync_legs).sum::<usize>()
        }
        Value::Array(items) => items.iter().map(in_sync_legs).sum(),
        _ => 0,
    }
}

#[test]
fn guide_leads_to_mirrored_volume_on_three_hosts() {
    let Some(net) = Net::new(2, 0) else {
        return;
    };
    let dir = Pools::Disk.dir();
    let all = dir.path();
    let mut machines: BTreeMap<String, Machine<'_>> = BTreeMap::new();
    for (address, host) in HOSTS {
        let machine = Machine::new(&net, host, address, all);
        machines.insert(address.to_owned(), machine);
    }
    let commands = guide();
    for (address, _) in HOSTS {
        let count = commands.iter().filter(|(host, _)| host == address).count();
        assert!(
            (1..=COMMANDS_MAX).contains(&count),
            "{address}: {count} commands"
        );
    }
    for (address, line) in &commands {
        let machine = machines.get_mut(address).expect("a host of the guide");
        machine.follow(&adapted(line, all));
    }
    let (_, last) = commands.last().expect("a command");
    assert!(last.starts_with("qemu-io "), "{last} is no I/O");
    // Each host knows the manager and the key without options.
    for machine in machines.values() {
        let shown = machine.ok(&["pagemesh", "volume", "show", "data", "--output", "json"]);
        let shown: Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(in_sync_legs(&shown), 2, "{shown:#}");
    }
    // The export ends before the bricks, and these before the manager.
    for address in ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"] {
        let machine = machines.get_mut(address).unwrap();
        machine.daemons.pop().expect("a daemon").stop();
    }
}

/// A machine with the manager and the brick `one` of its package, whose pool is in memory, and a volume `one`.
fn packaged_brick<'a>(net: &'a Net, all: &Path) -> Machine<'a> {
    let mut machine = Machine::new(net, Host::Manager, "10.0.0.1", all);
    machine.install_package();
    let address = Host::Manager.ip();
    let prepare = format!(
        "umask 077; printf %064d 7 > /etc/pagemesh/key; chown pagemesh /etc/pagemesh/key; umask 022
         for it in manager client brick-one; do
             sed 's/@NAME@/one/; s/@ADDRESS@/{address}/; s/@MANAGER@/{address}/' /run/share/${{it%-one}}.toml > /etc/pagemesh/$it.toml
         done
         runuser -u pagemesh -- pagemesh pool create /var/lib/pagemesh/one.pool --size 32M"
    );
    machine.ok(&["sh", "-ec", &prepare]);
    machine.start_unit("pagemesh-manager");
    machine.start_unit("pagemesh-brick@one");
    machine.ok(&[
        "pagemesh", "volume", "create", "one", "--size", "8M", "--layout", "concat",
    ]);
    machine
}

#[test]
fn packaged_brick_ends_stopped_client_of_root() {
    let Some(net) = Net::new(0, 0) else {
        return;
    };
    let dir = Pools::Memory.dir();
    let mut machine = packaged_brick(&net, dir.path());
    let export = ["pagemesh", "export", "nbd", "one", "--transport", "map"];
    let place = ["--socket", "/run/pagemesh/root.nbd", "--until-stdin-ends"];
    let command = machine.command(&[&export[..], &place].concat());
    let mut client = Daemon::start(command, &machine.dir, "export of root", 1).unwrap();
    client.signal("STOP");
    machine.daemons.pop().expect("the brick").kill();
    machine.start_unit("pagemesh-brick@one");
    assert_eq!(
        client.await_end().signal(),
        Some(rustix::process::Signal::KILL.as_raw())
    );
    while let Some(daemon) = machine.daemons.pop() {
        daemon.stop();
    }
}

#[test]
fn doctor_of_other_user_blames_no_daemon() {
    let Some(net) = Net::new(0, 0) else {
        return;
    };
    let dir = Pools::Memory.dir();
    let mut machine = packaged_brick(&net, dir.path());
    let doctor = ["pagemesh", "doctor", "--output", "json"];
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--",
    ];
    for (prefix, unseen) in [(&nobody[..], "warning"), (&[], "ok")] {
        let output = machine
            .command(&[prefix, &doctor].concat())
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let checks = report["checks"].as_array().unwrap();
        for (name, wanted) in [
            ("port-7070", "ok"),
            ("port-7071", "ok"),
            ("config", "ok"),
            ("key", unseen),
            ("manager", unseen),
        ] {
            let check = checks.iter().find(|check| check["name"] == name);
            let check = check.unwrap_or_else(|| panic!("no {name} in {report:#}"));
            assert_eq!(check["finding"], wanted, "{check:#}");
        }
    }
    while let Some(daemon) = machine.daemons.pop() {
        daemon.stop();
    }
}

#[test]
fn removal_leaves_no_dangling_link_of_a_unit() {
    let dir = tempfile::tempdir().unwrap();
    let script = std::fs::read_to_string(repository("contrib/deb/postrm")).unwrap();
    let wants = dir.path().join("multi-user.target.wants");
    std::fs::create_dir(&wants).unwrap();
    std::fs::write(dir.path().join("own.service"), "").unwrap();
    for (name, target) in [
        (
            "pagemesh-brick@one.service",
            "/nowhere/pagemesh-brick@.service",
        ),
        ("pagemesh-own.service", "../own.service"),
        ("other.service", "/nowhere/other.service"),
    ] {
        symlink(target, wants.join(name)).unwrap();
    }
    let script = script.replace("/etc/systemd/system", dir.path().to_str().unwrap());
    let script = script.replace("systemctl", "true");
    program::ok("sh", &["-c", &script, "postrm", "remove"]);
    let entries = std::fs::read_dir(&wants).unwrap();
    let mut left: Vec<_> = entries.map(|it| it.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["other.service", "pagemesh-own.service"]);
}

/// All values of a key of a unit.
fn unit_words(unit: &str, key: &str) -> Vec<String> {
    let start = format!("{key}=");
    let values = unit.lines().filter_map(|line| line.strip_prefix(&start));
    let words = values.flat_map(str::split_whitespace);
    words.map(str::to_owned).collect()
}

#[test]
fn units_restart_without_limit() {
    for name in [
        "pagemesh-manager",
        "pagemesh-brick@a",
        "pagemesh-export@a",
        "pagemesh-mount@a",
        "pagemesh-nfs@a",
    ] {
        let (unit, _) = unit_of(name);
        assert_eq!(unit_words(&unit, "StartLimitIntervalSec"), ["0"], "{name}");
        assert_eq!(unit_words(&unit, "RestartSec"), ["2s"], "{name}");
    }
}

#[test]
fn units_end_clients_before_bricks() {
    let target = "pagemesh-bricks.target".to_owned();
    let (brick, _) = unit_of("pagemesh-brick@a");
    assert!(unit_words(&brick, "Before").contains(&target));
    for name in [
        "pagemesh-brick@a",
        "pagemesh-export@a",
        "pagemesh-mount@a",
        "pagemesh-nfs@a",
    ] {
        let (unit, _) = unit_of(name);
        // Only an active target orders the end.
        assert!(unit_words(&unit, "Wants").contains(&target), "{name}");
        let after = unit_words(&unit, "After");
        assert!(
            after.contains(&"pagemesh-manager.service".to_owned()),
            "{name}"
        );
        assert_eq!(after.contains(&target), !name.contains("brick"), "{name}");
    }
}

#[test]
fn units_have_rights_over_stopped_clients() {
    for (name, calls) in [
        ("pagemesh-brick@a", &["ptrace"][..]),
        ("pagemesh-mount@a", &["ptrace", "pidfd_getfd"]),
    ] {
        let (unit, _) = unit_of(name);
        let (allowed, bounded) = (
            unit_words(&unit, "SystemCallFilter"),
            unit_words(&unit, "CapabilityBoundingSet"),
        );
        for call in calls {
            assert!(allowed.iter().any(|it| it == call), "{name}: {call}");
        }
        for capability in ["CAP_KILL", "CAP_SYS_PTRACE"] {
            assert!(
                bounded.iter().any(|it| it == capability),
                "{name}: {capability}"
            );
        }
    }
    // systemd gives the directory to the user of each unit that names it.
    let (mount, _) = unit_of("pagemesh-mount@a");
    assert!(unit_words(&mount, "RuntimeDirectory").is_empty());
}

#[test]
fn units_are_hardened() {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        return skip("needs systemd-analyze");
    }
    let dir = tempfile::tempdir().unwrap();
    // A mount cannot have a mount namespace of its own: no other process would see it.
    let limits = [
        ("manager", 30),
        ("brick@", 30),
        ("export@", 30),
        ("mount@", 47),
        ("nfs@", 30),
    ];
    for (name, limit) in limits {
        let unit = repository("contrib/systemd").join(format!("pagemesh-{name}.service"));
        let copy = dir
            .path()
            .join(format!("pagemesh-{}.service", name.replace('@', "@x")));
        std::fs::copy(unit, &copy).unwrap();
        let limit = format!("--threshold={limit}");
        let copy = copy.to_str().unwrap();
        let words = ["security", "--offline=true", "--no-pager", &limit, copy];
        program::ok("systemd-analyze", &words);
    }
}

#[test]
fn units_name_commands_that_exist() {
    for name in [
        "pagemesh-manager",
        "pagemesh-brick@a",
        "pagemesh-export@a",
        "pagemesh-mount@a",
        "pagemesh-nfs@a",
    ] {
        let (unit, instance) = unit_of(name);
        assert_eq!(unit_value(&unit, "Type").as_deref(), Some("notify"));
        let start = unit_value(&unit, "ExecStart").expect("a command");
        let start = start.replace("%i", &instance);
        let words: Vec<&str> = start.split(' ').skip(1).collect();
        let output = program::run(PAGEMESH, &words);
        let stderr = String::from_utf8_lossy(&output.stderr);
        // The command line is right, and there is no such file here.
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("the configuration file /etc/pagemesh/"),
            "{stderr}"
        );
    }
}

#[test]
fn service_manager_is_told_start_and_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(support::LIMIT)).unwrap();
    let key = dir.path().join("key");
    write_key(&key, &"ab".repeat(32));
    let config = dir.path().join("manager.toml");
    let listen = format!("{}:0", own_ip());
    let text = format!("listen = \"{listen}\"\nkey = \"{}\"\n", key.display());
    std::fs::write(&config, text).unwrap();
    let mut command = Command::new(PAGEMESH);
    command
        .args(["manager", "--until-stdin-ends", "--config"])
        .arg(&config)
        .current_dir(dir.path())
        .env("NOTIFY_SOCKET", &path)
        .env_remove("PAGEMESH_KEY");
    let daemon = Daemon::start(command, dir.path(), "manager", 1).unwrap();
    let received = || {
        let mut bytes = [0; 512];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let ready = received();
    assert!(ready.starts_with("READY=1\nSTATUS=http://127."), "{ready}");
    daemon.stop();
    assert!(received().starts_with("STOPPING=1\n"));
}

#[test]
fn wrong_configuration_is_named_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("brick.toml");
    for (text, parts) in [
        ("\npol = \"/p\"", ["brick.toml:2", "'pool'"]),
        ("pool = 4", ["brick.toml:1", "string"]),
        ("pool = \"/p\"\nname = \"-\"", ["brick.toml:2", "key name"]),
    ] {
        std::fs::write(&config, text).unwrap();
        let output = program::run(PAGEMESH, &["brick", "--config", config.to_str().unwrap()]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        for part in parts {
            assert!(stderr.contains(part), "no '{part}' in: {stderr}");
        }
    }
}

#[test]
fn doctor_finds_exposed_key_and_absent_manager() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    write_key(&key, &"ab".repeat(32));
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o644)).unwrap();
    let manager = format!("http://{}:1", own_ip());
    let key = key.to_str().unwrap();
    let words = [
        "doctor",
        "--output",
        "json",
        "--key",
        key,
        "--manager",
        &manager,
    ];
    let output = program::run(PAGEMESH, &words);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["worst"], "error");
    for name in ["key", "manager"] {
        let checks = report["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert_eq!(check["finding"], "error", "{check}");
        assert!(
            check["fix"].as_str().is_some_and(|fix| !fix.is_empty()),
            "{check}"
        );
    }
    let people = program::run(PAGEMESH, &["doctor", "--key", key]);
    let text = String::from_utf8_lossy(&people.stdout);
    assert!(text.contains("fix: chown pagemesh"), "{text}");
}
