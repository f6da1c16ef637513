//! A worker process that executes commands on files of the mount: on the direct path, or through
//! the kernel only.
//!
//! A command is an operation, a file, an offset and a length, 8 bytes each, and the bytes of a
//! write. An answer is an error or 0, whether the operation was done without the kernel, and a
//! length, 8 bytes each, and the bytes of a read.

use crate::support::mounted::{self, LIBRARY_FLAGS, TestMount};
use crate::support::{Cluster, PAGEMESH};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// The socket to which a worker reports, and its working directory, separated by a comma.
const WORKER_JOB_ENV: &str = "PAGEMESH_TEST_HAND";
const HEAD_BYTES: usize = 32;
const ANSWER_BYTES: usize = 24;

/// Operations of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerOp {
    Write,
    Read,
    Append,
    WriteDurably,
    Sync,
    Truncate,
    /// Closes all files, so that the mount can end.
    Close,
}

const WORKER_OPS: [WorkerOp; 7] = [
    WorkerOp::Write,
    WorkerOp::Read,
    WorkerOp::Append,
    WorkerOp::WriteDurably,
    WorkerOp::Sync,
    WorkerOp::Truncate,
    WorkerOp::Close,
];

/// A command.
#[derive(Clone, Debug)]
pub struct WorkerRequest {
    pub op: WorkerOp,
    pub file: usize,
    pub offset: u64,
    pub len: u64,
    pub bytes: Vec<u8>,
}

/// The result of a command.
pub struct WorkerReply {
    /// Whether the operation was done without a system call.
    pub is_direct: bool,
    pub bytes: Vec<u8>,
}

/// A process that waits for commands; dropping it ends it.
pub struct FsxWorker {
    stream: UnixStream,
    child: Child,
    is_direct: bool,
}

impl FsxWorker {
    pub fn start(cluster: &Cluster, mount: &TestMount, is_direct: bool) -> FsxWorker {
        let address = cluster.dir().join("hand.sock");
        let _ = std::fs::remove_file(&address);
        let listener = UnixListener::bind(&address).unwrap();
        let own = std::env::current_exe().unwrap();
        let mut command = match is_direct {
            false => Command::new(own),
            true => {
                let mut command = Command::new(PAGEMESH);
                command.args(mounted::exec_args()).arg(own);
                command
            }
        };
        let job = format!("{},{}", address.display(), mount.dir.display());
        command.args(["--exact", "fsx::worker_process", "--nocapture"]);
        let child = command.env(WORKER_JOB_ENV, job).spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        FsxWorker {
            stream,
            child,
            is_direct,
        }
    }

    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Sends a command; [`FsxWorker::reply`] waits for its result.
    pub fn send(&mut self, order: &WorkerRequest) {
        let what = WORKER_OPS.iter().position(|&it| it == order.op).unwrap() as u64;
        let words = [what, order.file as u64, order.offset, order.len];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.stream.write_all(&head).unwrap();
        self.stream.write_all(&order.bytes).unwrap();
    }

    /// The result of the command. Returns an error if the worker has died.
    pub fn reply(&mut self) -> io::Result<WorkerReply> {
        let mut head = [0; ANSWER_BYTES];
        self.stream.read_exact(&mut head)?;
        let word = |at: usize| u64::from_le_bytes(head[at * 8..][..8].try_into().unwrap());
        if word(0) != 0 {
            return Err(io::Error::from_raw_os_error(word(0) as i32));
        }
        let mut bytes = vec![0; word(2) as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(WorkerReply {
            is_direct: word(1) != 0,
            bytes,
        })
    }

    pub fn execute(&mut self, order: &WorkerRequest) -> io::Result<WorkerReply> {
        self.send(order);
        self.reply()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for FsxWorker {
    fn drop(&mut self) {
        // The process may have been killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Executes commands until the parent is gone.
pub fn run_worker() {
    let Ok(job) = std::env::var(WORKER_JOB_ENV) else {
        return;
    };
    let (address, dir) = job.split_once(',').unwrap();
    let mut stream = UnixStream::connect(address).unwrap();
    let mut files = WorkerFiles {
        dir: dir.into(),
        open: vec![],
    };
    let mut head = [0; HEAD_BYTES];
    while stream.read_exact(&mut head).is_ok() {
        let word = |at: usize| u64::from_le_bytes(head[at * 8..][..8].try_into().unwrap());
        let mut order = WorkerRequest {
            op: WORKER_OPS[word(0) as usize],
            file: word(1) as usize,
            offset: word(2),
            len: word(3),
            bytes: vec![],
        };
        if matches!(
            order.op,
            WorkerOp::Write | WorkerOp::Append | WorkerOp::WriteDurably
        ) {
            order.bytes.resize(order.len as usize, 0);
            stream.read_exact(&mut order.bytes).unwrap();
        }
        let before = write_calls();
        let done = files.execute(&order);
        let is_direct = write_calls() == before;
        let (error, bytes) = match done {
            Ok(bytes) => (0, bytes),
            Err(cause) => (cause.raw_os_error().unwrap_or(5), vec![]),
        };
        let words = [error as u64, is_direct.into(), bytes.len() as u64];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let told = stream.write_all(&head);
        if told.and_then(|()| stream.write_all(&bytes)).is_err() {
            return;
        }
    }
}

/// The number of write system calls of this process; see proc(5).
fn write_calls() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("syscw: "));
    line.unwrap().parse().unwrap()
}

struct WorkerFiles {
    dir: PathBuf,
    open: Vec<(usize, File)>,
}

fn open_file(dir: &Path, file: usize, more: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    // Without the flags, an open file of a kernel worker would bar the file from the direct path.
    options.custom_flags((more.bits() | LIBRARY_FLAGS).cast_signed());
    options.open(dir.join(format!("f{file}")))
}

impl WorkerFiles {
    fn file(&mut self, number: usize) -> io::Result<&File> {
        let at = self.open.iter().position(|(it, _)| *it == number);
        let at = match at {
            Some(at) => at,
            None => {
                let file = open_file(&self.dir, number, OFlags::empty())?;
                self.open.push((number, file));
                self.open.len() - 1
            }
        };
        Ok(&self.open[at].1)
    }

    fn execute(&mut self, order: &WorkerRequest) -> io::Result<Vec<u8>> {
        let (offset, bytes) = (order.offset, &order.bytes);
        match order.op {
            WorkerOp::Write => self.file(order.file)?.write_all_at(bytes, offset)?,
            WorkerOp::Append => {
                let file = open_file(&self.dir, order.file, OFlags::APPEND)?;
                (&file).write_all(bytes)?;
            }
            WorkerOp::WriteDurably => {
                let file = open_file(&self.dir, order.file, OFlags::DSYNC)?;
                file.write_all_at(bytes, offset)?;
            }
            WorkerOp::Sync => self.file(order.file)?.sync_all()?,
            WorkerOp::Truncate => self.file(order.file)?.set_len(order.len)?,
            WorkerOp::Close => self.open.clear(),
            WorkerOp::Read => {
                let mut bytes = vec![0; order.len as usize];
                let mut read = 0;
                loop {
                    let at = offset + read as u64;
                    match self.file(order.file)?.read_at(&mut bytes[read..], at)? {
                        0 => break,
                        more => read += more,
                    }
                }
                bytes.truncate(read);
                return Ok(bytes);
            }
        }
        Ok(vec![])
    }
}
