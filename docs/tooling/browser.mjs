// What axe.mjs and reports.mjs share: headless Chromium, and the findings of axe that matter.
import fs from "node:fs";
import puppeteer from "puppeteer-core";

const axe = fs.readFileSync("node_modules/axe-core/axe.min.js", "utf8");

// Headless Chromium has no mouse, and the theme of the site then makes no code block focusable.
const mouse = "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4";
const more = (process.env.CHROMIUM_ARGS ?? "").split(" ").filter(Boolean);

export const launch = () => puppeteer.launch({
  executablePath: process.env.CHROMIUM,
  args: ["--no-sandbox", "--allow-file-access-from-files", mouse, ...more],
  headless: "shell",
});

/** Sentences on the serious and critical findings; `also`: rules of less impact that count too. */
export async function violations(page, also = []) {
  await page.evaluate(axe);
  return (await page.evaluate(() => axe.run(document))).violations
    .filter(({ id, impact }) => ["serious", "critical"].includes(impact) || also.includes(id))
    .map(({ id, impact, nodes }) => `${impact} ${id} (${nodes.length}): ${nodes[0].html.slice(0, 150)}`);
}
