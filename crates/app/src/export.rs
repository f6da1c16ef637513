//! `pagemesh export`: attached volumes behind the NBD server.

use crate::args::Export;
use crate::asked::Asked;
use crate::ending::{Ending, Teller};
use crate::fenced::{self, TakenOver};
use crate::volume::{GivenBack, attach, expect};
use anyhow::{Context, anyhow};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::{Channel, Space, SpaceError};
use pagemesh_manage::wire::Content;
use pagemesh_nbd::{ExportOptions, Exports, Limits, Listen, Server};
use pagemesh_volume::Volume;
use std::net::ToSocketAddrs;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How long a new client waits for the size that the manager knows; after
/// that it gets the size known here.
const REFRESH_LIMIT: Duration = Duration::from_millis(500);

/// A volume that looks for its present size whenever a client asks for it.
struct Exported {
    volume: Arc<Volume>,
    refresh: SyncSender<mpsc::Sender<()>>,
}

impl Exported {
    fn new(volume: Volume) -> anyhow::Result<Exported> {
        let volume = Arc::new(volume);
        let (refresh, asked) = mpsc::sync_channel(1);
        let refreshed = Arc::downgrade(&volume);
        std::thread::Builder::new()
            .name("refresh".into())
            .spawn(move || keep_fresh(&refreshed, &asked))?;
        Ok(Exported { volume, refresh })
    }
}

fn keep_fresh(volume: &Weak<Volume>, asked: &Receiver<mpsc::Sender<()>>) {
    while let (Ok(answer), Some(volume)) = (asked.recv(), volume.upgrade()) {
        if let Err(cause) = volume.refresh() {
            tracing::debug!(%cause, "the size may be old");
        }
        // Whoever asked may have stopped waiting.
        let _ = answer.send(());
    }
}

impl Space for Exported {
    fn size_bytes(&self) -> u64 {
        let (answer, answered) = mpsc::channel();
        // While one is under way there is nothing to wait for.
        if self.refresh.try_send(answer).is_ok() {
            let _ = answered.recv_timeout(REFRESH_LIMIT);
        }
        self.volume.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        self.volume.open()
    }
}

/// Serves volumes until it is told to end.
pub fn run(command: &Export) -> anyhow::Result<()> {
    let Export::Nbd {
        volumes,
        socket,
        listen,
        read_only,
        no_keep_awake,
        scrubs,
        transport,
        client,
        until_stdin_ends,
    } = command;
    let listen = match (socket, listen) {
        (Some(path), _) => Listen::Unix(std::path::absolute(path)?),
        (None, Some(address)) => Listen::Tcp(listen_address(address)?),
        (None, None) => anyhow::bail!("name a place: --socket PATH or --listen ADDRESS"),
    };
    let ending = Ending::listen(*until_stdin_ends)?;
    let asked = Asked::listen()?;
    let exports = Exports::new();
    // Before anything is attached: a place in use must not fence a client.
    let limits = Limits {
        may_keep_cpus_awake: !no_keep_awake,
        ..Limits::default()
    };
    let server = Server::bind_with(listen, exports.clone(), limits)?;
    for name in volumes {
        expect(client, name, Content::Blocks)?;
    }
    let (mut attached, mut given_back) = (Vec::new(), Vec::new());
    for name in volumes {
        let exported = Exported::new(attach(client, *transport, name)?)?;
        exported.volume.plan_scrubs(scrubs.plan());
        attached.push(Arc::downgrade(&exported.volume));
        given_back.push(GivenBack(Arc::clone(&exported.volume)));
        let options = ExportOptions {
            read_only: *read_only,
            description: format!("pagemesh volume {name}"),
        };
        exports.add(&name.to_string(), Arc::new(exported), options)?;
    }
    let fenced = Fenced::watch(volumes, &attached, &exports, &ending.teller())?;
    asked.obey(attached)?;
    for name in volumes {
        println!("ready {}", uri(server.listen_address(), name));
    }
    serve(&server, &ending)?;
    for name in volumes {
        exports.remove(&name.to_string());
    }
    fenced.check()
}

/// Which of the exported volumes other clients took over.
struct Fenced {
    exported: usize,
    taken: Mutex<Vec<VolumeName>>,
}

impl Fenced {
    /// Disconnects the clients of each volume that another client takes over, and ends the
    /// export with the last one.
    fn watch(
        volumes: &[VolumeName],
        attached: &[Weak<Volume>],
        exports: &Exports,
        teller: &Teller,
    ) -> anyhow::Result<Arc<Fenced>> {
        let fenced = Arc::new(Fenced {
            exported: volumes.len(),
            taken: Mutex::default(),
        });
        for (name, volume) in volumes.iter().zip(attached) {
            let (fenced, name) = (Arc::clone(&fenced), name.clone());
            let (exports, teller) = (exports.clone(), teller.clone());
            fenced::watch(Weak::clone(volume), move || {
                tracing::warn!(volume = %name, "another client took over; clients are disconnected");
                exports.disconnect(&name.to_string());
                let mut taken = fenced.taken.lock().unwrap_or_else(PoisonError::into_inner);
                taken.push(name);
                if taken.len() == fenced.exported {
                    teller.end();
                }
            })?;
        }
        Ok(fenced)
    }

    /// An error if nothing is left to serve.
    fn check(&self) -> anyhow::Result<()> {
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.len() < self.exported {
            return Ok(());
        }
        let names: Vec<String> = taken.iter().map(VolumeName::to_string).collect();
        let names = names.join(" ");
        Err(TakenOver(format!(
            "another client took over {names}, or an operator detached it, and this export has \
             ended; what it had confirmed is there, unless a copy that lacks it was promoted by \
             force. Export it again to take it back: pagemesh export nbd {names}"
        ))
        .into())
    }
}

fn serve(server: &Server, ending: &Ending) -> anyhow::Result<()> {
    let tell = ending.teller();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let served = server.serve();
            // The other side may be waiting for a signal.
            tell.end();
            served
        });
        ending.wait();
        let stopped = server.stop();
        if stopped.cut_off + stopped.abandoned > 0 {
            tracing::warn!(cut_off = stopped.cut_off, "clients were cut off");
        }
        match serving.join() {
            Ok(served) => Ok(served?),
            Err(_) => anyhow::bail!("the server panicked"),
        }
    })
}

/// The address to listen on that a text as `host:port` names.
pub fn listen_address(address: &str) -> anyhow::Result<std::net::SocketAddr> {
    const WAY_OUT: &str = "write --listen as host:port, as in 127.0.0.1:7071";
    let found = address.to_socket_addrs();
    let mut found =
        found.map_err(|cause| anyhow!("cannot listen on '{address}': {cause}; {WAY_OUT}"))?;
    found
        .next()
        .with_context(|| format!("'{address}' names no address; {WAY_OUT}"))
}

fn uri(place: &Listen, name: &VolumeName) -> String {
    match place {
        Listen::Unix(path) => format!("nbd+unix:///{name}?socket={}", path.display()),
        Listen::Tcp(address) => format!("nbd://{address}/{name}"),
    }
}
