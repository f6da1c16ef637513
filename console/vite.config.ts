import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The manager serves the files with `default-src 'self'`: no inline script, style or data URL may be in them.
export default defineConfig({
  plugins: [svelte()],
  build: {
    assetsInlineLimit: 0,
    modulePreload: false,
    cssCodeSplit: false,
    target: "es2022",
    cssTarget: ["chrome123", "firefox128", "safari17.5"],
    rollupOptions: {
      output: {
        entryFileNames: "assets/console-[hash].js",
        chunkFileNames: "assets/part-[hash].js",
        assetFileNames: "assets/[name]-[hash][extname]",
      },
    },
  },
  server: { proxy: { "/api": "http://127.0.0.1:7070" } },
});
