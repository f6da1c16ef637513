//! Snapshots of several volumes at one moment, with clients that follow orders, fail, or stay away.

use crate::cluster;
use crate::snapshot_support;
use cluster::{Cluster, MIB, TestServer, attach_request, create_request, name};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::snapshots::CutTimes;
use pagemesh_manage::wire::{
    AnswerCut, CreateSnapshots, CreatedSnapshots, CutOrder, CutResult, CutStep, DetachVolume,
    ErrorCode,
};
use pagemesh_manage::{LayoutKind, Manager, ManagerClient};
use snapshot_support::{assert_fault, list, names, serve_with_volume, snap, sweep_to_the_end};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The orders of all clients, as they came.
#[derive(Clone, Default)]
struct OrderLog(Arc<Mutex<Vec<(String, CutStep)>>>);

impl OrderLog {
    fn push(&self, volume: &str, step: CutStep) {
        self.0.lock().expect("no panic").push((volume.into(), step));
    }

    fn steps(&self) -> Vec<CutStep> {
        let log = self.0.lock().expect("no panic");
        log.iter().map(|(_, step)| *step).collect()
    }
}

/// Short enough for a client that stays away, and long enough for the others on a busy machine.
const CALL_SHORT: CutTimes = CutTimes {
    poll: Duration::from_secs(60),
    fetch: Duration::from_secs(10),
    call: Duration::from_secs(5),
};

/// A cluster with the volumes `v` and `w`.
fn serve_two(cluster: &Cluster, cut: CutTimes) -> TestServer {
    let served = serve_with_volume(cluster, cut);
    let other = create_request("w", LayoutKind::Mirror, MIB);
    served.client.create(&other).expect("room");
    served
}

/// A client that answers the orders for a volume, until its attachment ends. None: it does not answer.
fn follow(
    client: &ManagerClient,
    volume: &'static str,
    log: &OrderLog,
    answer: impl Fn(CutOrder) -> Option<CutResult> + Send + 'static,
) -> (EpochNumber, JoinHandle<()>) {
    let (client, log) = (client.clone(), log.clone());
    let attached = client.attach(&name(volume), "c").expect("attached");
    let attachment = attached.layout.epoch;
    let thread = std::thread::spawn(move || {
        while let Ok(order) = client.poll_cut(&name(volume), attachment) {
            let Some(order) = order else { continue };
            log.push(volume, order.step);
            let Some(result) = answer(order) else { return };
            let answer = AnswerCut {
                attachment,
                epoch: order.epoch,
                step: order.step,
                result,
            };
            // A refusal means that the attachment has ended.
            let _ = client.answer_cut(&name(volume), &answer);
        }
    });
    (attachment, thread)
}

/// A client that carries each order out.
fn obey(order: CutOrder) -> Option<CutResult> {
    Some(match order.step {
        CutStep::Finish => CutResult::Released(1500),
        _ => CutResult::Done,
    })
}

fn group(text: &str) -> CreateSnapshots {
    CreateSnapshots {
        volumes: vec![name("v"), name("w")],
        name: snap(text),
        labels: vec![],
    }
}

fn create(served: &TestServer) -> CreatedSnapshots {
    served.client.create_snapshots(&group("g")).expect("made")
}

fn end(manager: &Manager, clients: [(&str, JoinHandle<()>); 2]) {
    for (volume, thread) in clients {
        let any = DetachVolume { attachment: None };
        manager.detach(&name(volume), any).expect("detached");
        thread.join().expect("no panic");
    }
}

#[test]
fn each_step_waits_for_all_volumes() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CutTimes::default());
    let log = OrderLog::default();
    let (_, v) = follow(&served.client, "v", &log, obey);
    let (_, w) = follow(&served.client, "w", &log, obey);
    let made = create(&served);
    assert!(made.consistent);
    assert_eq!(made.held_us, Some(1500));
    assert_eq!(names(&made.snapshots), ["g", "g"]);
    use CutStep::{Finish, Prepare, Raise};
    let expected = [Prepare, Prepare, Raise, Raise, Finish, Finish];
    assert_eq!(log.steps(), expected);
    end(served.handle.manager(), [("v", v), ("w", w)]);
}

#[test]
fn expired_hold_is_tried_again_as_a_whole() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CutTimes::default());
    let log = OrderLog::default();
    let expires = Mutex::new(true);
    let (_, v) = follow(&served.client, "v", &log, move |order| {
        let is_first = order.step == CutStep::Finish
            && std::mem::take(&mut *expires.lock().expect("no panic"));
        match is_first {
            true => Some(CutResult::LayoutChanged("its writes went on".into())),
            false => obey(order),
        }
    });
    let (_, w) = follow(&served.client, "w", &log, obey);
    let made = create(&served);
    assert_eq!(names(&made.snapshots), ["g", "g"]);
    assert_eq!(log.steps().len(), 6 + 2 + 6, "with two orders to abandon");
    let manager = served.handle.manager().clone();
    assert_eq!(names(&list(&manager, false)), ["g", "g"]);
    end(&manager, [("v", v), ("w", w)]);
    sweep_to_the_end(&cluster, &manager);
}

#[test]
fn client_that_dies_holding_fails_the_group() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CALL_SHORT);
    let log = OrderLog::default();
    let (_, v) = follow(&served.client, "v", &log, |order| match order.step {
        CutStep::Raise => None,
        _ => obey(order),
    });
    let (_, w) = follow(&served.client, "w", &log, obey);
    let manager = served.handle.manager().clone();
    let refused = manager.create_snapshots_keyed(&group("g"));
    assert_fault(refused, ErrorCode::InUse, &["the client c of the volume v"]);
    assert_eq!(list(&manager, false), [], "all or none");
    assert!(!log.steps().contains(&CutStep::Finish), "{:?}", log.steps());
    end(&manager, [("v", v), ("w", w)]);
    sweep_to_the_end(&cluster, &manager);
    manager.create_snapshots_keyed(&group("g")).expect("made");
}

/// The group begins with `w` unattached. Its client may write before the changes of `v` wait.
#[test]
fn volume_attached_meanwhile_is_cut_by_its_client() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CutTimes::default());
    let log = OrderLog::default();
    let manager = served.handle.manager().clone();
    let late = Mutex::new(None);
    let late = Arc::new(late);
    let (client, to, of_late) = (served.client.clone(), log.clone(), Arc::clone(&late));
    let (_, v) = follow(&served.client, "v", &log, move |order| {
        let mut late = of_late.lock().expect("no panic");
        if order.step == CutStep::Raise && late.is_none() {
            *late = Some(follow(&client, "w", &to, obey).1);
        }
        obey(order)
    });
    create(&served);
    let w = late.lock().expect("no panic").take().expect("it attached");
    let steps = log.steps();
    assert_eq!(steps.iter().filter(|it| **it == CutStep::Finish).count(), 2);
    end(&manager, [("v", v), ("w", w)]);
}

#[test]
fn late_answer_to_a_step_is_no_answer_to_the_next() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CALL_SHORT);
    let log = OrderLog::default();
    let (attachment, v) = follow(&served.client, "v", &log, |order| {
        (order.step == CutStep::Prepare).then_some(CutResult::Done)
    });
    let (client, volume) = (served.client.clone(), name("v"));
    let (_, w) = follow(&served.client, "w", &log, move |order| {
        if order.step == CutStep::Raise {
            // The answer of `v` to the first step arrives once more.
            let again = AnswerCut {
                attachment,
                epoch: order.epoch,
                step: CutStep::Prepare,
                result: CutResult::Done,
            };
            client.answer_cut(&volume, &again).expect("taken");
        }
        obey(order)
    });
    let manager = served.handle.manager().clone();
    let refused = manager.create_snapshots_keyed(&group("g"));
    assert_fault(refused, ErrorCode::InUse, &["volume v"]);
    assert!(!log.steps().contains(&CutStep::Finish), "{:?}", log.steps());
    end(&manager, [("v", v), ("w", w)]);
}

#[test]
fn volume_without_a_client_is_in_the_group() {
    let cluster = Cluster::new(4);
    let served = serve_two(&cluster, CutTimes::default());
    let log = OrderLog::default();
    let (_, v) = follow(&served.client, "v", &log, obey);
    let made = create(&served);
    assert_eq!(made.held_us, Some(1500));
    assert_eq!(log.steps().len(), 3);
    let manager = served.handle.manager().clone();
    let any = DetachVolume { attachment: None };
    manager.detach(&name("v"), any).expect("detached");
    v.join().expect("no panic");
    manager
        .attach(&name("v"), &attach_request("d"))
        .expect("attached");
}
