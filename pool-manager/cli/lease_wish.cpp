#include "pool-manager/cli/lease_wish.h"

#include <climits>

#include "pool-manager/cli/places.h"

namespace gpupool::cli {

std::vector<std::string> leaseOptionNames() {
  return {"gpus",   "memory",     "transport",      "wait", "manager",   "server",
          "tenant", "token-file", "network-device", "ttl",  "stall-time"};
}

HolderSettings leaseWish(const ClientOptions& options) {
  if (options.gpus == 0 || options.gpus > pool::kMaxDevices)
    throw options::OptionError("--gpus: 1 to " + std::to_string(pool::kMaxDevices));
  if (!options.transport.empty()) checkTransport(options.transport);
  if (options.ttl.count() < 1000 || options.ttl > std::chrono::hours(1))
    throw options::OptionError("--ttl: 1s to 1h");
  if (options.wait > std::chrono::hours(24 * 20)) throw options::OptionError("--wait: at most 20d");
  if (options.stallTime > std::chrono::hours(24)) throw options::OptionError("--stall-time: at most 24h");
  HolderSettings settings;
  settings.addresses = managerAddresses(options.manager);
  settings.request.deviceCount = options.gpus;
  settings.request.memoryBytes = options.memory.value;
  settings.credentials = credentialsOf(options.tokenFile, options.tenant);
  settings.request.tenant = settings.credentials().tenant;
  settings.request.server = options.server;
  settings.request.ttlMs = static_cast<uint32_t>(options.ttl.count());
  settings.request.waitMs = static_cast<uint32_t>(options.wait.count());
  settings.transport = options.transport;
  settings.networkDevice = options.networkDevice;
  settings.stallMs = static_cast<uint32_t>(options.stallTime.count());
  return settings;
}

}  // namespace gpupool::cli
