//! The mount's side: lets guests in, shows them files, keeps them away, and cleans up behind
//! those that are gone.
//!
//! Invariants: a row belongs to one connection, and is given to another only when it is
//! not active; one that its guest left active is cleared only when its bytes are alike on all
//! legs. Only processes of the mount's user, or of root, are let in, by the kernel's word
//! about them.

use crate::board;
use crate::rows::{self, FileBoard};
use crate::status::{Client, Clients, Refused};
use crate::wire::{self, Answer, Hidden, Question};
use pagemesh_base::contact;
use pagemesh_base::mapping::maps;
use pagemesh_base::peer::{Peer, peer, reach};
use pagemesh_base::resume::{self, Stop};
use pagemesh_fs::{Board, Fs, Ino};
use pagemesh_volume::Volume;
use pagemesh_volume::guests::{ROWS, Segment, Wound};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, SocketType, accept_with, bind, listen, shutdown};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, pidfd_send_signal, setrlimit,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections that the kernel keeps before they are accepted.
const BACKLOG: i32 = 64;
/// Connections at the same time: each process has one for questions, and one for each row.
/// More processes than there are rows ask, too: who maps a file has to say so.
const GUESTS_MAX: usize = 16 * ROWS;
/// Files with boards, each of which takes a descriptor; the kernel serves further ones.
const BOARDS_MAX: usize = 4096;
/// Looks at a guest that is inside before the thread gives up its processor: operations take
/// a microsecond or two.
const SPINS: u32 = 200;
/// Between two later looks.
const NAP: Duration = Duration::from_micros(50);
/// How long a guest that a signal stopped may stay inside of an operation that another process waits
/// for; then it runs for a moment, until it is outside.
const RESUME_AFTER: Duration = Duration::from_millis(100);
/// How long the end of a process that was killed is waited for.
const KILLED_MAX: Duration = Duration::from_secs(2);
/// How long one that runs, or that a debugger stopped, may stay there; then it is killed: longer
/// than it waits for a brick, or for the lock of one that is stopped, before it gives up.
const LATE_MAX: Duration = Duration::from_secs(15);

/// How long those who are inside may take to come out of a mount that is taken away.
const GIVE_UP_MAX: Duration = Duration::from_secs(2);
/// Between two tries to accept where the system lacks something.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Between two looks at guests that somebody waits for who does not come here.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Lets guests of a mount in, until it is dropped.
pub struct Server {
    host: Arc<Host>,
    listener: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
    /// Dropped, nobody looks any more.
    looking: Option<Sender<()>>,
}

/// Whether the mount is there. Once it is not, another one may have its device number, and
/// who asks here means that.
pub type IsMounted = Arc<dyn Fn() -> bool + Send + Sync>;

/// What all connections share.
struct Host {
    volume: Arc<Volume>,
    fs: Weak<Fs>,
    is_mounted: IsMounted,
    /// By row: the process that has it.
    rows: Mutex<Vec<Option<Arc<Guest>>>>,
    boards: Mutex<HashMap<Ino, Weak<FileBoard>>>,
    guests: AtomicUsize,
    is_ending: AtomicBool,
    clients: Clients,
}

/// A process at the other end of a connection.
struct Guest {
    process: OwnedFd,
    pid: Pid,
    socket: OwnedFd,
    client: Arc<Client>,
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// Listens for guests of the mount with this device number (`major:minor`).
    ///
    /// # Errors
    /// When the system has no socket, memory or thread for it.
    pub fn start(
        volume: Arc<Volume>,
        fs: &Arc<Fs>,
        device: &str,
        is_mounted: IsMounted,
    ) -> io::Result<Server> {
        volume.admit_guests().map_err(io::Error::other)?;
        raise_descriptors();
        let listener = Arc::new(wire::socket()?);
        bind(&*listener, &wire::address(device)?)?;
        listen(&*listener, BACKLOG)?;
        let host = Arc::new(Host {
            volume,
            fs: Arc::downgrade(fs),
            is_mounted,
            rows: Mutex::new(vec![None; ROWS]),
            boards: Mutex::default(),
            guests: AtomicUsize::new(0),
            is_ending: AtomicBool::new(false),
            clients: Clients::default(),
        });
        let (served, listened) = (Arc::clone(&host), Arc::clone(&listener));
        let thread = std::thread::Builder::new().name("guests".into());
        let accepts = thread.spawn(move || accept_all(&served, &listened))?;
        let mut server = Server {
            host,
            listener,
            threads: vec![accepts],
            looking: None,
        };
        let (looking, ended) = mpsc::channel();
        let looked_after = Arc::clone(&server.host);
        let thread = std::thread::Builder::new().name("guests-late".into());
        let looks = thread.spawn(move || look_after(&looked_after, &ended))?;
        server.threads.push(looks);
        server.looking = Some(looking);
        let told = Arc::downgrade(&server.host);
        fs.tell_opens(move |thread| {
            if let Some(host) = told.upgrade() {
                host.note_open(thread);
            }
        });
        Ok(server)
    }

    /// Takes in a process by the socket that one of its threads offers, see [`contact`].
    pub fn connector(&self) -> impl Fn(u32, &[u8]) -> Result<(), Errno> + Send + Sync + use<> {
        let host = Arc::downgrade(&self.host);
        move |thread, argument| {
            let host = host.upgrade().filter(|host| !host.is_over());
            let host = host.ok_or(Errno::NOSYS)?;
            let socket = contact::accept(thread, argument).inspect_err(
                |cause| tracing::debug!(thread, %cause, "an offered socket was not taken"),
            )?;
            take_in(&host, socket);
            Ok(())
        }
    }

    /// Nobody is waited for any more, as the mount is being taken away. Its files may be served
    /// for a while yet, so guests are kept out for good, and those inside come out first.
    pub fn give_up(&self) {
        if !self.host.is_ending.load(Ordering::Acquire)
            && let Some(segment) = self.host.segment()
        {
            segment.close();
            let began = Instant::now();
            while !segment.is_quiet() && began.elapsed() < GIVE_UP_MAX {
                std::thread::sleep(NAP);
            }
        }
        self.host.is_ending.store(true, Ordering::Release);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.give_up();
        // Wakes who accepts; it fails only for a socket that does not listen.
        let _ = shutdown(&*self.listener, Shutdown::Both);
        self.looking = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        for guest in guard(&self.host.rows).iter().flatten() {
            let _ = shutdown(&guest.socket, Shutdown::Both);
        }
    }
}

/// Boards and connections take more descriptors than a process is given unasked.
fn raise_descriptors() {
    let limits = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limits.maximum,
        ..limits
    };
    if let Err(cause) = setrlimit(Resource::Nofile, wanted) {
        tracing::debug!(%cause, "the limit of descriptors stays as it is");
    }
}

/// Ends guests that do not come out of an operation, where the keeper waits for them, or the
/// copy that follows for what they have to say.
fn look_after(host: &Host, ended: &Receiver<()>) {
    let mut inside: HashMap<usize, (u64, Instant)> = HashMap::new();
    while ended.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        let Some(segment) = host.segment() else {
            return;
        };
        let active: Vec<usize> = segment.active().map(|(number, _)| number).collect();
        inside.retain(|number, _| active.contains(number));
        let is_awaited = segment.is_closed() || segment.ring().awaited().is_some();
        for number in active {
            let now = (segment.row(number).active(), Instant::now());
            let since = inside.entry(number).or_insert(now);
            if since.0 != now.0 || !is_awaited {
                *since = now;
            }
            let waited = since.1.elapsed();
            if waited >= LATE_MAX {
                host.end(number, "it did not come out of an operation");
            } else if waited >= RESUME_AFTER {
                host.resume(segment, number);
            }
        }
    }
}

fn accept_all(host: &Arc<Host>, listener: &OwnedFd) {
    while !host.is_ending.load(Ordering::Acquire) {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(_) if host.is_ending.load(Ordering::Acquire) => return,
            Err(cause) => {
                // Who waits to be let in must not do so for ever.
                tracing::warn!(%cause, "cannot let guests of the mount in; trying again");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        take_in(host, socket);
    }
}

/// Serves a connection on a thread of its own. The kernel serves a process that is turned away.
fn take_in(host: &Arc<Host>, socket: OwnedFd) {
    if host.guests.fetch_add(1, Ordering::AcqRel) >= GUESTS_MAX {
        host.guests.fetch_sub(1, Ordering::AcqRel);
        host.clients.refuse(Refused::Full);
        return;
    }
    let served = Arc::clone(host);
    let thread = std::thread::Builder::new().name("guest".into());
    let spawned = thread.spawn(move || {
        serve(&served, socket);
        served.guests.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(cause) = spawned {
        host.guests.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(%cause, "a guest of the mount was not let in");
    }
}

/// Who lets guests in for a device.
///
/// # Errors
/// When nobody does.
pub fn holder(device: &str) -> io::Result<Peer> {
    peer(reach(SocketType::SEQPACKET, &wire::name(device))?)
}

/// The process at the other end, if it may be let in.
fn admit(host: &Host, socket: OwnedFd) -> io::Result<Guest> {
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let peer = peer(&socket)?;
    if !peer.is_trusted() {
        host.clients.refuse(Refused::OtherUser);
        return Err(refused());
    }
    // Who cannot be watched is no guest.
    let pid = peer.pid.ok_or_else(|| {
        host.clients.refuse(Refused::Unseen);
        refused()
    })?;
    Ok(Guest {
        process: pidfd_open(pid, PidfdFlags::empty())?,
        pid,
        socket,
        client: host.clients.client(pid),
    })
}

fn serve(host: &Arc<Host>, socket: OwnedFd) {
    let guest = match admit(host, socket) {
        Ok(guest) => Arc::new(guest),
        Err(cause) => return tracing::debug!(%cause, "who wanted to be a guest was refused"),
    };
    let mut row = None;
    if let Err(cause) = answer_all(host, &guest, &mut row) {
        tracing::debug!(%cause, pid = guest.pid.as_raw_pid(), "a guest's connection ended");
    }
    if let Some(number) = row {
        // It may go on, and use the row, if its connection was closed by accident.
        loop {
            let is_ending = host.is_ending.load(Ordering::Acquire);
            if is_ending || host.has_left(&guest) || guest.is_gone(LOOK_EVERY) {
                break;
            }
        }
        host.clean_up(number, &guest);
    }
}

fn answer_all(host: &Arc<Host>, guest: &Arc<Guest>, row: &mut Option<usize>) -> io::Result<()> {
    let socket = guest.socket.as_fd();
    while let Some((bytes, memory)) = wire::receive(socket)? {
        let question = Question::decode(&bytes).map_err(io::Error::other)?;
        if !(host.is_mounted)() {
            return Ok(());
        }
        match question {
            Question::Join => {
                if row.is_none() {
                    *row = host.take_row(guest);
                    if row.is_none() {
                        host.clients.refuse(Refused::Rows);
                    }
                }
                let (answer, segment) = host.joined(*row);
                let memory = segment.map(|segment| segment.file().as_fd());
                wire::send(socket, &answer.encode(), memory)?;
            }
            Question::Call => host.volume.call_shipping(),
            Question::Leave => {
                if let Some(number) = row.take() {
                    host.clean_up(number, guest);
                }
            }
            Question::Look => wire::send(socket, &host.joined(*row).0.encode(), None)?,
            Question::Write(ino) => {
                let answer = host.write_together(guest, Ino(ino), memory)?;
                wire::send(socket, &answer.encode(), None)?;
            }
            Question::Account => {
                let ledger = guest.client.ledger();
                let memory = ledger.map(|ledger| ledger.file().as_fd());
                let answer = memory.map_or(Answer::No, |_| Answer::Yes);
                wire::send(socket, &answer.encode(), memory)?;
            }
            Question::Status => {
                let memory = host.status()?;
                wire::send(socket, &Answer::Yes.encode(), Some(memory.as_fd()))?;
            }
            Question::Connect => {
                if let Some(socket) = memory {
                    take_in(host, socket);
                }
            }
            Question::Socket(leg) => {
                let (answer, found) = host.socket_of(leg);
                wire::send(socket, &answer.encode(), found.as_ref().map(AsFd::as_fd))?;
            }
            Question::Board(ino) | Question::Grow(ino) => {
                let grows = matches!(question, Question::Grow(_));
                let (answer, board) = host.shown(Ino(ino), grows);
                let memory = board.as_ref().map(|board| board.board().file().as_fd());
                wire::send(socket, &answer.encode(), memory)?;
            }
        }
    }
    Ok(())
}

impl Host {
    fn segment(&self) -> Option<&Segment> {
        self.volume.admit_guests().ok()
    }

    fn is_over(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// The socket of the brick of a leg. The guest connects to it itself, so that the brick
    /// knows its process.
    fn socket_of(&self, leg: u64) -> (Answer, Option<OwnedFd>) {
        let found = || {
            let picture = self.volume.guest_picture()?;
            let seat = picture.seats.get(usize::try_from(leg).ok()?)?;
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            rustix::fs::open(&seat.socket, flags, Mode::empty()).ok()
        };
        match found() {
            Some(socket) => (Answer::Yes, Some(socket)),
            None => (Answer::No, None),
        }
    }

    /// A thread opens a file, and not through the preload library. If it belongs to a direct
    /// client, a descriptor number may come to lead to that file before the mount hears that the
    /// number was closed.
    fn note_open(&self, thread: u32) {
        if self.guests.load(Ordering::Acquire) == 0 {
            return;
        }
        let rows = guard(&self.rows);
        let mut clients: Vec<Pid> = rows.iter().flatten().map(|guest| guest.pid).collect();
        drop(rows);
        clients.dedup();
        if is_of_one(&clients, thread)
            && let Some(segment) = self.segment()
        {
            segment.note_open();
        }
    }

    fn take_row(&self, guest: &Arc<Guest>) -> Option<usize> {
        let mut rows = guard(&self.rows);
        let number = rows.iter().position(Option::is_none)?;
        rows[number] = Some(Arc::clone(guest));
        Some(number)
    }

    fn joined(&self, row: Option<usize>) -> (Answer, Option<&Segment>) {
        match row.zip(self.segment()) {
            Some((row, segment)) => {
                let picture = self.volume.guest_picture();
                (Answer::Joined(row as u32, picture), Some(segment))
            }
            // It may be given one later.
            None => (Answer::No, self.segment()),
        }
    }

    /// The board of a file, as the file is now, with room behind its end for who wants that.
    fn shown(self: &Arc<Host>, ino: Ino, grows: bool) -> (Answer, Option<Arc<FileBoard>>) {
        let Some(fs) = self.fs.upgrade() else {
            return (Answer::No, None);
        };
        let make = || {
            let mut boards = guard(&self.boards);
            boards.retain(|_, board| board.strong_count() > 0);
            if boards.len() >= BOARDS_MAX {
                return None;
            }
            let board = match board::Board::create() {
                Ok(board) => board,
                Err(cause) => {
                    tracing::warn!(%cause, "there is no memory to show a file to guests");
                    return None;
                }
            };
            let host = Arc::clone(self);
            let made = Arc::new(FileBoard::new(Arc::new(board), move || {
                host.await_quiet(ino);
            }));
            boards.insert(ino, Arc::downgrade(&made));
            Some(made as Arc<dyn Board>)
        };
        let shown = match grows {
            true => fs.grow(ino, make),
            false => fs.show(ino, make),
        };
        match shown {
            Ok(Some(_)) => {
                let board = guard(&self.boards).get(&ino).and_then(Weak::upgrade);
                match board {
                    Some(board) => (Answer::Yes, Some(board)),
                    None => (Answer::No, None),
                }
            }
            Ok(None) => (Answer::Hidden(self.why_hidden(&fs, ino)), None),
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "a file was not shown to a guest");
                (Answer::No, None)
            }
        }
    }

    /// Why guests cannot have a file.
    fn why_hidden(&self, fs: &Fs, ino: Ino) -> Hidden {
        let is_full = || guard(&self.boards).len() >= BOARDS_MAX;
        let (hidden, refused) = match () {
            () if fs.maps(ino) => (Hidden::Mapped, Refused::Mapped),
            () if fs.is_cached(ino) => (Hidden::Cached, Refused::Cached),
            () if is_full() => (Hidden::Full, Refused::Files),
            () => (Hidden::Shape, Refused::Shape),
        };
        self.clients.refuse(refused);
        hidden
    }

    /// What `pagemesh mount status` shows, as JSON.
    fn status(&self) -> io::Result<File> {
        let files = {
            let boards = guard(&self.boards);
            let shown = boards.iter().filter_map(|(ino, board)| {
                let board = board.upgrade()?;
                (!board.board().is_outdated()).then_some(ino.0)
            });
            shown.collect()
        };
        let rows = guard(&self.rows).iter().flatten().count();
        let hindrance = self.segment().and_then(Segment::hindrance);
        let told = self.clients.status(hindrance, rows, files);
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut memory = File::from(rustix::fs::memfd_create("pagemesh-status", flags)?);
        memory.write_all(&serde_json::to_vec(&told)?)?;
        Ok(memory)
    }

    /// Overwrites parts of a file together, as a guest could not. Not once it is gone: who
    /// has seen it end may have changed the file since.
    fn write_together(
        &self,
        guest: &Guest,
        ino: Ino,
        memory: Option<OwnedFd>,
    ) -> io::Result<Answer> {
        let (Some(fs), Some(memory)) = (self.fs.upgrade(), memory) else {
            return Ok(Answer::Failed(Errno::OPNOTSUPP.raw_os_error()));
        };
        let mut bytes = Vec::new();
        let mut memory = File::from(memory).take(wire::PARTS_BYTES_MAX as u64 + 1);
        memory.read_to_end(&mut bytes)?;
        let parts = wire::decode_parts(&bytes.into()).map_err(io::Error::other)?;
        let written = fs
            .borrow()
            .and_then(|mut port| fs.write_together(&mut port, ino, &parts, || guest.is_waiting()));
        Ok(match written {
            Ok(()) => Answer::Yes,
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "parts of a file were not written together");
                Answer::Failed(cause.errno().raw_os_error())
            }
        })
    }

    /// Waits until no guest is inside of an operation on a file.
    fn await_quiet(&self, ino: Ino) {
        let Some(segment) = self.segment() else {
            return;
        };
        let (mut spins, mut looked) = (0, None);
        rows::await_quiet(segment, ino, |number| {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
                return true;
            }
            let since = *looked.get_or_insert_with(Instant::now);
            self.await_row(segment, number);
            // Whoever cleans up behind a dead one waits for the others, too.
            if since.elapsed() >= RESUME_AFTER {
                looked = Some(Instant::now());
                self.resume_stopped(segment);
            }
            !self.is_ending.load(Ordering::Acquire)
        });
    }

    /// Waits until a guest has left its operation or is gone. A guest that is stopped runs for a
    /// moment.
    /// Who is gone is cleaned up behind by the thread of its connection.
    fn await_row(&self, segment: &Segment, number: usize) {
        let row = segment.row(number);
        let inside = row.active();
        let began = Instant::now();
        let mut looked = Duration::ZERO;
        while row.active() == inside && inside % 2 == 1 {
            let waited = began.elapsed();
            if self.is_ending.load(Ordering::Acquire) {
                return;
            }
            let guest = self.guest(number);
            if guest.is_none_or(|guest| guest.has_ended()) {
                return std::thread::sleep(NAP);
            }
            if waited >= LATE_MAX {
                self.end(number, "it did not come out of an operation");
                return std::thread::sleep(NAP);
            }
            // It may only wait for a lock of another that is stopped.
            if waited >= looked + RESUME_AFTER {
                looked = waited;
                self.resume_stopped(segment);
            }
            std::thread::sleep(NAP);
        }
    }

    /// Guests that a signal stopped inside of an operation run until they are outside.
    fn resume_stopped(&self, segment: &Segment) {
        segment
            .active()
            .for_each(|(number, _)| self.resume(segment, number));
    }

    fn resume(&self, segment: &Segment, number: usize) {
        let Some(guest) = self.guest(number) else {
            return;
        };
        let pid = guest.pid.as_raw_pid().cast_unsigned();
        if resume::stop_of(pid) != Some(Stop::Signal) {
            return;
        }
        let is_outside = || segment.row(number).place().is_none();
        let is_out = resume::run(pid, &is_outside);
        let name = guest.client.name();
        tracing::info!(
            pid,
            name,
            is_out,
            "a stopped client ran until it was outside of an operation"
        );
    }

    /// Whether nothing of a guest is left that could use its row: its process has ended, or
    /// executed another program.
    fn has_left(&self, guest: &Guest) -> bool {
        let maps = || {
            let found = self.segment()?.file().metadata().ok()?;
            let pid = guest.pid.as_raw_pid().cast_unsigned();
            maps(pid, found.dev(), found.ino())
        };
        guest.is_gone(Duration::ZERO) || maps() == Some(false)
    }

    fn guest(&self, row: usize) -> Option<Arc<Guest>> {
        guard(&self.rows)[row].clone()
    }

    fn end(&self, row: usize, why: &str) {
        if let Some(guest) = self.guest(row) {
            guest.end(why);
        }
    }

    /// A guest's connection has ended.
    fn clean_up(&self, number: usize, guest: &Guest) {
        let Some(segment) = self.segment() else {
            return;
        };
        let row = segment.row(number);
        if row.place().is_some() {
            // It may have closed the connection by accident, and go on.
            if !self.has_left(guest) {
                self.await_row(segment, number);
            }
            if let Some(place) = row.place() {
                if !self.has_left(guest) {
                    guest.end("it was inside of an operation when its connection ended");
                    guest.is_gone(KILLED_MAX);
                }
                self.heal(segment, number, guest);
                let board = guard(&self.boards).get(&Ino(place.file)).cloned();
                let board = board.and_then(|board| board.upgrade());
                rows::clear(segment, number, board.as_ref().map(|board| board.board()));
            }
        }
        guard(&self.rows)[number] = None;
    }
}

impl Host {
    /// Makes the copies alike where a guest died.
    fn heal(&self, segment: &Segment, number: usize, guest: &Guest) {
        let Some(wound) = Wound::of(segment.row(number)) else {
            return;
        };
        tracing::info!(
            pid = guest.pid.as_raw_pid(),
            ?wound,
            "a guest died inside of an operation; the copies are compared there"
        );
        self.volume.heal(number, wound);
    }
}

impl Guest {
    /// Whether its process has ended, after so long.
    fn is_gone(&self, wait: Duration) -> bool {
        let until = Timespec::try_from(wait).unwrap_or_default();
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        matches!(poll(&mut polled, Some(&until)), Ok(ended) if ended > 0)
    }

    /// Whether it is gone, which the thread of its connection then hears of: a child that it
    /// forked may have the connection still.
    fn has_ended(&self) -> bool {
        let is_gone = self.is_gone(Duration::ZERO);
        if is_gone {
            // It may be shut already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
        is_gone
    }

    /// Whether it is there to be answered, and has not begun to end: that is so before
    /// anything of it is closed or given back that another process may notice.
    fn is_waiting(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let is_there = matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0));
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid.as_raw_pid()));
        let mut tasks = tasks.into_iter().flatten().flatten();
        is_there && tasks.any(|task| !is_ending(&task.path().join("stat")))
    }

    fn end(&self, why: &str) {
        if !self.has_ended() {
            let (pid, name) = (self.pid.as_raw_pid(), self.client.name());
            let why = &match resume::stop_of(pid.cast_unsigned()) {
                Some(Stop::Tracer(tracer)) => {
                    let tracer_name = resume::name_of(tracer);
                    format!("{why}; process {tracer} ({tracer_name}) had stopped it, see ptrace(2)")
                }
                Some(Stop::Signal) => {
                    format!("{why}; it was stopped, and did not leave it when it ran")
                }
                None => why.to_owned(),
            };
            tracing::warn!(pid, name, why, "a guest is ended");
            self.client.note_end(why);
            // It may have ended by itself meanwhile.
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
    }
}

/// Whether a thread belongs to one of these processes. The kernel gives 0 for a thread in a PID
/// namespace that this process does not see: such a thread may belong to any process.
fn is_of_one(processes: &[Pid], thread: u32) -> bool {
    let Some(pid) = Pid::from_raw(thread.cast_signed()) else {
        return !processes.is_empty();
    };
    if processes.is_empty() || processes.contains(&pid) {
        return !processes.is_empty();
    }
    // The kernel gives a descriptor only for the first thread of a process.
    if pidfd_open(pid, PidfdFlags::empty()).is_ok() {
        return false;
    }
    let is_of = |process: &Pid| {
        let process = process.as_raw_pid();
        Path::new(&format!("/proc/{process}/task/{thread}")).exists()
    };
    processes.iter().any(is_of)
}

/// What the kernel tells of a process or thread, counted from its state on, proc(5).
fn stat(path: &Path, index: usize) -> Option<String> {
    let stat = std::fs::read_to_string(path).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(index).map(str::to_owned)
}

/// Whether a thread ends or has ended.
fn is_ending(path: &Path) -> bool {
    /// `flags`, behind the state and five numbers.
    const FLAGS: usize = 6;
    /// `PF_EXITING` (Linux, `include/linux/sched.h`)
    const EXITING: u32 = 4;
    let flags = stat(path, FLAGS).and_then(|flags| flags.parse::<u32>().ok());
    flags.is_none_or(|flags| flags & EXITING != 0)
}
