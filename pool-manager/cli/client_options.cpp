#include "pool-manager/cli/client_options.h"

#include <unistd.h>

#include <cstdlib>

#include "pool-manager/cli/places.h"

namespace gpupool::cli {

const char kClientPrefix[] = "GPUPOOL_";
const char kClientIntroduction[] =
    "gpupool on a machine that uses the pool: every option at its default. The environment "
    "(GPUPOOL_<OPTION>) and "
    "the command line (--option) win over this file. Read from $GPUPOOL_CONFIG, or else the first that "
    "exists of "
    "~/.config/gpupool/client.yaml, <prefix>/etc/gpupool/client.yaml and /etc/gpupool/client.yaml.";

std::vector<options::Option> ClientOptions::table() {
  return {
      {"manager", manager, "ADDRESS",
       "The pool manager: host:port or unix:/path; several, separated by commas, are tried in order. Empty: "
       "the pool that "
       "`gpupool up` started on this machine."},
      {"gpus", gpus, "N", "How many GPUs to lease, all on one server."},
      {"memory", memory, "SIZE",
       "Memory to lease on each GPU (20GiB), sharing it with other leases; 0 leases whole GPUs."},
      {"transport", transport, "shm|ucx",
       "How to reach the server: shm (shared memory, same machine) or ucx (any network). Empty: shm where "
       "that is "
       "possible, else ucx."},
      {"network-device", networkDevice, "NAME",
       "The network device that ucx uses (mlx5_0:1, eth0). Empty: what UCX chooses."},
      {"server", server, "NAME", "Lease on this server only. Empty: on any."},
      {"tenant", tenant, "NAME",
       "On whose account. With tokens: whose token of --token-file to show; empty: the only one in it."},
      {"token-file", tokenFile, "FILE",
       "For a manager that wants a token: a file of mode 0600 with the line 'tenant: token'. Read by the "
       "lease's "
       "holder; the program never sees it."},
      {"wait", wait, "TIME", "Wait this long for GPUs to become free; 0 fails at once."},
      {"ttl", ttl, "TIME",
       "The lease ends this long after its holder was last heard of. The holder renews it three times in "
       "that span."},
      {"stall-time", stallTime, "TIME",
       "A worker that does nothing for so long, not even say that it lives (stopped, its machine starved), "
       "is given "
       "up: CUDA calls then fail and a line says why. 0: never, as long as its machine answers."},
  };
}

std::string clientConfigFile() {
  if (const char* chosen = std::getenv("GPUPOOL_CONFIG"); chosen != nullptr && *chosen != '\0') return chosen;
  std::vector<std::string> candidates;
  const char* config = std::getenv("XDG_CONFIG_HOME");
  const char* home = std::getenv("HOME");
  if (config != nullptr && *config == '/')
    candidates.push_back(std::string(config) + "/gpupool/client.yaml");
  else if (home != nullptr && *home == '/')
    candidates.push_back(std::string(home) + "/.config/gpupool/client.yaml");
  candidates.push_back(executableDirectory() + "/../etc/gpupool/client.yaml");
  candidates.push_back("/etc/gpupool/client.yaml");
  for (const std::string& path : candidates)
    if (::access(path.c_str(), R_OK) == 0) return path;
  return "";
}

}  // namespace gpupool::cli
