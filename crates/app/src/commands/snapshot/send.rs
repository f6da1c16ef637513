//! `pagemesh snapshot send`: writes a snapshot, or the changes between two, as a stream.

use super::SnapshotPath;
use super::source::{BookmarkSource, ChangedPart, Changes, SnapshotSource, stream_content};
use crate::args::{ManagerArgs, Transport};
use crate::client::manager_client;
use crate::output::{self, bytes};
use crate::snapshot_path::ChangeStart;
use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use indicatif::ProgressBar;
use pagemesh_base::units::Size;
use pagemesh_manage::ManagerClient;
use pagemesh_stream::{
    ContentSummary, Header, PAGE_BYTES, ResumeToken, StreamStart, StreamWriter, is_zero,
};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Bytes of changed pages between two checkpoints: a cut costs that many again.
const CHECKPOINT_BYTES: u64 = 64 << 20;
/// Level of zstd: the library's default.
const LEVEL: i32 = 3;

/// Write a snapshot as a stream to standard output or a file, for `snapshot receive`.
///
/// With `--from`, the stream has the changes since that snapshot, or since the snapshot of that bookmark. Hold the snapshots while the
/// stream is on its way, so that it can be resumed.
#[derive(Args)]
pub struct SendArgs {
    /// Snapshot.
    #[arg(value_name = "VOLUME@NAME")]
    pub snapshot: SnapshotPath,
    /// Send only the changes since this earlier snapshot of the volume, which the receiver has, or since its bookmark
    /// `VOLUME#EARLIER`.
    #[arg(long, value_name = "VOLUME@EARLIER")]
    pub from: Option<ChangeStart>,
    /// File for the stream, which must not exist; `-` is standard output. The file has the suffix `.partial` until it is whole; one of an earlier
    /// sender is overwritten.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub to: PathBuf,
    /// Compress each record by zstd, if that makes it shorter.
    #[arg(long)]
    pub compress: bool,
    /// Bytes of the stream per second, at most.
    #[arg(long, value_name = "BYTES")]
    pub rate: Option<Size>,
    /// Send the rest of a stream that was cut: the token that `receive` printed, or stored in its `--resume-file`.
    #[arg(long, value_name = "TOKEN")]
    pub resume: Option<ResumeToken>,
    /// Write no stream, but print the bytes of the changed pages: the most that a stream without compression has, but for its records' headers.
    #[arg(long)]
    pub dry_run: bool,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result, for programs.
#[derive(Serialize)]
pub struct Sent {
    snapshot: String,
    from: Option<String>,
    /// The byte of the volume at which the stream begins.
    start: u64,
    /// Bytes of the pages that may differ.
    pub changed_bytes: u64,
    /// None at a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<SentStream>,
}

/// The bytes of a stream.
#[derive(Serialize)]
pub struct SentStream {
    pub stream_bytes: u64,
    pub data_bytes: u64,
    pub zero_bytes: u64,
    summary: String,
}

/// Sends a snapshot.
pub fn run(args: &SendArgs) -> anyhow::Result<()> {
    let is_piped = args.to == Path::new("-");
    ensure!(
        args.dry_run || !is_piped || !io::stdout().is_terminal(),
        "standard output is a terminal; send to a pipe, or to a file with --to FILE"
    );
    let sent = send(args)?;
    match &sent.stream {
        None => output::print(args.client.output, &sent, || {
            let changed = bytes(sent.changed_bytes);
            format!("{} has {changed} of pages to send", args.snapshot)
        }),
        Some(done) if is_piped => {
            eprintln!("sent {}", text(&args.snapshot, done));
            Ok(())
        }
        Some(done) => output::print(args.client.output, &sent, || {
            format!("sent {}", text(&args.snapshot, done))
        }),
    }
}

/// Sends a snapshot to standard output or a file, or counts the bytes at a dry run.
pub fn send(args: &SendArgs) -> anyhow::Result<Sent> {
    let manager = manager_client(&args.client)?;
    let open = |path| SnapshotSource::open(&args.client, args.transport, &manager, path);
    let source = open(&args.snapshot)?;
    let from = match &args.from {
        None => StreamFrom::Nothing,
        Some(ChangeStart::Snapshot(path)) => StreamFrom::Snapshot(open(path)?),
        Some(ChangeStart::Bookmark(path)) => {
            StreamFrom::Bookmark(BookmarkSource::open(&manager, path)?)
        }
    };
    let header = header_of(&manager, args, &source, &from)?;
    let mut changes = from.changes_of(&source)?;
    let start = header.start.position;
    let changed_bytes = changes.count_bytes(start)?;
    let stream = if args.dry_run {
        None
    } else if args.to == Path::new("-") {
        let out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let (_, done) = write_stream(args, out, &header, &mut changes, changed_bytes)?;
        Some(done)
    } else {
        Some(write_file(args, |file| {
            write_stream(args, file, &header, &mut changes, changed_bytes)
        })?)
    };
    Ok(Sent {
        snapshot: args.snapshot.to_string(),
        from: args.from.as_ref().map(ToString::to_string),
        start,
        changed_bytes,
        stream,
    })
}

/// The start of the changes.
enum StreamFrom {
    Nothing,
    Snapshot(SnapshotSource),
    Bookmark(BookmarkSource),
}

impl StreamFrom {
    fn changes_of(&self, source: &SnapshotSource) -> anyhow::Result<Changes> {
        match self {
            StreamFrom::Nothing => Changes::new(source, None),
            // The bytes of before would be read for nothing: the stream has whole pages.
            StreamFrom::Snapshot(from) => Ok(Changes::new(source, Some(from))?.without_old()),
            StreamFrom::Bookmark(from) => Changes::since_bookmark(source, from),
        }
    }

    /// The epoch of the snapshot, and its name.
    fn epoch_and_name(&self) -> (Option<u32>, String) {
        match self {
            StreamFrom::Nothing => (None, String::new()),
            StreamFrom::Snapshot(from) => (Some(from.identity.epoch), from.info.name.to_string()),
            StreamFrom::Bookmark(from) => {
                (Some(from.identity.epoch), from.info.snapshot.to_string())
            }
        }
    }
}

fn text(path: &SnapshotPath, done: &SentStream) -> String {
    let (data, stream) = (bytes(done.data_bytes), bytes(done.stream_bytes));
    format!("{path}: {data} of pages in a stream of {stream}")
}

fn header_of(
    manager: &ManagerClient,
    args: &SendArgs,
    source: &SnapshotSource,
    from: &StreamFrom,
) -> anyhow::Result<Header> {
    let (from_epoch, from_name) = from.epoch_and_name();
    let start = match &args.resume {
        None => StreamStart::default(),
        Some(token) => {
            ensure!(
                token.to == source.identity && token.from_epoch == from_epoch,
                "the token is of another stream; name the snapshots of that one, {} to send and {} for --from",
                token.to,
                token
                    .from_epoch
                    .map_or("none".into(), |it| format!("epoch {it}"))
            );
            token.start.clone()
        }
    };
    let content = stream_content(manager, &args.snapshot.volume)?;
    Ok(Header {
        stream: Uuid::new_v4(),
        to: source.identity.clone(),
        to_name: source.info.name.to_string(),
        from_epoch,
        from_name,
        has_page_summary: from_epoch.is_some(),
        size_bytes: source.size_bytes(),
        limit_bytes: source.info.size_bytes,
        content,
        created_unix_ms: source.info.created_unix_ms,
        start,
    })
}

/// Writes a file that has its name only once it is whole and durable. It overwrites the unfinished file of a killed sender.
fn write_file(
    args: &SendArgs,
    write: impl FnOnce(File) -> anyhow::Result<(File, SentStream)>,
) -> anyhow::Result<SentStream> {
    let path = &args.to;
    let mut partial = path.clone().into_os_string();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    if path.exists() {
        bail!("{} exists; name another file with --to", path.display());
    }
    let file = open_unfinished(&partial)?;
    let (file, sent) =
        write(file).with_context(|| format!("{} has a stream that was cut", partial.display()))?;
    file.sync_all()
        .with_context(|| format!("cannot store {}", partial.display()))?;
    let named = renameat_with(CWD, &partial, CWD, path, RenameFlags::NOREPLACE);
    match named {
        // Some file systems cannot refuse to replace a file.
        Err(Errno::INVAL) => std::fs::hard_link(&partial, path)
            .and_then(|()| std::fs::remove_file(&partial))
            .with_context(|| format!("cannot rename {}", partial.display()))?,
        named => named.with_context(|| format!("cannot rename {}", partial.display()))?,
    }
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let stored = File::open(parent).and_then(|dir| dir.sync_all());
    stored.with_context(|| format!("cannot make the name {} durable", path.display()))?;
    Ok(sent)
}

/// Opens the file of an unfinished stream, and empties it. Refuses a file that another process writes or has just renamed.
fn open_unfinished(partial: &Path) -> anyhow::Result<File> {
    let shown = partial.display();
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false);
    let file = file
        .open(partial)
        .with_context(|| format!("cannot make {shown}"))?;
    let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    // A file system without locks has one writer at a time by its users' care.
    let is_busy = locked == Err(Errno::WOULDBLOCK);
    let is_same = std::fs::metadata(partial).is_ok_and(|named| {
        let own = file.metadata();
        own.is_ok_and(|own| (own.dev(), own.ino()) == (named.dev(), named.ino()))
    });
    ensure!(
        is_same && !is_busy,
        "another process writes {shown}; name another file with --to"
    );
    file.set_len(0)
        .with_context(|| format!("cannot empty {shown}"))?;
    Ok(file)
}

/// Writes a stream. This thread reads the changes, and another one writes them.
fn write_stream(
    args: &SendArgs,
    out: File,
    header: &Header,
    changes: &mut Changes,
    changed_bytes: u64,
) -> anyhow::Result<(File, SentStream)> {
    let bar = output::progress("sending");
    bar.set_length(changed_bytes);
    let (batches, read) = sync_channel::<Vec<ChangedPart>>(1);
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| StreamOutput::start(args, out, header)?.write(read, &bar));
        let visited = changes.visit_batches(header.start.position, |batch| {
            // The writer has ended, and returns the cause.
            batches.send(batch).context("the stream was cut")
        });
        drop(batches);
        let output = writer
            .join()
            .map_err(|_| anyhow!("the writer of the stream has panicked"))??;
        visited.and(Ok(output))
    });
    bar.finish_and_clear();
    written?.end()
}

/// A stream that is written.
struct StreamOutput {
    stream: StreamWriter<BufWriter<PacedWriter<File>>>,
    summary: ContentSummary,
    unchecked_bytes: u64,
}

impl StreamOutput {
    fn start(args: &SendArgs, out: File, header: &Header) -> anyhow::Result<StreamOutput> {
        let out = BufWriter::with_capacity(1 << 20, PacedWriter::new(out, args.rate));
        let level = args.compress.then_some(LEVEL);
        Ok(StreamOutput {
            stream: StreamWriter::new(out, header, level)?,
            summary: header.start.summary,
            unchecked_bytes: 0,
        })
    }

    fn write(
        mut self,
        batches: Receiver<Vec<ChangedPart>>,
        bar: &ProgressBar,
    ) -> anyhow::Result<StreamOutput> {
        for part in batches.into_iter().flatten() {
            part.add_to(&mut self.summary);
            write_part(&mut self.stream, &part)?;
            let len = part.new.len() as u64;
            bar.inc(len);
            self.unchecked_bytes += len;
            if self.unchecked_bytes >= CHECKPOINT_BYTES {
                self.unchecked_bytes = 0;
                self.stream.checkpoint(part.offset + len, self.summary)?;
            }
        }
        Ok(self)
    }

    fn end(self) -> anyhow::Result<(File, SentStream)> {
        let before_end = self.stream.stored_bytes();
        let (out, totals) = self.stream.end(self.summary)?;
        let out = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        let sent = SentStream {
            stream_bytes: out.written.max(before_end),
            data_bytes: totals.data_bytes,
            zero_bytes: totals.zero_bytes,
            summary: self.summary.to_string(),
        };
        Ok((out.out, sent))
    }
}

/// Writes the pages that differ, as runs of data and of zeroes.
fn write_part<W: Write>(stream: &mut StreamWriter<W>, part: &ChangedPart) -> anyhow::Result<()> {
    #[derive(PartialEq)]
    enum Page {
        Same,
        Zero,
        Data,
    }
    let pages: Vec<Page> = part
        .new
        .chunks(PAGE_BYTES)
        .zip(part.old.chunks(PAGE_BYTES))
        .map(|(new, old)| match new == old && part.is_old_known {
            true => Page::Same,
            false if is_zero(new) => Page::Zero,
            false => Page::Data,
        })
        .collect();
    let mut at = 0;
    for run in pages.chunk_by(|a, b| a == b) {
        let len = run.len() * PAGE_BYTES;
        let offset = part.offset + at as u64;
        match run[0] {
            Page::Same => {}
            Page::Zero => stream.zeroes(offset, len as u64)?,
            Page::Data => stream.data(offset, &part.new[at..at + len])?,
        }
        at += len;
    }
    Ok(())
}

/// A writer that sleeps, so that it does not exceed its rate on average.
struct PacedWriter<W> {
    out: W,
    rate: Option<u64>,
    began: Instant,
    written: u64,
}

impl<W> PacedWriter<W> {
    fn new(out: W, rate: Option<Size>) -> PacedWriter<W> {
        PacedWriter {
            out,
            rate: rate.map(|rate| rate.0.max(1)),
            began: Instant::now(),
            written: 0,
        }
    }
}

impl<W: Write> Write for PacedWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // Slow streams flow in small pieces.
        let most = self
            .rate
            .map_or(usize::MAX, |rate| (rate / 8).max(4096) as usize);
        let count = self.out.write(&data[..data.len().min(most)])?;
        self.written += count as u64;
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(self.written as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(self.began.elapsed()));
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
