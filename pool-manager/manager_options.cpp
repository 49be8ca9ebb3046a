#include "pool-manager/manager_options.h"

namespace gpupool::pool {

const char kManagerPrefix[] = "GPUPOOL_MANAGER_";
const char kManagerIntroduction[] =
    "gpupool-manager: every option at its default. The environment (GPUPOOL_MANAGER_<OPTION>) and the "
    "command "
    "line (--option) win over this file. Read from --config, or else /etc/gpupool/manager.yaml.";

std::vector<options::Option> ManagerOptions::table() {
  return {
      {"listen", listen, "HOST:PORT",
       "Serve servers and clients on this TCP address; '*' means every interface. Empty: no TCP. There is no "
       "TLS "
       "yet: leases carry their session keys in clear, and without --tokens whoever reaches this address can "
       "lease. Bind it to a network you trust."},
      {"tokens", tokens, "FILE",
       "Let in from the network only who proves a token of this file: lines 'tenant: token', mode 0600. "
       "Leases "
       "belong to the tenant that made them. Servers prove the token of the tenant 'servers'. Read again "
       "when it changes. "
       "The Unix socket's own user needs none. Empty: no tokens."},
      {"socket", socket, "PATH",
       "Serve this host on a Unix socket, for this user and root. Empty: none. One of --listen and --socket "
       "is needed."},
      {"store", store, "PATH",
       "The SQLite file that holds leases across restarts (created with mode 0600; its folder must exist). "
       "'memory' keeps nothing."},
      {"any-user", anyUser, "", "Let every user of this host in through the Unix socket."},
      {"beat", beat, "TIME", "Servers report this often."},
      {"silent", silent, "TIME", "Nothing is placed on a server that has been silent for this long."},
      {"min-ttl", minTtl, "TIME", "The shortest time that a lease runs without renewal."},
      {"max-ttl", maxTtl, "TIME", "The longest time that a lease runs without renewal."},
      {"drift", drift, "TIME", "Added to every deadline, for clocks and delayed messages."},
      {"kill", kill, "TIME",
       "What a server needs at most to end a lease's sessions. A device whose server does not confirm is "
       "free again "
       "this long after the lease's deadline."},
      {"call", call, "TIME", "A server answers an order within this."},
  };
}

}  // namespace gpupool::pool
