#include "server/walls/walls.h"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <stdexcept>

#include "base/capabilities.h"
#include "base/log.h"
#include "server/walls/calls.h"
#include "server/walls/files.h"

namespace gpupool::server::walls {
namespace {

constexpr rlim_t kMostDescriptors = 65'536;
constexpr std::pair<Mode, const char*> kModes[] = {
    {Mode::off, "off"}, {Mode::automatic, "auto"}, {Mode::required, "required"}, {Mode::log, "log"}};

// A report of theirs takes ptrace, child processes, and files that the environment names.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

void succeed(int result, const char* what) {
  if (result != 0) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

bool setsCalls = false;  // seccomp stands: closeNetwork adds to it

void setLimits() {
  const auto set = [](__rlimit_resource resource, rlim_t most) {
    rlimit limit{};
    succeed(getrlimit(resource, &limit), "getrlimit");
    limit.rlim_max = std::min(limit.rlim_max, most);
    limit.rlim_cur = std::min(limit.rlim_cur, limit.rlim_max);
    succeed(setrlimit(resource, &limit), "setrlimit");
  };
  set(RLIMIT_CORE, 0);
  set(RLIMIT_MSGQUEUE, 0);
  set(RLIMIT_NOFILE, kMostDescriptors);
  // Pinned memory is what a worker is for; what a lease may pin, the server's account says.
  rlimit locked{RLIM_INFINITY, RLIM_INFINITY};
  if (setrlimit(RLIMIT_MEMLOCK, &locked) == 0 || getrlimit(RLIMIT_MEMLOCK, &locked) != 0) return;
  locked.rlim_cur = locked.rlim_max;
  setrlimit(RLIMIT_MEMLOCK, &locked);
}

std::vector<FileRule> rulesOf(const Plan& plan) {
  auto rules = filesOfWorkers(plan.driver);
  if (!plan.moduleCache.empty()) rules.push_back({plan.moduleCache, FileRule::Access::cache});
  return rules;
}

bool below(const std::string& path, const std::string& folder) {
  return path == folder || (path.starts_with(folder) && path[folder.size()] == '/');
}

// Each once, whatever its arguments.
void logCalls(const Plan& plan) {
  watchCalls(plan.network,
             [rules = rulesOf(plan), known = std::set<std::string>()](const std::string& call) mutable {
               constexpr std::string_view kOpen = "open ";
               if (call.starts_with(kOpen)) {
                 const std::string path = call.substr(kOpen.size());
                 for (const FileRule& rule : rules)
                   if (below(path, rule.path)) return;
               }
               const size_t arguments = call.starts_with(kOpen) ? call.npos : call.find('(');
               if (known.insert(call.substr(0, arguments)).second)
                 GPUPOOL_WARNING("walls would refuse: %s", call.c_str());
             });
}

void put(State& state, Mode mode, const char* name, bool there, const std::string& why) {
  if (!there) {
    state.missing.push_back(std::string(name) + ": " + why);
  } else if (mode == Mode::log) {
    state.missing.push_back(std::string(name) + ": --walls log lets everything pass");
  } else {
    state.standing.emplace_back(name);
  }
}

// But for devices.
State ofKernel(Mode mode) {
  State state;
  if (mode == Mode::off || kSanitized) {
    state.missing.emplace_back(kSanitized && mode != Mode::off ? "all: this build has a sanitizer"
                                                               : "all: --walls is off");
    return state;
  }
  state.standing = {"no_new_privs", "capabilities", "undumpable", "limits"};
  put(state, mode, "landlock", landlockVersion() > 0,
      "this kernel has none, or it is switched off (Linux 5.13, lsm=landlock)");
  put(state, mode, "seccomp", hasSeccomp(), "this kernel has no filters of calls (CONFIG_SECCOMP_FILTER)");
  return state;
}

bool stands(const State& state, const char* name) {
  return std::find(state.standing.begin(), state.standing.end(), name) != state.standing.end();
}

// Before the capabilities go, and before landlock, which forbids mounts.
void hideDevices(const Devices& devices) {
  try {
    keepDevices(devices);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(kOwnDevices) + ": " + error.what());
  }
}

}  // namespace

std::optional<Mode> modeNamed(std::string_view name) {
  for (const auto& [mode, text] : kModes)
    if (name == text) return mode;
  return std::nullopt;
}

std::string nameOf(Mode mode) {
  for (const auto& [one, text] : kModes)
    if (one == mode) return text;
  return "";
}

State ofThisMachine(Mode mode, uid_t user) {
  State state = ofKernel(mode);
  if (state.standing.empty()) return state;
  const std::string why = mode == Mode::log ? "" : whyNoOwnDevices(user);
  put(state, mode, kOwnDevices, why.empty(),
      "this kernel or container lets this process make no mount namespace: " + why);
  return state;
}

State raise(const Plan& plan) {
  State state = ofKernel(plan.mode);
  if (!state.standing.empty())
    put(state, plan.mode, kOwnDevices, plan.devices.has_value(), "the server has not asked for it");
  if (plan.mode == Mode::required && !state.missing.empty())
    throw std::runtime_error("--walls required, and missing is " + state.missing[0]);
  if (state.standing.empty()) return state;
  setLimits();
  if (stands(state, kOwnDevices)) hideDevices(*plan.devices);
  succeed(keepCapabilities({}) ? 0 : -1, "capset");
  succeed(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
  succeed(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE");
  if (stands(state, "landlock")) permitOnly(rulesOf(plan));
  if (stands(state, "seccomp")) {
    permitCalls(plan.network);
    setsCalls = true;
  }
  if (plan.mode == Mode::log && hasSeccomp()) logCalls(plan);
  return state;
}

bool hasOwnUser(const UserRange& users) {
  uid_t user = 0, effective = 0, saved = 0;
  gid_t group = 0, effectiveGroup = 0, savedGroup = 0;
  return getresuid(&user, &effective, &saved) == 0 && users.has(user) && effective == user && saved == user &&
         getresgid(&group, &effectiveGroup, &savedGroup) == 0 && group == users.group() &&
         effectiveGroup == group && savedGroup == group;
}

void closeLocal() {
  if (setsCalls) refuseLocalSockets();
}

void closeNetwork() {
  if (setsCalls) refuseNetwork();
}

}  // namespace gpupool::server::walls
