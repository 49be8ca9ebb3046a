// `gpupool run` and `gpupool hold` as a user sees them.
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tool_fixture.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;
using Fixture = ToolFixture;

TEST_CASE_METHOD(Fixture, "the exit status is the program's") {
  for (int status : {0, 7, 255}) {
    Program program;
    run(program, {"--", "/bin/sh", "-c", "exit " + std::to_string(status)});
    CHECK(program.exitStatus() == status);
    CHECK(program.text.empty());
    CHECK(soonFree());  // when it returns, the device is free
  }
}

TEST_CASE_METHOD(Fixture, "so is the signal it died of") {
  for (int number : {SIGUSR1, SIGTERM, SIGSEGV, SIGKILL}) {
    Program program;
    run(program, {"sh", "-c", "kill -" + std::to_string(number) + " $$"});
    CHECK(program.signal() == number);
    CHECK(soonFree());
  }
}

TEST_CASE_METHOD(Fixture, "126 and 127 are the shell's, 125 is ours, and all say why") {
  Program missing, notExecutable, usage, bad, many, none, library;
  run(missing, {"--", "/no/such/program"});
  CHECK(missing.exitStatus() == 127);
  CHECK(missing.text == "gpupool: /no/such/program: there is no such program\n");
  CHECK(server->revokeReasons.empty());  // nothing was leased for it
  CHECK(contains(tool(127, {"run", "--protect", "10s", "true"}),
                 "10s: there is no such program; did you mean --protect=10s?"));
  run(notExecutable, {"--", folder.path + "/lib/libcuda.so.1"});
  CHECK(notExecutable.exitStatus() == 126);
  CHECK(soonFree());
  run(usage, {});
  CHECK(usage.exitStatus() == 125);
  CHECK(contains(usage.text, "which program?"));
  run(bad, {"--gpus", "none", "true"});
  CHECK(bad.exitStatus() == 125);
  CHECK(contains(bad.text, "--gpus: 'none' is not a whole number"));
  const std::string reason(201, 'r'), tenant(65, 't');
  CHECK(contains(tool(125, {"run", "--memory", "20", "true"}),
                 "--memory: 20 is less than the least, 1MiB: give a number with its unit"));
  CHECK(contains(tool(125, {"run", "--reason", reason, "true"}),
                 "--reason: at most 200 bytes, and these are 201"));
  CHECK(contains(tool(125, {"run", "--tenant", tenant, "true"}), "--tenant: at most 64 bytes"));
  CHECK(contains(tool(2, {"leases", "--tenant", tenant}), "--tenant: at most 64 bytes"));
  CHECK(contains(tool(2, {"cordon", "--reason", reason, "a"}), "--reason: at most 200 bytes"));
  CHECK(contains(tool(2, {"drain", "--reason", reason, "a"}), "--reason: at most 200 bytes"));
  CHECK(contains(tool(125, {"run", "--gpus", "9", "true"}), "--gpus: 1 to 8, and these are 9"));
  run(many, {"--gpus", "2", "true"});
  CHECK(many.exitStatus() == 125);
  CHECK(contains(many.text, "no server has more than 1"));
  run(none, {"--manager", "unix:/nowhere/manager", "true"});
  CHECK(none.exitStatus() == 125);
  CHECK(contains(none.text, "no pool manager is reachable (tried unix:/nowhere/manager: "));
  CHECK(contains(none.text, "systemctl status gpupool-manager"));
  CHECK(contains(tool(1, {"leases", "--manager", "127.0.0.1:1"}), "check the address"));
  CHECK_FALSE(contains(tool(1, {"leases", "--manager", "127.0.0.1:1"}), "gpupool up"));
  const auto usual = environment;
  environment[1] = "GPUPOOL_STATE=/nowhere";
  CHECK(contains(tool(1, {"leases"}), "start a pool on this machine with `gpupool up --detach`"));
  environment = usual;
  environment[2] = "GPUPOOL_LIBRARY_DIR=/nowhere";
  run(library, {"true"});
  CHECK(library.exitStatus() == 125);
  CHECK(contains(library.text, "/nowhere/libcuda.so.1 is missing"));
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "the program finds the library and the holder, and its own signals as they were") {
  Program program;
  run(program, {"--", "sh", "-c",
                "echo $LD_LIBRARY_PATH; echo $GPUPOOL_HOLDER; grep -c $GPUPOOL_HOLDER /proc/net/unix; "
                "grep -E 'SigBlk|SigIgn' /proc/self/status"});
  INFO(program.text);
  CHECK(program.text.find(folder.path + "/lib:/before\n") == 0);
  CHECK(contains(program.text, ":/before\n@gpupool-run-"));
  CHECK(contains(program.text, "\n1\nSigBlk"));
  CHECK(contains(program.text, "SigBlk:\t0000000000000000"));
  CHECK(contains(program.text, "SigIgn:\t0000000000000000"));
  const size_t start = program.text.find('\n') + 1;
  const std::string holder = program.text.substr(start, program.text.find('\n', start) - start);
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) CHECK_FALSE(contains(line, holder));
}

TEST_CASE_METHOD(Fixture, "the program is told which devices it has, unless its user chose") {
  Program told, chosen;
  run(told, {"--", "sh", "-c", "echo devices: $CUDA_VISIBLE_DEVICES"});
  CHECK(contains(told.text, "devices: 0\n"));
  environment.push_back("CUDA_VISIBLE_DEVICES=");
  run(chosen, {"--", "sh", "-c", "echo devices: ${CUDA_VISIBLE_DEVICES-unset}."});
  CHECK(contains(chosen.text, "devices: .\n"));
}

TEST_CASE_METHOD(Fixture, "NCCL's queue is small unless the transport is shm or its user chose") {
  Program network, here, chosen;
  const std::string say = "echo fifo: ${NCCL_WORK_FIFO_BYTES-unset}.";
  run(network, {"--", "sh", "-c", say});
  CHECK(contains(network.text, "fifo: 65536.\n"));
  run(here, {"--transport", "shm", "--", "sh", "-c", say});
  CHECK(contains(here.text, "fifo: unset.\n"));
  environment.push_back("NCCL_WORK_FIFO_BYTES=4096");
  run(chosen, {"--", "sh", "-c", say});
  CHECK(contains(chosen.text, "fifo: 4096.\n"));
}

TEST_CASE_METHOD(Fixture, "a program opens sessions through its holder") {
  Program program, wrong;
  run(program, {APPLICATION, "open"});
  CHECK(program.exitStatus() == 0);
  CHECK(program.text == "session on a by shm, 1 devices, worker says hello\n");
  run(wrong, {APPLICATION, "open", "beef"});
  CHECK(wrong.exitStatus() == 16);
  CHECK(wrong.text == "refused 6: server a: rows differ\n");
}

TEST_CASE_METHOD(Fixture, "a client library's own holder leases, serves and goes") {
  Program program;
  start(program, {APPLICATION, "hold", TOOL});
  finish(program);
  CHECK(program.exitStatus() == 0);
  CHECK(program.text == "session on a by shm, 1 devices, worker says hello\n");
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "hold keeps nothing of the process that started it") {
  // The pipe's writing end must not live on in the holder: its reader waits for the end of file.
  int pair[2], pipe[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
  REQUIRE(::pipe(pipe) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(pair[1], 9);
    ::close(pair[0]);
    ::dup2(pipe[1], 1);
    ::dup2(pipe[1], 2);
    become({TOOL, "hold", "--descriptor", "9"});
  }
  ::close(pair[1]);
  ::close(pipe[1]);
  pollfd wait{pipe[0], POLLIN, 0};
  REQUIRE(::poll(&wait, 1, 5000) == 1);
  char byte;
  CHECK(::read(pipe[0], &byte, 1) == 0);
  CHECK(::kill(pid, 0) == 0);
  CHECK(::getsid(pid) == pid);
  ::close(pair[0]);
  int status = 0;
  CHECK(until([&] { return ::waitpid(pid, &status, WNOHANG) == pid; }));
  CHECK(WEXITSTATUS(status) == 0);
  ::close(pipe[0]);
}

TEST_CASE_METHOD(Fixture, "signals sent to the tool reach the program, once") {
  Program program;
  const std::string script =
      "n=0; trap 'n=$((n+1))' USR1; trap 'echo got $n; exit 42' TERM; trap '' HUP; echo ready 1; "
      "while :; do sleep 0.05; done";
  start(program, {TOOL, "run", "bash", "-c", script});
  sleeper(program);
  ::kill(program.pid, SIGHUP);
  ::kill(program.pid, SIGUSR1);
  pause(300);
  ::kill(program.pid, SIGTERM);
  finish(program);
  CHECK(program.exitStatus() == 42);
  CHECK(contains(program.text, "got 1\n"));
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "a lease is renewed for as long as the program runs") {
  Program program;
  start(program, {TOOL, "run", "--ttl", "4s", "sleep", "5"});  // a busy machine renews late
  finish(program);
  CHECK(program.exitStatus() == 0);
  CHECK(program.text.empty());
  CHECK(server->revokeReasons == std::vector<std::string>{"released"});
}

TEST_CASE_METHOD(Fixture, "interrupted while it waits, the tool leaves the queue") {
  Program holder, waiter;
  start(holder, {TOOL, "run", APPLICATION, "sleep", "30"});
  sleeper(holder);
  start(waiter, {TOOL, "run", "--wait", "1m", "true"});
  pause(200);
  ::kill(waiter.pid, SIGINT);
  finish(waiter);
  CHECK(waiter.signal() == SIGINT);
  pause(100);
  ::kill(holder.pid, SIGTERM);
  finish(holder);
  pause(100);
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "the tool killed, the program keeps its lease to its end") {
  Program tool;
  start(tool, {TOOL, "run", "--ttl", "2s", APPLICATION, "sleep", "30"});
  const pid_t program = sleeper(tool);
  ::kill(tool.pid, SIGKILL);
  finish(tool);
  pause(2800);  // past the TTL
  CHECK_FALSE(free());
  ::kill(program, SIGTERM);
  CHECK(until([&] { return free(); }));
}

TEST_CASE_METHOD(Fixture, "the holder killed, the program runs on with its lease and the user is told") {
  Program tool;
  start(tool, {TOOL, "run", "--ttl", "2s", "sh", "-c", "echo ready 1; sleep 5; exit 5"});
  sleeper(tool);
  std::ifstream children("/proc/" + std::to_string(tool.pid) + "/task/" + std::to_string(tool.pid) +
                         "/children");
  pid_t holder = 0;  // the first child
  REQUIRE(children >> holder);
  ::kill(holder, SIGKILL);
  pause(4000);  // past the TTL, and what the manager waits
  CHECK_FALSE(free());
  finish(tool);
  CHECK(tool.exitStatus() == 5);
  CHECK(contains(tool.text, "the process that holds the lease was killed: another one takes the lease over"));
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "a lease lost under the program is reported") {
  Program tool;
  start(tool, {TOOL, "run", "--ttl", "2s", "sh", "-c", "echo ready 1; sleep 3; exit 3"});
  sleeper(tool);
  server->disconnect();
  server->leases.clear();
  server->facts.incarnation = Id::random();
  server->join(address);
  finish(tool);
  CHECK(tool.exitStatus() == 3);
  CHECK(contains(tool.text, "the lease has ended: its server a was restarted"));
}

TEST_CASE_METHOD(Fixture, "share and priority are the lease's, whichever way they are named") {
  Program program;
  uint32_t share = 0;
  Priority priority = Priority::normal;
  SECTION("not at all") { run(program, {"true"}); }
  SECTION("on the command line") {
    run(program, {"--share", "25%", "--priority", "high", "true"});
    share = 25, priority = Priority::high;
  }
  SECTION("in the environment, without the wrapper") {
    environment.insert(environment.end(), {"GPUPOOL_SHARE=40", "GPUPOOL_PRIORITY=low"});
    start(program, {APPLICATION, "hold", TOOL});
    finish(program);
    share = 40, priority = Priority::low;
  }
  SECTION("in the configuration file") {
    std::ofstream(folder.path + "/client.yaml") << "share: 100%\npriority: high\n";
    environment.push_back("GPUPOOL_CONFIG=" + folder.path + "/client.yaml");
    run(program, {"true"});
    share = 100, priority = Priority::high;
  }
  INFO(program.text);
  CHECK(program.exitStatus() == 0);
  REQUIRE(server->terms.size() == 1);
  CHECK(server->terms[0].sharePercent == share);
  CHECK(server->terms[0].priority == priority);
}

TEST_CASE_METHOD(Fixture, "a share or a priority that is none is refused") {
  for (const char* share : {"0", "0%", "101", "25%%", "-5", "x", "1.5", "%", "4294967297"}) {
    Program program;
    run(program, {"--share", share, "true"});
    CHECK(program.exitStatus() == 125);
    CHECK(program.text == "gpupool: --share: '" + std::string(share) +
                              "' is not a share of a GPU's time: 1% to 100% (examples: 25%, 25)\n");
  }
  Program urgent, hold;
  run(urgent, {"--priority", "urgent", "true"});
  CHECK(urgent.exitStatus() == 125);
  CHECK(urgent.text == "gpupool: --priority: 'urgent' is not low, normal or high\n");
  environment.push_back("GPUPOOL_PRIORITY=High");
  start(hold, {APPLICATION, "hold", TOOL});
  finish(hold);
  CHECK(contains(hold.text, "--priority: 'High' is not low, normal or high"));
  CHECK(server->terms.empty());
}

TEST_CASE_METHOD(Fixture, "where more is leased than there is, leases and devices show whose turn it is") {
  Program first, second, third;
  const auto hold = [&](Program& program, std::vector<std::string> options) {
    options.insert(options.begin(), {TOOL, "run"});
    options.insert(options.end(), {APPLICATION, "sleep", "60"});
    start(program, options);
    sleeper(program);
    return server->leases;
  };
  hold(first, {});
  CHECK_FALSE(contains(said({"devices"}), "LEASED"));
  CHECK_FALSE(contains(said({"devices", "--json"}), "leasableBytes"));
  CHECK_FALSE(contains(said({"leases"}), "active,"));
  CHECK_FALSE(contains(said({"leases", "--json"}), "turn"));
  ::kill(first.pid, SIGTERM);
  finish(first);
  REQUIRE(soonFree());

  overcommit(200);
  const Id one = hold(second, {"--memory", "6GiB", "--share", "25%", "--priority", "high"}).begin()->first;
  hold(third, {"--memory", "5GiB"});
  REQUIRE(server->leases.size() == 2);
  Id other;
  for (const auto& [id, lease] : server->leases)
    if (id != one) other = id;
  server->turns = {{one, TurnPlace::resident, 65'000, 3, "", {}},
                   {other, TurnPlace::waiting, 2'000, 1, "its kernel runs on", {}}};
  server->hindrances = {{other, {"cannot be moved: its kernels are strange"}}};
  server->beatNow().wait(io.waitScope);
  const std::string leases = said({"leases"});
  CHECK(contains(leases, "6.0 GiB      active, resident"));
  CHECK(contains(leases, "5.0 GiB      active, waiting"));
  const std::string verbose = said({"leases", "-v"});
  CHECK(contains(verbose, "STATE             SHARE  PRIORITY  SERVED  TURNS  IDLE  IDLE RELEASE  AGE"));
  CHECK(contains(verbose, "active, resident  25%    high      1m      3      "));
  CHECK(contains(verbose, "active, waiting   -      normal    2s      1      "));
  CHECK(contains(verbose, other.text().substr(0, 8) + " was not put aside: its kernel runs on\n"));
  CHECK(contains(verbose, "\n" + other.text().substr(0, 8) + " cannot be moved: its kernels are strange\n"));
  CHECK_FALSE(contains(leases, "strange"));
  const std::string listed = said({"leases", "--json"});
  CHECK(contains(listed, "\"cannot be moved: its kernels are strange\""));
  CHECK(contains(listed, "\"place\": \"waiting\""));
  CHECK(contains(listed, "\"servedMs\": 65000"));
  CHECK(contains(listed, "\"sharePercent\": 25"));
  CHECK(contains(listed, "\"priority\": \"high\""));
  const std::string devices = said({"devices"});
  CHECK(contains(devices, "MEMORY   FREE     LEASED                STATE   HELD BY"));
  CHECK(contains(devices, "8.0 GiB  5.0 GiB  11.0 GiB of 16.0 GiB  leased  "));
  CHECK(contains(devices, "application (resident)"));
  CHECK(contains(devices, "application (waiting)"));
  const std::string state = said({"devices", "--json"});
  CHECK(contains(state, "\"leasedBytes\": 11811160064"));
  CHECK(contains(state, "\"leasableBytes\": 17179869184"));
  CHECK(contains(state, "\"" + other.text() + "\": \"waiting\""));
  CHECK(contains(said({"servers", "-v"}), "a leases 200% of its GPUs' memory: leases take turns\n"));
  for (Program* program : {&second, &third}) {
    ::kill(program->pid, SIGTERM);
    finish(*program);
  }
}

// A shell with job control on a terminal of its own.
TEST_CASE_METHOD(Fixture,
                 "migrate says what has moved, or why not; interrupted, it leaves the lease as it is") {
  Program program;
  start(program, {TOOL, "run", "--", APPLICATION, "sleep", "60"});
  const pid_t pid = sleeper(program);
  const std::string lease = server->leases.begin()->first.text().substr(0, 8);
  CHECK(said({"migrate", "--drain", "5s", lease}) ==
        "gpupool: lease " + lease +
            ": 2 sessions moved with 3.0 GiB; the longest pause was 0.7 s; it is on a GPU 0\n");
  CHECK(server->migrations == std::vector<uint32_t>{5000});

  server->refuseMigrate = "process 7 (train): a capture is open";
  Program refused;
  start(refused, {TOOL, "migrate", lease});
  finish(refused);
  CHECK(refused.exitStatus() == 1);
  CHECK(refused.text == "gpupool: server a: process 7 (train): a capture is open\n");

  server->refuseSuspend = server->refuseMigrate;
  Program kept;
  start(kept, {TOOL, "suspend", lease});
  finish(kept);
  CHECK(kept.text == refused.text);
  server->refuseMigrate.clear();
  server->muteMigrate = true;
  Program interrupted;
  start(interrupted, {TOOL, "migrate", lease});
  REQUIRE(until([&] { return server->migrations.size() == 3; }));
  ::kill(interrupted.pid, SIGINT);
  finish(interrupted);
  CHECK(interrupted.signal() == SIGINT);
  CHECK(contains(said({"leases"}), "active"));
  ::kill(pid, SIGTERM);
  finish(program);
  CHECK(soonFree());
}

TEST_CASE_METHOD(Fixture, "Ctrl-Z, fg and Ctrl-C work as without the tool, and the lease outlives the stop") {
  Program shell;
  environment.push_back("PS1=% ");
  environment.push_back("TERM=dumb");
  shell.pid = ::forkpty(&shell.output, nullptr, nullptr, nullptr);
  if (shell.pid == 0) become({"/bin/bash", "--norc", "--noprofile", "-i"});
  ::fcntl(shell.output, F_SETFL, O_NONBLOCK);
  size_t seen = 0;
  const auto type = [&](const std::string& text) {
    seen = shell.text.size();
    REQUIRE(::write(shell.output, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  };
  const auto expect = [&](const std::string& text) {
    const bool found = until([&] {
      shell.poll();
      return shell.text.find(text, seen) != std::string::npos;
    });
    INFO(shell.text);
    REQUIRE(found);
  };
  type(std::string(TOOL) + " run --ttl 2s " + APPLICATION + " sleep 30\n");
  expect("ready ");
  type("\x1a");
  expect("Stopped");
  pause(2800);  // past the TTL
  CHECK(server->leases.size() == 1);
  type("fg\n");
  expect("sleep 30");
  pause(100);
  type("\x03");
  expect("% ");
  type("echo status $?.\n");
  expect("status 130.");
  CHECK(soonFree());
  type("exit\n");
  finish(shell);
}
