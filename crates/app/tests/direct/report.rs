//! The reports of a program under `pagemesh exec`, and of its mount, on direct operations and on
//! operations that the kernel got.

use super::support::mounted::{self, CLASSIC, TestMount, preload_library};
use super::support::{Cluster, PAGEMESH, Pools, program};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Writes by descriptors that lead to the kernel for different reasons, and then waits.
const WRITES: &str = r#"
import fcntl, mmap, os, sys
fd = os.open('plain', os.O_RDWR)
for page in range(100):
    os.pwrite(fd, bytes(4096), page % 16 * 4096)
appends = os.open('flags', os.O_RDWR)
fcntl.fcntl(appends, fcntl.F_SETFL, os.O_APPEND)
os.write(appends, b'x')
mapped = os.open('mapped', os.O_RDWR)
mmap.mmap(mapped, 4096)
for _ in range(10):
    os.pread(mapped, 10, 0)
os.pread(int(sys.argv[1]), 10, 0)
print('up', flush=True)
sys.stdin.readline()
"#;

fn exec(mount: &TestMount, options: &[&str]) -> Command {
    let mut command = program::limited("sh");
    // The descriptor comes from a process that the library does not know.
    let script = r#"exec 9<inherited; exec "$@" 9"#;
    command.args(["-c", script, "sh", PAGEMESH, "exec", "--library"]);
    command
        .arg(preload_library())
        .args(["--patience", "4"])
        .args(options);
    command.args(["--", "python3", "-c", WRITES]);
    command.current_dir(&mount.dir);
    command
}

fn with_files(pools: Pools) -> Option<(Cluster, TestMount)> {
    let cluster = mounted::cluster_with_medium(pools, &[64, 64], "24M")?;
    let mount = TestMount::with_fuse(&cluster, "files", "auto", CLASSIC);
    mount.sh("for name in plain flags mapped inherited; do head -c 65536 /dev/zero > $name; done");
    Some((cluster, mount))
}

fn file<'v>(report: &'v Value, name: &str) -> &'v Value {
    let files = report["files"].as_array().unwrap();
    let is_it = |file: &&Value| {
        file["path"]
            .as_str()
            .is_some_and(|path| path.ends_with(name))
    };
    files
        .iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("{report}"))
}

#[test]
fn report_gives_reasons_for_kernel_operations() {
    let Some((cluster, mount)) = with_files(Pools::Memory) else {
        return;
    };
    let place = cluster.dir().join("report");
    let option = format!("--report={}", place.display());
    let mut command = exec(&mount, &[&option, "--output", "json"]);
    program::succeeded("a program", command.stdin(Stdio::null()).output().unwrap());
    let text = std::fs::read_to_string(&place).unwrap();
    let report: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let plain = file(&report, "plain");
    assert_eq!(plain["reasons"]["patience"], 4, "{report}");
    let inherited = file(&report, "inherited");
    assert_eq!(inherited["reasons"]["unknown-descriptor"], 1, "{report}");
    let (direct, kernel) = (&plain["direct"], &plain["kernel"]);
    let sum = direct.as_u64().unwrap() + kernel.as_u64().unwrap();
    assert!(sum == 100 && direct.as_u64() > Some(80), "{report}");
    assert_eq!(file(&report, "flags")["reasons"]["append-changed"], 1);
    assert!(file(&report, "mapped")["reasons"]["mapped"].as_u64() > Some(0));
    assert_eq!(file(&report, "mapped")["direct"], 0);
    // The readable report, on standard error.
    let mut command = exec(&mount, &["--report"]);
    let ended = command.env("PAGEMESH_LOG", "info").stdin(Stdio::null());
    let said = String::from_utf8(ended.output().unwrap().stderr).unwrap();
    assert!(
        said.contains("1: O_APPEND was set or cleared later"),
        "{said}"
    );
    let told = "the kernel serves operations on files of mounts: the file is mapped";
    assert_eq!(said.matches(told).count(), 1, "{said}");
    mount.stop(&cluster);
}

#[test]
fn mount_status_shows_direct_clients() {
    let Some((cluster, mount)) = with_files(Pools::Memory) else {
        return;
    };
    let mut command = exec(&mount, &[]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = super::ChildGuard(command.spawn().unwrap());
    let mut said = BufReader::new(client.0.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "up");
    let dir = mount.dir.to_str().unwrap();
    let shown = cluster.json(&["mount", "status", dir]);
    let processes = shown[0]["processes"].as_array().unwrap();
    let is_it = |process: &&Value| process["name"] == "python3";
    let process = processes
        .iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("{shown}"));
    assert!(process["direct"].as_u64() > Some(80), "{shown}");
    assert_eq!(process["reasons"]["patience"], 4, "{shown}");
    assert_eq!(process["reasons"]["append-changed"], 1, "{shown}");
    assert!(shown[0]["refused"]["mapped"].as_u64() > Some(0), "{shown}");
    assert_eq!(shown[0]["closed"], Value::Null);
    let table = cluster.ok(&["mount", "status"]);
    assert!(
        table.contains("python3") && table.contains("direct path open"),
        "{table}"
    );
    client.0.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(client.0.wait().unwrap().success());
    cluster.refused(&["mount", "status", "/"], &["no file system of pagemesh"]);
    mount.stop(&cluster);
}

#[test]
fn mount_status_says_that_pools_buffer() {
    let Some((cluster, mount)) = with_files(Pools::Disk) else {
        return;
    };
    let place = cluster.dir().join("report");
    let option = format!("--report={}", place.display());
    let mut command = exec(&mount, &[&option, "--output", "json"]);
    program::succeeded("a program", command.stdin(Stdio::null()).output().unwrap());
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&place).unwrap()).unwrap();
    assert!(
        file(&report, "plain")["reasons"]["file-sync"].as_u64() > Some(0),
        "{report}"
    );
    let shown = cluster.json(&["mount", "status", mount.dir.to_str().unwrap()]);
    assert_eq!(shown[0]["closed"], "file-sync");
    mount.stop(&cluster);
}
