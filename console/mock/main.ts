// Serves the built console with an invented cluster: npm run mock [SCENARIO] [PORT]. Tokens: pm_admin, pm_operator, pm_viewer.

import { fileURLToPath } from "node:url";
import { Mock } from "./server.ts";
import type { Scenario } from "./world.ts";

const mock = new Mock((process.argv[2] ?? "busy") as Scenario, fileURLToPath(new URL("../dist", import.meta.url)));
await mock.start(Number(process.argv[3] ?? 7070));
console.log(`ready ${mock.url}`);
