//! Random operations of one program through four doors at once: the C library, bare system calls,
//! io_uring, and a plug-in past preloaded libraries. The program compares each result with a model.
//! PAGEMESH_DOORS_OPS says how many operations, PAGEMESH_DOORS_SEED which, and PAGEMESH_DOORS_WITH
//! what is done beside the usual (`here`, `ends`; see doors.c):
//! `make doors OPS=1000000 SEED=7 EXEC=1 WITH="here ends"`. For root with /dev/fuse.

use super::support::Cluster;
use super::support::mounted::{self, Mounted, directly, exec};
use super::support::{PAGEMESH, program};
use pagemesh_base::mapping::OPENED_BY_LIBRARY;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

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

fn run(is_direct: bool) {
    run_on(is_direct, &[], |cluster| {
        Mounted::by(cluster, "files", "map", "auto")
    });
}

fn run_on(is_direct: bool, always: &[&str], mount: impl FnOnce(&Cluster) -> Mounted) {
    let Some(cluster) = mounted::cluster(&[256, 256], "128M") else {
        return;
    };
    let mount = mount(&cluster);
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
    run(false);
}

/// `here`: io_uring at the current position, too.
#[test]
fn doors_through_the_page_cache_agree_with_a_model() {
    run_on(false, &["here"], |cluster| {
        Mounted::with_page_cache(cluster, "files")
    });
}

#[test]
fn doors_under_exec_agree_with_a_model() {
    run(true);
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
    let file = super::opened(&mount, "file");
    file.write_all_at(&[1; 40_000], 0).unwrap();
    let direct = super::direct(super::guest(), &file);
    super::check(&direct, &file, 0, &[1; 4096]);
    let first = direct.changes().unwrap();
    let count = || direct.changes().unwrap() - first;
    mount.sh("cat file > /dev/null; echo more >> other");
    assert_eq!(count(), 0, "by another process");
    // This thread is not the first one of its process.
    let past = File::open(mount.path("file")).unwrap();
    assert_eq!(count(), 1, "opened past a library");
    drop(past);
    assert_eq!(count(), 1, "closed, without a word to the mount");
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(OPENED_BY_LIBRARY.cast_signed());
    let announced = options.open(mount.path("file")).unwrap();
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
