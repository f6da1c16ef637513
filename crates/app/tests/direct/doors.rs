//! Random operations of one program through four interfaces at once: the C library, bare system
//! calls, io_uring, and a plug-in that bypasses preloaded libraries. The program compares each
//! result with a model. PAGEMESH_DOORS_OPS sets the number of operations, PAGEMESH_DOORS_SEED their
//! order, and PAGEMESH_DOORS_WITH the optional operations (`here`, `ends`; see doors.c): `make
//! doors OPS=1000000 SEED=7 EXEC=1`. Needs root and /dev/fuse.

use super::support::Cluster;
use super::support::mounted::{self, TestMount, direct_command, exec_args, open_as_library};
use super::support::{PAGEMESH, program};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Operations when all tests run.
const OPERATIONS: &str = "20000";

/// Compiles a program of these tests, and its plug-in.
fn build(cluster: &Cluster, name: &str) -> [PathBuf; 2] {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/direct/doors");
    let compile = |into: &str, names: &[&str], more: &[&str]| {
        let path = cluster.dir().join(into);
        let mut words = vec!["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"];
        words.extend(more);
        words.extend(["-Wno-unused-result", "-o", path.to_str().unwrap()]);
        let names = names.iter().map(|name| sources.join(name));
        let names: Vec<_> = names.map(|it| it.to_str().unwrap().to_owned()).collect();
        words.extend(names.iter().map(String::as_str));
        program::ok("cc", &words);
        path
    };
    [
        compile(name, &[&format!("{name}.c"), "ring.c"], &[]),
        compile("plugin.so", &["plugin.c"], &["-shared", "-fPIC"]),
    ]
}

fn run(is_direct: bool, always: &[&str]) {
    let Some(cluster) = mounted::cluster(&[256, 256], "128M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let elsewhere = cluster.dir().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let [doors, plugin] = build(&cluster, "doors");
    let given = std::env::var("PAGEMESH_DOORS_OPS").ok();
    let seed = std::env::var("PAGEMESH_DOORS_SEED").unwrap_or_else(|_| "1".into());
    let program = if is_direct {
        Path::new(PAGEMESH)
    } else {
        &doors
    };
    let program = program.to_str().unwrap();
    let mut command = match given {
        // A campaign has no time limit.
        Some(_) => Command::new(program),
        None => program::limited(program),
    };
    if is_direct {
        command.args(exec_args()).arg(&doors);
    }
    command.arg(&mount.dir).arg(&elsewhere).arg(&plugin);
    command
        .arg(given.as_deref().unwrap_or(OPERATIONS))
        .arg(&seed);
    let with = std::env::var("PAGEMESH_DOORS_WITH").unwrap_or_default();
    command.args(with.split_whitespace().chain(always.iter().copied()));
    let status = command.status().unwrap();
    assert!(status.success(), "seed {seed}: {status}");
    mount.stop(&cluster);
    cluster.check_identical("files");
}

#[test]
fn io_paths_through_kernel_match_model() {
    run(false, &["here", "ends"]);
}

#[test]
fn io_paths_under_exec_match_model() {
    run(true, &[]);
}

/// The C library makes the ring, so the preload library sees it.
#[test]
fn io_paths_under_exec_match_at_current_offset() {
    run(true, &["here", "ends"]);
}

#[test]
fn liburing_ring_disables_direct_path() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/direct/doors");
    let source = |name: &str| sources.join(name).to_str().unwrap().to_owned();
    let at = |name: &str| cluster.dir().join(name).to_str().unwrap().to_owned();
    let options = ["-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"];
    // Like a library that the program is linked with, but through one call within the library.
    let (library, program) = (at("liburing.so"), at("rings"));
    let mut words = options.to_vec();
    let from = source("liburing.c");
    words.extend([
        library.as_str(),
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",
        &from,
    ]);
    program::ok("cc", &words);
    let mut words = options.to_vec();
    let from = source("rings.c");
    words.extend([program.as_str(), &from, &library]);
    program::ok("cc", &words);
    mount.sh("echo something > file");
    let file = mount.path("file");
    for name in [
        "io_uring_queue_init",
        "io_uring_queue_init_params",
        "io_uring_queue_init_mem",
        "io_uring_setup",
    ] {
        let words = [program.as_str(), file.to_str().unwrap(), name];
        let ended = direct_command(&words).output().unwrap();
        program::succeeded(name, ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Closes a number past the library, reuses it for another file, and uses it.
fn check_descriptor_reuse(way: &str, seconds: &[&str]) {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    let [program, plugin] = build(&cluster, "reused");
    for second in seconds {
        let words = [&program, &mount.dir, cluster.dir(), &plugin].map(|it| it.to_str().unwrap());
        let mut command = direct_command(&words);
        command.args([way, second]);
        let ended = command.output().unwrap();
        program::succeeded(&format!("{way}, {second}"), ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

const REUSE_KINDS: [&str; 6] = ["file", "tmp", "pipe", "none", "readonly", "append"];

#[test]
fn descriptor_closed_by_system_call_is_noticed() {
    check_descriptor_reuse("raw", &REUSE_KINDS);
}

#[test]
fn descriptor_replaced_by_dup2_is_noticed() {
    let replaced: Vec<_> = REUSE_KINDS.into_iter().filter(|it| *it != "none").collect();
    check_descriptor_reuse("dup2", &replaced);
}

#[test]
fn descriptor_closed_by_close_range_is_noticed() {
    check_descriptor_reuse("range", &REUSE_KINDS);
}

#[test]
fn descriptor_closed_by_io_uring_is_noticed() {
    check_descriptor_reuse("ring", &REUSE_KINDS);
}

#[test]
fn descriptor_closed_by_deepbind_plugin_is_noticed() {
    check_descriptor_reuse("plugin", &REUSE_KINDS);
}

/// A client checks its descriptor numbers when this count changes. Processes without the library do
/// not change it.
#[test]
fn opens_and_closes_of_clients_are_counted() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
    // The shell has no descriptor of the file to close.
    let mut other = Command::new("sh")
        .args(["-c", "read go; echo more >> other; cat other"])
        .current_dir(&mount.dir)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let file = super::open_file(&mount, "file");
    file.write_all_at(&[1; 40_000], 0).unwrap();
    let direct = super::direct_file(super::new_client(), &file);
    super::check(&direct, &file, 0, &[1; 4096]);
    let first = direct.change_count().unwrap();
    let count = || direct.change_count().unwrap() - first;
    other.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(other.wait().unwrap().success());
    assert_eq!(count(), 0, "by another process");
    // This thread is not the first one of its process.
    let past = File::open(mount.path("other")).unwrap();
    assert_eq!(count(), 1, "opened past a library");
    drop(past);
    assert_eq!(count(), 1, "closed, without a word to the mount");
    let announced = open_as_library(OpenOptions::new().read(true)).open(mount.path("file"));
    let announced = announced.unwrap();
    let second = announced.try_clone().unwrap();
    assert_eq!(count(), 1, "opened by a library");
    drop(announced);
    assert_eq!(count(), 2, "closed one of two descriptors");
    drop(second);
    assert_eq!(count(), 3, "closed the other one");
    drop((direct, file));
    mount.stop(&cluster);
    cluster.check_identical("files");
}
