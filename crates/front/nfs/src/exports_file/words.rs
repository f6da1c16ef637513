//! The words of an exports file, and their places.

use super::ExportsFileCause as Cause;
use std::iter::Peekable;
use std::str::Chars;

/// The place of a word in a file, from 1. Columns are characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TextPosition {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// A word without its quotes and escapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) place: TextPosition,
    pub(super) text: String,
}

/// A mistake and its place.
pub(super) type Mistake = (TextPosition, Cause);

/// Reads the words of lines. See [`super::ExportsFile`] for the grammar.
pub(super) struct WordReader<'a> {
    chars: Peekable<Chars<'a>>,
    place: TextPosition,
}

impl<'a> WordReader<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self {
            chars: text.chars().peekable(),
            place: TextPosition { line: 1, column: 1 },
        }
    }

    /// The words of the next line, with its continuations; none at the end of the text.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<Word>>, Mistake> {
        if self.chars.peek().is_none() {
            return Ok(None);
        }
        let mut words = Vec::new();
        loop {
            let place = self.place;
            match self.chars.peek().copied() {
                None => return Ok(Some(words)),
                Some('\n') => {
                    self.take();
                    return Ok(Some(words));
                }
                Some('#') => self.skip_comment(),
                Some(' ' | '\t' | '\r') => {
                    self.take();
                }
                Some('\\') if self.is_continued() => {
                    self.take();
                    self.take();
                }
                Some(_) => {
                    let text = self.word(place)?;
                    words.push(Word { place, text });
                }
            }
        }
    }

    fn take(&mut self) -> Option<char> {
        let taken = self.chars.next()?;
        match taken {
            '\n' => {
                self.place.line += 1;
                self.place.column = 1;
            }
            _ => self.place.column += 1,
        }
        Some(taken)
    }

    /// A backslash does not continue a comment.
    fn skip_comment(&mut self) {
        while self.chars.peek().is_some_and(|next| *next != '\n') {
            self.take();
        }
    }

    /// Whether a backslash ends the line.
    fn is_continued(&self) -> bool {
        let mut ahead = self.chars.clone();
        ahead.next() == Some('\\') && ahead.next() == Some('\n')
    }

    fn word(&mut self, begin: TextPosition) -> Result<String, Mistake> {
        let mut bytes = Vec::new();
        let mut quoted = None;
        loop {
            let place = self.place;
            match self.chars.peek().copied() {
                None | Some('\n') => break,
                Some(' ' | '\t' | '\r') if quoted.is_none() => break,
                Some('\\') if self.is_continued() => break,
                Some('"') => {
                    self.take();
                    quoted = match quoted {
                        None => Some(place),
                        Some(_) => None,
                    };
                }
                Some('\\') => bytes.push(self.escaped()?),
                Some(other) if other.is_control() && other != '\t' => {
                    return Err((place, Cause::ControlCharacter(other)));
                }
                Some(other) => {
                    self.take();
                    bytes.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes());
                }
            }
        }
        if let Some(place) = quoted {
            return Err((place, Cause::OpenQuote));
        }
        match String::from_utf8(bytes) {
            Ok(text) if text.contains('\0') => Err((begin, Cause::ControlCharacter('\0'))),
            Ok(text) => Ok(text),
            Err(_) => Err((begin, Cause::NotUtf8)),
        }
    }

    /// The byte of a backslash and three octal digits.
    fn escaped(&mut self) -> Result<u8, Mistake> {
        let place = self.place;
        self.take();
        let mut value = 0;
        for _ in 0..3 {
            let digit = self.chars.peek().and_then(|next| next.to_digit(8));
            value = value * 8 + digit.ok_or((place, Cause::Escape))?;
            self.take();
        }
        u8::try_from(value).map_err(|_| (place, Cause::Escape))
    }
}
