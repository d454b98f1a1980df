// The status page: asks the daemon again and again, and shows what it said last, also while it is
// away. One loop; nothing here changes anything at the daemon.

import { Away, NeedsToken, ask, token } from "./api.js";
import { curveChart, hasCharts, inBytes, inNumbers, inShares, timeChart } from "./charts.js";
import { at, bar, fill, setText } from "./dom.js";
import { age, curveSentence, curveSteps, hitAt, hitRatio, tierNames, together, trouble } from "./facts.js";
import { bytes, bytesPerSecond, clock, count, perSecond, percent, seconds } from "./format.js";

const FAST_MS = 2000; // the report
const SLOW_MS = 10000; // prefixes and curves
const ROWS_MAX = 25; // of a table; the JSON has all
const HOTTEST = 12;

const shown = { report: null, history: null, hottest: [], curves: {}, tenant: "", step: 1 };
const due = { history: 0, slow: 0 };

// --- the loop ---------------------------------------------------------------------------------------

let turns = 0; // what an earlier turn still waits for, such as another tenant's history, is dropped

async function refresh() {
  const turn = ++turns;
  try {
    const report = await ask("/v1/stats");
    if (turn !== turns) return;
    shown.report = report;
    chooseTenant(report.tenants.map(({ name }) => name));
    const got = await askForMore(Date.now());
    if (turn !== turns) return;
    Object.assign(shown, got);
    at("main").hidden = false;
    tell("");
    show();
  } catch (error) {
    if (turn !== turns) return;
    if (error instanceof NeedsToken) showLogin();
    else if (error instanceof Away) tell(awayText(), "away");
    else tell(`The page could not show what the daemon said: ${error.message}`, "away");
  }
}

// What changes more slowly than the report, where it is due.
async function askForMore(now) {
  const of = shown.tenant ? `&tenant=${encodeURIComponent(shown.tenant)}` : "";
  const got = {};
  if (now >= due.history) {
    got.history = await ask(`/v1/history?step=${shown.step}${of}`);
    due.history = now + Math.min(60, 2 * shown.step) * 900;
  }
  if (now >= due.slow) {
    got.hottest = await ask(`/v1/blocks/top?count=${HOTTEST}${of}`);
    got.curves = await ask("/v1/mrc");
    due.slow = now + SLOW_MS;
  }
  return got;
}

let waiting = 0;
async function run() {
  clearTimeout(waiting);
  if (!document.hidden && at("login").hidden) await refresh();
  clearTimeout(waiting);
  waiting = setTimeout(run, FAST_MS);
}

function awayText() {
  if (!shown.report) return "The daemon does not answer. Still trying.";
  return `The daemon does not answer. This is what it said at ${clock(shown.report.now_s, true)}.`;
}

// The state is a live region: it is written only when it changes.
function tell(text, state) {
  const notice = at("notice");
  setText(notice, text);
  notice.hidden = !text;
  document.body.classList.toggle("is-away", state === "away");
  if (state === "away") setState("away");
}

function setState(state) {
  setText(at("state"), state);
  at("state").className = `state ${state.replace(" ", "-")}`;
}

function showLogin() {
  const again = token.get() !== null;
  token.forget();
  at("main").hidden = true;
  at("login").hidden = false;
  setState("locked");
  setText(at("login-error"), again ? "That token opens nothing here." : "");
  at("token").value = "";
  at("token").focus();
}

// --- what it shows ------------------------------------------------------------------------------------

function chooseTenant(names) {
  const choice = at("tenant");
  const wanted = names.length > 1 ? ["", ...names] : [];
  if (choice.dataset.names !== JSON.stringify(wanted)) {
    choice.dataset.names = JSON.stringify(wanted);
    choice.replaceChildren(...wanted.map((name) => new Option(name || "all", name)));
    if (!names.includes(shown.tenant)) shown.tenant = "";
    choice.value = shown.tenant;
  }
  at("tenant-choice").hidden = names.length < 2;
}

function show() {
  const { report } = shown;
  const tenants = report.tenants.filter(({ name }) => !shown.tenant || name === shown.tenant);
  setState(report.is_ready ? "ready" : "not ready");
  setText(at("daemon"),
    `${report.version} · pid ${report.pid} · up ${seconds(report.now_s - report.started_s)}`);
  showNow(together(tenants));
  showTime();
  showCurve(tenants);
  showTables(tenants);
}

function showNow(all) {
  const { history } = shown;
  const last = (field) => history?.[field].at(-1) ?? null;
  const { traffic, ssd } = all;
  setText(at("now-hit"), percent(last("hit_ratio") ?? hitRatio(traffic)));
  setText(at("now-hit-more"), hitRatio(traffic) === null
    ? "nobody has asked yet"
    : `${percent(hitRatio(traffic))} of ${count(traffic.requested || traffic.asked)} since the start`);
  setText(at("now-get"), bytesPerSecond(last("get_bytes_per_s")));
  setText(at("now-get-more"), `${bytes(traffic.loaded_bytes)} since the start`);
  setText(at("now-put"), bytesPerSecond(last("put_bytes_per_s")));
  setText(at("now-put-more"), `${bytes(traffic.stored_bytes)} since the start`);
  setText(at("now-dram"), bytes(all.used));
  setText(at("now-dram-more"),
    `of ${bytes(all.limit)} · ${count(all.blocks)} blocks, ${count(all.pinned)} pinned`);
  bar(at("now-dram-bar"), all.limit ? all.used / all.limit : 0, "DRAM used", `${bytes(all.used)} of ${bytes(all.limit)}`);
  setText(at("now-ssd"), ssd ? bytes(ssd.used) : "none");
  at("now-ssd-bar").hidden = !ssd;
  if (ssd) bar(at("now-ssd-bar"), ssd.capacity ? ssd.used / ssd.capacity : 0, "SSD used", `${bytes(ssd.used)} of ${bytes(ssd.capacity)}`);
  setText(at("now-ssd-more"), !ssd ? "no SSD tier is configured" : ssd.readOnly
    ? `takes no writes: ${ssd.readOnly}`
    : `of ${bytes(ssd.capacity)} · ${count(ssd.blocks)} blocks, ${count(ssd.queue)} to write`);
  setText(at("now-evicted"), perSecond(last("dram_evictions_per_s")));
  setText(at("now-evicted-more"),
    `${count(all.evictions)} blocks${ssd ? `, ${count(ssd.evictions)} from the SSD` : ""}`);
}

function showTime() {
  const { history } = shown;
  if (!history) return;
  at("no-charts").hidden = hasCharts();
  timeChart("chart-hit", "Hit ratio", history,
    [{ name: "hits", field: "hit_ratio", tone: "one" }], percent, inShares);
  timeChart("chart-bytes", "Bytes read and stored", history, [
    { name: "read", field: "get_bytes_per_s", tone: "one" },
    { name: "stored", field: "put_bytes_per_s", tone: "two" }], bytesPerSecond, inBytes);
  timeChart("chart-memory", "Bytes in the tiers", history, [
    { name: "DRAM", field: "dram_used_bytes", tone: "one" },
    { name: "SSD", field: "ssd_used_bytes", tone: "two" }], bytes, inBytes);
  timeChart("chart-evictions", "Evicted blocks", history, [
    { name: "from DRAM", field: "dram_evictions_per_s", tone: "one" },
    { name: "from SSD", field: "ssd_evictions_per_s", tone: "two" }], perSecond, inNumbers);
}

// Of the tenant chosen, or of the one whose curve is made of the most references.
function showCurve(tenants) {
  const [name, of] = tenants.map((each) => [each.name, shown.curves[each.name]?.all])
    .filter(([, curve]) => curve)
    .sort((one, other) => other[1].references - one[1].references)[0] ?? ["", null];
  const [says, more] = curveSentence(of);
  setText(at("curve-says"), shown.report.tenants.length > 1 && name ? `${name}: ${says}` : says);
  setText(at("curve-more"), more);
  at("curve-steps").hidden = !more;
  fill(at("curve-steps"), [
    { title: "DRAM", kind: "name", of: ({ size }) => bytes(size) },
    { title: "Times", kind: "number", of: ({ times }) => (times === 1 ? "now" : `×${times < 1 ? `1/${1 / times}` : times}`) },
    { title: "Hit ratio", kind: "number", of: ({ hit }) => percent(hit) },
  ], curveSteps(of), "Nothing yet.");
  at("chart-curve").hidden = !more;
  if (more) curveChart("chart-curve", of);
}

function showTables(tenants) {
  const isOne = shown.report.tenants.length < 2;
  at("tenants-section").hidden = isOne;
  fill(at("tenants"), TENANT_COLUMNS, tenants, "No tenants.");
  const of = (list, column) => (isOne ? list : [list[0], column, ...list.slice(1)]);
  const named = tenants.flatMap((tenant) => tenant.namespaces.map((each) => ({ ...each, tenant: tenant.name })));
  const spaces = named.sort((one, other) => weight(other) - weight(one));
  cut("spaces", of(SPACE_COLUMNS, TENANT), spaces, "No engine has opened a namespace yet.");
  const clients = tenants.flatMap((tenant) => tenant.clients.map((each) => ({ ...each, tenant: tenant.name })));
  clients.sort((one, other) => other.loaded_bytes + other.bytes_in - one.loaded_bytes - one.bytes_in);
  cut("clients", of(CLIENT_COLUMNS, TENANT), clients, "Nobody is connected.");
  cut("hottest", of(HOT_COLUMNS, TENANT), shown.hottest, "Nothing has been used yet.");
  cut("trouble", TROUBLE_COLUMNS, trouble(tenants, shown.tenant ? {} : shown.report.refused),
    "Nothing: no miss, no refusal, no fault.");
}

const weight = ({ traffic }) => traffic.requested + traffic.asked + traffic.given;

function cut(id, columns, rows, empty) {
  fill(at(id), columns, rows.slice(0, ROWS_MAX), empty);
  const title = at(`${id}-title`);
  title.dataset.name ??= title.textContent;
  const more = rows.length > ROWS_MAX ? `: the first ${ROWS_MAX} of ${count(rows.length)}` : "";
  setText(title, title.dataset.name + more);
}

const TENANT = { title: "Tenant", kind: "text", of: ({ tenant }) => tenant };
const TENANT_COLUMNS = [
  { title: "Tenant", kind: "name", of: ({ name }) => name },
  { title: "Hit ratio", kind: "number", of: ({ traffic }) => percent(hitRatio(traffic)) },
  { title: "At twice the DRAM", kind: "number", of: ({ name }) => {
    const curve = shown.curves[name]?.all;
    return curve?.points.length > 1 ? percent(hitAt(curve, 2 * curve.now_bytes)) : "–";
  } },
  { title: "Asked for", kind: "number", of: ({ traffic }) => count(traffic.requested || traffic.asked) },
  { title: "Read", kind: "number", of: ({ traffic }) => bytes(traffic.loaded_bytes) },
  { title: "Stored", kind: "number", of: ({ traffic }) => bytes(traffic.stored_bytes) },
  { title: "DRAM", kind: "number", of: ({ dram }) => `${bytes(dram.used_bytes)} of ${bytes(dram.limit_bytes)}` },
  { title: "SSD", kind: "number", of: ({ ssd }) => (ssd ? `${bytes(ssd.used_bytes)} of ${bytes(ssd.capacity_bytes)}` : "–") },
  { title: "Evicted", kind: "number", of: ({ dram }) => count(dram.evictions) },
  { title: "Clients", kind: "number", of: ({ clients }) => count(clients.length) },
];
const SPACE_COLUMNS = [
  { title: "Namespace", kind: "name", of: ({ name, id }) => name || id.slice(0, 12) },
  { title: "Model", kind: "text", of: ({ model }) => model || "–" },
  { title: "Hit ratio", kind: "number", of: ({ traffic }) => percent(hitRatio(traffic)) },
  { title: "Asked for", kind: "number", of: ({ traffic }) => count(traffic.requested || traffic.asked) },
  { title: "From SSD", kind: "number", of: ({ traffic }) => count(traffic.hit_ssd || traffic.loaded_ssd) },
  { title: "Read", kind: "number", of: ({ traffic }) => bytes(traffic.loaded_bytes) },
  { title: "Stored", kind: "number", of: ({ traffic }) => bytes(traffic.stored_bytes) },
  { title: "Blocks here", kind: "number", of: ({ blocks }) => count(blocks) },
  { title: "Block", kind: "number", of: (each) => `${bytes(each.block_bytes)}${each.block_tokens ? `, ${each.block_tokens} tokens` : ""}` },
];
const HOT_COLUMNS = [
  { title: "Key", kind: "name code", of: ({ key }) => key },
  { title: "Namespace", kind: "text", of: ({ namespace, number }) => namespace || `#${number}` },
  { title: "Blocks deep", kind: "number", of: ({ depth }) => count(depth) },
  { title: "Tokens", kind: "number", of: ({ tokens }) => count(tokens || null) },
  { title: "Heat", kind: "number", of: ({ heat }) => heat.toFixed(1) },
  { title: "Last used", kind: "number", of: ({ idle_s }) => age(idle_s) },
  { title: "In", kind: "text", of: ({ tiers }) => tierNames(tiers) },
  { title: "Branches", kind: "number", of: ({ children }) => count(children) },
];
const CLIENT_COLUMNS = [
  { title: "Client", kind: "name", of: ({ name, number }) => name || `#${number}` },
  { title: "Process", kind: "text", of: ({ pid, peer }) => `${pid} · ${peer}` },
  { title: "By", kind: "text", of: ({ has_shm }) => (has_shm ? "shared memory" : "TCP") },
  { title: "Since", kind: "number", of: ({ age_s }) => seconds(age_s) },
  { title: "Gets", kind: "number", of: ({ gets }) => count(gets) },
  { title: "Read", kind: "number", of: ({ loaded_bytes }) => bytes(loaded_bytes) },
  { title: "Sent / received", kind: "number", of: (each) => `${bytes(each.bytes_in)} / ${bytes(each.bytes_out)}` },
  { title: "Leases", kind: "number", of: ({ leases, leased_bytes }) => (leases ? `${count(leases)}, ${bytes(leased_bytes)}` : "0") },
];
const TROUBLE_COLUMNS = [
  { title: "What", kind: "name", of: ({ what }) => what },
  { title: "Why", kind: "text", of: ({ reason }) => reason },
  { title: "Times", kind: "number", of: ({ times }) => count(times) },
  { title: "What to do", kind: "text", of: ({ advice }) => advice },
];

// --- what people do -------------------------------------------------------------------------------------

function again() {
  due.history = due.slow = 0;
  run();
}

at("range").addEventListener("change", (event) => {
  shown.step = Number(event.target.value);
  again();
});
at("tenant").addEventListener("change", (event) => {
  shown.tenant = event.target.value;
  again();
});
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(at("token").value.trim());
  at("login").hidden = true;
  again();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.report && show());
document.addEventListener("visibilitychange", () => !document.hidden && run());
run(); // a module: the document is there
