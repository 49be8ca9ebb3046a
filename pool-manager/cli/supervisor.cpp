#include "pool-manager/cli/supervisor.h"

#include <kj/common.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <stdexcept>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/places.h"

namespace gpupool::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kServerPatience{8000}, kManagerPatience{3000}, kHeldPatience{15'000};
constexpr int kMostQuickDeaths = 5;  // each within ten seconds of its start
// Only the first server says at once that it has no driver; one that is started again waits for the repair.
constexpr const char* kFirstServer = "GPUPOOL_SERVER_DRIVER_WAIT=2s";

std::string describeDevices(const std::vector<Device>& devices) {
  std::map<std::string, int> counts;
  for (const Device& device : devices) ++counts[device.name + ", " + options::formatSize(device.memoryBytes)];
  std::string text;
  for (const auto& [name, count] : counts)
    text += (text.empty() ? "" : "; ") + std::to_string(count) + " x " + name;
  return text.empty() ? "no devices" : text;
}

}  // namespace

Supervisor::Supervisor(PoolDirectory& directory, PoolPlan plan)
    : directory_(directory),
      plan_(std::move(plan)),
      manager_{plan_.manager, {}, directory.file(kManagerLog), "manager", {}, {}},
      server_{plan_.server, plan_.serverEnvironment, directory.file(kServerLog), "server", {}, {}} {
  sigemptyset(&signals_);
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&signals_, number);
  ::sigprocmask(SIG_BLOCK, &signals_, &before_);
  // Workers of a server that was killed come to us, and do not outlive the pool.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  for (Child* child : {&manager_, &server_}) child->environment.push_back("GPUPOOL_LOG=info");
  if (log::enabled(log::Level::debug))
    for (Child* child : {&manager_, &server_}) child->environment.back() = "GPUPOOL_LOG=debug";
}

Supervisor::~Supervisor() {
  stop();
  directory_.remove();
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

void Supervisor::launch(Child& child) {
  child.process = startDaemon(child.words, child.environment, child.log, child.role);
  child.started = steady_clock::now();
  writeProcesses(directory_.file(kProcesses),
                 {nameProcess(::getpid(), "supervisor"), manager_.process, server_.process});
}

std::string Supervisor::explain(const std::string& what) const {
  std::string text = what;
  for (const Child* child : {&server_, &manager_})
    if (const std::string lines = tail(child->log, 12); !lines.empty())
      text += "\nthe " + child->role + "'s last words (" + child->log + "):\n" + lines;
  return text;
}

std::string Supervisor::readiness(bool* ready) {
  ManagerQuery query(std::vector{plan_.managerAddress}, 2000);
  for (const ListedServer& server : query.servers()) {
    if (server.info.pid != static_cast<uint32_t>(server_.process.pid)) continue;
    if (server.info.devices.empty()) return "its server found no GPU";
    if (server.warmWorkers == 0) return "its server has joined, but no worker is ready";
    *ready = true;
    return "server " + server.info.name + " with " + describeDevices(server.info.devices);
  }
  return "its server has not joined the manager";
}

std::string Supervisor::start() {
  launch(manager_);
  server_.environment.push_back(kFirstServer);
  KJ_DEFER(server_.environment.pop_back());
  const auto until = steady_clock::now() + plan_.wait;
  std::string state = "its manager does not answer";
  while (steady_clock::now() < until) {
    bool died = false;
    if (interrupted(milliseconds(50), &died)) throw std::runtime_error("interrupted");
    if (const Child* dead = firstDead(); dead != nullptr)
      throw std::runtime_error(explain("the " + dead->role + " ended while it started"));
    if (::access((directory_.path() + "/" + kManagerSocket).c_str(), F_OK) != 0) continue;
    if (server_.process.pid < 0) launch(server_);
    try {
      bool ready = false;
      state = readiness(&ready);
      if (ready) return state;
    } catch (const kj::Exception& error) {
      state = pool::errorText(error);
    } catch (const std::exception& error) {
      state = error.what();
    }
  }
  throw std::runtime_error(
      explain("the pool is not ready after " + options::formatTime(plan_.wait) + ": " + state));
}

bool Supervisor::interrupted(milliseconds limit, bool* died) {
  const timespec wait{limit.count() / 1000, limit.count() % 1000 * 1'000'000};
  siginfo_t info;
  const int number =
      limit.count() < 0 ? ::sigwaitinfo(&signals_, &info) : ::sigtimedwait(&signals_, &info, &wait);
  if (number == SIGCHLD) *died = true;
  return number == SIGINT || number == SIGTERM || number == SIGHUP;
}

Supervisor::Child* Supervisor::firstDead() {
  pid_t pid;
  int status = 0;
  Child* dead = nullptr;
  // Adopted orphans are reaped here too.
  while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0)
    for (Child* child : {&manager_, &server_})
      if (child->process.pid == pid) {
        child->process = {};
        child->killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        dead = child;
      }
  return dead;
}

bool Supervisor::watch(std::string* why) {
  bool died = false;
  for (;;) {
    if (!died && interrupted(milliseconds(-1), &died)) return true;
    if (!std::exchange(died, false)) continue;
    firstDead();
    for (Child* child : {&manager_, &server_}) {
      if (child->process.pid > 0) continue;
      const bool quick = steady_clock::now() < child->started + std::chrono::seconds(10);
      child->quickDeaths = !quick ? 0 : child->killed ? child->quickDeaths : child->quickDeaths + 1;
      if (child->quickDeaths >= kMostQuickDeaths) {
        *why = explain("the " + child->role + " dies again and again");
        return false;
      }
      GPUPOOL_WARNING("the %s ended; starting it again (see %s)", child->role.c_str(), child->log.c_str());
      // A child that dies during this pause is seen right behind it.
      if (child->quickDeaths > 0 && interrupted(milliseconds(500 * child->quickDeaths), &died)) return true;
      launch(*child);
    }
  }
}

// No server tells their programs that the pool is gone: those would wait for it for ever.
void Supervisor::endHeld() {
  if (!alive(manager_.process)) return;
  try {
    ManagerQuery query(std::vector{plan_.managerAddress}, 2000);
    std::vector<Id> held;
    for (const pool::Lease& lease : query.leases())
      if (lease.state == "held") held.push_back(lease.id);
    query.dropAll(held, kHeldPatience.count());
  } catch (const kj::Exception& error) {
    GPUPOOL_WARNING("programs of leases that are held may wait for ever: %s", pool::errorText(error).c_str());
  } catch (const std::exception& error) {
    GPUPOOL_WARNING("programs of leases that are held may wait for ever: %s", error.what());
  }
}

void Supervisor::stop() {
  endHeld();
  // In this order: programs whose server alone is shut down go on at another one (`gpupool run --protect`).
  endProcess(manager_.process, kManagerPatience);
  endProcess(server_.process, kServerPatience);
  // What is left are orphans of a server that did not end by itself.
  for (int attempt = 0; attempt < 20; ++attempt) {
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    const auto left = children();
    if (left.empty()) return;
    for (pid_t pid : left) ::kill(pid, attempt < 10 ? SIGTERM : SIGKILL);
    ::usleep(100'000);
  }
}

}  // namespace gpupool::cli
