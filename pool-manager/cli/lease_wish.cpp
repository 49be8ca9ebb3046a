#include "pool-manager/cli/lease_wish.h"

#include <climits>

#include "pool-manager/cli/places.h"
#include "pool-manager/device_filter.h"

namespace gpupool::cli {

std::vector<std::string> leaseOptionNames() {
  return {"gpus",
          "gpu",
          "spread",
          "pack",
          "reason",
          "time",
          "memory",
          "share",
          "priority",
          "transport",
          "wait",
          "manager",
          "server",
          "tenant",
          "token-file",
          "tls-ca",
          "network-device",
          "ttl",
          "stall-time",
          "protect",
          "protect-interval",
          "protect-log",
          "protect-log-data",
          "protect-keep",
          "protect-dir",
          "protect-size",
          "protect-wait",
          "protect-silence",
          "on-divergence",
          "claim",
          "idle-release"};
}

uint32_t parseShare(const std::string& text) {
  if (text.empty()) return 0;
  const std::string number = text.ends_with('%') ? text.substr(0, text.size() - 1) : text;
  const bool digits =
      !number.empty() && number.size() <= 3 && number.find_first_not_of("0123456789") == std::string::npos;
  const unsigned long percent = digits ? std::stoul(number) : 0;
  if (percent == 0 || percent > 100)
    throw options::OptionError("--share: '" + text +
                               "' is not a share of a GPU's time: 1% to 100% (examples: 25%, 25)");
  return static_cast<uint32_t>(percent);
}

pool::Priority parsePriority(const std::string& text) {
  for (const auto priority : {pool::Priority::low, pool::Priority::normal, pool::Priority::high})
    if (text == pool::name(priority)) return priority;
  throw options::OptionError("--priority: '" + text + "' is not low, normal or high");
}

namespace {

// "--memory 20" is a slip: nobody leases 20 bytes.
void checkMemory(options::Bytes memory) {
  if (memory.value != 0 && memory.value < pool::kLeastMemory)
    throw options::OptionError("--memory: " + std::to_string(memory.value) +
                               " is less than the least, 1MiB: give a number with its unit, KiB, MiB, GiB or "
                               "TiB (20GiB); without one it is bytes");
}

}  // namespace

HolderSettings leaseWish(const ClientOptions& options) {
  if (options.gpus == 0 || options.gpus > pool::kMostLeased)
    throw options::OptionError("--gpus: 1 to " + std::to_string(pool::kMostLeased) + ", and these are " +
                               std::to_string(options.gpus));
  checkMemory(options.memory);
  checkReason(options.reason);
  if (!options.transport.empty()) checkTransport(options.transport);
  if (options.ttl.count() < 1000 || options.ttl > std::chrono::hours(1))
    throw options::OptionError("--ttl: 1s to 1h");
  if (options.protectInterval.count() < 1000 || options.protectInterval > std::chrono::hours(24))
    throw options::OptionError("--protect-interval: 1s to 24h");
  const bool mayBeProtected = options.protect.value_or(true);
  if (mayBeProtected && (options.protectLog.value == 0 || options.protectLogData.value == 0))
    throw options::OptionError("--protect-log and --protect-log-data: at least 1");
  const bool standbyKeeps = options.protectKeep == "standby";
  const bool holderKeeps = options.protectKeep == "holder" || standbyKeeps;
  if (!holderKeeps && options.protectKeep != "server")
    throw options::OptionError("--protect-keep: '" + options.protectKeep +
                               "' is not holder, standby or server");
  if (options.protectWait > std::chrono::hours(24)) throw options::OptionError("--protect-wait: at most 24h");
  if (options.protectSilence.count() != 0 &&
      (options.protectSilence.count() < 1000 || options.protectSilence > std::chrono::hours(24)))
    throw options::OptionError("--protect-silence: 0, or 1s to 24h");
  if (mayBeProtected && holderKeeps && options.protectSize.value == 0)
    throw options::OptionError("--protect-size: at least 1");
  if (options.onDivergence != "stop" && options.onDivergence != "continue")
    throw options::OptionError("--on-divergence: '" + options.onDivergence + "' is not stop or continue");
  if (options.wait > std::chrono::hours(24 * 20)) throw options::OptionError("--wait: at most 20d");
  if (options.stallTime > std::chrono::hours(24)) throw options::OptionError("--stall-time: at most 24h");
  if (options.time.count() != 0 && options.time.count() < 1000)
    throw options::OptionError("--time: at least 1s");
  if (options.idleRelease.count() != 0 &&
      (options.idleRelease.count() < 1000 || options.idleRelease > std::chrono::hours(720)))
    throw options::OptionError("--idle-release: 1s to 720h");
  try {
    pool::parseDeviceFilter(options.gpu);
  } catch (const std::invalid_argument& error) {
    throw options::OptionError(error.what());
  }
  HolderSettings settings;
  settings.addresses = managerAddresses(options.manager);
  settings.request.deviceCount = options.gpus;
  settings.request.memoryBytes = options.memory.value;
  const auto protect =
      options.protect.value_or(false) ? static_cast<uint32_t>(options.protectInterval.count()) : 0;
  settings.request.turns = {parseShare(options.share),
                            parsePriority(options.priority),
                            protect,
                            static_cast<uint32_t>(options.idleRelease.count()),
                            mayBeProtected && holderKeeps,
                            !options.protect.has_value(),
                            mayBeProtected && standbyKeeps};
  settings.keepFolder = options.protectDir;
  settings.keepBytes = options.protectSize.value;
  settings.failOverWaitMs = static_cast<uint32_t>(options.protectWait.count());
  settings.request.gpu = options.gpu;
  settings.request.policy = options.spread && !options.pack ? pool::Policy::spread : pool::Policy::pack;
  settings.request.reason = options.reason;
  settings.request.limitMs = static_cast<uint64_t>(options.time.count());
  settings.credentials = credentialsOf(options);
  settings.request.tenant = settings.credentials().tenant;
  settings.request.server = options.server;
  settings.request.adopts = options.claim;
  settings.request.ttlMs = static_cast<uint32_t>(options.ttl.count());
  settings.request.waitMs = static_cast<uint32_t>(options.wait.count());
  settings.transport = options.transport;
  settings.networkDevice = options.networkDevice;
  if (mayBeProtected) {
    settings.logFrameBytes = options.protectLog.value;
    settings.logPayloadBytes = options.protectLogData.value;
    settings.silenceMs = static_cast<uint32_t>(options.protectSilence.count());
    settings.goOnDifferent = options.onDivergence == "continue";
  }
  settings.stallMs = static_cast<uint32_t>(options.stallTime.count());
  return settings;
}

}  // namespace gpupool::cli
