//! Shapes: the layouts that a volume may have, and the sizes that fit them.
//!
//! Pure. A [`Shape`] that exists is a valid one.

use pagemesh_base::layout::{COLUMNS_MAX, LEGS_MAX, SLICE_BYTES_MAX, STRIPE_BYTES};
use pagemesh_base::units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

const PAGE: u64 = PAGE_BYTES as u64;
/// Default columns of a stripe: the minimum.
const COLUMNS_DEFAULT: usize = 2;
/// Default copies of a mirror.
const COPIES_DEFAULT: usize = 2;
/// Bytes of the largest volume: offsets fit in the signed 64-bit file offset of a client.
pub const VOLUME_BYTES_MAX: u64 = i64::MAX as u64 / PAGE * PAGE;
/// Bytes of address space for each byte of the limit of a volume with files. The smallest files
/// take eight times their bytes, and the file system moves no file.
const FILES_SPACE_FACTOR: u64 = 16;
/// The least address space for each byte after the limit of the files was raised. Partly filled
/// spans may then use up the address space before the files reach their limit.
pub const FILES_SPACE_FACTOR_MIN: u64 = 4;
/// Bytes of the smallest volume that holds files.
const FILES_SPACE_BYTES_MIN: u64 = 1 << 30;
/// The highest limit of all files together.
pub const FILES_BYTES_MAX: u64 = SLICE_BYTES_MAX / FILES_SPACE_FACTOR;

/// Bytes of address space for files with this limit.
#[must_use]
pub fn files_space_bytes(files_bytes: u64) -> u64 {
    (files_bytes.min(FILES_BYTES_MAX) * FILES_SPACE_FACTOR).max(FILES_SPACE_BYTES_MIN)
}

/// How a volume is laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum LayoutKind {
    /// One copy, on one brick after the other.
    #[serde(rename = "concat")]
    Concat,
    /// One copy, spread over columns.
    #[serde(rename = "stripe")]
    Stripe,
    /// Two or three copies.
    #[default]
    #[serde(rename = "mirror")]
    Mirror,
    /// Columns of two or three copies each.
    #[serde(rename = "stripe+mirror")]
    StripeMirror,
}

/// A valid combination of columns and copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// The kind of layout.
    pub kind: LayoutKind,
    /// 1 to [`COLUMNS_MAX`].
    pub columns: usize,
    /// 1 to [`LEGS_MAX`].
    pub copies: usize,
}

/// The reason why a request has no valid shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Columns without a stripe.
    #[error("a {0} volume is not striped, so it has no {1} columns")]
    NotStriped(LayoutKind, usize),
    /// Copies without a mirror.
    #[error("a {0} volume is not mirrored, so it has no {1} copies")]
    NotMirrored(LayoutKind, usize),
    /// A stripe with too few or too many columns.
    #[error("a stripe has 2 to {COLUMNS_MAX} columns, not {0}")]
    Columns(usize),
    /// A mirror with too few or too many copies.
    #[error("a mirror has 2 to {LEGS_MAX} copies, not {0}")]
    Copies(usize),
    /// A size of zero.
    #[error("a volume of 0 bytes can hold nothing; the smallest size is {PAGE} bytes")]
    Zero,
    /// A size that is not a multiple of pages.
    #[error("{asked} bytes are not whole pages of {PAGE} bytes; the nearest sizes are {}", nearest(*asked))]
    Unaligned {
        /// Bytes asked for.
        asked: u64,
    },
    /// A size above the limit of a volume or of its slices.
    #[error("{asked} bytes are too large: {what} has at most {most} bytes")]
    TooLarge {
        /// Bytes asked for.
        asked: u64,
        /// The limited thing.
        what: &'static str,
        /// Its limit.
        most: u64,
    },
}

impl std::fmt::Display for LayoutKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LayoutKind::Concat => "concat",
            LayoutKind::Stripe => "stripe",
            LayoutKind::Mirror => "mirror",
            LayoutKind::StripeMirror => "stripe+mirror",
        })
    }
}

fn nearest(asked: u64) -> String {
    let below = asked / PAGE * PAGE;
    match (below, below.checked_add(PAGE)) {
        (0, above) => format!("{}", above.unwrap_or(PAGE)),
        (below, None) => format!("{below}"),
        (below, Some(above)) => format!("{below} and {above}"),
    }
}

impl Shape {
    /// The shape with another number of copies.
    ///
    /// # Errors
    /// When the number is zero or too large.
    pub fn with_copies(self, copies: usize) -> Result<Shape, ShapeError> {
        let striped = matches!(self.kind, LayoutKind::Stripe | LayoutKind::StripeMirror);
        let kind = match (striped, copies) {
            (false, 1) => LayoutKind::Concat,
            (true, 1) => LayoutKind::Stripe,
            (false, 2..=LEGS_MAX) => LayoutKind::Mirror,
            (true, 2..=LEGS_MAX) => LayoutKind::StripeMirror,
            _ => return Err(ShapeError::Copies(copies)),
        };
        Ok(Shape {
            kind,
            copies,
            ..self
        })
    }

    /// Checks a requested shape; missing numbers take their defaults.
    ///
    /// # Errors
    /// When the numbers do not fit the kind, or exceed its limits.
    pub fn new(
        kind: LayoutKind,
        columns: Option<usize>,
        copies: Option<usize>,
    ) -> Result<Shape, ShapeError> {
        let (striped, mirrored) = match kind {
            LayoutKind::Concat => (false, false),
            LayoutKind::Stripe => (true, false),
            LayoutKind::Mirror => (false, true),
            LayoutKind::StripeMirror => (true, true),
        };
        let columns = match (striped, columns) {
            (false, None | Some(1)) => 1,
            (false, Some(columns)) => return Err(ShapeError::NotStriped(kind, columns)),
            (true, columns) => columns.unwrap_or(COLUMNS_DEFAULT),
        };
        let copies = match (mirrored, copies) {
            (false, None | Some(1)) => 1,
            (false, Some(copies)) => return Err(ShapeError::NotMirrored(kind, copies)),
            (true, copies) => copies.unwrap_or(COPIES_DEFAULT),
        };
        if striped && !(2..=COLUMNS_MAX).contains(&columns) {
            return Err(ShapeError::Columns(columns));
        }
        if mirrored && !(2..=LEGS_MAX).contains(&copies) {
            return Err(ShapeError::Copies(copies));
        }
        Ok(Shape {
            kind,
            columns,
            copies,
        })
    }

    /// The bytes of a segment are a multiple of this.
    #[must_use]
    pub fn grain_bytes(&self) -> u64 {
        match self.columns {
            1 => PAGE,
            columns => STRIPE_BYTES * columns as u64,
        }
    }

    /// The size of a segment: the requested bytes, rounded up to whole stripes. A concatenation may
    /// use several slices.
    ///
    /// # Errors
    /// When it is zero, not whole pages, or too large.
    pub fn fit(&self, asked: u64) -> Result<u64, ShapeError> {
        if asked == 0 {
            return Err(ShapeError::Zero);
        }
        if !asked.is_multiple_of(PAGE) {
            return Err(ShapeError::Unaligned { asked });
        }
        let too_large = |what, most| ShapeError::TooLarge { asked, what, most };
        let bytes = asked
            .checked_next_multiple_of(self.grain_bytes())
            .filter(|&bytes| bytes <= VOLUME_BYTES_MAX)
            .ok_or_else(|| too_large("a volume", VOLUME_BYTES_MAX))?;
        let reach = SLICE_BYTES_MAX * self.columns as u64;
        if self.kind != LayoutKind::Concat && bytes > reach {
            return Err(too_large("a segment of this shape", reach));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[track_caller]
    fn check(
        kind: LayoutKind,
        columns: Option<usize>,
        copies: Option<usize>,
        wanted: Option<(usize, usize)>,
    ) {
        let got = Shape::new(kind, columns, copies).map(|shape| (shape.columns, shape.copies));
        assert_eq!(got.as_ref().ok(), wanted.as_ref(), "{got:?}");
    }

    #[test]
    fn shapes_have_defaults_and_limits() {
        check(LayoutKind::Concat, None, None, Some((1, 1)));
        check(LayoutKind::Concat, Some(2), None, None);
        check(LayoutKind::Concat, None, Some(2), None);
        check(LayoutKind::Stripe, None, None, Some((2, 1)));
        check(LayoutKind::Stripe, Some(1), None, None);
        check(
            LayoutKind::Stripe,
            Some(COLUMNS_MAX),
            Some(1),
            Some((COLUMNS_MAX, 1)),
        );
        check(LayoutKind::Stripe, Some(COLUMNS_MAX + 1), None, None);
        check(LayoutKind::Mirror, None, None, Some((1, 2)));
        check(LayoutKind::Mirror, None, Some(0), None);
        check(LayoutKind::Mirror, None, Some(1), None);
        check(LayoutKind::Mirror, None, Some(4), None);
        check(LayoutKind::StripeMirror, Some(4), Some(3), Some((4, 3)));
        check(LayoutKind::StripeMirror, Some(usize::MAX), None, None);
    }

    #[test]
    fn refusals_name_the_nearest_sizes() {
        let mirror = Shape::new(LayoutKind::Mirror, None, None).expect("a shape");
        let said = |asked| mirror.fit(asked).expect_err("refused").to_string();
        assert!(said(5000).ends_with("4096 and 8192"), "{}", said(5000));
        assert!(said(1).ends_with("are 4096"), "{}", said(1));
        assert!(
            said(u64::MAX).contains("18446744073709547520"),
            "{}",
            said(u64::MAX)
        );
        assert!(said(0).contains("4096"));
        assert!(said(u64::MAX - 4095).contains("too large"));
        assert!(said(SLICE_BYTES_MAX + PAGE).contains("too large"));
    }

    proptest! {
        #[test]
        fn fitted_size_is_smallest_whole_stripe(asked: u64, shift in 0u32..64, columns in 2usize..=COLUMNS_MAX) {
            let shape = Shape::new(LayoutKind::Stripe, Some(columns), None).expect("a shape");
            let asked = asked >> shift;
            if let Ok(bytes) = shape.fit(asked) {
                prop_assert!(bytes >= asked && bytes - asked < shape.grain_bytes());
                prop_assert_eq!(bytes % shape.grain_bytes(), 0);
                prop_assert!(bytes / columns as u64 <= SLICE_BYTES_MAX);
            }
        }
    }
}
