//! The mount's own requests on the files of its direct clients.

use super::append_log::LOG_BYTES;
use super::client_set::CheckedOp;
use super::shared_files::{ALL_FILES, APPEND_FILE, FileReply, FileRequest};
use super::{APPEND_FILE_ODDS, append_file_read, checker_sectors};
use crate::checker::{OpKind, OpOutcome, SECTOR, fill};
use crate::cluster::tell;
use crate::mount::MountJob;
use crate::scenario::Scenario;
use std::ops::Range;

/// The mount's own requests use channels from here on, which no direct client has.
const KERNEL_CHANNEL: u32 = 1 << 20;

/// A request to the mount, and its operation in the checker.
#[derive(Clone)]
pub(crate) struct PendingFileRequest {
    pub(super) file: usize,
    pub(super) request: FileRequest,
    pub(super) operation: Option<CheckedOp>,
}

impl PendingFileRequest {
    pub(crate) fn job(&self) -> MountJob {
        MountJob::FileRequest(self.file, self.request.clone())
    }
}

impl Scenario {
    /// The mount's next request on the files of its direct clients.
    pub(crate) fn next_file_request(&mut self, at: usize) -> Option<PendingFileRequest> {
        let client = &self.clients[at];
        let hosting = client.mount_clients.as_ref()?;
        let missing: Vec<usize> = (0..ALL_FILES)
            .filter(|&file| {
                let shown = hosting.exposed_files[file].as_ref();
                shown.is_none_or(|shown| shown.map.is_outdated())
            })
            .collect();
        let guests = self.direct_clients.as_mut()?;
        if let Some(file) = guests.rng.pick(&missing)
            && !guests.rng.one_in(4)
        {
            return Some(PendingFileRequest {
                file,
                request: FileRequest::Expose(file == APPEND_FILE && !guests.rng.one_in(4)),
                operation: None,
            });
        }
        if !guests.rng.one_in(2) {
            return None;
        }
        if guests.rng.one_in(APPEND_FILE_ODDS) {
            let size = hosting.exposed_files[APPEND_FILE]
                .as_ref()
                .map_or(0, |it| it.map.size());
            let (ask, operation) = match size > LOG_BYTES || guests.rng.one_in(2) {
                true => (
                    append_file_read(),
                    CheckedOp::LogRead(guests.append_log.now()),
                ),
                false => {
                    let (operation, data) = guests.begin_append(true);
                    (FileRequest::Write(None, data), operation)
                }
            };
            return Some(PendingFileRequest {
                file: APPEND_FILE,
                request: ask,
                operation: Some(operation),
            });
        }
        let (file, own) = guests.random_range();
        let (offset, count) = (own.start * SECTOR, own.end - own.start);
        let (ask, kind) = match guests.rng.one_in(2) {
            true => {
                let len = (count * SECTOR) as u32;
                (FileRequest::Read(offset, len), OpKind::Read(vec![]))
            }
            false => {
                let value = guests.next_value();
                (
                    FileRequest::Write(Some(offset), fill(value, count)),
                    OpKind::Write(value),
                )
            }
        };
        Some(self.begin_file_request(at, file, &own, ask, kind))
    }

    pub(super) fn begin_file_request(
        &mut self,
        at: usize,
        file: usize,
        own: &Range<u64>,
        ask: FileRequest,
        kind: OpKind,
    ) -> PendingFileRequest {
        let (number, attachment) = (self.clients[at].number, self.clients[at].attachment);
        let all = checker_sectors(file, own);
        tell!(self.cluster, "client {number} begins {kind:?} of {all:?}");
        let operation = self
            .checker
            .begin(attachment, KERNEL_CHANNEL + number, all, kind);
        PendingFileRequest {
            file,
            request: ask,
            operation: Some(CheckedOp::Sectors(operation)),
        }
    }

    /// Takes the answer of the mount.
    pub(crate) fn handle_file_reply(
        &mut self,
        at: usize,
        asked: &PendingFileRequest,
        reply: FileReply,
    ) -> Result<(), String> {
        let operation = || asked.operation.expect("it was begun");
        match reply {
            FileReply::Exposed(shown) => {
                if let Some(hosting) = &mut self.clients[at].mount_clients {
                    hosting.exposed_files[asked.file] = shown;
                }
                Ok(())
            }
            FileReply::Data(data) => {
                self.report.count("mount read with direct clients", 1);
                self.record_read(operation(), &data)
            }
            FileReply::Done => {
                self.report.count("mount wrote with direct clients", 1);
                self.record_end(operation(), OpOutcome::Done)
            }
        }
    }
}
