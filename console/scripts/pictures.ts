// Takes the pictures of docs/operations/console.md, before the mock: npm run pictures.

import { fileURLToPath } from "node:url";
import { open, shutDown } from "../tests/pages/browser.ts";

const DOCS = fileURLToPath(new URL("../../docs/operations", import.meta.url));
const PICTURES = [
  { name: "console-overview", path: "/", theme: "light", shows: "Busiest volumes", height: 760 },
  { name: "console-volume", path: "/volumes/pg-ledger", theme: "dark", shows: "Where the time goes", height: 760 },
] as const;

for (const { name, path, theme, shows, height } of PICTURES) {
  const { page, close } = await open({ path, theme, role: "operator" });
  await page.setViewportSize({ width: 1240, height });
  await page.getByText(shows).first().waitFor();
  await page.locator(".chart canvas").first().waitFor();
  await page.waitForTimeout(300);
  await page.screenshot({ path: `${DOCS}/${name}.png` });
  await close();
}
await shutDown();
