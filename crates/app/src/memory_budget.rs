//! The memory that a brick takes for the data pages of a pool on a disk.

use pagemesh_base::units::{PAGE_BYTES, Size};
use pagemesh_brick::disk_file::MEMORY_BUDGET_MIN;
use pagemesh_brick::resource_limits;
use std::fmt;
use std::str::FromStr;

/// The largest default.
const MEMORY_BUDGET_DEFAULT_MAX: u64 = 4 << 30;
/// The default is this part of the machine's memory (one eighth).
const MEMORY_BUDGET_DIVISOR: u64 = 8;

/// Bytes of memory, at least [`MEMORY_BUDGET_MIN`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget(usize);

impl MemoryBudget {
    /// The budget of each of `bricks` bricks on this machine.
    pub fn of_each(bricks: u32) -> MemoryBudget {
        let memory_bytes = resource_limits::machine_memory().map_or(0, |(all, _)| all);
        MemoryBudget::share(memory_bytes, bricks)
    }

    fn share(memory_bytes: u64, bricks: u32) -> MemoryBudget {
        let of_all = (memory_bytes / MEMORY_BUDGET_DIVISOR).min(MEMORY_BUDGET_DEFAULT_MAX);
        let each = of_all / u64::from(bricks.max(1));
        // Whole pages, so that the text is short.
        let each = usize::try_from(each).unwrap_or(usize::MAX) / PAGE_BYTES * PAGE_BYTES;
        MemoryBudget(each.max(MEMORY_BUDGET_MIN))
    }

    /// A budget of these bytes, or the least.
    pub fn at_least(bytes: u64) -> MemoryBudget {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        MemoryBudget(bytes.max(MEMORY_BUDGET_MIN))
    }

    /// The budget in bytes.
    pub fn bytes(self) -> usize {
        self.0
    }
}

impl FromStr for MemoryBudget {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryBudget, String> {
        let size: Size = text.parse().map_err(|cause| format!("{cause}"))?;
        let bytes = usize::try_from(size.0).unwrap_or(usize::MAX);
        if bytes < MEMORY_BUDGET_MIN {
            let least = Size(MEMORY_BUDGET_MIN as u64);
            return Err(format!(
                "{size} is too little memory for the pages of a disk; use at least {least}"
            ));
        }
        Ok(MemoryBudget(bytes))
    }
}

impl fmt::Display for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Size(self.0 as u64).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_an_eighth_within_bounds() {
        let share = |memory, bricks| MemoryBudget::share(memory, bricks).bytes() as u64;
        assert_eq!(share(16 << 30, 1), 2 << 30);
        assert_eq!(share(16 << 30, 4), 512 << 20);
        assert_eq!(share(1 << 40, 1), MEMORY_BUDGET_DEFAULT_MAX);
        assert_eq!(share(1 << 40, 4), MEMORY_BUDGET_DEFAULT_MAX / 4);
        assert_eq!(share(64 << 20, 1), MEMORY_BUDGET_MIN as u64);
        assert_eq!(share(0, 0), MEMORY_BUDGET_MIN as u64);
    }

    #[test]
    fn budget_below_the_minimum_is_refused() {
        assert_eq!(
            "16M".parse::<MemoryBudget>().map(|it| it.to_string()),
            Ok("16M".into())
        );
        let refused = "15M".parse::<MemoryBudget>().expect_err("too little");
        assert!(refused.contains("at least 16M"), "{refused}");
        assert!("much".parse::<MemoryBudget>().is_err());
    }
}
