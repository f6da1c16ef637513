//! Clients race for a volume.

use crate::faults::load::LoadPlan;
use crate::faults::nbd::{Command, NbdConnection, SHUTDOWN};
use crate::faults::oracle::{BLOCK, BlockState};
use crate::faults::rig::{VOLUME, VolumeRig};
use crate::support::{Export, Pools};

const ROUNDS: u64 = 6;

/// Writes one block and records it in the oracle. Returns the error number of a refused write.
fn write_block(rig: &VolumeRig, export: &Export, block: u64) -> Result<(), u32> {
    let change = rig.oracle.next_change();
    let mut data = [0; BLOCK];
    rig.oracle.content(block, change, &mut data);
    // A client that knows that it is fenced accepts no connection.
    let Ok(mut nbd) = NbdConnection::connect(&export.socket(), VOLUME, true) else {
        return Err(SHUTDOWN);
    };
    let at = block * BLOCK as u64;
    let sent = nbd.send(1, (Command::Write, 0), at, BLOCK as u32, &data);
    // The server of a fenced client closes its connections.
    let Ok(reply) = sent.and_then(|()| nbd.reply()) else {
        return Err(SHUTDOWN);
    };
    match reply.errno {
        0 => {
            let state = BlockState {
                change,
                zero: false,
            };
            rig.oracle.block(block).begin(state);
            rig.oracle.block(block).confirm(change);
            Ok(())
        }
        // The write did not begin, so its contents must not appear.
        errno => Err(errno),
    }
}

/// While one client works, two more attach at once. Exactly one has the volume afterwards, and the
/// others write nothing any more.
fn check_racing_clients(transports: [&str; 2], seed: u64) {
    let mut rig = VolumeRig::new(Pools::Memory, 2, 16, &[], seed);
    rig.serve(transports[0]);
    for round in 0..ROUNDS {
        let load = rig.load(&LoadPlan::default());
        load.await_answers(200);
        let before = rig.take_export();
        let cluster = &rig.cluster;
        let attached: Vec<Export> = std::thread::scope(|scope| {
            let racers = transports.map(|transport| {
                scope.spawn(move || cluster.try_export_from(0, &[VOLUME], transport))
            });
            let racers = racers.map(|racer| racer.join().expect("no panic"));
            racers.into_iter().flatten().collect()
        });
        assert!(!attached.is_empty(), "round {round}: no client attached");
        let report = load.finish();
        let lost = report.failures.iter().find(|what| what.contains("lost"));
        assert_eq!(lost, None, "round {round}");
        // Each of them twice: a refused client stays refused.
        let all: Vec<&Export> = attached.iter().chain([&before]).collect();
        let mut taken = vec![false; all.len()];
        for block in 0..2 {
            for (at, export) in all.iter().enumerate() {
                let answer = write_block(&rig, export, block);
                assert!(
                    matches!(answer, Ok(()) | Err(SHUTDOWN)),
                    "round {round}: {answer:?}"
                );
                assert!(block == 0 || taken[at] == answer.is_ok(), "round {round}");
                taken[at] = answer.is_ok();
            }
        }
        assert_eq!(
            taken.iter().filter(|taken| **taken).count(),
            1,
            "round {round}: {taken:?} of {} and the one before",
            attached.len()
        );
        assert!(!taken[all.len() - 1], "round {round}: the one before won");
        before.kill();
        for (mut export, taken) in attached.into_iter().zip(taken) {
            match taken {
                true => rig.set_export(export),
                false => {
                    export.await_fenced();
                }
            }
        }
        rig.verify();
    }
    rig.end_and_check();
    rig.verify_without_each(2, transports[0]);
}

#[test]
fn one_of_racing_mapped_clients_wins() {
    check_racing_clients(["map", "map"], 0x61);
}

#[test]
fn one_of_racing_tcp_and_mapped_clients_wins() {
    check_racing_clients(["tcp", "map"], 0x62);
}
