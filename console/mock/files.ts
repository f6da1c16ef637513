// The built console over HTTP, with the headers that the manager sends.

import { existsSync, readFileSync } from "node:fs";
import type { IncomingMessage, ServerResponse } from "node:http";
import { extname, join, normalize } from "node:path";

const TYPES: Record<string, string> = { ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml" };
export const HEADERS: Record<string, string> = {
  "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "no-referrer",
};

export function serveFile(root: string, path: string, request: IncomingMessage, response: ServerResponse): void {
  const named = join(root, normalize(path));
  const isFile = path !== "/" && named.startsWith(root) && existsSync(named) && extname(named) !== "";
  const wantsPage = request.headers.accept?.includes("text/html") ?? false;
  if (!isFile && !wantsPage) {
    response.writeHead(404).end();
    return;
  }
  const file = isFile ? named : join(root, "index.html");
  response.writeHead(200, { ...HEADERS, "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
  response.end(readFileSync(file));
}
