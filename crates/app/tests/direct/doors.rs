//! Random operations of one program through four doors at once: the C library, bare system calls,
//! io_uring, and a plug-in past preloaded libraries. The program compares each result with a model.
//! PAGEMESH_DOORS_OPS says how many operations, PAGEMESH_DOORS_SEED which, and PAGEMESH_DOORS_WITH
//! what is done beside the usual (`here`, `ends`; see doors.c): `make doors OPS=1000000 SEED=7 EXEC=1`. For root with /dev/fuse.

use super::support::Cluster;
use super::support::mounted::{self, Mounted, as_library, directly, exec};
use super::support::{PAGEMESH, program};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Of a run of all tests.
const OPERATIONS: &str = "20000";

/// A program of one of these tests, and its plug-in.
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
    let mount = Mounted::by(&cluster, "files", "map", "auto");
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
        // A campaign takes as long as it takes.
        Some(_) => Command::new(program),
        None => program::limited(program),
    };
    if is_direct {
        command.args(exec()).arg(&doors);
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
fn doors_by_the_kernel_agree_with_a_model() {
    run(false, &["here", "ends"]);
}

#[test]
fn doors_under_exec_agree_with_a_model() {
    run(true, &[]);
}

/// The ring is made by the C library, where the preload library sees it.
#[test]
fn doors_under_exec_agree_at_the_current_position() {
    run(true, &["here", "ends"]);
}

#[test]
fn ring_of_liburing_takes_a_process_off_the_path() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/direct/doors");
    let source = |name: &str| sources.join(name).to_str().unwrap().to_owned();
    let at = |name: &str| cluster.dir().join(name).to_str().unwrap().to_owned();
    let options = ["-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o"];
    // As a library that the program is linked with, but by one call within it.
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
        let ended = directly(&words).output().unwrap();
        program::succeeded(name, ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

/// Closes a number past the library, has it lead to something else, and uses it.
fn reuse(way: &str, seconds: &[&str]) {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    let [program, plugin] = build(&cluster, "reused");
    for second in seconds {
        let words = [&program, &mount.dir, cluster.dir(), &plugin].map(|it| it.to_str().unwrap());
        let mut command = directly(&words);
        command.args([way, second]);
        let ended = command.output().unwrap();
        program::succeeded(&format!("{way}, {second}"), ended);
    }
    mount.stop(&cluster);
    cluster.check_identical("files");
}

const SECONDS: [&str; 6] = ["file", "tmp", "pipe", "none", "readonly", "append"];

#[test]
fn number_closed_by_a_system_call_is_noticed() {
    reuse("raw", &SECONDS);
}

#[test]
fn number_replaced_by_dup2_is_noticed() {
    let replaced: Vec<_> = SECONDS.into_iter().filter(|it| *it != "none").collect();
    reuse("dup2", &replaced);
}

#[test]
fn number_closed_by_close_range_is_noticed() {
    reuse("range", &SECONDS);
}

#[test]
fn number_closed_by_io_uring_is_noticed() {
    reuse("ring", &SECONDS);
}

#[test]
fn number_closed_by_a_deepbind_plugin_is_noticed() {
    reuse("plugin", &SECONDS);
}

/// A client checks its numbers when this count changes. Processes without the library change
/// nothing for it.
#[test]
fn opens_and_closes_of_clients_are_counted() {
    let Some(cluster) = mounted::cluster(&[64, 64], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", "auto");
    // It has no descriptor of the file to close.
    let mut other = Command::new("sh")
        .args(["-c", "read go; echo more >> other; cat other"])
        .current_dir(&mount.dir)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let file = super::opened(&mount, "file");
    file.write_all_at(&[1; 40_000], 0).unwrap();
    let direct = super::direct(super::guest(), &file);
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
    let announced = as_library(OpenOptions::new().read(true)).open(mount.path("file"));
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
