// axe on every page of the site, in light and dark colours, and a search without a network:
//     make docs-in-browser    (or, after it: CHROMIUM=/usr/bin/chromium node docs/tooling/axe.mjs build/site)
// It fails for a serious or critical finding, a request to a network, and a search that finds nothing. A minute or two.
import fs from "node:fs";
import path from "node:path";
import { launch, violations } from "./browser.mjs";

const site = path.resolve(process.argv[2]);
const browser = await launch();
// Reports are pages of their own (reports.mjs), and 404.html has addresses for a server.
const pages = fs.readdirSync(site, { recursive: true }).filter((name) => name.endsWith(".html") && !/_report|404/.test(name));
let faults = pages.length ? 0 : 1;

const complain = (words) => {
  faults += 1;
  console.log(words);
};

for (const name of pages) {
  const page = await browser.newPage();
  page.on("request", (request) => /^(https?|wss?):/.test(request.url()) && complain(`${name}: asks ${request.url()}`));
  await page.goto(`file://${site}/${name}`, { waitUntil: "load" });
  await page.addStyleTag({ content: "* { transition: none !important }" }); // colours would change slowly
  for (const scheme of ["default", "slate"]) {
    await page.evaluate((value) => document.body.setAttribute("data-md-color-scheme", value), scheme);
    for (const words of await violations(page)) complain(`${name}, ${scheme}: ${words}`);
  }
  await page.close();
}

const page = await browser.newPage();
await page.goto(`file://${site}/index.html`);
await page.type("input.md-search__input", "philox");
const found = await page.waitForSelector(".md-search-result__link", { timeout: 20000 }).catch(() => null);
if (!found) complain("the search finds nothing");
await browser.close();
console.log(`${pages.length} pages, ${faults} faults`);
process.exit(faults ? 1 : 0);
