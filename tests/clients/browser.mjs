// Debian's Chromium, led by lines of JSON on standard input: `{"do": "open", "url": …, "title": …}`, `{"do": "use"}`.
//
// Tells in lines of JSON what it sees: `{"page": title, "status": code}` for each page that comes, `{"opened": …}` once the page of that
// title is there, with all that went wrong on the way; `{"used": …}`: what a page's own fetch, event stream, WebSocket and image
// came to. Nothing here reloads a page.
//
// Environment: `DORMOUSE_CLIENTS`, the folder of npm's packages; `CHROMIUM`.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(`${process.env.DORMOUSE_CLIENTS}/`);
const { chromium } = require('playwright-core');

const tell = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  // Its own sandbox does not work for root; a container's shared memory is too small for it.
  args: ['--no-sandbox', '--disable-dev-shm-usage'],
});
// Tests have certificates of their own.
const page = await browser.newPage({ locale: 'en-GB', ignoreHTTPSErrors: true });

let errors = [];
let hosts = new Set();
page.on('console', (message) => {
  // That the page itself came with 503 is no error in it: the waking page does.
  const itself = message.location().url === page.url() && message.text().includes('status of 503');
  if (message.type() === 'error' && !itself) errors.push(message.text());
});
page.on('pageerror', (error) => errors.push(String(error)));
page.on('requestfailed', (request) => errors.push(`${request.url()}: ${request.failure()?.errorText}`));
page.on('request', (request) => hosts.add(new URL(request.url()).host));
let status;
page.on('response', (response) => {
  if (response.request().isNavigationRequest()) status = response.status();
});
page.on('domcontentloaded', async () => {
  // It may be replaced meanwhile; then the next one is told.
  const title = await page.title().catch(() => undefined);
  if (title !== undefined) tell({ page: title, status });
});

async function open(url, title) {
  errors = [];
  hosts = new Set();
  await page.goto(url, { timeout: 0 });
  await page.waitForFunction((title) => document.title === title, title, { timeout: 0 });
  const [text, protocol] = await page.evaluate(() => [
    document.querySelector('h1').textContent,
    performance.getEntriesByType('navigation')[0].nextHopProtocol,
  ]);
  tell({ opened: { errors, hosts: [...hosts], text, protocol, status } });
}

// In the page, as the app's own scripts do.
async function use() {
  const used = await page.evaluate(async () => {
    const answer = await fetch('/api');
    const events = await new Promise((resolve) => {
      const source = new EventSource('/events');
      const end = (what) => (source.close(), resolve(what));
      source.onmessage = (event) => end(event.data);
      source.onerror = () => end('error');
    });
    const socket = await new Promise((resolve) => {
      const socket = new WebSocket(`${location.origin.replace('http', 'ws')}/ws`);
      socket.onopen = () => socket.send('hello');
      socket.onmessage = (event) => resolve(event.data);
      socket.onerror = () => resolve('error');
    });
    const posted = await fetch('/', { method: 'POST', body: 'a form' });
    const image = await fetch('/picture.png', { mode: 'no-cors' });
    await Promise.all([posted.text(), image.text()]);
    const kind = answer.headers.get('content-type');
    return {
      fetch: { status: answer.status, kind, body: await answer.json() },
      post: posted.status,
      image: image.status,
      events,
      socket,
    };
  });
  tell({ used });
}

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  if (asked.do === 'open') await open(asked.url, asked.title);
  else await use();
}
await browser.close();
