//! A process of its own that does what it is told with files of the mount: on the direct
//! path, or by the kernel alone.
//!
//! A command is what, file, offset and length, 8 bytes each, and the bytes of a write. An
//! answer is an error or 0, whether it was done without the kernel, and a length, 8 bytes
//! each, and the bytes of a read.

use crate::support::mounted::{self, LIBRARY_FLAGS, Mounted};
use crate::support::{Cluster, PAGEMESH};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Where a hand reports, and which directory it works in, divided by a comma.
const JOB: &str = "PAGEMESH_TEST_HAND";
const HEAD_BYTES: usize = 32;
const ANSWER_BYTES: usize = 24;

/// What a hand can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Write,
    Read,
    Append,
    WriteDurably,
    Sync,
    Truncate,
    /// Of all files, so that the mount can go.
    Close,
}

const ALL: [What; 7] = [
    What::Write,
    What::Read,
    What::Append,
    What::WriteDurably,
    What::Sync,
    What::Truncate,
    What::Close,
];

/// A command.
#[derive(Clone, Debug)]
pub struct Order {
    pub what: What,
    pub file: usize,
    pub offset: u64,
    pub len: u64,
    pub bytes: Vec<u8>,
}

/// What became of it.
pub struct Done {
    /// Without a system call.
    pub is_direct: bool,
    pub bytes: Vec<u8>,
}

/// A process that waits for orders; dropping it ends it.
pub struct Hand {
    stream: UnixStream,
    child: Child,
    is_direct: bool,
}

impl Hand {
    pub fn start(cluster: &Cluster, mount: &Mounted, is_direct: bool) -> Hand {
        let address = cluster.dir().join("hand.sock");
        let _ = std::fs::remove_file(&address);
        let listener = UnixListener::bind(&address).unwrap();
        let own = std::env::current_exe().unwrap();
        let mut command = match is_direct {
            false => Command::new(own),
            true => {
                let mut command = Command::new(PAGEMESH);
                command.args(mounted::exec()).arg(own);
                command
            }
        };
        let job = format!("{},{}", address.display(), mount.dir.display());
        command.args(["--exact", "hand_works", "--nocapture"]);
        let child = command.env(JOB, job).spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        Hand {
            stream,
            child,
            is_direct,
        }
    }

    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Says what is to be done next; [`Hand::done`] waits for it.
    pub fn tell(&mut self, order: &Order) {
        let what = ALL.iter().position(|&it| it == order.what).unwrap() as u64;
        let words = [what, order.file as u64, order.offset, order.len];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.stream.write_all(&head).unwrap();
        self.stream.write_all(&order.bytes).unwrap();
    }

    /// What became of the order. An error too if the hand died.
    pub fn done(&mut self) -> io::Result<Done> {
        let mut head = [0; ANSWER_BYTES];
        self.stream.read_exact(&mut head)?;
        let word = |at: usize| u64::from_le_bytes(head[at * 8..][..8].try_into().unwrap());
        if word(0) != 0 {
            return Err(io::Error::from_raw_os_error(word(0) as i32));
        }
        let mut bytes = vec![0; word(2) as usize];
        self.stream.read_exact(&mut bytes)?;
        Ok(Done {
            is_direct: word(1) != 0,
            bytes,
        })
    }

    pub fn does(&mut self, order: &Order) -> io::Result<Done> {
        self.tell(order);
        self.done()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the child does until its parent is gone.
pub fn work() {
    let Ok(job) = std::env::var(JOB) else { return };
    let (address, dir) = job.split_once(',').unwrap();
    let mut stream = UnixStream::connect(address).unwrap();
    let mut files = Files {
        dir: dir.into(),
        open: vec![],
    };
    let mut head = [0; HEAD_BYTES];
    while stream.read_exact(&mut head).is_ok() {
        let word = |at: usize| u64::from_le_bytes(head[at * 8..][..8].try_into().unwrap());
        let mut order = Order {
            what: ALL[word(0) as usize],
            file: word(1) as usize,
            offset: word(2),
            len: word(3),
            bytes: vec![],
        };
        if matches!(order.what, What::Write | What::Append | What::WriteDurably) {
            order.bytes.resize(order.len as usize, 0);
            stream.read_exact(&mut order.bytes).unwrap();
        }
        let before = calls();
        let done = files.does(&order);
        let is_direct = calls() == before;
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

/// Calls that this process wrote with; proc(5).
fn calls() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("syscw: "));
    line.unwrap().parse().unwrap()
}

struct Files {
    dir: PathBuf,
    open: Vec<(usize, File)>,
}

fn opened(dir: &Path, file: usize, more: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    // Else the file would have no direct path as long as a hand by the kernel has it.
    options.custom_flags((more.bits() | LIBRARY_FLAGS).cast_signed());
    options.open(dir.join(format!("f{file}")))
}

impl Files {
    fn file(&mut self, number: usize) -> io::Result<&File> {
        let at = self.open.iter().position(|(it, _)| *it == number);
        let at = match at {
            Some(at) => at,
            None => {
                let file = opened(&self.dir, number, OFlags::empty())?;
                self.open.push((number, file));
                self.open.len() - 1
            }
        };
        Ok(&self.open[at].1)
    }

    fn does(&mut self, order: &Order) -> io::Result<Vec<u8>> {
        let (offset, bytes) = (order.offset, &order.bytes);
        match order.what {
            What::Write => self.file(order.file)?.write_all_at(bytes, offset)?,
            What::Append => {
                let file = opened(&self.dir, order.file, OFlags::APPEND)?;
                (&file).write_all(bytes)?;
            }
            What::WriteDurably => {
                let file = opened(&self.dir, order.file, OFlags::DSYNC)?;
                file.write_all_at(bytes, offset)?;
            }
            What::Sync => self.file(order.file)?.sync_all()?,
            What::Truncate => self.file(order.file)?.set_len(order.len)?,
            What::Close => self.open.clear(),
            What::Read => {
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
