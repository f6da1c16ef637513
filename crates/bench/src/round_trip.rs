//! Time of a round trip over the kernel's TCP, with a request of a page and a short reply: the
//! lower bound for a synchronous copy over loopback.

use crate::error::BenchError;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const REQUEST_BYTES: usize = 4096;
const ANSWER_BYTES: usize = 16;
/// Uncounted round trips at the start: new connections are slow.
const WARM_UP_TRIPS: u32 = 200;

/// The mean of `count` round trips between two threads with blocking calls, on two cores if this
/// process may use two.
pub(crate) fn mean_round_trip(count: u32) -> Result<Duration, BenchError> {
    time_round_trips(count).map_err(BenchError::system("measure a round trip over loopback"))
}

fn time_round_trips(count: u32) -> io::Result<Duration> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    let cores = allowed_cores()?;
    for end in [&client, &server] {
        end.set_nodelay(true)?;
    }
    std::thread::scope(|scope| {
        let (first, last) = (cores[0], cores[cores.len() - 1]);
        scope.spawn(move || -> io::Result<()> {
            pin_to_core(last)?;
            let mut request = [0; REQUEST_BYTES];
            // Ends when the peer closes.
            while server.read_exact(&mut request).is_ok() {
                server.write_all(&[0; ANSWER_BYTES])?;
            }
            Ok(())
        });
        // A thread of its own, so that the caller keeps its CPU affinity.
        let asking = scope.spawn(move || {
            pin_to_core(first)?;
            let mut began = Instant::now();
            for number in 0..WARM_UP_TRIPS + count {
                if number == WARM_UP_TRIPS {
                    began = Instant::now();
                }
                client.write_all(&[1; REQUEST_BYTES])?;
                client.read_exact(&mut [0; ANSWER_BYTES])?;
            }
            Ok(began.elapsed() / count.max(1))
        });
        let gone = |_| io::Error::other("a thread panicked");
        asking.join().map_err(gone)?
    })
}

/// Cores that this process may use; at least one.
fn allowed_cores() -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None::<Pid>)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&core| allowed.is_set(core))
        .collect();
    match cores.is_empty() {
        true => Err(io::Error::other("no core may be used")),
        false => Ok(cores),
    }
}

fn pin_to_core(core: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(core);
    Ok(sched_setaffinity(None, &only)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn round_trip_time_is_positive() {
        let mean = super::mean_round_trip(100).expect("measured");
        assert!(mean.as_nanos() > 100, "{mean:?}");
    }
}
