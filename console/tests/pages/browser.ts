// A browser on the built console before the mock. Each page fails its test if the console of the browser shows an
// error, or if markup from the data was run.

import { mkdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import { test } from "vitest";
import { chromium, type Browser, type BrowserContext, type Page } from "playwright-core";
import { Mock } from "../../mock/server.ts";
import type { Scenario } from "../../mock/world.ts";

const DIST = fileURLToPath(new URL("../../dist", import.meta.url));
const SHOTS = fileURLToPath(new URL("../../../target/console-shots", import.meta.url));
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
export const WIDTHS = [390, 820, 1440] as const;
export const THEMES = ["light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

export interface Opened {
  page: Page;
  mock: Mock;
  context: BrowserContext;
  /** Errors that a test expects, such as refused requests, match one of these. */
  expected: RegExp[];
  /** Fails on errors that the browser has shown. */
  close(): Promise<void>;
}

export interface Wanted {
  scenario?: Scenario;
  role?: "admin" | "operator" | "viewer" | null;
  path?: string;
  width?: number;
  theme?: Theme;
  /** Changes the mock before the page opens. */
  prepare?: (mock: Mock) => void;
}

let browser: Browser | null = null;

export async function launch(): Promise<Browser> {
  const executablePath = process.env["CHROMIUM"] ?? "/usr/bin/chromium";
  browser ??= await chromium.launch({ executablePath, args: ["--no-sandbox", "--force-color-profile=srgb"] });
  return browser;
}

export async function shutDown(): Promise<void> {
  await browser?.close();
  browser = null;
}

export async function open(wanted: Wanted = {}): Promise<Opened> {
  const { scenario = "busy", role = "admin", path = "/", width = 1440, theme = "light" } = wanted;
  const mock = new Mock(scenario, DIST);
  wanted.prepare?.(mock);
  await mock.start();
  const context = await (await launch()).newContext({ viewport: { width, height: width < 600 ? 844 : 900 }, colorScheme: theme, reducedMotion: "reduce", locale: "en-GB", timezoneId: "UTC" });
  if (role) await context.addCookies([{ name: "pagemesh_token", value: `pm_${role}`, url: mock.url, httpOnly: true, sameSite: "Strict" }]);
  const page = await context.newPage();
  const errors: string[] = [];
  const expected: RegExp[] = [];
  page.on("console", (message) => {
    if (message.type() === "error" || message.type() === "warning") errors.push(`${message.text()} ${message.location().url}`);
  });
  page.on("pageerror", (error) => errors.push(String(error)));
  await page.goto(mock.url + path);
  const close = async () => {
    const hacked = await page.evaluate("window.hacked").catch(() => undefined);
    await context.close();
    await mock.stop();
    const unexpected = errors.filter((error) => !expected.some((it) => it.test(error)));
    if (hacked !== undefined) throw new Error("markup from the data was run");
    if (unexpected.length > 0) throw new Error(`the browser's console has errors:\n${unexpected.join("\n")}`);
  };
  return { page, mock, context, expected, close };
}

/** Violations of WCAG 2.2 AA that axe finds. */
export async function violations(page: Page): Promise<string[]> {
  const loaded = await page.evaluate("typeof axe");
  if (loaded === "undefined") await page.evaluate(AXE);
  const run = `axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"] })
    .then((found) => found.violations.map((it) => it.id + ": " + it.nodes.slice(0, 4).map((node) => node.target.join(" ") + " " + (node.any[0]?.message ?? "")).join("; ")))`;
  return page.evaluate<string[]>(run);
}

/** Whether the page is wider than its window, which would scroll sideways. */
export async function overflow(page: Page): Promise<number> {
  return page.evaluate<number>("document.documentElement.scrollWidth - document.documentElement.clientWidth");
}

export async function shoot(page: Page, name: string, width: number, theme: Theme): Promise<void> {
  mkdirSync(SHOTS, { recursive: true });
  await page.screenshot({ path: `${SHOTS}/${name}-${width}-${theme}.png`, fullPage: true });
}

/** A test with a page of its own. It fails also on errors of the browser's console that it does not expect. */
export function check(name: string, wanted: Wanted, run: (page: Page, opened: Opened) => Promise<void>): void {
  test(name, async () => {
    const opened = await open(wanted);
    opened.page.setDefaultTimeout(8000);
    let isDone = false;
    try {
      await run(opened.page, opened);
      isDone = true;
    } finally {
      await opened.close().catch((error: unknown) => {
        if (isDone) throw error;
      });
    }
  });
}
