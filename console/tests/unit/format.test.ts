import { describe, expect, test } from "vitest";
import { ago, bytes, commandSize, count, duration, latency, moment, parseSize, percent, plural, roughDuration, sentence, share } from "../../src/text/format.ts";

test.each([[7, "7 s"], [59, "59 s"], [602, "10 min"], [7199, "1 h"], [200_000, "2 d"]])("the rough duration of %d s", (seconds, text) => {
  expect(roughDuration(seconds)).toBe(text);
});

describe("numbers for people", () => {
  test.each([
    [0, "0 B"], [1023, "1023 B"], [1024, "1 KiB"], [1536, "1.50 KiB"], [1024 * 1024 - 1, "1.00 MiB"], [2 ** 40 * 2, "2 TiB"],
    [2 ** 63, "8 EiB"], [null, "–"], [undefined, "–"], [Number.NaN, "–"],
  ])("bytes of %s", (value, text) => expect(bytes(value)).toBe(text));

  test.each([[0, "0"], [9999, "9999"], [10_000, "10 k"], [12_345, "12.3 k"], [1_284_113, "1.28 M"], [5e9, "5 G"], [0.25, "0.25"], [null, "–"]])(
    "count of %s", (value, text) => expect(count(value)).toBe(text));

  test.each([[0, "0 ns"], [999, "999 ns"], [1000, "1 µs"], [38_412, "38.4 µs"], [999_499, "999 µs"], [999_600, "1.00 ms"], [2.5e9, "2.50 s"], [null, "–"]])(
    "latency of %s", (value, text) => expect(latency(value)).toBe(text));

  test.each([[0, "0 s"], [59.4, "59 s"], [60, "1 min"], [61, "1 min 1 s"], [3600, "1 h"], [3660, "1 h 1 min"], [90_000, "1 d 1 h"], [-5, "0 s"], [null, "–"]])(
    "duration of %s", (value, text) => expect(duration(value)).toBe(text));

  test("an age is never in the future", () => {
    expect(ago(-3)).toBe("just now");
    expect(ago(75)).toBe("1 min 15 s ago");
    expect(ago(null)).toBe("never");
  });

  test("shares stay within a whole", () => {
    expect(share(5, 0)).toBe(0);
    expect(share(9, 4)).toBe(100);
    expect(percent(1, 1000)).toBe("<1 %");
    expect(percent(999, 1000)).toBe("99 %");
  });

  test("words", () => {
    expect(plural(1, "copy", "copies")).toBe("1 copy");
    expect(plural(0, "copy", "copies")).toBe("0 copies");
    expect(moment(Number.NaN)).toBe("–");
  });
});

describe("sizes from people", () => {
  test.each([
    ["100G", 100 * 2 ** 30], ["1.5 TiB", 1.5 * 2 ** 40], ["4096", 4096], [" 2 mb ", 2 * 2 ** 20], ["10g", 10 * 2 ** 30],
    ["", null], ["-1G", null], ["1e9", null], ["G", null], ["99999999P", null], ["1GG", null],
  ])("%s", (text, value) => expect(parseSize(text)).toBe(value));

  test.each([[2 ** 30, "1G"], [1536 * 2 ** 20, "1536M"], [4096, "4K"], [4097, "4097"]])("the command line's form of %s", (value, text) => {
    expect(commandSize(value)).toBe(text);
    expect(parseSize(text)).toBe(value);
  });
});

describe("messages of the manager", () => {
  test.each([["close a page", "Close a page."], ["Is it?", "Is it?"], ["", ""], [" no brick has room. ", "No brick has room."]])(
    "%s", (text, shown) => expect(sentence(text)).toBe(shown));
});
