//! What is on a terminal's screen: the guest's output, read as a terminal would read it.
//!
//! The output comes from a guest and may be anything, so nothing in it can be fatal: an emulator that breaks on it is
//! replaced by an empty one, which the program's next drawing fills.

use std::num::NonZeroU16;
use std::panic::{AssertUnwindSafe, catch_unwind};

use api::terminal::{TerminalScreen, TerminalSize};

/// The emulator, and how much of the output it has seen.
pub(super) struct Screen {
    parser: vt100::Parser,
    size: TerminalSize,
    /// Position of the next byte of output.
    pub(super) offset: u64,
}

impl Screen {
    pub(super) fn new(size: TerminalSize) -> Self {
        Self { parser: parser(size), size, offset: 0 }
    }

    /// The screen as it was [drawn](Self::draw) after `offset` bytes of output.
    pub(super) fn drawn(size: TerminalSize, drawing: &str, offset: u64) -> Self {
        let mut screen = Self::new(size);
        screen.process(drawing.as_bytes());
        screen.offset = offset;
        screen
    }

    /// Shows output that begins at `offset`. What is missing before it is no longer kept anywhere.
    pub(super) fn show(&mut self, offset: u64, bytes: &[u8]) {
        self.process(bytes);
        self.offset = offset + bytes.len() as u64;
    }

    pub(super) fn size(&self) -> TerminalSize {
        self.size
    }

    pub(super) fn resize(&mut self, size: TerminalSize) {
        self.size = size;
        let [rows, columns] = sides(size);
        let resized = catch_unwind(AssertUnwindSafe(|| {
            self.parser.screen_mut().set_size(rows, columns);
        }));
        if resized.is_err() {
            self.parser = parser(size);
        }
    }

    /// Bytes that draw it on a terminal of its size, whatever was there before.
    pub(super) fn draw(&self) -> String {
        let screen = self.parser.screen();
        // Full-screen programs have a screen of their own, from which the terminal goes back when they end.
        let which = if screen.alternate_screen() { "\x1b[?1049h" } else { "\x1b[?1049l" };
        format!("{which}{}", screen.state_formatted())
    }

    pub(super) fn text(&self) -> TerminalScreen {
        let screen = self.parser.screen();
        let (cursor_row, cursor_column) = screen.cursor_position();
        let TerminalSize { columns, rows } = self.size;
        TerminalScreen { text: screen.contents(), cursor_row, cursor_column, columns, rows }
    }

    fn process(&mut self, bytes: &[u8]) {
        let parser = &mut self.parser;
        if catch_unwind(AssertUnwindSafe(|| parser.process(bytes))).is_err() {
            tracing::warn!("the emulator broke on a terminal's output; its screen begins anew");
            self.parser = self::parser(self.size);
        }
    }
}

/// An empty emulator. No lines are kept that have left the screen: they are in the output, from any position.
fn parser(size: TerminalSize) -> vt100::Parser {
    let [rows, columns] = sides(size);
    vt100::Parser::new(rows, columns, 0)
}

fn sides(size: TerminalSize) -> [NonZeroU16; 2] {
    [size.rows, size.columns].map(|side| NonZeroU16::new(side).unwrap_or(NonZeroU16::MIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: TerminalSize = TerminalSize { columns: 20, rows: 4 };

    #[test]
    fn a_screen_that_is_drawn_is_the_same_screen() {
        let mut screen = Screen::new(SIZE);
        let output = "one\r\n\x1b[1;31mtwo\x1b[m\r\nthree\r\nfour\r\nfive ü\x1b[2;3H";
        screen.show(0, output.as_bytes());
        assert_eq!(screen.text().text, "two\nthree\nfour\nfive ü");
        let again = Screen::drawn(SIZE, &screen.draw(), screen.offset);
        assert_eq!(again.text(), screen.text());
        assert_eq!((again.text().cursor_row, again.text().cursor_column), (1, 2));
        assert_eq!(again.draw(), screen.draw());
        assert_eq!(again.offset, output.len() as u64);
    }

    #[test]
    fn a_full_screen_programs_screen_is_drawn_as_one() {
        let mut screen = Screen::new(SIZE);
        screen.show(0, b"below\x1b[?1049h\x1b[Habove");
        assert!(screen.draw().starts_with("\x1b[?1049h"));
        assert_eq!(screen.text().text, "above");
        screen.show(screen.offset, b"\x1b[?1049l");
        assert_eq!(screen.text().text, "below");
    }

    /// A cut character and a cut sequence go on with the next piece.
    #[test]
    fn pieces_may_be_cut_anywhere() {
        let output = "ä\x1b[1;32mgrün\x1b[m".as_bytes();
        let mut whole = Screen::new(SIZE);
        whole.show(0, output);
        for cut in 0..output.len() {
            let mut screen = Screen::new(SIZE);
            screen.show(0, &output[..cut]);
            screen.show(cut as u64, &output[cut..]);
            assert_eq!(screen.draw(), whole.draw(), "cut at {cut}");
        }
    }

    #[test]
    fn no_output_and_no_size_breaks_it() {
        let mut screen = Screen::new(SIZE);
        let mut state = 88_172_645_463_325_252_u64;
        for round in 0..400_u16 {
            let bytes: Vec<u8> = (0..200)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    // Mostly what sequences are made of.
                    b"\x1b[;0123456789?hlmABCDHJKLMPSTr@\n\r\x08 x\xc3\xa4\xe4"
                        [usize::try_from(state % 40).unwrap() % 39]
                })
                .collect();
            screen.show(screen.offset, &bytes);
            let side = 2 + round % 30;
            screen.resize(TerminalSize { columns: side, rows: 32 - side + 2 });
            assert_eq!(screen.size().columns, side);
        }
        screen.show(screen.offset, b"\x1bcstill there");
        assert!(screen.text().text.replace('\n', "").contains("still there"));
    }
}
