#!/usr/bin/env python3
"""scripts/suite: labels, minutes, skips, budgets and findings; what tests/sessions/disturb finds; pace.py."""
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = os.path.join(os.path.dirname(os.path.realpath(__file__)), "..", "..")
SUITE = os.path.join(ROOT, "scripts", "suite")
sys.dont_write_bytecode = True


def load(path):
    loader = importlib.machinery.SourceFileLoader(os.path.basename(path), path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import pace  # noqa: E402

suite = load(SUITE)
disturb = load(os.path.join(ROOT, "tests", "sessions", "disturb"))
# Stands for ctest: one test, which passes and writes what it has found, where it is told to.
CTEST = """#!/bin/sh
case "$*" in *--show-only*)
  echo '{"tests": [{"name": "a", "properties": [{"name": "LABELS", "value": ["unit"]}]}]}'
  exit ;;
esac
while [ "$1" != --output-junit ]; do shift; done
folder=$(dirname "$2")
echo '<testsuite><testcase name="a" time="1" status="run"/></testsuite>' >"$2"
if [ -n "$FOUND" ]; then mkdir "$folder/findings" && echo "$FOUND" >"$folder/findings/table.txt"; fi
"""


def listing(**labels):
    return {"tests": [{"name": name, "properties": [{"name": "LABELS", "value": value}]}
                      for name, value in labels.items()]}


def result(name, label="unit", seconds=1.0, status="passed", processors=1, serial=False):
    return suite.Result(suite.Test(name, label, processors, serial), seconds, status, "")


def report(results, skips=(), ci=False, judge=True):
    with contextlib.redirect_stdout(io.StringIO()):
        return suite.report(results, 4, {"unit": 1.0, "faults": 2.0}, [suite.re.compile(one) for one in skips], ci, judge)


class Suite(unittest.TestCase):
    def test_each_test_has_one_label(self):
        budgets = {"unit": 1.0, "faults": 1.0}
        self.assertEqual(suite.tests_of(listing(a=["unit"], b=["faults", "representative"]), budgets)[1], [])
        wrong = suite.tests_of(listing(a=["unit", "faults"], b=["others"], c=[]), budgets)[1]
        self.assertEqual(len(wrong), 3)

    def test_minutes_are_shares_of_the_run(self):
        minutes = suite.minutes_by_label([result("a", seconds=120), result("b", seconds=60, processors=2),
                                          result("c", "faults", seconds=30, serial=True)], 4)
        self.assertEqual(minutes, {"unit": 1.0, "faults": 0.5})

    def test_a_label_beyond_its_budget_fails(self):
        within, beyond = result("a", seconds=4 * 89), result("a", seconds=4 * 91)
        self.assertEqual(report([within]), (1, []))
        self.assertEqual(len(report([beyond])[1]), 1)
        self.assertEqual(report([beyond], judge=False), (1, []))

    def test_an_unlisted_skip_fails_in_ci(self):
        skipped = result("rdma_verbs", status="skipped")
        self.assertEqual(report([skipped]), (0, []))
        self.assertEqual(len(report([skipped], ci=True)[1]), 1)
        self.assertEqual(len(report([skipped], skips=["rdma"], ci=True)[1]), 1)
        self.assertEqual(report([skipped], skips=["rdma_.*"], ci=True), (0, []))

    def test_what_did_not_run_fails(self):
        self.assertEqual(len(report([result("a", status="stopped"), result("b", status="failed")])[1]), 2)

    def test_an_unsteady_test_is_listed_and_three_fail(self):
        unsteady = [result(name, status="unsteady") for name in "abc"]
        self.assertEqual(report(unsteady[:2]), (2, []))
        self.assertEqual(len(report(unsteady)[1]), 1)

    def test_what_failed_is_run_again_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            junit, asked = os.path.join(folder, "tests.xml"), os.path.join(folder, "asked")
            with open(junit + ".second", "w", encoding="utf-8") as file:
                file.write("""<testsuite><testcase name="a" time="2" status="run"/>
                  <testcase name="b" time="2" status="fail"><failure message="Failed"/></testcase></testsuite>""")
            command = ["sh", "-c", f"echo \"$@\" >{asked}; cp {junit}.second {junit}.again", "ctest"]
            first = [result("a", status="failed"), result("b", status="failed"), result("c"), result("d", status="stopped")]
            tests = {one.test.name: one.test for one in first}
            with contextlib.redirect_stdout(io.StringIO()):
                again = suite.run_again(first, command, junit, tests)
            self.assertEqual([one.status for one in again], ["unsteady", "failed", "passed", "stopped"])
            with open(asked, encoding="utf-8") as file:
                self.assertIn("-R ^(a|b)$", file.read())
            many = [result(str(number), status="failed") for number in range(9)]
            self.assertEqual(suite.run_again(many, ["false"], junit, {}), many)

    def test_junit(self):
        tests = {name: suite.Test(name, "unit", 1, False) for name in "abcd"}
        junit = xml.etree.ElementTree.fromstring("""<testsuite>
          <testcase name="a" time="1.5" status="run"/>
          <testcase name="b" time="2" status="fail"><failure message="Failed"/></testcase>
          <testcase name="c" time="0" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/>
            <system-out>skipped: no qemu</system-out></testcase>
          <testcase name="d" time="0" status="notrun"><skipped message="Fixture dependency failed"/></testcase>
        </testsuite>""")
        found = [(one.status, one.why) for one in suite.results_of(junit, tests)]
        self.assertEqual(found[0], ("passed", ""))
        self.assertEqual(found[1][0], "failed")
        self.assertEqual(found[2], ("skipped", "skipped: no qemu"))
        self.assertEqual(found[3][0], "stopped")

    def test_the_files_can_be_read(self):
        self.assertGreater(len(suite.read_budgets(os.path.join(suite.ROOT, "tests", "labels.txt"))), 5)
        suite.read_skips(os.path.join(suite.ROOT, "tests", "skips.txt"))


    def test_what_a_passing_test_has_found_is_printed_once(self):
        with tempfile.TemporaryDirectory() as folder:
            ctest = os.path.join(folder, "ctest")
            with open(ctest, "w", encoding="utf-8") as file:
                file.write(CTEST)
            os.chmod(ctest, 0o755)

            def run(found):
                path = f"{folder}:{os.environ['PATH']}"
                return subprocess.run([SUITE, "--build", folder, "--all"], env={**os.environ, "PATH": path, "FOUND": found},
                                      stdout=subprocess.PIPE, text=True, check=True).stdout

            self.assertIn("\n101 moved\n", run("101 moved"))
            self.assertNotIn("101 moved", run(""))  # an earlier run's is not this one's


class Restorability(unittest.TestCase):
    def test_counts_and_a_line_for_each_exception(self):
        verdicts = {"scan": ("yes", 3), "heap": ("no: it uses the device's heap", 1), "late": ("not tried: too short", 0),
                    "wrong": ("yes", 2)}
        lines = disturb.findings(verdicts, ["wrong"], "shm", 7).splitlines()
        self.assertEqual(lines[0], "restorability of 4 programs over shm, seed 7: 2 moved, 6 times; 1 not restorable; "
                                   "1 not tried; 1 failed")
        self.assertEqual([line.split(None, 1) for line in lines[1:]],
                         [["heap", "no: it uses the device's heap"], ["late", "not tried: too short"],
                          ["wrong", "FAILED when it was disturbed; yes"]])


class Pace(unittest.TestCase):
    def setUp(self):
        self.now, self.running = 100.0, 0
        self.sampler = pace._Sampler(2, lambda: self.running, lambda: self.now)

    def pass_time(self, seconds, running, step=pace.INTERVAL):
        self.running, end = running, self.now + seconds
        while self.now < end - step / 2:
            self.now += step
            self.sampler.sample()

    def test_an_idle_machine_counts_every_second(self):
        self.pass_time(4, running=2)
        self.assertAlmostEqual(self.sampler.at(104) - self.sampler.at(101), 3)

    def test_a_busy_one_counts_its_share(self):
        self.pass_time(4, running=1)
        self.pass_time(4, running=8)
        self.assertAlmostEqual(self.sampler.at(108) - self.sampler.at(100), 4 + 1)
        self.assertAlmostEqual(self.sampler.at(108) - self.sampler.at(106), 0.5)

    def test_what_nobody_could_run_in_does_not_count(self):
        self.pass_time(1, running=1)
        self.pass_time(30, running=1, step=30)
        self.assertAlmostEqual(self.sampler.at(131) - self.sampler.at(100), 1 + pace.LATE)

    def test_the_time_before_and_after_the_samples(self):
        self.pass_time(1, running=1)
        self.assertAlmostEqual(self.sampler.at(101.05) - self.sampler.at(99.5), 1.55)


if __name__ == "__main__":
    unittest.main()
