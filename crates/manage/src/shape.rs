//! Shapes: what somebody may wish a volume to look like, and which sizes fit.
//!
//! Pure. A [`Shape`] that exists is a valid one.

use pagemesh_base::layout::{COLUMNS_MAX, LEGS_MAX, SLICE_BYTES_MAX, STRIPE_BYTES};
use pagemesh_base::units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

const PAGE: u64 = PAGE_BYTES as u64;
/// Columns of a stripe, if nobody says: the fewest that stripe.
const COLUMNS_DEFAULT: usize = 2;
/// Copies of a mirror, if nobody says.
const COPIES_DEFAULT: usize = 2;
/// Bytes of the largest volume: offsets stay within what a signed 64-bit file
/// offset of a client can say.
pub const VOLUME_BYTES_MAX: u64 = i64::MAX as u64 / PAGE * PAGE;
/// Addresses of a volume that holds files, for each byte that they may take: the
/// smallest files take eight times theirs, and nothing is moved.
const FILES_SPACE_FACTOR: u64 = 16;
/// The same, of files that may take more than they were made for: spans that are not
/// full may then use the addresses up before the files have taken what they may.
pub const FILES_SPACE_FACTOR_MIN: u64 = 4;
/// Bytes of the smallest volume that holds files.
const FILES_SPACE_BYTES_MIN: u64 = 1 << 30;
/// Bytes that files may take, at most.
pub const FILES_BYTES_MAX: u64 = SLICE_BYTES_MAX / FILES_SPACE_FACTOR;

/// Bytes of a volume whose files may take so many.
#[must_use]
pub fn files_space_bytes(files_bytes: u64) -> u64 {
    (files_bytes.min(FILES_BYTES_MAX) * FILES_SPACE_FACTOR).max(FILES_SPACE_BYTES_MIN)
}

/// How a volume is laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Kind {
    /// One copy, one brick after the other.
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
    /// The word for it.
    pub kind: Kind,
    /// 1 to [`COLUMNS_MAX`].
    pub columns: usize,
    /// 1 to [`LEGS_MAX`].
    pub copies: usize,
}

/// Why a wish has no shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Columns without a stripe.
    #[error("a {0} volume is not striped, so it has no {1} columns")]
    NotStriped(Kind, usize),
    /// Copies without a mirror.
    #[error("a {0} volume is not mirrored, so it has no {1} copies")]
    NotMirrored(Kind, usize),
    /// A stripe over too few or too many.
    #[error("a stripe has 2 to {COLUMNS_MAX} columns, not {0}")]
    Columns(usize),
    /// A mirror of too few or too many.
    #[error("a mirror has 2 to {LEGS_MAX} copies, not {0}")]
    Copies(usize),
    /// Nothing.
    #[error("a volume of 0 bytes can hold nothing; the smallest size is {PAGE} bytes")]
    Zero,
    /// Not whole pages.
    #[error("{asked} bytes are not whole pages of {PAGE} bytes; the nearest sizes are {}", nearest(*asked))]
    Unaligned {
        /// Bytes asked for.
        asked: u64,
    },
    /// More than a volume or its slices can count.
    #[error("{asked} bytes are too large: {what} has at most {most} bytes")]
    TooLarge {
        /// Bytes asked for.
        asked: u64,
        /// What would be too large.
        what: &'static str,
        /// Its limit.
        most: u64,
    },
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Concat => "concat",
            Kind::Stripe => "stripe",
            Kind::Mirror => "mirror",
            Kind::StripeMirror => "stripe+mirror",
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
    /// The same with another number of copies.
    ///
    /// # Errors
    /// When there would be none, or too many.
    pub fn with_copies(self, copies: usize) -> Result<Shape, ShapeError> {
        let striped = matches!(self.kind, Kind::Stripe | Kind::StripeMirror);
        let kind = match (striped, copies) {
            (false, 1) => Kind::Concat,
            (true, 1) => Kind::Stripe,
            (false, 2..=LEGS_MAX) => Kind::Mirror,
            (true, 2..=LEGS_MAX) => Kind::StripeMirror,
            _ => return Err(ShapeError::Copies(copies)),
        };
        Ok(Shape {
            kind,
            copies,
            ..self
        })
    }

    /// Checks a wish; what is not said has a default.
    ///
    /// # Errors
    /// When the numbers do not fit the kind or its limits.
    pub fn new(
        kind: Kind,
        columns: Option<usize>,
        copies: Option<usize>,
    ) -> Result<Shape, ShapeError> {
        let (striped, mirrored) = match kind {
            Kind::Concat => (false, false),
            Kind::Stripe => (true, false),
            Kind::Mirror => (false, true),
            Kind::StripeMirror => (true, true),
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

    /// The size a segment gets: what was asked for, rounded up to whole
    /// stripes. A concatenation may take several slices for it.
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
        if self.kind != Kind::Concat && bytes > reach {
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
        kind: Kind,
        columns: Option<usize>,
        copies: Option<usize>,
        wanted: Option<(usize, usize)>,
    ) {
        let got = Shape::new(kind, columns, copies).map(|shape| (shape.columns, shape.copies));
        assert_eq!(got.as_ref().ok(), wanted.as_ref(), "{got:?}");
    }

    #[test]
    fn shapes_have_defaults_and_limits() {
        check(Kind::Concat, None, None, Some((1, 1)));
        check(Kind::Concat, Some(2), None, None);
        check(Kind::Concat, None, Some(2), None);
        check(Kind::Stripe, None, None, Some((2, 1)));
        check(Kind::Stripe, Some(1), None, None);
        check(
            Kind::Stripe,
            Some(COLUMNS_MAX),
            Some(1),
            Some((COLUMNS_MAX, 1)),
        );
        check(Kind::Stripe, Some(COLUMNS_MAX + 1), None, None);
        check(Kind::Mirror, None, None, Some((1, 2)));
        check(Kind::Mirror, None, Some(0), None);
        check(Kind::Mirror, None, Some(1), None);
        check(Kind::Mirror, None, Some(4), None);
        check(Kind::StripeMirror, Some(4), Some(3), Some((4, 3)));
        check(Kind::StripeMirror, Some(usize::MAX), None, None);
    }

    #[test]
    fn refusals_name_the_nearest_sizes() {
        let mirror = Shape::new(Kind::Mirror, None, None).expect("a shape");
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
        fn a_fit_is_the_least_whole_stripe(asked: u64, shift in 0u32..64, columns in 2usize..=COLUMNS_MAX) {
            let shape = Shape::new(Kind::Stripe, Some(columns), None).expect("a shape");
            let asked = asked >> shift;
            if let Ok(bytes) = shape.fit(asked) {
                prop_assert!(bytes >= asked && bytes - asked < shape.grain_bytes());
                prop_assert_eq!(bytes % shape.grain_bytes(), 0);
                prop_assert!(bytes / columns as u64 <= SLICE_BYTES_MAX);
            }
        }
    }
}
