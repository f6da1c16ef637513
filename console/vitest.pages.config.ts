import { defineConfig } from "vitest/config";

// One browser and one server at a time: the machine that builds may have two processors.
export default defineConfig({
  test: { include: ["tests/pages/**/*.test.ts"], fileParallelism: false, testTimeout: 60_000, hookTimeout: 60_000 },
});
