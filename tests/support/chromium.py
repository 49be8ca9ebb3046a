"""A headless Chromium, driven by the DevTools protocol over two pipes: no driver program, no port and no package of
Python's beyond its own."""
import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable")
PATIENCE = 60  # seconds; one answer takes a hundredth


def program():
    """None: there is none."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), None)


class Failed(AssertionError):
    pass


class Browser:
    def __init__(self, folder):
        (commands, self._out), (self._in, answers) = os.pipe(), os.pipe()
        words = [program(), "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                 f"--user-data-dir={folder}", "about:blank"]
        self._log = open(os.path.join(folder, "log"), "wb")
        self._process = subprocess.Popen(["/bin/sh", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "sh", *words],
                                         pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        os.close(commands), os.close(answers)
        self._rest, self._number, self.events = b"", 0, []

    def call(self, method, session=None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise Failed(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self, until, what):
        """The next message; events are kept."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise Failed(f"the browser does not answer {what}")
            self._rest += part
        text, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def page(self, before=""):
        """before: a script that runs before the page's own."""
        return Page(self, before)

    def close(self):
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._out), os.close(self._in)
        self._log.close()


class Page:
    def __init__(self, browser, before):
        self.browser = browser
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        if before:
            self.call("Page.addScriptToEvaluateOnNewDocument", source=before)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def events(self, method):
        return [one["params"] for one in self.browser.events if one["method"] == method and one.get("sessionId") == self.session]

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)

    def size(self, width, height, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def colours(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme},
                                                          {"name": "prefers-reduced-motion", "value": "reduce"}])

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise Failed(f"{script}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def until(self, script, what):
        until = time.monotonic() + PATIENCE
        while True:
            try:
                value = self.evaluate(script)
            except Failed as error:  # the page is being loaded
                value, what = None, f"{what}: {error}" if time.monotonic() > until else what
            if value:
                return value
            if time.monotonic() > until:
                raise Failed(f"{what}; the page says: {self.evaluate('document.body.innerText')}")
            time.sleep(0.05)

    def click(self, selector):
        """As a mouse does: at the middle of what is seen there, and only if nothing lies above it."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{find} !== null && !{find}.disabled", f"{selector} cannot be clicked")
        # What has just been put into the page, or was scrolled to, may lie elsewhere a moment later.
        x, y = self.until(f"""(() => {{
            const one = {find};
            one.scrollIntoView({{block: "center"}});
            const box = one.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            const there = document.elementFromPoint(x, y);
            return one === there || one.contains(there) ? [x, y] : null; }})()""", f"something lies above {selector}")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, name):
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[name]
        text = {"text": {"Enter": "\r", " ": " "}[name]} if name in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name, windowsVirtualKeyCode=code)

    def screenshot(self, path):
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture))
