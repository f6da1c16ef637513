import { describe, expect, test } from "vitest";
import { nextLink } from "../../src/api/client.ts";
import { brickPath, parseRoute, queryText, subjectPath, volumePath } from "../../src/text/route.ts";

describe("addresses", () => {
  test.each(["/", "/bricks", "/volumes", "/files", "/events", "/tokens"])("%s is a page", (path) => {
    expect(parseRoute(path).page).toBe(path === "/" ? "overview" : path.slice(1));
  });

  test.each(["/nothing", "/volumes/a/b", "/volumes/%E0%A4%A", "/events/3", "/api"])("%s is unknown", (path) => {
    expect(parseRoute(path)).toEqual({ page: "unknown", path });
  });

  test.each(["a", "a.b-c_d", "%", "a/b", "<img>", "ü"])("the name %s survives its address", (name) => {
    expect(parseRoute(volumePath(name))).toEqual({ page: "volume", name });
    expect(parseRoute(volumePath(name, "files"))).toEqual({ page: "file-system", name });
    expect(parseRoute(brickPath(name))).toEqual({ page: "brick", name });
  });

  test("events lead to their subjects", () => {
    expect(subjectPath({ kind: "brick", name: "b 1" })).toBe("/bricks/b%201");
    expect(subjectPath({ kind: "manager", name: "manager" })).toBeNull();
  });

  test("empty values leave the query", () => {
    expect(queryText({ a: "", b: null, c: undefined, d: 0, e: "x&y" })).toBe("?d=0&e=x%26y");
    expect(queryText({})).toBe("");
  });

  test.each([
    ['</api/v1/volumes?after=b&limit=2>; rel="next"', "/api/v1/volumes?after=b&limit=2"],
    ['</a>; rel="prev", </b>; rel="next"', "/b"], ['</a>; rel="prev"', null], ["nonsense", null], [null, null],
  ])("the next page of %s", (header, target) => expect(nextLink(header)).toBe(target));
});
