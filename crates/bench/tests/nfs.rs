//! The load generator against nfs-ganesha. The test needs root and the installed server; else it does nothing.

use pagemesh_bench::BenchError;
use pagemesh_bench::nfs::compare::{Candidate, CompareOptions, LoadedServer, run_ladder};
use pagemesh_bench::nfs::file_set::FileSetScale;
use pagemesh_bench::nfs::ganesha::{GaneshaOptions, GaneshaServer};
use pagemesh_bench::nfs::mix::OperationMix;
use pagemesh_bench::nfs::schedule::Arrivals;
use pagemesh_bench::report::ReportCell;
use std::time::Duration;

#[test]
fn ganesha_answers_every_operation_of_the_mix() {
    let dir = tempfile::tempdir().expect("a directory");
    let options = GaneshaOptions {
        name: "ganesha".into(),
        class: "ext4".into(),
        dir: dir.path().into(),
        image_dir: dir.path().into(),
        size_bytes: 256 << 20,
    };
    let server = match GaneshaServer::start(&options) {
        Err(BenchError::Missing { .. } | BenchError::Option(_)) => return,
        // Without loop devices or namespaces there is no server.
        Err(BenchError::Program { program, .. }) if program == "mount" => return,
        server => server.expect("it starts"),
    };
    let compare = CompareOptions {
        rounds: 5,
        runtime: Duration::from_millis(500),
        warmup: Duration::from_millis(100),
        timeout: Duration::from_secs(30),
        connections: 3,
        arrivals: Arrivals::Poisson,
        mix: OperationMix::SFS97,
        scale: FileSetScale::with_room(1.0, 64 << 20),
        seed: 1,
    };
    let candidate = Candidate::new(server.target.clone());
    let mut servers = [LoadedServer::open(candidate, &compare).expect("it is reached")];
    let report = run_ladder(("nfs", "ganesha"), &mut servers, &[400.0], &compare);
    let report = report.expect("all answers are expected");
    assert_ne!(
        report.cell("ganesha (ext4)", "mean"),
        Some(&ReportCell::Missing)
    );
    eprintln!("{}", report.text());
    drop(server);
    let left: Vec<_> = std::fs::read_dir(dir.path())
        .expect("it is there")
        .collect();
    assert_eq!(left.len(), 1, "only the configuration is left: {left:?}");
}
