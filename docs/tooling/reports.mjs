// Report pages in headless Chromium, at three widths, in light and dark colours:
//     make docs-in-browser    (looks at docs/results; for others, after it:)
//     CHROMIUM=/usr/bin/chromium node docs/tooling/reports.mjs docs/results runs/mine/report.html [--pictures FOLDER]
// It fails for a page that is wider than its window, an error in the console, a request to a network, a finding of axe, and a tab stop
// without a name or a visible focus. `--pictures` keeps the whole page as a PNG of each width and colour. A few seconds a page.
import fs from "node:fs";
import path from "node:path";
import { launch, violations } from "./browser.mjs";

const WIDTHS = [400, 800, 1600], SCHEMES = ["light", "dark"], HEIGHT = 1000;
const args = process.argv.slice(2), at = args.indexOf("--pictures");
const pictures = at < 0 ? null : args.splice(at, 2)[1];
const pages = args.flatMap((name) => !fs.statSync(name).isDirectory() ? [name]
  : fs.readdirSync(name).filter((file) => file.endsWith(".html")).map((file) => path.join(name, file)));
if (pictures) fs.mkdirSync(pictures, { recursive: true });
const browser = await launch();
let faults = pages.length ? 0 : 1;

const complain = (words) => {
  faults += 1;
  console.log(words);
};

/** Of each element that Tab reaches, in order: its beginning, its name, and whether its focus shows. */
async function tabStops(page) {
  const stops = [];
  for (;;) {
    await page.keyboard.press("Tab");
    const stop = await page.evaluate(() => {
      const here = document.activeElement;
      if (here === document.body || here.dataset.seen) return null;
      here.dataset.seen = "yes";
      const by = (here.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "");
      const name = here.getAttribute("aria-label") || by.join(" ").trim() || here.labels?.[0]?.textContent || here.textContent;
      const { outlineStyle, outlineWidth } = getComputedStyle(here);
      const shows = outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
      return { html: here.cloneNode(false).outerHTML.slice(0, 120), name: name.trim(), shows };
    });
    if (!stop) return stops;
    stops.push(stop);
  }
}

for (const name of pages) {
  const page = await browser.newPage();
  const said = (words) => complain(`${name}: ${words}`);
  page.on("console", (message) => ["error", "warn"].includes(message.type()) && said(`console: ${message.text()}`));
  page.on("pageerror", (error) => said(`script: ${error.message}`));
  page.on("request", (request) => /^(https?|wss?):/.test(request.url()) && said(`asks ${request.url()}`));

  for (const width of WIDTHS) {
    await page.setViewport({ width, height: HEIGHT });
    for (const scheme of SCHEMES) {
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.goto(`file://${path.resolve(name)}`, { waitUntil: "load" });
      const place = `${width} px, ${scheme}`;
      const wide = await page.evaluate(() => document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth);
      if (wide > 0) said(`${place}: ${wide} px wider than the window`);
      if (pictures) {
        const file = `${name.replace(/\.html$/, "").split(path.sep).slice(-2).join("-")}-${width}-${scheme}.png`;
        await page.screenshot({ path: path.join(pictures, file), fullPage: true });
      }
      for (const words of await violations(page, ["heading-order", "region", "page-has-heading-one"])) said(`${place}: ${words}`);
    }
  }
  for (const { html, name: label, shows } of await tabStops(page)) {
    if (!label) said(`a tab stop without a name: ${html}`);
    if (!shows) said(`a tab stop whose focus does not show: ${html}`);
  }
  await page.close();
}
await browser.close();
console.log(`${pages.length} pages, ${faults} faults`);
process.exit(faults ? 1 : 0);
