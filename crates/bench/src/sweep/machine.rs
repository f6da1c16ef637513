//! CPU time of the whole machine, as the kernel counts it in `/proc/stat` (proc(5)): in ticks,
//! usually of 10 ms, so short spans are coarse.

use std::fs;

/// Ticks of all cores since the start of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CpuTicks {
    busy: u64,
    system: u64,
    all: u64,
}

/// CPU use between two readings, of all cores together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct CpuShare {
    /// User and system time.
    pub busy_percent: f64,
    /// System time alone: the kernel, with its interrupts.
    pub system_percent: f64,
}

impl CpuTicks {
    pub(crate) fn now() -> Option<CpuTicks> {
        parse_stat(&fs::read_to_string("/proc/stat").ok()?)
    }

    /// `None` if no tick has passed.
    pub(crate) fn share_since(&self, before: &CpuTicks) -> Option<CpuShare> {
        let all = self.all.checked_sub(before.all).filter(|all| *all > 0)?;
        let percent = |now: u64, then: u64| now.saturating_sub(then) as f64 / all as f64 * 100.0;
        Some(CpuShare {
            busy_percent: percent(self.busy, before.busy),
            system_percent: percent(self.system, before.system),
        })
    }
}

/// The first line: user, nice, system, idle, iowait, irq, softirq, steal. The fields behind them
/// are part of user and nice. Stolen time counts as idle here.
fn parse_stat(stat: &str) -> Option<CpuTicks> {
    let fields = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks = fields.split_ascii_whitespace().take(8).map(str::parse);
    let ticks: Vec<u64> = ticks.collect::<Result<_, _>>().ok()?;
    let [user, nice, system, idle, iowait, irq, softirq, steal] = *ticks.first_chunk()?;
    let system = system + irq + softirq;
    let busy = user + nice + system;
    Some(CpuTicks {
        busy,
        system,
        all: busy + idle + iowait + steal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_shares_are_of_all_ticks() {
        let before = parse_stat("cpu  100 0 50 800 10 5 5 30 7 0\ncpu0 1 1").expect("a reading");
        let after = parse_stat("cpu  130 10 60 840 10 5 15 30 7 0\n").expect("a reading");
        let share = after.share_since(&before).expect("ticks have passed");
        assert_eq!((share.busy_percent, share.system_percent), (60.0, 20.0));
        assert_eq!(before.share_since(&before), None);
        assert_eq!(before.share_since(&after), None);
        assert!(CpuTicks::now().is_some());
    }

    #[test]
    fn malformed_stat_line_is_refused() {
        for text in [
            "",
            "cpu0 1 2 3 4 5 6 7 8",
            "cpu  1 2 3",
            "cpu  1 2 x 4 5 6 7 8",
        ] {
            assert_eq!(parse_stat(text), None, "{text}");
        }
    }
}
