"""For tests/manager/web_page: a pool of 1,000 servers with 8 GPUs each, whose lists are made up in the browser, and what
the page does to show it; and a script that looks for text of too little contrast."""
import json

SERVERS, DEVICES, LEASES = 1000, 8, 3000

# Each text that is seen: 4.5 to 1 against what is behind it, as WCAG 2 has it for normal text. Of disabled buttons
# nothing is demanded. Returns what is below.
CONTRAST = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => numbers(colour).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor, parts = numbers(colour);
      if (parts.length === 3 || parts[3] === 1) return colour;
    }
    return matchMedia("(prefers-color-scheme: dark)").matches ? "rgb(0, 0, 0)" : "rgb(255, 255, 255)";
  };
  const faint = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility() || node.closest("noscript, script, :disabled")) continue;
    const [one, other] = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (other + 0.05);
    if (ratio < 4.5) faint.push(`${ratio.toFixed(2)}: ${walk.currentNode.data.trim().slice(0, 40)}`);
  }
  return faint;
})()"""

# In place of the manager. One device's load changes with each look.
LISTS = """(() => {
  const [SERVERS, DEVICES, LEASES] = %s;
  const hex = (number) => number.toString(16).padStart(32, "0");
  const holder = (i) => i %% 2 ? "trainer" : "in use";
  let looks = 0;
  const device = (i, j) => {
    const at = i * DEVICES + j, leased = at < LEASES ? [hex(at)] : [];
    return {server: `node${i}`, ordinal: j, name: "GPU", uuid: `GPU-${at}`, memoryBytes: 85899345920, freeBytes: 0,
            healthy: i !== 996, problem: i === 996 ? "it has fallen off the bus" : "", leases: leased, suspended: [], cordoned: false,
            sample: {ageMs: 1, lastXid: 0, gpuPercent: at === 0 ? looks %% 100 : 50, usedBytes: 1 << 30, temperatureC: 40, powerMilliwatts: 300400}};
  };
  const upTo = (count, make) => Array.from({length: count}, (_, i) => make(i));
  const lists = {
    "/v1/self": () => ({role: "operator", tenant: "", tokens: true, allTenants: true, may: ["look", "change_lease", "cordon"]}),
    "/v1/devices": () => (++looks, {devices: upTo(SERVERS * DEVICES, (at) => device(Math.floor(at / DEVICES), at %% DEVICES))}),
    "/v1/servers": () => ({servers: upTo(SERVERS, (i) => ({name: `node${i}`, alive: i !== 997, absent: i === 999, cordoned: i >= 998,
      cordonReason: "", cordonedBy: "", cordonedSeconds: 0, lastBeatMs: 1, leftOut: []}))}),
    "/v1/leases": () => ({leases: upTo(LEASES, (at) => ({id: hex(at), server: `node${Math.floor(at / DEVICES)}`, state: "active",
      tenant: "alice", holder: holder(at), ageMs: 7200000, devices: [{ordinal: at %% DEVICES, uuid: `GPU-${at}`, memoryBytes: 85899345920}]}))}),
    "/v1/queue": () => ({queue: upTo(500, (i) => ({id: hex(100000 + i), state: "queued", tenant: "bob", holder: "waits", position: i + 1,
      ageMs: 7200000, priority: "normal", resumes: false}))})};
  window.looks = () => looks;
  window.fetch = async (path) => {
    const list = lists[path.split("?")[0]];
    return new Response(JSON.stringify(list ? list() : {error: {code: "none", message: "none", hint: ""}}), {status: list ? 200 : 503});
  };
})();""" % json.dumps([SERVERS, DEVICES, LEASES])

WATCH = """(() => {
  window.touched = 0;
  new MutationObserver((list) => { window.touched += list.length; })
    .observe(document.getElementById("main"), {childList: true, subtree: true, characterData: true, attributes: true});
})()"""


def check(browser, stage):
    page = browser.page(LISTS)
    page.size(1280, 900)
    page.call("Page.navigate", url=f"http://127.0.0.1:{stage.pool.port}/")
    page.until("document.querySelectorAll('.server').length === 1000", "a thousand servers are not shown")
    figure = "document.querySelector('[data-figure=\"%s\"] dd').textContent"
    assert page.evaluate(figure % "GPUs") == str(SERVERS * DEVICES)
    assert page.evaluate(figure % "In use") == str(LEASES)
    assert page.evaluate("document.querySelectorAll('.tile').length") == 0  # all groups are closed
    nodes = page.evaluate("document.querySelectorAll('*').length")
    assert nodes < 30000, nodes
    page.click('[data-server="node0"] .toggle')
    page.until("document.querySelectorAll('.tile').length === 8", "a group does not open")

    # The next looks touch the one load that has changed.
    page.evaluate(WATCH)
    looks = page.evaluate("looks()")
    page.until(f"looks() >= {looks} + 2 && touched > 0", "nobody looks again")
    touched, looked = page.evaluate("[touched, looks()]")
    assert touched <= 6 * (looked - looks), (touched, looked - looks)

    tile = page.evaluate("document.querySelectorAll('.tile')[1].innerText")
    assert all(part in tile for part in ("50 %", "80 GiB of 80 GiB leased", "40 °C", "300 W", "1 GiB occupied", "trainer")), tile
    for state, server in (("out of order", "node996"), ("unreachable", "node997"), ("drained", "node998"), ("absent", "node999")):
        page.evaluate(f"document.getElementById('find-devices').value = {server!r}")
        page.evaluate("document.getElementById('find-devices').dispatchEvent(new Event('input'))")
        page.click(f'[data-server="{server}"] .toggle')
        page.until(f"document.querySelector('[data-server=\"{server}\"]').innerText.includes({state!r})", f"{server} is not {state}")
        page.until("[...document.querySelectorAll('[data-server] .tile')].every((one) => one.dataset.kind === 'out')", server)
    page.evaluate("document.getElementById('find-devices').value = ''")

    page.click("#find-devices")
    page.type("node777")
    page.until("document.querySelectorAll('.server').length === 1", "the filter finds nothing, or too much")
    page.click('[data-server="node777"] .toggle')
    page.until("document.querySelectorAll('.tile').length === 8", "a group that was found does not open")
    assert page.evaluate("document.querySelectorAll('#leases tbody tr').length") == 100
    page.click("#leases div > button")
    page.until("document.querySelectorAll('#leases tbody tr').length === 200", "the table does not grow")
    page.close()
