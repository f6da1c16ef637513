//! A client's part in a cut: it fetches the order, cuts its volume, and answers.

use super::SnapshotOracle;
use crate::cluster::tell;
use crate::scenario::Scenario;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::ManagerError;
use pagemesh_manage::wire::{AnswerCut, CutResult, CutStep};
use pagemesh_volume::CutError;
use std::sync::mpsc::Receiver;

/// Odds that a client asks for an order in a step, while there may be one.
const ORDER_ODDS: u64 = 8;
/// Odds that a client sends its answer in a step.
const ANSWER_ODDS: u64 = 4;

/// A cut that a client carries out.
pub(crate) enum ClientCut {
    Cutting(u32, Receiver<Result<(), CutError>>),
    Answering(AnswerCut),
}

impl Scenario {
    /// A step of a client's cut.
    pub(super) fn step_client_cut(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
    ) -> Result<(), String> {
        let client = &mut self.clients[at];
        if client.attachment == 0 || client.is_stopped() {
            return Ok(());
        }
        let next = match client.cut.take() {
            None => self.fetch_order(oracle, at),
            Some(ClientCut::Cutting(epoch, result)) => match result.try_recv() {
                Err(_) => Some(ClientCut::Cutting(epoch, result)),
                Ok(result) => Some(self.end_cut(oracle, at, epoch, result)?),
            },
            Some(ClientCut::Answering(answer)) => self.answer_cut(oracle, at, answer),
        };
        self.clients[at].cut = next;
        Ok(())
    }

    fn fetch_order(&mut self, oracle: &mut SnapshotOracle, at: usize) -> Option<ClientCut> {
        if oracle.pending.is_none() || !oracle.rng.one_in(ORDER_ODDS) {
            return None;
        }
        let client = &self.clients[at];
        let fetched = (self.manager_host).cut_order(client.number, &self.name, client.attachment);
        let epoch = fetched.ok()??.epoch.0;
        let result = client.driven.cut_snapshot(Epoch(epoch));
        let operation = self.checker.begin_snapshot(client.attachment, self.sectors);
        oracle.begun.insert(epoch, operation);
        Some(ClientCut::Cutting(epoch, result))
    }

    fn end_cut(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
        epoch: u32,
        result: Result<(), CutError>,
    ) -> Result<ClientCut, String> {
        tell!(self.cluster, "the cut of epoch {epoch} ends: {result:?}");
        self.report.count(
            match &result {
                Ok(()) => "cut done",
                Err(CutError::LegsChanged) => "cut voided by a change of legs",
                Err(CutError::TornOperation) => "cut voided by a torn operation",
                Err(_) => "cut failed",
            },
            1,
        );
        if result.is_ok()
            && let Some(operation) = oracle.begun.remove(&epoch)
        {
            self.checker.end_snapshot(operation)?;
            oracle.ended.insert(epoch, operation);
        }
        Ok(ClientCut::Answering(AnswerCut {
            attachment: EpochNumber(self.clients[at].attachment),
            epoch: EpochNumber(epoch),
            step: CutStep::Whole,
            result: match result {
                Ok(()) => CutResult::Done,
                Err(error) if error.is_transient() => CutResult::LayoutChanged(error.to_string()),
                Err(error) => CutResult::Failed(error.to_string()),
            },
        }))
    }

    fn answer_cut(
        &mut self,
        oracle: &mut SnapshotOracle,
        at: usize,
        answer: AnswerCut,
    ) -> Option<ClientCut> {
        if !oracle.rng.one_in(ANSWER_ODDS) {
            return Some(ClientCut::Answering(answer));
        }
        let number = self.clients[at].number;
        let sent = self.manager_host.answer_cut(number, &self.name, &answer);
        let pending = oracle.pending.as_mut();
        if let Some(pending) = pending.filter(|it| it.epoch() == answer.epoch.0) {
            // The answer may have arrived although the client did not hear that.
            pending.is_answered = true;
        }
        let is_lost = matches!(sent, Err(ManagerError::Unreachable { .. }));
        (is_lost && oracle.pending.is_some()).then_some(ClientCut::Answering(answer))
    }
}
