//! Common client programs, against the server.

use crate::support;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::TestServer;
use support::memory::CompletionMode;

const MIB: u64 = 1 << 20;

/// Runs a program to its end, in a directory of its own, and gives its output.
fn run_program(program: &str, dir: &Path, arguments: &[&str]) -> String {
    let result = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .output();
    let output = match result {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            panic!("{program} is not installed: apt-get install fio qemu-utils libnbd-bin")
        }
        output => output.unwrap(),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{text}{errors}",
        output.status
    );
    text
}

/// A file with data, holes and zeroes.
fn make_image(dir: &Path, size_bytes: u64) -> PathBuf {
    let mut bytes = vec![0; size_bytes as usize];
    let mut state = 1u32;
    for (at, chunk) in bytes.chunks_mut(64 << 10).enumerate() {
        if at % 3 == 0 {
            for byte in chunk {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (state >> 24) as u8;
            }
        }
    }
    let path = dir.join("image");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Runs a check for each kind of address, and each completion mode.
fn for_each_transport(size_bytes: u64, check: impl Fn(&TestServer)) {
    check(&TestServer::new(size_bytes, CompletionMode::AtOnce));
    check(&TestServer::new(size_bytes, CompletionMode::Shuffled(11)));
    check(&TestServer::on_tcp(
        size_bytes,
        CompletionMode::Shuffled(12),
    ));
}

#[test]
fn nbdinfo_shows_export_properties() {
    for_each_transport(16 * MIB, |running| {
        let dir = running.dir.path();
        let uri = running.uri("disk");
        let json = run_program("nbdinfo", dir, &["--json", &uri]);
        for wanted in [
            "\"export-size\": 16777216",
            "\"can_multi_conn\": true",
            "\"can_flush\": true",
            "\"can_fua\": true",
            "\"can_trim\": true",
            "\"can_zero\": true",
            "\"can_fast_zero\": true",
            "\"can_df\": true",
            "\"is_read_only\": false",
            "\"block_size_preferred\": 4096",
            "\"block_size_maximum\": 33554432",
            "base:allocation",
            "structured",
        ] {
            assert!(json.contains(wanted), "{wanted} is not in {json}");
        }
        let list = run_program("nbdinfo", dir, &["--list", &running.uri("")]);
        assert!(list.contains("export=\"disk\""), "{list}");
        run_program(
            "qemu-io",
            dir,
            &["-f", "raw", "-c", "write -P 1 1M 2M", &uri],
        );
        let map = run_program("nbdinfo", dir, &["--map", &uri]);
        let rows: Vec<Vec<&str>> = map
            .lines()
            .map(|line| line.split_whitespace().take(3).collect())
            .collect();
        let wanted = [
            ["0", "1048576", "3"],
            ["1048576", "2097152", "0"],
            ["3145728", "13631488", "3"],
        ];
        assert_eq!(rows, wanted, "{map}");
    });
}

#[test]
fn nbdcopy_copies_there_and_back() {
    for_each_transport(24 * MIB, |running| {
        let dir = running.dir.path();
        let image = make_image(dir, 24 * MIB);
        let uri = running.uri("disk");
        run_program("nbdcopy", dir, &["--flush", image.to_str().unwrap(), &uri]);
        assert!(running.memory.bytes() == std::fs::read(&image).unwrap());
        run_program("nbdcopy", dir, &[&uri, "copy"]);
        assert!(std::fs::read(dir.join("copy")).unwrap() == std::fs::read(&image).unwrap());
    });
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    for_each_transport(24 * MIB, |running| {
        let dir = running.dir.path();
        let image = make_image(dir, 24 * MIB);
        let image = image.to_str().unwrap();
        let uri = running.uri("disk");
        let raw = ["-f", "raw", "-O", "raw"];
        run_program(
            "qemu-img",
            dir,
            &[&["convert", "-n"], &raw[..], &[image, &uri]].concat(),
        );
        run_program(
            "qemu-img",
            dir,
            &["compare", "-f", "raw", "-F", "raw", image, &uri],
        );
        run_program(
            "qemu-img",
            dir,
            &[&["convert"], &raw[..], &[&uri, "back"]].concat(),
        );
        run_program(
            "qemu-img",
            dir,
            &["compare", "-f", "raw", "-F", "raw", image, "back"],
        );
        let map = run_program(
            "qemu-img",
            dir,
            &["map", "-f", "raw", "--output", "json", &uri],
        );
        assert!(map.contains("\"zero\": true"), "{map}");
        assert!(map.contains("\"zero\": false"), "{map}");
    });
}

#[test]
fn qemu_io_reads_back_written_patterns() {
    for_each_transport(16 * MIB, |running| {
        let commands = [
            "write -P 0xa1 0 4M",
            "write -P 0xb2 1234 777",
            "read -P 0xa1 0 1234",
            "read -P 0xb2 1234 777",
            "read -P 0xa1 2011 100000",
            "write -f -P 0xc3 3M 64k",
            "write -z 1M 1M",
            "read -P 0 1M 1M",
            "write -z -u 2M 100000",
            "read -P 0 2M 100000",
            "discard 512k 256k",
            "read -P 0 512k 256k",
            "read -P 0xc3 3M 64k",
            "aio_write -P 5 8M 3M",
            "aio_write -P 6 12M 3M",
            "aio_flush",
            "flush",
            "read -P 5 8M 3M",
            "read -P 6 12M 3M",
            "read -P 0 15M 1M",
        ];
        let uri = running.uri("disk");
        let mut arguments = vec!["-f", "raw"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(&uri);
        let output = run_program("qemu-io", running.dir.path(), &arguments);
        assert!(!output.contains("verification failed"), "{output}");
    });
}

#[test]
fn fio_verifies_written_data() {
    for_each_transport(32 * MIB, |running| {
        let uri = format!("--uri={}", running.uri("disk"));
        let arguments = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-256k",
            "--bs_unaligned=1",
            "--size=32M",
            "--iodepth=32",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--randseed=7",
        ];
        run_program("fio", running.dir.path(), &arguments);
    });
}
