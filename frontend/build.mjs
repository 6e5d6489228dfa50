// Bundles the page into pentad/view/static and writes the digest of its sources beside it, which a
// test compares: a bundle that does not match its sources is found without node.
import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "pentad", "view", "static");

await build({
  entryPoints: { app: join(here, "src", "main.ts") },
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "iife",
  target: "es2022",
  legalComments: "none",
  outdir: out,
  logLevel: "info",
});
copyFileSync(join(here, "src", "index.html"), join(out, "index.html"));

const sha = (bytes) => createHash("sha256").update(bytes).digest("hex");
const sources = ["package.json", "build.mjs", ...readdirSync(join(here, "src")).map((n) => `src/${n}`)];
const digest = sha(sources.sort().map((n) => `${n} ${sha(readFileSync(join(here, n)))}\n`).join(""));
const built = Object.fromEntries(
  ["app.css", "app.js", "index.html"].map((n) => [n, sha(readFileSync(join(out, n)))]),
);
writeFileSync(join(out, "build.json"), JSON.stringify({ sources: digest, built }, null, 2) + "\n");
