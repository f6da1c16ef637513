// The pages and their addresses. Pure.

export type Route =
  | { page: "overview" }
  | { page: "bricks" }
  | { page: "brick"; name: string }
  | { page: "volumes" }
  | { page: "volume"; name: string }
  | { page: "files" }
  | { page: "file-system"; name: string }
  | { page: "nfs" }
  | { page: "schedules" }
  | { page: "events" }
  | { page: "tokens" }
  | { page: "unknown"; path: string };

function decode(part: string): string | null {
  try {
    return decodeURIComponent(part);
  } catch {
    return null;
  }
}

/** The page at a path. A path that names nothing is `unknown`, never an error. */
export function parseRoute(path: string): Route {
  const parts = path.split("/").filter((part) => part !== "");
  const [first, second] = parts;
  const name = second === undefined ? null : decode(second);
  if (parts.length === 0) return { page: "overview" };
  if (parts.length === 1) {
    if (first === "bricks" || first === "volumes" || first === "files") return { page: first };
    if (first === "nfs" || first === "schedules" || first === "events" || first === "tokens") return { page: first };
  }
  if (parts.length === 2 && name) {
    if (first === "bricks") return { page: "brick", name };
    if (first === "volumes") return { page: "volume", name };
    if (first === "files") return { page: "file-system", name };
  }
  return { page: "unknown", path };
}

export function brickPath(name: string): string {
  return `/bricks/${encodeURIComponent(name)}`;
}

export function volumePath(name: string, content: string = "blocks"): string {
  return `/${content === "files" ? "files" : "volumes"}/${encodeURIComponent(name)}`;
}

/** The page of an event's subject; null for subjects without one. */
export function subjectPath(subject: { kind: string; name: string }): string | null {
  if (subject.kind === "brick") return brickPath(subject.name);
  if (subject.kind === "volume") return volumePath(subject.name);
  if (subject.kind === "token") return "/tokens";
  return null;
}

/** The query without empty values, as `?a=b`, or nothing. */
export function queryText(values: Record<string, string | number | null | undefined>): string {
  const given = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") given.set(key, String(value));
  }
  const text = given.toString();
  return text === "" ? "" : `?${text}`;
}
