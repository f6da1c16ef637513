//! Decodes numbers from the front of a byte slice, and never reads beyond its end.

/// The bytes not read yet.
pub(crate) struct FieldReader<'a>(&'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> FieldReader<'a> {
        FieldReader(bytes)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// The bytes not read yet.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Reads entries of one size until no byte is left; none if the last entry is cut.
    pub(crate) fn list<T>(
        mut self,
        one: impl Fn(&mut FieldReader<'a>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let mut entries = Vec::new();
        while !self.0.is_empty() {
            entries.push(one(&mut self)?);
        }
        Some(entries)
    }
}
